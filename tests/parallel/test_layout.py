"""What of a parameter a rank holds: parts that are taken, put back and counted."""

import itertools

import pytest
import torch

from pycomm.parallel.ground.layout import Layout, whole

SHAPE = (4, 6, 2)
CASES = {  # layouts of all ranks: every index is counted once
    "rows": [Layout(SHAPE, 0, ((0, 1),), ((0, 1),)), Layout(SHAPE, 0, ((1, 4),), ((1, 4),))],
    "ranges out of order": [
        Layout(SHAPE, 1, ((3, 6), (0, 1)), ((3, 6), (0, 1))),
        Layout(SHAPE, 1, ((1, 3),), ((1, 3),)),
    ],
    "held twice": [
        Layout(SHAPE, 1, ((0, 4),), ((0, 4),), overlap=True),
        Layout(SHAPE, 1, ((2, 6),), ((4, 6),), overlap=True),
        Layout(SHAPE, 1, ((2, 4),), (), overlap=True),
    ],
    "whole": [whole(torch.empty(SHAPE)), whole(torch.empty(SHAPE), 1), whole(torch.empty(SHAPE), 2)],
    "nothing here": [Layout(SHAPE, 2, ((0, 0),), ()), Layout(SHAPE, 2, ((0, 2),), ((0, 2),))],
}


@pytest.mark.parametrize("name", CASES)
def test_parts(name):
    full = torch.arange(1.0, 49.0).view(SHAPE)
    counted = torch.zeros(SHAPE)
    for layout in CASES[name]:
        local = layout.take(full)
        kept = local.clone()
        local += 1  # a copy
        assert torch.equal(full, torch.arange(1.0, 49.0).view(SHAPE))
        if layout.dim is not None:
            index = torch.tensor([i for start, stop in layout.ranges for i in range(start, stop)]).long()
            assert torch.equal(kept, full.index_select(layout.dim, index))
        placed = torch.zeros(SHAPE)
        layout.put(placed, kept)
        layout.put(placed, kept)  # it is added
        assert torch.equal(layout.take(placed), 2 * kept)
        assert int((placed != 0).sum()) == kept.numel()
        mask = layout.counted_mask(torch.ones_like(kept))
        assert mask is None or mask.shape == kept.shape and set(mask.unique().tolist()) <= {0.0, 1.0}
        layout.put(counted, torch.ones_like(kept) if mask is None else mask)
    assert torch.equal(counted, torch.ones(SHAPE))


def test_whole():
    for rank, partial in itertools.product(range(3), (False, True)):
        layout = whole(torch.empty(2, 3), rank, partial)
        assert layout.full_shape == (2, 3) and layout.dim is None and layout.partial == partial
        assert bool(layout.counted) == (rank == 0) and not layout.overlap
