"""Attention masks on a split sequence, against F.scaled_dot_product_attention on the whole one."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch_ranks import spawn

from pycomm.groups import ALONE, Group, as_group
from pycomm.parallel.sequence import SequenceAttention, ring_ulysses_attention, split
from pycomm.parallel.sequence import mask as masks

BATCH = 2
SHAPES = [(4, 4, 16, 8, 8), (6, 2, 13, 4, 4), (5, 1, 7, 3, 2)]  # query heads, key heads, T, D, Dv


def make_mask(kind, heads, length):
    generator = torch.Generator().manual_seed(1)
    at = torch.arange(length)
    causal = at[:, None] >= at
    if kind == "window":
        return (causal & (at[:, None] - at < 3))[None, None]
    if kind == "left padding":  # whole rows see nothing
        return (causal & (at >= torch.tensor([[0], [3]])[:, None]))[:, None]
    if kind == "keys":
        return (at < torch.tensor([[length], [length // 2 + 1]]))[:, None, None]
    if kind == "two dimensions":
        return causal | (at < 2)
    bias = torch.randn(BATCH, heads, length, length, generator=generator, dtype=torch.float64)
    if kind == "bias of heads":
        return bias
    if kind == "bias of one head and -inf":
        return bias[:1, :1].masked_fill(~causal, -torch.inf)
    assert kind == "lowest numbers"
    return torch.zeros(BATCH, 1, length, length, dtype=torch.float64).masked_fill(
        ~causal, torch.finfo(torch.float64).min
    )


KINDS = [
    *("window", "left padding", "keys", "two dimensions", "bias of heads", "bias of one head and -inf"),
    "lowest numbers",
]


def make(shape, kind):
    q_heads, k_heads, length, size, v_size = shape
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(BATCH, heads, length, width, generator=generator, dtype=torch.float64)
        for heads, width in ((q_heads, size), (k_heads, size), (k_heads, v_size), (q_heads, v_size))
    )
    return (q, k, v), grad, make_mask(kind, q_heads, length)


def results(attention, inputs, grad):
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = attention(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def compare(shape, kind, ring, ulysses, zigzag):
    inputs, grad, mask = make(shape, kind)

    def whole(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    def cut(q, k, v):
        return ring_ulysses_attention(q, k, v, ring, ulysses, zigzag=zigzag, length=length, attn_mask=mask)

    length = inputs[0].shape[2]
    held = split.positions(length, ring, ulysses, zigzag)
    found = results(cut, [x[:, :, held] for x in inputs], grad[:, :, held])
    for name, mine, right in zip(("out", "dq", "dk", "dv"), found, results(whole, inputs, grad), strict=True):
        error = (mine - right[:, :, held]).abs().max().item() if len(held) else 0.0
        assert error < 1e-12, (name, shape, kind, error)


def body(rank, world_size, sizes, zigzag):
    names = {"ring": rank // sizes[1], "ulysses": rank % sizes[1]}
    lists = {
        "ring": [[r * sizes[1] + u for r in range(sizes[0])] for u in range(sizes[1])],
        "ulysses": [[r * sizes[1] + u for u in range(sizes[1])] for r in range(sizes[0])],
    }
    groups = {}
    for name in names:
        for members in lists[name]:
            pg = torch.distributed.new_group(members)
            if rank in members:
                groups[name] = as_group(pg, name) if len(members) > 1 else None
    ring, ulysses = (groups[name] or ALONE for name in names)
    for shape in SHAPES:
        for kind in KINDS:
            compare(shape, kind, ring, ulysses, zigzag)


@pytest.mark.parametrize(
    "sizes, zigzag",
    [((2, 1), True), ((3, 1), False), ((3, 1), True), ((1, 2), False), ((1, 4), False), ((2, 2), True)],
)
def test_masks(sizes, zigzag):
    spawn(sizes[0] * sizes[1], body, sizes, zigzag)


def test_a_block_that_nobody_sees_is_left_out():
    mask = make_mask("window", 1, 16)
    assert masks.block_of(masks.Mask(mask), ((8, 16),), ((0, 4),)) is None
    part = masks.block_of(masks.Mask(mask), ((0, 2), (14, 16)), ((1, 3), (12, 13)))
    assert torch.equal(part[0, 0], mask[0, 0][[0, 1, 14, 15]][:, [1, 2, 12]])


class Looks(TorchDispatchMode):
    """Counts the passes over a whole mask of numbers."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.amax.default
        return func(*args, **(kwargs or {}))


def looks_of_one_call(rank, size):
    inputs, _, mask = make(SHAPES[0], "bias of heads")
    mode = SequenceAttention(as_group(None, "ring"), ALONE, True)
    mode.length = inputs[0].shape[2]
    pieces = [split.cut(x, 2, split.ring_spans(mode.length, size, rank, True)) for x in inputs]
    with Looks() as looks, mode:
        F.scaled_dot_product_attention(*pieces, mask)
    assert looks.count == 1, looks.count


def test_a_mask_is_looked_at_once():
    spawn(2, looks_of_one_call)


@pytest.mark.parametrize(
    "mask, options, text",
    [
        (torch.ones(1, 1, 3, 3, dtype=torch.bool), {}, r"\(1, 1, 3, 3\) is not that of the whole sequence"),
        (torch.ones(3, 1, 6, 6, dtype=torch.bool), {}, r"\(1 or 2, 1 or 4, 1 or 6, 6\)"),
        (torch.ones(4, 6, 6, dtype=torch.bool), {"is_causal": True}, "not both"),
        (torch.zeros(6, 6, dtype=torch.float64, requires_grad=True), {}, "needs a gradient"),
        (torch.zeros(6, 6, dtype=torch.int64), {}, "is torch.int64"),
        (torch.full((6, 6), -1.7e308, dtype=torch.float64), {}, "may attend to no key, said by numbers"),
        (torch.full((6, 6), torch.finfo(torch.float32).min), {}, "may attend to no key, said by numbers"),
    ],
)
def test_refusals(mask, options, text):
    mode = SequenceAttention(Group("ring", 2, 0, None), ALONE, False)
    mode.length = 6
    q, k, v = (torch.zeros(2, 4, 3, 4, dtype=torch.float64) for _ in range(3))
    with pytest.raises(ValueError, match=r"\[rank 0/2 of ring, .*split sequence.*" + text), mode:
        F.scaled_dot_product_attention(q, k, v, mask, **options)
