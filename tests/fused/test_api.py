"""Arguments of pycomm.fused: what is refused and how, groups, and that one process is a group of one."""

import _thread
import threading
import types

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from oracle import draw
from torch_ranks import spawn

import pycomm
from pycomm import fused
from pycomm.fused import api, dispatch, machine, ranks, twice
from pycomm.testing import run_ranks

A, B = torch.ones(6, 5, 64), torch.ones(64, 8)

# (function, arguments, keywords, error, its text) on rank 1 of 2
WRONG = [
    ("matmul", (A, torch.ones(32, 8)), {}, ValueError,
     r"\[rank 0/1\] matmul: a \(6, 5, 64\) has K=64, b \(32, 8\) has K=32"),
    ("matmul", (A, B.double()), {}, TypeError, "a is float32, b is float64"),
    ("matmul", (A, B, torch.ones(8).half()), {}, TypeError, "a is float32, bias is float16"),
    ("matmul", (A, B, torch.ones(7)), {}, ValueError, r"bias has shape \(7,\), b \(64, 8\); expected \(8,\)"),
    ("matmul", (A, B.numpy()), {}, TypeError, "b must be a torch tensor, not ndarray"),
    ("matmul", (A.long(), B.long()), {}, TypeError,
     "dtype int64 is not supported on cpu; use one of float32"),
    ("matmul", (A.to("meta"), B), {}, ValueError, "a is on meta, b is on cpu"),
    ("matmul", (A.to("meta"), B.to("meta")), {}, ValueError, "tensors are on meta; the CPU and CUDA"),
    ("matmul", (A[0, 0], B), {}, ValueError,
     r"a has shape \(64,\), b \(64, 8\); expected \(..., K\) with a leading dimension"),
    ("matmul", (A, B[0]), {}, ValueError, r"b \(8,\)"),
    ("matmul", (A, B), {"activation": "tanh"}, ValueError,
     "unknown activation 'tanh'; expected None or one of relu, silu, gelu"),
    ("matmul", (A, B[:, :7]), {"activation": "swiglu"}, ValueError,
     r"b \(64, 7\) has an odd number of columns"),
    ("all_gather_matmul", (A, B), {"dim": 2}, ValueError,
     r"\[rank 1/2\] all_gather_matmul: dim=2 is the inner dimension"),
    ("all_gather_matmul", (A, B), {"dim": -1}, ValueError, "dim=-1 is the inner dimension"),
    ("all_gather_matmul", (A, B), {"dim": 3}, ValueError,
     "dim=3 is out of range of a .*expected 0 to 1, or -3 to -2"),
    ("all_gather_matmul", (A, B), {"dim": -4}, ValueError, "dim=-4 is out of range"),
    ("all_gather_matmul", (A, B), {"sizes": [6]}, ValueError, "sizes has 1 entries for 2 ranks"),
    ("all_gather_matmul", (A, B), {"sizes": [6, 5]}, ValueError, r"sizes\[1\]=5, but a has 6 along dim 0"),
    ("all_gather_matmul", (A, B), {"sizes": [-1, 6]}, ValueError, r"sizes=\[-1, 6\] must not be negative"),
    ("all_gather_matmul", (A, B), {"shards": [8, 7]}, ValueError,
     r"shards\[1\]=7, but b's part here is 8 long"),
    ("matmul_reduce_scatter", (A, B), {"shards": [64, 8]}, ValueError,
     r"shards\[1\]=8, but b's part here is 64 long"),
    ("matmul_all_reduce", (A, B), {"shards": [64]}, ValueError, "shards has 1 entries for 2 ranks"),
    ("matmul_reduce_scatter", (A, B), {"sizes": [3, 4]}, ValueError,
     r"sizes=\[3, 4\] sum to 7, but a has 6 along dim 0"),
    ("matmul_reduce_scatter", (A, B, 5), {}, TypeError,
     "group must be a torch ProcessGroup, a pycomm.Communicator or None, not int"),
    ("matmul_all_reduce", (A, B.double()), {}, TypeError,
     r"\[rank 1/2\] matmul_all_reduce: a is float32, b is float64"),
]  # fmt: skip


def refuse_all(rank, world_size):
    """Rank 1 passes what is wrong; nothing may have been sent, so a right call that follows works."""
    for name, args, options, error, text in WRONG:
        if rank == 1:
            with pytest.raises(error, match=text):
                getattr(fused, name)(*args, **options)
        out = fused.matmul_all_reduce(A, B)
        assert out[0, 0, 0] == 64 * world_size


def test_wrong_arguments():
    spawn(2, refuse_all)


def disagree(rank, world_size):
    with pytest.raises(
        pycomm.MismatchError,
        match=rf"\[rank {rank}/2 .*count={32 + 8 * rank} here, {40 - 8 * rank} on rank {1 - rank}",
    ):
        fused.matmul_all_reduce(torch.ones(4 + rank, 8), torch.ones(8, 8))


def test_ranks_that_disagree():
    spawn(2, disagree)


def of_groups(rank, world_size):
    half = dist.new_group([0, 1])
    everyone = dist.new_group([0, 1, 2])
    x, w = torch.full((2, 4), float(rank)), torch.ones(4, 3)
    assert torch.equal(fused.matmul_all_reduce(x, w, everyone), torch.full((2, 3), 12.0))
    assert torch.equal(fused.matmul_all_reduce(x, w), torch.full((2, 3), 12.0))
    if rank < 2:
        assert torch.equal(fused.all_gather_matmul(x, w, half)[:, 0], torch.tensor([0.0, 0.0, 4.0, 4.0]))
        assert ranks.of(half).size == 2 and ranks.of(half).group.name == half.group_name
    else:
        with pytest.raises(ValueError, match=r"\[rank 2/3\] this rank is not in the group"):
            fused.matmul_all_reduce(x, w, half)
    ranks.of(everyone).cache.staging = x
    assert ranks.of(everyone).cache.staging is x and ranks.of(None).cache.staging is None
    kept = len(ranks._caches)
    del half, everyone
    dist.destroy_process_group()
    assert kept >= 2 and len(ranks._caches) == 0, "what groups keep outlives them"


def test_groups():
    spawn(3, of_groups)


def test_alone():
    """No group, and a group of one: what matmul does, without a collective."""
    a, b, bias = (
        draw(0, 6, 5, dtype=torch.float32),
        draw(1, 5, 8, dtype=torch.float32),
        draw(2, 8, dtype=torch.float32),
    )
    expected = fused.matmul(a, b, bias, "swiglu")
    assert ranks.of(None).group.name == "alone"

    def all_three(group):
        options = {"bias": bias, "activation": "swiglu"}
        return [
            fused.all_gather_matmul(a, b, group, **options),
            fused.matmul_reduce_scatter(a, b, group, sizes=[6], **options),
            fused.matmul_all_reduce(a, b, group, **options),
        ]

    for out in all_three(None) + run_ranks(1, all_three)[0]:
        assert torch.equal(out, expected)


def test_only_what_is_needed_has_a_gradient():
    def body(comm):
        a, b, bias = draw(comm.rank, 4, 3), draw(5, 3, 2), draw(6, 2)
        for needed in (a, b, bias):
            needed.requires_grad_()
            for function in (fused.all_gather_matmul, fused.matmul_reduce_scatter, fused.matmul_all_reduce):
                function(a, b, comm, bias=bias, activation="gelu").sum().backward()
                assert needed.grad is not None and sum(x.grad is not None for x in (a, b, bias)) == 1, (
                    function
                )
                needed.grad = None
            needed.requires_grad_(False)
        assert fused.matmul(a, b, bias).grad_fn is None

    run_ranks(2, body)


@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_a_gradient_is_the_same_whatever_else_needs_one(activation):
    """Of each of the seven choices of a, b and bias, beside frozen ones; uneven pieces."""

    def body(comm):
        wide = 4 if activation else 2
        a, b, bias = draw(comm.rank, 2 + comm.rank, 3), draw(5 + comm.rank, 3, wide), draw(9, wide)
        whole = draw(3 + comm.rank, 5, 3)
        for function, x, options in (
            (fused.all_gather_matmul, a, {"sizes": [2, 3]}),
            (fused.matmul_reduce_scatter, whole, {"sizes": [1, 4]}),
            (fused.matmul_all_reduce, whole, {}),
        ):
            found = {}
            for chosen in range(1, 8):
                leaves = [y.clone().requires_grad_(bool(chosen >> i & 1)) for i, y in enumerate((x, b, bias))]
                out = function(*leaves[:2], comm, bias=leaves[2], activation=activation, **options)
                (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
                assert [y.grad is not None for y in leaves] == [y.requires_grad for y in leaves], chosen
                found[chosen] = [y.grad for y in leaves]
            for chosen, grads in found.items():
                for grad, right in zip(grads, found[7], strict=True):
                    assert grad is None or torch.equal(grad, right), f"{function.__name__}, {chosen}"

    run_ranks(2, body)


def test_ranks_with_shards_of_their_own():
    """Columns where rows are gathered, else rows; one rank may have none."""

    def body(comm):
        widths = (3, 0, 5)
        mine = widths[comm.rank]
        x, w = draw(1, 6, 8), draw(2, 8, 8)
        first = sum(widths[: comm.rank])
        out = fused.all_gather_matmul(
            x[2 * comm.rank :][:2], w[:, first:][:, :mine], comm, shards=widths, activation="relu"
        )
        torch.testing.assert_close(out, (x @ w)[:, first:][:, :mine].relu())
        parts = x[:, first:][:, :mine], w[first:][:mine]
        torch.testing.assert_close(fused.matmul_all_reduce(*parts, comm, shards=widths), x @ w)
        out = fused.matmul_reduce_scatter(*parts, comm, shards=list(widths))
        torch.testing.assert_close(out, (x @ w)[2 * comm.rank :][:2])

    run_ranks(3, body)


def test_gradients_are_those_of_finite_differences():
    """matmul alone; the collective ones are compared with one process in test_plain.py."""
    a, b, bias = (x.requires_grad_() for x in (draw(0, 2, 3, 4), draw(1, 4, 6), draw(2, 6)))
    for activation in (None, "silu", "gelu", "gelu_tanh", "swiglu"):
        assert torch.autograd.gradcheck(lambda *x: fused.matmul(*x, activation), (a, b, bias))  # noqa: B023


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """As torch's products: operands of any of its dtypes, results in that of autocast, gradients in those of
    the operands.
    """
    b, bias = (
        draw(1, 5, 4, dtype=torch.float32).requires_grad_(),
        draw(2, 4, dtype=torch.float32).requires_grad_(),
    )

    def body(comm):
        a = draw(comm.rank, 6, 5, dtype=torch.bfloat16).requires_grad_()
        for function in (fused.all_gather_matmul, fused.matmul_reduce_scatter, fused.matmul_all_reduce):
            with torch.autocast("cpu", dtype):
                out = function(a, b, comm, bias=bias, activation="gelu")
            plain = function(a.to(dtype), b.to(dtype), comm, bias=bias.to(dtype), activation="gelu")
            assert out.dtype == dtype and torch.equal(out, plain)
            grads = torch.autograd.grad(out.sum(), (a, b, bias))
            assert [grad.dtype for grad in grads] == [a.dtype, torch.float32, torch.float32]
        with torch.autocast("cpu", dtype):
            assert fused.matmul(a.double(), b.double()).dtype == torch.float64

    run_ranks(2, body)


def test_a_lazy_negation_is_carried_out():
    def body(comm):
        a, b = draw(comm.rank, 4, 3), draw(5, 3, 2)
        for function in (fused.all_gather_matmul, fused.matmul_reduce_scatter, fused.matmul_all_reduce):
            assert torch.equal(function(torch._neg_view(a), b, comm), -function(a, b, comm))

    run_ranks(2, body)


def test_second_derivatives_are_refused():
    def body(comm):
        a, b = draw(0, 2, 3).requires_grad_(), draw(1, 3, 2)
        for function, options in (
            (fused.matmul, {"activation": "silu"}),
            (fused.matmul_all_reduce, {"group": comm, "activation": "relu"}),
            (fused.all_gather_matmul, {"group": comm}),
            (fused.matmul_reduce_scatter, {"group": comm}),
        ):
            total = function(a, b, **options).square().sum()
            with pytest.raises(ValueError, match="create_graph=True"):
                torch.autograd.grad(total, a, create_graph=True)

    run_ranks(2, body)


def test_second_derivatives_of_a_sum_over_ranks():
    """As one process has them, of the sum of both ranks' products."""

    def second(products, leaves):
        first = torch.autograd.grad(products.pow(3).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    parts = [(draw(r, 4, 3).requires_grad_(), draw(5 + r, 3, 2).requires_grad_()) for r in range(2)]
    bias = draw(9, 2).requires_grad_()
    whole = second(sum(a @ b for a, b in parts) + bias, [x for pair in parts for x in pair] + [bias])

    def body(comm):
        a, b = (x.detach().requires_grad_() for x in parts[comm.rank])
        its = bias.detach().requires_grad_()
        first = torch.autograd.grad(
            fused.matmul_all_reduce(a, b, comm, bias=its).pow(3).sum(), (a, b, its), create_graph=True
        )
        # of each rank's own part here, and of what both have once
        own = sum(g.square().sum() for g in first[:2])
        total = twice._Sum.apply(own, ranks.of(comm)) + first[2].square().sum()
        found = torch.autograd.grad(total, (a, b, its))
        for value, right in zip(found, (*whole[2 * comm.rank : 2 * comm.rank + 2], whole[4]), strict=True):
            torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-5)

    run_ranks(2, body)


def test_the_callers_tensors_are_unchanged():
    def body(comm):
        tensors = [draw(comm.rank, 4, 3), draw(1, 3, 2), draw(2, 2)]
        before = [x.clone() for x in tensors]
        a, b, bias = tensors
        for function in (fused.all_gather_matmul, fused.matmul_reduce_scatter, fused.matmul_all_reduce):
            function(a, b, comm, bias=bias, activation="relu")
        fused.matmul(a, b, bias, "silu")
        assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))

    run_ranks(2, body)


def recomputed_products(rank, world_size):
    """How many products a checkpoint computes again of two, and the gradients' layout."""
    calls, forward = [], dispatch.forward
    dispatch.forward = lambda *args, **options: calls.append(args[0].op) or forward(*args, **options)
    a, (first, second) = (
        torch.randn(6, 4, requires_grad=True),
        [torch.randn(4, 4, requires_grad=True) for _ in range(2)],
    )

    def block(x):
        return fused.matmul_all_reduce(fused.matmul_all_reduce(x, first.t()).relu(), second.t())

    torch.utils.checkpoint.checkpoint(block, a, use_reentrant=False).sum().backward()
    got = [x.grad.clone() for x in (first, second)]
    block(a.detach().requires_grad_()).sum().backward()
    dispatch.forward = forward
    same = all(torch.equal(2 * mine, x.grad) for mine, x in zip(got, (first, second), strict=True))
    return calls.count("matmul_all_reduce"), same, first.grad.is_contiguous() and second.grad.is_contiguous()


def test_a_checkpoint_recomputes_only_what_it_needs():
    """Forward twice 2 calls; the checkpoint's recomputation needs the first alone, since the second's inputs
    are then known.
    """
    assert spawn(2, recomputed_products) == [(5, True, True)] * 2


def test_backward_of_ranks_that_are_threads():
    """On the thread that torch has for a GPU they would wait for each other for ever: that is refused. A
    thread that Python's threading did not start is as torch's.
    """
    here = machine.Machine(90, 2, 66, "", threads=True)
    cache = ranks.Cache()
    cache.machines[A.device] = here
    context = types.SimpleNamespace(
        ranks=ranks.ALONE._replace(cache=cache),
        device=A.device,
        problem=types.SimpleNamespace(op="all_gather_matmul"),
        kept=None,
        saved_tensors=(A, B, None),
    )
    said, done = [], threading.Event()

    def backward():
        try:
            api._saved(context)
        except RuntimeError as error:
            said.append(str(error))
        done.set()

    _thread.start_new_thread(backward, ())
    assert done.wait(20)
    (text,) = said
    assert text.startswith("[rank 0/1] pycomm.fused.all_gather_matmul: the ranks are threads of one process")
    assert "set_multithreading_enabled(False)" in text
    assert api._saved(context)[0] is A  # on a thread of the rank's own
    context.ranks.cache.machines[A.device] = here._replace(threads=False)
    said.clear(), done.clear()
    _thread.start_new_thread(backward, ())
    assert done.wait(20) and not said
