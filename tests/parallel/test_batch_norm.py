"""BatchNorm over the rows of all data ranks: beside experts, and where a layer is not as torch makes it."""

import equality
import pytest
import torch
from odd_models import numbers
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.data.batch_norm import _forward
from pycomm.parallel.ground.comm import ALONE


def test_averages_that_were_taken_away_stay_away():
    """torch takes such a layer, too: it has the statistics of each batch."""
    layer, x = nn.BatchNorm1d(3), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    layer.running_mean = layer.running_var = None
    torch.testing.assert_close(_forward(layer, layer.forward, ALONE, x), layer(x))
    assert layer.running_mean is None and layer.running_var is None


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1), (0, 3, 5)])
def test_one_value_has_no_variance(shape):
    layer = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match=r"BatchNorm on rank 0/1 .*: [01] value per channel on all ranks"):
        _forward(layer, layer.forward, ALONE, torch.ones(shape))
    assert layer.num_batches_tracked == 0
    x = torch.tensor([[[1.0, 3.0]] * 3])
    torch.testing.assert_close(_forward(layer, layer.forward, ALONE, x), nn.BatchNorm1d(3)(x))
    layer.eval()
    assert torch.equal(_forward(layer, layer.forward, ALONE, x), layer(x))


class WithExperts(nn.Module):
    """A norm whose layer before it has no bias, as its gradient would be zero but for rounding; experts."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(9, 6, bias=False), nn.BatchNorm1d(6, momentum=0.3)
        self.moe = par.MoE(6, lambda: nn.Linear(6, 6), 3, top_k=2, aux_loss=0.0)
        self.last = nn.Linear(6, 9)

    def forward(self, x):
        x = self.norm(self.first(x) * 3 + 50)
        return self.last(x + self.moe(x))


def mean_square(out, y):
    return (out - y).square().mean()


def trained(rank, world_size, texts):
    """Losses of two steps and the state after them; one of no plan is the process alone."""
    found = []
    for text in texts:
        torch.manual_seed(0)
        model = WithExperts().double()
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, opt = par.parallelize(model, opt, text)
        losses = [par.step(model, opt, numbers(step, 11), mean_square).item() for step in range(2)]
        found.append((losses, par.full_state_dict(model)))
    return found


@pytest.mark.parametrize("texts", [("ep=2", "ep=2,zero=1", "dp=2"), ("dp=2,ep=2,zero=3",)])
def test_rows_of_all_ranks_that_have_rows(texts):
    """Of ep, too, and of ranks that differ in the number of their rows."""
    ((losses, state),) = trained(0, 1, [""])
    for found in spawn(par.Plan.parse(texts[0]).world_size, trained, texts):
        for text, (its_losses, its_state) in zip(texts, found, strict=True):
            assert equality.relative(its_losses, losses) < 1e-11, text
            for name, value in state.items():
                assert equality.relative(its_state[name], value) < 1e-10, (text, name)
