"""The operations on CPU tensors, results and gradients, against a product in one process in float64: ugly
sizes, every dimension that can be cut, all activations and dtypes, torch groups of pycomm and Gloo,
Communicators, whole and in chunks."""

import types
from typing import NamedTuple

import oracle
import pytest
import torch
import torch.distributed as dist
from oracle import ACTIVATIONS, close, draw
from tiers import tier
from torch_ranks import spawn

from pycomm import fused
from pycomm.fused import plain, ranks
from pycomm.fused.problem import Problem
from pycomm.groups import even_sizes
from pycomm.testing import run_ranks


class Case(NamedTuple):
    """lead: leading dimensions of the whole a; its `dim` is cut into `sizes` (None: as torch.tensor_split
    does).
    """

    lead: tuple = (24,)
    k: int = 16
    n: int = 8
    dim: int = 0
    sizes: object = None  # function of the world size
    activation: str | None = None
    bias: bool = False
    dtype: torch.dtype = torch.float64
    strided: bool = False  # a and b are not contiguous


def ragged(world_size):
    return [(7 * r + 3) % 5 for r in range(world_size)]  # 3, 0, 2, 4: uneven, and one of them empty


def one_holds_all(world_size):
    return [6] + [0] * (world_size - 1)


CASES = [
    Case(),
    Case(lead=(1,), k=1, n=1, sizes=lambda n: [1] + [0] * (n - 1)),
    Case(lead=(0,), sizes=lambda n: [0] * n, bias=True, activation="relu"),
    Case(k=0, bias=True),
    Case(k=1, n=1, bias=True),
    Case(sizes=ragged, bias=True, activation="gelu"),
    Case(sizes=one_holds_all, activation="swiglu", strided=True),
    Case(lead=(2, 12, 3), dim=1, bias=True, activation="silu"),
    Case(lead=(2, 0, 3), dim=-3, sizes=ragged, strided=True),
    Case(lead=(3, 0), dim=-2, sizes=ragged, bias=True, activation="swiglu"),
    *[Case(lead=(40,), bias=bias, activation=name) for name in ACTIVATIONS for bias in (True, False)],
    *[
        Case(lead=(12, 4), k=33, n=20, dim=1, bias=True, activation="gelu_tanh", dtype=t)
        for t in (torch.float16, torch.bfloat16)
    ],
    *[
        Case(lead=(36,), k=33, n=20, sizes=None, activation=name, dtype=t)
        for name in ("swiglu", "silu")
        for t in (torch.float16, torch.bfloat16)
    ],
    *[
        Case(lead=(48,), k=64, n=40, bias=True, activation=name, dtype=torch.float32, strided=True)
        for name in (None, "relu", "swiglu")
    ],
]


def sizes_of(case, world_size):
    length = case.lead[case.dim if case.dim >= 0 else case.dim + len(case.lead) + 1]
    return tuple(case.sizes(world_size)) if case.sizes else tuple(even_sizes(length, world_size))


def tensor(case, seed, *shape):
    x = draw(seed, *shape, dtype=case.dtype)
    if case.strided and len(shape) > 1:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    return x.requires_grad_()


def compare(out, expected, weights, loss, mine, theirs):
    """Results, then gradients of sum(out * weights): those of `mine` against those that the oracle's loss
    gives `theirs`.
    """
    close(out, expected.detach())
    grads = torch.autograd.grad(out, mine, weights.to(out.dtype))
    for name, actual, wanted in zip(
        "a b bias".split(), grads, torch.autograd.grad(loss, theirs, allow_unused=True), strict=False
    ):
        try:
            close(actual, torch.zeros_like(actual, dtype=torch.float64) if wanted is None else wanted)
        except AssertionError as error:
            raise AssertionError(f"gradient of {name}: {error}") from error
    return [out.detach(), *grads]


def double(x):
    return x.detach().double().requires_grad_()


def given(*tensors):
    return [x for x in tensors if x is not None]


def run_all_gather(case, group, rank, n):
    """Every rank has columns, and a bias, of its own."""
    sizes, at = sizes_of(case, n), case.dim if case.dim >= 0 else case.dim + len(case.lead) + 1
    panels = 2 if case.activation == "swiglu" else 1
    shapes = [(*case.lead[:at], size, *case.lead[at + 1 :], case.k) for size in sizes]
    pieces = [tensor(case, 10 + r, *shape) for r, shape in enumerate(shapes)]
    bs = [tensor(case, 20 + r, case.k, panels * case.n) for r in range(n)]
    biases = [tensor(case, 30 + r, panels * case.n) if case.bias else None for r in range(n)]
    exact = (
        [double(piece) for piece in pieces],
        [double(b) for b in bs],
        [None if x is None else double(x) for x in biases],
    )
    outs = [
        oracle.all_gather_matmul(exact[0], exact[1][r], at, exact[2][r], case.activation) for r in range(n)
    ]
    weights = [draw(40 + r, *outs[r].shape, dtype=case.dtype) for r in range(n)]
    loss = sum((out * w.double()).sum() for out, w in zip(outs, weights, strict=True))
    told = sizes if len(set(sizes)) > 1 else None
    out = fused.all_gather_matmul(
        pieces[rank], bs[rank], group, dim=case.dim, sizes=told, bias=biases[rank], activation=case.activation
    )
    mine, theirs = given(pieces[rank], bs[rank], biases[rank]), given(*(x[rank] for x in exact))
    return compare(out, outs[rank], weights[rank], loss, mine, theirs)


def run_reduce(case, group, rank, n, scatter):
    at = case.dim if case.dim >= 0 else case.dim + len(case.lead) + 1
    panels, sizes = 2 if case.activation == "swiglu" else 1, sizes_of(case, n)
    lead = (*case.lead[:at], sum(sizes), *case.lead[at + 1 :])
    a_parts = [tensor(case, 10 + r, *lead, case.k) for r in range(n)]
    b_parts = [tensor(case, 20 + r, case.k, panels * case.n) for r in range(n)]
    bias = tensor(case, 30, panels * case.n) if case.bias else None
    exact = [double(a) for a in a_parts], [double(b) for b in b_parts], None if bias is None else double(bias)
    whole = oracle.matmul_all_reduce(*exact, case.activation)
    weights = draw(40, *whole.shape, dtype=case.dtype)
    mine, theirs = given(a_parts[rank], b_parts[rank], bias), given(exact[0][rank], exact[1][rank], exact[2])
    loss = (whole * weights.double()).sum()
    if not scatter:
        out = fused.matmul_all_reduce(
            a_parts[rank], b_parts[rank], group, bias=bias, activation=case.activation
        )
        return compare(out, whole, weights, loss, mine, theirs)
    given_sizes = sizes if case.sizes else None
    out = fused.matmul_reduce_scatter(
        a_parts[rank],
        b_parts[rank],
        group,
        dim=case.dim,
        sizes=given_sizes,
        bias=bias,
        activation=case.activation,
    )
    return compare(out, whole.split(sizes, at)[rank], weights.split(sizes, at)[rank], loss, mine, theirs)


def run_case(case, group, rank, n):
    try:
        gathered = run_all_gather(case, group, rank, n)
        scattered = run_reduce(case, group, rank, n, scatter=True)
        reduced = run_reduce(case, group, rank, n, scatter=False)
    except Exception as error:
        raise AssertionError(f"rank {rank}/{n}, {case}: {type(error).__name__}: {error}") from error
    return gathered, scattered, reduced


def in_process(rank, world_size, cases):
    results = [run_case(case, None, rank, world_size) for case in cases]
    return [reduced[0].view(torch.uint8).numpy().tobytes() for _, _, reduced in results]


@tier(quick=1 / 4)
@pytest.mark.parametrize("form", ["auto", "chunked"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_torch_group(world_size, form, monkeypatch):
    monkeypatch.setenv("PYCOMM_FUSED", form)
    results = spawn(world_size, in_process, CASES)
    assert all(result == results[0] for result in results), "matmul_all_reduce: the bits differ between ranks"


@tier(quick=1 / 2)
@pytest.mark.parametrize("form", ["auto", "chunked"])
def test_gloo_group(form, monkeypatch):
    monkeypatch.setenv("PYCOMM_FUSED", form)
    spawn(
        3,
        in_process,
        [case for case in CASES if case.dtype in (torch.float64, torch.float32)],
        backend="gloo",
    )


@pytest.mark.parametrize("form", ["auto", "chunked"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_communicator(world_size, form, monkeypatch):
    monkeypatch.setenv("PYCOMM_FUSED", form)
    run_ranks(
        world_size, lambda comm: [run_case(case, comm, comm.rank, comm.world_size) for case in CASES] and None
    )


# --- what tables choose --------------------


def large(rank, world_size):
    """Partial sums in registered memory (reduce_scatter, and all_reduce with a bias), and more of them than
    fit, so in chunks.
    """
    for rows in (1024, 24576):
        a, b, bias = (
            draw(rank, rows, 4, dtype=torch.float32),
            draw(rank + 9, 4, 384, dtype=torch.float32),
            torch.ones(384),
        )
        whole = (
            sum(
                draw(r, rows, 4).float().double() @ draw(r + 9, 4, 384).float().double()
                for r in range(world_size)
            )
            + 1.0
        )
        for _ in range(2):  # the second time the memory is there already
            piece = fused.matmul_reduce_scatter(a, b, bias=bias)
            close(piece, whole.tensor_split(world_size)[rank])
            reduced = fused.matmul_all_reduce(a, b, bias=bias, activation="relu")
            close(reduced, whole.relu())
        assert torch.equal(fused.matmul_reduce_scatter(a, b, bias=bias), piece), "a rerun gives other bits"
    memory = ranks.of(dist.group.WORLD).cache.staging
    assert memory.numel() == plain.MOST_STAGING, f"{memory.numel()} bytes of staging"


@tier(slow=1)
@pytest.mark.parametrize("world_size", [2, 3])
def test_registered_partial_sums(world_size):
    spawn(world_size, large)


def results_of_their_own(rank, world_size):
    """A result, or what is saved for its backward pass, must not lie in memory that the next call uses."""
    a, b, bias = draw(1, 512, 8, dtype=torch.float32), draw(2, 8, 256, dtype=torch.float32), torch.ones(256)
    for options in (
        {"bias": bias},
        {"activation": "relu"},
        {"activation": "gelu"},
        {"bias": bias, "activation": "silu"},
    ):
        for function in (fused.matmul_all_reduce, fused.matmul_reduce_scatter):
            result = function(a, b, **options)
            before = result.clone()
            function(a + 1, b, **options)
            assert torch.equal(result, before), f"{function.__name__} {options}: changed by the next call"
            gradients = []
            for between in (lambda: None, lambda: function(a + 1, b, **options)):  # noqa: B023
                w = b.clone().requires_grad_()
                out = function(a, w, **options)
                between()
                out.sum().backward()
                gradients.append(w.grad)
            assert torch.equal(*gradients), (
                f"{function.__name__} {options}: the gradient was changed by the next call"
            )


def test_results_do_not_lie_in_reused_memory():
    spawn(2, results_of_their_own)


class Late:
    """A group whose works do nothing before they are waited for, as slow as a collective can be: what is read
    before that, or written where it reads, is wrong. Every peer has what this rank has.
    """

    def __init__(self, size):
        self.size, self.rank, self.communicator, self.cache = size, size - 1, object(), ranks.Cache()
        self.under_way, self.most = [], 0

    def empty(self, count, dtype, device):
        return torch.full((count,), 171, dtype=dtype)

    def work(self, done, async_op):
        if not async_op:
            done()
            return None
        self.under_way.append(done)
        self.most = max(self.most, len(self.under_way))
        return types.SimpleNamespace(wait=lambda: (self.under_way.remove(done), done()))

    def all_gather(self, parts, x, async_op=True):
        parts = parts.split(x.shape[0]) if isinstance(parts, torch.Tensor) else parts
        return self.work(lambda: [part.copy_(x[: part.shape[0]]) for part in parts], async_op)

    def reduce_scatter(self, out, parts, async_op=True):
        parts = parts.split(out.shape[0]) if isinstance(parts, torch.Tensor) else parts
        return self.work(lambda: out.copy_(self.size * parts[self.rank]), async_op)

    def all_reduce(self, x, async_op=True):
        return self.work(lambda: x.mul_(self.size), async_op)


@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
@pytest.mark.parametrize("columns", [8, 640], ids=["ordinary memory", "registered memory"])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"activation": "gelu"}], ids=str)
def test_nothing_is_read_before_it_is_there(chunks, columns, options):
    """Whatever the number of chunks: two of matmul_reduce_scatter share their slots with those after them."""
    size, rows = 3, 300
    a, b = draw(1, rows, 4, dtype=torch.float32), draw(2, 4, columns, dtype=torch.float32)
    bias = draw(3, columns, dtype=torch.float32) if options.get("bias") else None
    sizes = even_sizes(rows, size)

    def problem(op, m, **cut):
        return Problem(op, m, columns, 4, torch.float32, size, size - 1, **options, **cut)

    def expected(z):
        z = z if bias is None else z + bias
        return z if "activation" not in options else torch.nn.functional.gelu(z)

    group = Late(size)
    found = plain.matmul_reduce_scatter(
        problem("matmul_reduce_scatter", rows, sizes=tuple(sizes)), group, a, b, bias, chunks
    )
    close(found.out, expected(size * (a @ b).split(sizes)[-1]))
    assert group.most <= 2 and (group.cache.staging is not None) == (columns == 640)
    found = plain.matmul_all_reduce(problem("matmul_all_reduce", rows), group, a, b, bias, chunks)
    close(found.out, expected(size * (a @ b)))
    mine = a[: sizes[-1]]
    found = plain.all_gather_matmul(
        problem("all_gather_matmul", size * sizes[-1], sizes=(sizes[-1],) * size),
        group, mine, b, bias, chunks, keep=True,
    )  # fmt: skip
    close(found.out, expected(torch.cat([mine @ b] * size)))
    assert torch.equal(found.gathered, torch.cat([mine] * size)) and not group.under_way


def in_inference_mode(rank, world_size):
    a, b = draw(1, 512, 8, dtype=torch.float32), draw(2, 8, 256, dtype=torch.float32).requires_grad_()
    with torch.inference_mode():
        first = fused.matmul_reduce_scatter(a, b)
    assert not ranks.of().cache.staging.is_inference(), "later calls may not write to it"
    again = fused.matmul_reduce_scatter(a, b)
    again.sum().backward()
    assert torch.equal(first, again) and b.grad is not None


def test_memory_that_inference_mode_made():
    spawn(2, in_inference_mode)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_accumulate_in_float32(dtype):
    """4096 products of 1: a sum in 16 bits would stop at 2048 (f16) or 256 (bf16). Three ranks: 1 and twice
    half of its last bit, which are lost if each is added and rounded by itself."""
    ones = torch.ones(1, 4096, dtype=dtype)
    assert fused.matmul(ones, ones.t()).item() == 4096
    step = 2.0 ** (-11 if dtype == torch.float16 else -8)
    outs = run_ranks(
        3,
        lambda comm: fused.matmul_all_reduce(
            torch.tensor([[1.0, step, step][comm.rank]]).to(dtype)[:, None],
            torch.ones(1, 1, dtype=dtype),
            comm,
        ),
    )
    assert [out.item() for out in outs] == [1 + 2 * step] * 3
