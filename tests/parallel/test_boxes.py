"""Flat ranges as boxes, and boxes through layouts, against indices counted one by one."""

import itertools
import math

import pytest
import torch
from torch_ranks import equal

from pycomm.parallel.checkpoint.boxes import boxes_of, cover
from pycomm.parallel.ground.layout import Layout


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (1, 5), (4, 1), (2, 3, 4), (3, 1, 2)])
def test_cover(shape):
    count = math.prod(shape)
    place = torch.arange(count).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(count + 1), 2):
        boxes = cover(shape, start, stop)
        assert len(boxes) <= max(2 * len(shape) - 1, 1) and all(0 not in sizes for _, sizes in boxes)
        found = [place[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))] for box in boxes]
        assert [int(v) for values in found for v in values.reshape(-1)] == list(range(start, stop))
        assert all(tuple(values.shape) == sizes for values, (_, sizes) in zip(found, boxes, strict=True))


LAYOUTS = [
    [Layout((4, 6))],
    [Layout((4, 6), 0, ((0, 1),), ((0, 1),)), Layout((4, 6), 0, ((1, 4),), ((1, 4),))],
    [
        Layout((4, 6), 1, ((0, 2), (4, 5)), ((0, 2), (4, 5))),
        Layout((4, 6), 1, ((2, 4), (5, 6)), ((2, 4), (5, 6))),
    ],
    [
        Layout((4, 6), 0, ((0, 3),), ((0, 3),), overlap=True),
        Layout((4, 6), 0, ((1, 4),), ((3, 4),), overlap=True),
    ],
    [Layout((2, 6, 3), 1, ((3, 6), (0, 2)), ((3, 6), (0, 1))), Layout((2, 6, 3), 1, ((0, 3),), ((1, 3),))],
    [Layout((2, 3), 0, ((0, 2),), ((0, 2),)), Layout((2, 3), 0, ((2, 2),), ((2, 2),))],
    [Layout((5,), counted=((0, 1),)), Layout((5,), counted=())],
    [Layout(())],
]


@pytest.mark.parametrize("layouts", LAYOUTS, ids=range(len(LAYOUTS)))
def test_boxes_through_layouts(layouts):
    full = torch.arange(float(math.prod(layouts[0].full_shape))).view(layouts[0].full_shape)
    for parts in (1, 2, 3, 5):
        counts = torch.zeros_like(full)
        for layout in layouts:
            local = layout.take(full)
            bounds = [part * local.numel() // parts for part in range(parts + 1)]
            held = torch.zeros_like(full)
            for start, stop in itertools.pairwise(bounds):
                values = local if parts == 1 else local.reshape(-1)[start:stop]
                for counted, target in ((False, held), (True, counts)):
                    for box in boxes_of(layout, local.shape, start, stop, values, counted):
                        place = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                        equal(box.values, full[place])
                        target[place] += 1
            expected = torch.zeros_like(full)
            layout.put(expected, torch.ones_like(local))
            equal(held, expected)
        equal(counts, torch.ones_like(full))


def test_boxes_of_an_empty_tensor():
    (box,) = boxes_of(Layout((0, 3)), (0, 3), 0, 0, torch.empty(0, 3))
    assert box.offsets == (0, 0) and box.sizes == (0, 3) and box.values.shape == (0, 3)
