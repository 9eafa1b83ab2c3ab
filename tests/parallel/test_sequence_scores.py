"""Soft caps and sinks on a split sequence against the formula on the whole one, in fp64; and the eager
attention of transformers, which asks for them.
"""

import itertools

import pytest
import torch
from sequence_cases import mesh
from torch_ranks import spawn

from pycomm.parallel.sequence import ring_ulysses_attention, split

BATCH = 2
SHAPES = [(4, 4, 16, 8, 8), (6, 2, 13, 4, 3), (5, 1, 7, 3, 3)]  # query heads, key heads, T, D, Dv


def written_out(q, k, v, sinks, cap, mask):
    shared = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(shared, 1).mT / q.shape[3] ** 0.5
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return weights @ v.repeat_interleave(shared, 1)


def cases():
    for shape, cap, has_sinks, causal in itertools.product(SHAPES, (None, 0.7), (False, True), (False, True)):
        q_heads, k_heads, length, size, v_size = shape
        generator = torch.Generator().manual_seed(length)
        q, k, v, grad, sinks = (
            torch.randn(of, generator=generator, dtype=torch.float64)
            for of in (
                *((BATCH, q_heads, length, size), (BATCH, k_heads, length, size)),
                *((BATCH, k_heads, length, v_size), (BATCH, q_heads, length, v_size), (q_heads,)),
            )
        )
        mask = torch.ones(length, length, dtype=torch.bool)
        if causal:
            mask = mask.tril()
        elif length == 16:
            mask = mask.triu(-2)  # not the one that a kernel knows by name
        inputs = [x.requires_grad_() for x in (q, k, v, *([sinks] if has_sinks else []))]
        out = written_out(*inputs, *([] if has_sinks else [None]), cap, mask)
        grads = torch.autograd.grad(out, inputs, grad)
        yield inputs, grad, mask, {"softcap": cap, "causal": causal}, (out.detach(), grads)


def body(rank, world_size, ring_size):
    ring, ulysses = mesh(world_size, ring_size)
    for inputs, grad, mask, options, (out, grads) in cases():
        length = grad.shape[2]
        held = split.positions(length, ring, ulysses, True)
        mine = [x.detach()[:, :, held].requires_grad_() for x in inputs[:3]]
        sinks = inputs[3].detach().requires_grad_() if len(inputs) > 3 else None
        causal = options["causal"]
        found = ring_ulysses_attention(
            *mine,
            *(ring, ulysses),
            is_causal=causal,
            zigzag=True,
            length=length,
            attn_mask=None if causal else mask,
            softcap=options["softcap"],
            sinks=sinks,
        )
        case = f"{tuple(inputs[0].shape)} {options} sinks={sinks is not None}"
        torch.testing.assert_close(found, out[:, :, held], msg=lambda text: f"{case}: {text}")  # noqa: B023
        found.backward(grad[:, :, held])
        for piece, whole in zip(mine, grads, strict=False):
            torch.testing.assert_close(piece.grad, whole[:, :, held])
        if sinks is not None:  # each rank has the part of its queries
            total = torch.zeros_like(sinks) if sinks.grad is None else sinks.grad.clone()
            torch.distributed.all_reduce(total)
            torch.testing.assert_close(total, grads[3], msg=lambda text: f"{case}: {text}")  # noqa: B023


@pytest.mark.parametrize("world_size, ring_size", [(1, 1), (2, 2), (3, 3), (2, 1), (3, 1), (4, 2)])
def test_caps_and_sinks(world_size, ring_size):
    spawn(world_size, body, ring_size)
