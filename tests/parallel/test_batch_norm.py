"""BatchNorm over the rows of all data ranks, where a layer is not as torch makes it."""

import torch
from torch import nn

from pycomm.parallel.data.batch_norm import _forward
from pycomm.parallel.ground.comm import ALONE


def test_averages_that_were_taken_away_stay_away():
    """torch takes such a layer, too: it has the statistics of each batch."""
    layer, x = nn.BatchNorm1d(3), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    layer.running_mean = layer.running_var = None
    torch.testing.assert_close(_forward(layer, layer.forward, ALONE, x), layer(x))
    assert layer.running_mean is None and layer.running_var is None
