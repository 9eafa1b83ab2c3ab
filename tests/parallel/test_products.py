"""Linear layers with their collectives through pycomm.fused: against F.linear and the collective apart, and
that plans really use them.
"""

import functools
import itertools

import pytest
import torch
from models import GPT
from tiers import tier
from torch import nn
from torch.nn import functional as F
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm import fused
from pycomm.groups import ALONE, as_group, even_sizes
from pycomm.parallel.ground import differentiable
from pycomm.parallel.pipeline import DeferWeights, WeightStore
from pycomm.parallel.tensor import products, split_heads
from pycomm.parallel.tensor.cut_sublayer import head_slices
from pycomm.parallel.tensor.narrow import HeadCounts
from pycomm.parallel.tensor.slices import Pieces

ROWS, LENGTH, LAYERS, STEPS = 4, 8, 2, 3
NAMES = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def count_fused():
    """Wraps the functions of pycomm.fused in this process, to be used for any size; returns {name: calls}."""
    products.LEAST_FLOPS = 0
    calls = dict.fromkeys(NAMES, 0)

    def counted(name, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            calls[name] += 1
            assert kwargs["shards"] is not None  # or ranks with uneven shards could choose different forms
            return function(*args, **kwargs)

        return call

    for name in NAMES:
        setattr(fused, name, counted(name, getattr(fused, name)))
    return calls


def operands(name, group, shape):
    """x, weight and bias of this rank for one function of products.py, leaves of their own.

    shape: (batch, sizes, shards, width, bias); sizes and shards of all ranks, bias: whether there is one.
    """
    batch, sizes, shards, width, bias = shape
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    weights = [
        draw(shard, width) if name in ("copy_linear", "gather_linear") else draw(width, shard)
        for shard in shards
    ]
    lengths = sizes if name == "gather_linear" else [sum(sizes)] * group.size
    inputs = [draw(batch, length, weight.shape[1]) for length, weight in zip(lengths, weights, strict=True)]
    x = inputs[0] if name == "copy_linear" else inputs[group.rank]
    vector = draw(weights[group.rank].shape[0])
    return [
        tensor.clone().requires_grad_() for tensor in (x, weights[group.rank], vector)[: 3 if bias else 2]
    ]


def outcome(name, group, shape, frozen=()):
    """[output, gradients] and the calls that were recorded. shape: as operands() takes it."""
    _, sizes, shards, _, bias = shape
    tensors = operands(name, group, shape)
    for index in frozen:
        tensors[index].requires_grad_(False)
    along = [Pieces(1, sizes)] if name in ("gather_linear", "linear_reduce_scatter") else []
    with par.count_traffic() as traffic:
        out = getattr(products, name)(
            tensors[0], tensors[1], tensors[2] if bias else None, group, *along, shards
        )
        pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
        (out * pull).sum().backward()
    return [out.detach(), *(tensor.grad for tensor in tensors)], [tuple(call) for call in traffic.log]


def products_body(rank, world_size):
    group = as_group(None, "tp")
    calls, fits = count_fused(), products._fits
    cuts = [
        ([3] * world_size, [4] * world_size),
        (even_sizes(7, world_size), even_sizes(5, world_size)),
    ]
    # Ranks without positions, ranks without features.
    cuts.append(([2] + [0] * (world_size - 1), [0] * (world_size - 1) + [3]))
    for name in products.__all__:
        for sizes, shards in cuts:
            for bias, frozen in ((True, ()), (False, ()), (True, (0,)), (True, (1, 2))):
                for again in (False, True) if name == "gather_linear" else (False,):
                    case = (name, group, (2, sizes, shards, 6, bias), frozen)
                    products._fits, products.gathers_again = (lambda *args: False), lambda x: False
                    expected, log = outcome(*case)
                    assert not any(calls.values())
                    products._fits, products.gathers_again = fits, lambda x, again=again: again
                    found, found_log = outcome(*case)
                    assert (
                        any(calls.values()) == (name != "gather_linear" or again)
                        if frozen != (0,) or name != "copy_linear"
                        else True
                    )
                    calls.update(dict.fromkeys(NAMES, 0))
                    for a, b in zip(found, expected, strict=True):
                        assert (a is None) == (b is None), case
                        if a is not None:
                            assert a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-12), case
                    if again and 1 not in frozen:
                        gather = log[0]  # x, once more in backward
                        found_log.remove(gather)
                    assert sorted(found_log) == sorted(log), case


@tier(quick=1 / 4)
@pytest.mark.parametrize("world_size, backend", [(1, "pycomm"), (2, "pycomm"), (3, "pycomm"), (3, "gloo")])
@pytest.mark.parametrize("form", ["auto", "chunked"])
def test_products_equal_linear_and_collective(monkeypatch, world_size, backend, form):
    if world_size == 1:
        spawn(1, alone_body)
        return
    monkeypatch.setenv("PYCOMM_FUSED", form)
    spawn(world_size, products_body, backend=backend)


def written_body(rank, world_size):
    group = as_group(None, "tp")
    count_fused()
    products.gathers_again = lambda x: True
    fits, sizes, shards = products._fits, [3] * world_size, [4] * world_size
    for name, batch in itertools.product(products.__all__, (1, 2)):
        for form in (fits, lambda *args: False):
            products._fits = form
            along = [Pieces(1, sizes)] if name in ("gather_linear", "linear_reduce_scatter") else []
            x, weight = operands(name, group, (batch, sizes, shards, 6, False))
            before = x.detach().clone()
            out = getattr(products, name)(x, weight, None, group, *along, shards)
            expected = out.detach() + 1
            assert torch.equal(out.add_(1), expected)
            out.sum().backward()
            assert torch.equal(x, before) and x.grad is not None
    for name, length in (("scatter_to", 2 * world_size), ("gather_from", 2), ("gather_sum", 2)):
        x = torch.ones(1, length, 3, requires_grad=True)
        out = getattr(differentiable, name)(x, 1, [2] * world_size, group)
        out.add_(1).sum().backward()
        assert torch.equal(x, torch.ones_like(x)) and torch.equal(out, 2 * torch.ones_like(out))
        assert x.grad is not None


def test_results_may_be_written():
    """As in `out = mlp(x); out += expert(x)`; also with one row, where pieces lie in memory as they are."""
    spawn(2, written_body)


def alone_body(rank, world_size):
    """A group of one: F.linear and nothing else."""
    calls = count_fused()
    for name in products.__all__:
        (out, *grads), log = outcome(name, as_group(None, "tp"), (2, [5], [4], 6, True))
        x, weight, bias = operands(name, ALONE, (2, [5], [4], 6, True))
        assert torch.equal(out, F.linear(x, weight, bias).detach()) or torch.allclose(
            out, F.linear(x, weight) + bias, rtol=0, atol=1e-12
        )
        assert log == [] and not any(calls.values()) and all(grad is not None for grad in grads)


@pytest.mark.parametrize("q_heads, kv_heads, parts", [(5, 5, 3), (6, 3, 2), (8, 2, 3), (7, 1, 5)])
@pytest.mark.parametrize("joined", [False, True])
def test_lengths_of_head_slices(q_heads, kv_heads, parts, joined):
    """Every rank knows what all hold, of each layer of an attention."""
    heads = split_heads(q_heads, kv_heads, parts)
    counts = HeadCounts(q_heads, kv_heads, 4)
    of_ranks = []
    for rank in range(parts):
        columns, row = head_slices(counts, heads, rank, joined)
        of_ranks.append([*columns, row])
    for layer in zip(*of_ranks, strict=True):
        held = tuple(sum(stop - start for start, stop in slices.ranges) for slices in layer)
        assert all(slices.lengths == held for slices in layer)


def losses_of(rank, world_size, text, again=False):
    """Losses of some steps in fp64, and the calls of pycomm.fused in the last one."""
    if again:
        products.gathers_again = lambda x: True
    torch.manual_seed(0)
    model = GPT(heads=4, layers=LAYERS, tied=False).double()
    opt = torch.optim.AdamW(model.parameters(), 1e-2)
    model, opt = par.parallelize(model, opt, par.Plan.parse(text))
    calls, losses = count_fused(), []
    for step in range(STEPS):
        calls.update(dict.fromkeys(NAMES, 0))
        generator = torch.Generator().manual_seed(step)
        batch = [torch.randint(0, 29, (ROWS, LENGTH), generator=generator) for _ in range(2)]
        losses.append(float(par.step(model, opt, tuple(batch), clip=0.5)))
    return losses, calls


# plan, x gathered again, calls per block, calls of the head (its input enters in the form of a column layer)
PLANS = [
    ("tp=2", False, {"matmul_all_reduce": 4}, {"matmul_all_reduce": 1}),
    ("tp=2,megatron_sp", False, {"matmul_reduce_scatter": 2}, {}),
    (
        "tp=2,megatron_sp",
        True,
        {"matmul_reduce_scatter": 2, "all_gather_matmul": 2},
        {"all_gather_matmul": 1},
    ),
    (
        "tp=3,megatron_sp",
        True,
        {"matmul_reduce_scatter": 2, "all_gather_matmul": 2},
        {"all_gather_matmul": 1},
    ),
]


@tier(quick=1 / 8, slow=1 / 2)
@pytest.mark.parametrize("text, again, per_block, of_head", PLANS)
@pytest.mark.parametrize("form", ["plain", "chunked"])
def test_plans_go_through_fused(monkeypatch, text, again, per_block, of_head, form):
    """The losses of one process, in every form, and as many calls as layers that can be fused."""
    monkeypatch.setenv("PYCOMM_FUSED", form)
    expected, none = spawn(1, losses_of, "")[0]
    assert not any(none.values())
    for losses, calls in spawn(par.Plan.parse(text).tp, losses_of, text, again):
        assert losses == pytest.approx(expected, rel=1e-12, abs=0)
        assert calls == {name: LAYERS * per_block.get(name, 0) + of_head.get(name, 0) for name in NAMES}


def postponed_body(rank, world_size):
    """Under DeferWeights backward leaves the weights' gradients to flush, with the values of the
    fused form.
    """
    group = as_group(None, "tp")
    calls, sequence = count_fused(), ([3, 4], [5, 2])
    for name in products.__all__:
        expected, _ = outcome(name, group, (2, *sequence, 6, True))
        tensors = operands(name, group, (2, *sequence, 6, True))
        x, weight, bias = tensors[0], *map(nn.Parameter, (tensor.detach() for tensor in tensors[1:]))
        along = [Pieces(1, sequence[0])] if name in ("gather_linear", "linear_reduce_scatter") else []
        store = WeightStore()
        calls.update(dict.fromkeys(NAMES, 0))
        with DeferWeights(store, 0):
            out = getattr(products, name)(x, weight, bias, group, *along, sequence[1])
        pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
        (out * pull).sum().backward()
        assert weight.grad is None and x.grad is not None and not any(calls.values()), name
        store.flush(0)
        for a, b in zip((out.detach(), x.grad, weight.grad, bias.grad), expected, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-12), name


def test_weight_gradients_are_postponed_under_zero_bubble():
    spawn(2, postponed_body)


def other_inputs_body(rank, world_size):
    """What pycomm.fused does not take runs apart: vectors, autocast; and a width that does not fit is
    F.linear's error.
    """
    group, calls = as_group(None, "tp"), count_fused()
    x, weight = torch.ones(4), torch.full((3, 4), 0.5)
    assert torch.equal(products.linear_reduce(x, weight, None, group, [4, 4]), torch.full((3,), 4.0))
    with torch.autocast("cpu", torch.bfloat16):
        out = products.linear_reduce(x[None], weight, None, group, [4, 4])
    assert out.dtype == torch.bfloat16 and torch.equal(out.float(), torch.full((1, 3), 4.0))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        products.linear_reduce(torch.ones(2, 5), weight, None, group, [4, 4])
    with pytest.raises(RuntimeError, match="same dtype"):
        products.linear_reduce(x[None].double(), weight, None, group, [4, 4])
    assert not any(calls.values())
    with torch.device("cpu"):  # a mode too, but none that looks for weights
        products.linear_reduce(x[None], weight, None, group, [4, 4])
    assert calls["matmul_all_reduce"] == 1


def test_inputs_that_run_apart():
    spawn(2, other_inputs_body)


def small_body(rank, world_size):
    group, least = as_group(None, "tp"), products.LEAST_FLOPS
    calls = count_fused()
    products.LEAST_FLOPS = least
    shards = [64, 128]  # by the longest, or the ranks would not choose alike
    rows = int(least / (2 * 32 * 128))
    for count, expected in ((rows, 0), (rows + 1, 1)):
        x, weight = torch.ones(count, shards[rank]), torch.ones(32, shards[rank])
        assert products.linear_reduce(x, weight, None, group, shards)[-1, -1] == sum(shards)
        assert calls["matmul_all_reduce"] == expected


def test_small_products_run_apart_on_a_cpu():
    spawn(2, small_body)
