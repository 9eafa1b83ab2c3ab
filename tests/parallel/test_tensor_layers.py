"""Tensor-parallel layers, head splits and the cut cross-entropy, each against torch's own in the same
process.
"""

import itertools

import pytest
import tolerance
import torch
from tensor_models import Sizes
from tiers import tier
from torch import nn
from torch.nn import functional as F
from torch_ranks import spawn

from pycomm.parallel.ground import comm
from pycomm.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabShard,
    cross_entropy,
    split_heads,
)

ROUNDINGS = 32  # see tolerance.py


def close(actual, expected, what, whole=None):
    """whole: what `expected` is a piece of, or its size as tolerance.py has it."""
    assert actual.dtype == expected.dtype, (what, actual.dtype, expected.dtype)
    tolerance.near(str(what), actual, expected, expected if whole is None else whole, ROUNDINGS)


@pytest.mark.parametrize(
    "q_heads, kv_heads, parts",
    [
        (5, 5, 3),
        (6, 3, 2),
        (8, 2, 3),
        (8, 2, 4),
        (6, 2, 4),
        (7, 1, 5),
        (12, 4, 4),
        (6, 3, 5),
        (3, 3, 3),
        (9, 3, 1),
    ],
)
def test_split_heads(q_heads, kv_heads, parts):
    ranks = split_heads(q_heads, kv_heads, parts)
    per_kv = q_heads // kv_heads
    assert [head for rank in ranks for head in range(*rank.q)] == list(
        range(q_heads)
    )  # each query head once, in order
    assert all(rank.q_count >= 1 for rank in ranks)
    for rank in ranks:
        assert {head // per_kv for head in range(*rank.q)} == set(
            range(*rank.kv)
        )  # with exactly the kv heads that it reads
        assert rank.q_count % rank.kv_count == 0
    counted = [head for rank in ranks if rank.counts_kv for head in range(*rank.kv)]
    assert counted == list(range(kv_heads))
    assert any(rank.shares_kv for rank in ranks) == (kv_heads < parts)


@pytest.mark.parametrize(
    "q_heads, kv_heads, parts, text",
    [
        (3, 3, 4, "3 query heads .* 4 ranks"),
        (6, 4, 2, "6 query heads .* 4 kv heads"),
        (6, 0, 2, "6 query heads .* 0 kv heads"),
    ],
)
def test_heads_that_do_not_fit(q_heads, kv_heads, parts, text):
    with pytest.raises(ValueError, match="blocks.0.attn.*" + text):
        split_heads(q_heads, kv_heads, parts, "blocks.0.attn")


def full_linear(sizes, bias, dtype):
    torch.manual_seed(11)
    return nn.Linear(*sizes, bias=bias, dtype=dtype)


def check_layouts(layer, full, case, sizes):
    """sizes: of the gradients of `full`, from tolerance.gradient_sizes."""
    layouts, named = layer.layouts(), dict(full.named_parameters())
    assert layouts.keys() == named.keys()
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.detach(), layouts[name].take(named[name].detach())), (case, name)
        size = sizes[id(named[name])]
        close(parameter.grad, layouts[name].take(named[name].grad), f"{case} {name}.grad", size)


def linear_case(group, sizes, bias, dtype, kind):
    """One column or row layer against nn.Linear, forward and backward."""
    case, full = (sizes, bias, dtype, kind), full_linear(sizes, bias, dtype)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 3, sizes[0], generator=generator, dtype=dtype, requires_grad=True)
    pull = torch.randn(2, 3, sizes[1], generator=generator, dtype=dtype)
    with tolerance.gradient_sizes(full) as gradients:
        expected = full(x)
        (expected * pull).sum().backward()
    bias_of_full = full.bias.detach() if bias else None
    of_out, of_x, _, _ = tolerance.linear(x.detach(), full.weight.detach(), bias_of_full, pull)
    mine = x.detach().clone().requires_grad_()
    if kind == "seeded":  # the constructor draws what nn.Linear draws
        torch.manual_seed(11)
        layer = ColumnParallelLinear(*sizes, bias, group=group, dtype=dtype)
    elif kind in ("gathered", "columns"):
        layer = ColumnParallelLinear.from_module(full, group, gather_output=kind == "gathered")
    else:
        layer = RowParallelLinear.from_module(full, group, input_is_parallel=kind == "row parallel")
    start, stop = layer.layouts()["weight"].ranges[0]
    if kind == "row parallel":
        out = layer(mine[..., start:stop])
        close(mine[..., start:stop].detach(), x[..., start:stop].detach(), case)
    else:
        out = layer(mine)
    if kind == "columns":
        expected, pull = expected[..., start:stop], pull[..., start:stop]
    assert out.shape[-1] == layer.out_features
    close(out.detach(), expected.detach(), f"{case} output", of_out)
    (out * pull).sum().backward()
    x_grad = x.grad
    if kind == "row parallel":
        x_grad = torch.zeros_like(x_grad)
        x_grad[..., start:stop] = x.grad[..., start:stop]
    close(mine.grad, x_grad, f"{case} x.grad", of_x)
    check_layouts(layer, full, case, gradients)


def embedding_case(group, rows, padding, dtype):
    torch.manual_seed(12)
    full = nn.Embedding(rows, 3, padding_idx=padding, dtype=dtype)
    layer = VocabParallelEmbedding.from_module(full, group)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, rows, (4, 3), generator=generator)
    pull = torch.randn(4, 3, 3, generator=generator, dtype=dtype)
    with tolerance.gradient_sizes(full) as gradients:
        expected, out = full(ids), layer(ids)
        (expected * pull).sum().backward()
    close(out.detach(), expected.detach(), f"embedding {rows}")
    assert out.requires_grad  # also where a rank has no rows: what follows must run the same collectives
    (out * pull).sum().backward()
    check_layouts(layer, full, (rows, padding), gradients)
    with pytest.raises(IndexError, match=f"{rows} rows"):
        layer(ids + rows)


def pair_with_sequence(group, length, features, dtype):
    """Column and row layer on pieces of the sequence: the outputs and input gradients of a rank are its piece
    of those of one process.
    """
    torch.manual_seed(13)
    up, down = nn.Linear(4, features, dtype=dtype), nn.Linear(features, 5, dtype=dtype)
    sequence = Sizes()
    sequence.sizes = comm.even_sizes(length, group.size)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, length, 4, generator=generator, dtype=dtype, requires_grad=True)
    pull = torch.randn(2, length, 5, generator=generator, dtype=dtype)
    with tolerance.gradient_sizes(nn.ModuleList([up, down])) as gradients:
        expected = down(torch.tanh(up(x)))
        (expected * pull).sum().backward()
    piece = comm.split_dim(x.detach(), 1, sequence.sizes, group).clone().requires_grad_()
    column = ColumnParallelLinear.from_module(up, group, gather_output=False, sequence=sequence)
    row = RowParallelLinear.from_module(down, group, input_is_parallel=True, sequence=sequence)
    out = row(torch.tanh(column(piece)))
    part = comm.split_dim(expected.detach(), 1, sequence.sizes, group)
    close(out.detach(), part, "sequence output", expected.detach())
    (out * comm.split_dim(pull, 1, sequence.sizes, group)).sum().backward()
    close(piece.grad, comm.split_dim(x.grad, 1, sequence.sizes, group), "sequence x.grad", x.grad)
    check_layouts(column, up, "sequence column", gradients)
    assert row.layouts()["bias"].partial == (group.size >= 1)
    comm.all_reduce(row.bias.grad, group)
    check_layouts(row, down, "sequence row", gradients)
    for cls, whole in (
        (ColumnParallelLinear, {"gather_output": True}),
        (RowParallelLinear, {"input_is_parallel": False}),
    ):
        layer = cls.from_module(
            down, group, sequence=sequence, **whole
        )  # alone: the whole features of this rank's piece, in and out
        full_in = torch.randn(
            2, length, features, generator=torch.Generator().manual_seed(6), dtype=dtype, requires_grad=True
        )
        mine = comm.split_dim(full_in.detach(), 1, sequence.sizes, group).clone().requires_grad_()
        down.zero_grad()
        (down(full_in) * pull).sum().backward()
        of_out, of_in, of_weight, _ = tolerance.linear(
            full_in.detach(), down.weight.detach(), down.bias.detach(), pull
        )
        out = layer(mine)
        close(out.detach(), comm.split_dim(down(full_in).detach(), 1, sequence.sizes, group), cls, of_out)
        (out * comm.split_dim(pull, 1, sequence.sizes, group)).sum().backward()
        close(mine.grad, comm.split_dim(full_in.grad, 1, sequence.sizes, group), cls, of_in)
        close(layer.weight.grad, layer.layouts()["weight"].take(down.weight.grad), cls, of_weight)
    if (
        group.size > 1 and length > 1
    ):  # else the piece of one rank is the whole, which only the others could tell
        with pytest.raises(ValueError, match=rf"\[rank {group.rank}/{group.size}\].*this rank's piece"):
            column(x)


def layers_body(rank, world_size):
    group = comm.as_group(None, "tp")
    kinds = ("seeded", "gathered", "columns", "row", "row parallel")
    for sizes, bias, kind in itertools.product(
        [(5, 7), (3, 2), (8, 8), (1, 9), (4, 1)], (True, False), kinds
    ):
        linear_case(group, sizes, bias, torch.float64, kind)
    for kind in kinds:
        linear_case(group, (5, 7), True, torch.float32, kind)
    for rows, padding in ((7, None), (7, 5), (7, 0), (2, None), (1, None), (16, 3)):
        embedding_case(group, rows, padding, torch.float64)
    for length, features in ((7, 6), (8, 8), (2, 5), (1, 3), (5, 2)):
        pair_with_sequence(group, length, features, torch.float64)


@tier(quick=1 / 2)
@pytest.mark.parametrize(
    "world_size, backend", [(1, "pycomm"), (2, "pycomm"), (3, "pycomm"), (4, "pycomm"), (3, "gloo")]
)
def test_layers(world_size, backend):
    spawn(world_size, layers_body, backend=backend)


def counts_body(rank, world_size):
    """A column layer and the row layer behind it: one all_reduce each way, of the size of the activation."""
    group = comm.as_group(None, "tp")
    column = ColumnParallelLinear(6, 9, group=group, gather_output=False)
    row = RowParallelLinear(9, 6, group=group, input_is_parallel=True)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with comm.count_traffic() as forward:
        out = row(column(x).relu())
    with comm.count_traffic() as backward:
        out.sum().backward()
    for traffic in (forward, backward):
        assert [call.op for call in traffic.log] == ["all_reduce"]
        assert traffic.nbytes() == 2 * (world_size - 1) * 4 * 6 * 4 // world_size


def test_a_pair_reduces_once_each_way():
    spawn(3, counts_body)


LOSS_CASES = [  # vocabulary, shape of the targets, which of them are ignored, scale of the logits
    (7, (2, 5), "some", 1.0),
    (7, (3,), "none", 30.0),
    (7, (4,), "all", 1.0),
    (2, (2, 2), "some", 1.0),
    (1, (3,), "none", 1.0),
    (16, (1, 1), "none", 500.0),
    (9, (0,), "none", 1.0),
]


def loss_body(rank, world_size, dtype):
    group = comm.as_group(None, "tp")
    for vocab, shape, ignored, scale in LOSS_CASES:
        generator = torch.Generator().manual_seed(4)
        logits = (
            (torch.randn(*shape, vocab, generator=generator, dtype=torch.float64) * scale)
            .to(dtype)
            .requires_grad_()
        )
        targets = torch.randint(0, vocab, shape, generator=generator)
        if ignored != "none":
            targets.flatten()[:: 1 if ignored == "all" else 2] = -7
        counts = bool((targets != -7).any())
        if counts:
            expected = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-7)
            expected.mul(3).backward()
            grad = logits.grad
        else:
            expected, grad = logits.sum() * 0, torch.zeros_like(logits)
        for cut in (False, True):
            start = sum(comm.even_sizes(vocab, world_size)[:rank]) if cut else 0
            stop = start + comm.even_sizes(vocab, world_size)[rank] if cut else vocab
            leaf = logits.detach()[..., start:stop].clone().requires_grad_()
            mine = leaf * 1
            if cut and world_size > 1:
                mine.vocab_shard = VocabShard(group, start, stop, vocab)
            with comm.count_traffic() as traffic:
                loss = cross_entropy(mine, targets, ignore_index=-7)
            assert traffic.calls() == (2 if cut and world_size > 1 else 0)
            loss.mul(3).backward()
            case = (vocab, shape, ignored, cut)
            # The logits' own size: the loss is a difference of two of them, and zero where there is one word.
            size = max(1.0, logits.detach().abs().max().item()) if logits.numel() else 1.0
            close(loss.detach(), expected.detach(), case, size)
            close(leaf.grad, grad[..., start:stop], case, 3 * size / max(1, int((targets != -7).sum())))
            assert torch.isfinite(leaf.grad).all(), case


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cross_entropy(world_size, dtype):
    spawn(world_size, loss_body, dtype)


def test_cross_entropy_in_16_bits_is_computed_in_32():
    spawn(2, half_body)


def half_body(rank, world_size):
    logits = (torch.randn(50, 31, generator=torch.Generator().manual_seed(4)) * 4).bfloat16()
    targets = torch.arange(50) % 31
    start, stop = (0, 16) if rank == 0 else (16, 31)
    mine = logits[:, start:stop].clone()
    mine.vocab_shard = VocabShard(comm.as_group(), start, stop, 31)
    loss = cross_entropy(mine, targets)
    assert loss.dtype == torch.bfloat16
    assert abs(loss.float() - F.cross_entropy(logits.float(), targets)) <= 2**-8 * loss.float()


class AHead:
    fqn, sharded_output, local_size, full_size = "lm_head", True, 4, 7


@pytest.mark.parametrize(
    "columns, targets, head, text",
    [
        (4, [1, 2], AHead, "no longer the mark of the head 'lm_head'.*sharded_output = False"),
        (7, [1, 7], None, r"targets must lie in 0\.\.6"),
        (7, [1, -1], None, "ignore_index=-100"),
        (7, [1, 2, 3], None, "do not fit targets"),
    ],
)
def test_cross_entropy_refuses(columns, targets, head, text):
    with pytest.raises(ValueError, match=text):
        cross_entropy(torch.zeros(2, columns), torch.tensor(targets), head=head)
