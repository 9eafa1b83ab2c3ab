"""One call of a kernel of pycomm.fused in Triton's interpreter: its operands, what must come out, and tables
of calls.

Every call is checked against float64 on every rank; moreover its operands lie between NaNs, so that a read
outside of them shows in the result, and its results between bytes that must stay as they are.
"""

import contextlib
from typing import NamedTuple

import tolerance
import torch
from oracle import ACTIVATIONS, draw

from pycomm.fused import ranks
from pycomm.fused.config import Config
from pycomm.fused.problem import Problem
from pycomm.groups import even_sizes

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ROUNDINGS = {torch.float32: 8, torch.float16: 1, torch.bfloat16: 0.5}  # see tolerance.py
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
TILE = Config(32, 32, 32, movers=1)


class Job(NamedTuple):
    """One call. sizes: function of the number of ranks; a, b: how they lie in memory ("rows", "columns", or
    "strided": with gaps).
    """

    op: str
    n: int = 40
    k: int = 40
    sizes: object = lambda world_size: tuple(even_sizes(41, world_size))
    outer: int = 1
    inner: int = 1
    activation: str | None = None
    bias: bool = True
    save: bool = True
    keep: bool = False
    a: str = "rows"
    b: str = "columns"
    config: Config = TILE
    dtype: torch.dtype = torch.float32
    seed: int = 0
    widths: tuple = ()  # every rank's own n (all_gather_matmul), or k

    def problem(self, world_size, rank):
        sizes = self.sizes(world_size)
        rows = self.outer * sum(sizes) * self.inner
        n = self.widths[rank] if self.widths and self.op == GATHER else self.n
        k = self.widths[rank] if self.widths and self.op != GATHER else self.k
        cut = (
            {"outer": self.outer, "inner": self.inner, "sizes": sizes} if self.op in (GATHER, SCATTER) else {}
        )
        return Problem(
            self.op,
            rows,
            n,
            k,
            self.dtype,
            world_size,
            rank,
            self.activation,
            self.bias,
            **cut,
            shards=self.widths,
        )


def ragged(world_size):
    """35, 0, 3, 20: more than a tile, nothing, little."""
    return (35, 0, 3, 20)[:world_size]


def nothing(world_size):
    return (0,) * world_size


# --- data and what must come out --------------------


def lay_out(x, layout):
    """x between NaNs, with the strides that `layout` says."""
    if x.dim() == 2 and layout == "columns":
        return lay_out(x.t(), "rows").t()
    step = 2 if layout == "strided" else 1
    around = x.new_full((x.shape[0] + 2, *x.shape[1:-1], x.shape[-1] * step), float("nan"))
    inside = around[1:-1] if x.dim() > 1 else around[1 : 1 + x.shape[0]]
    inside = inside[..., ::step]
    return inside.copy_(x)


def operands(job, world_size, rank):
    """(a, b, bias) of a rank; a of all_gather_matmul whole: equal on all ranks, of which `piece` cuts this
    rank's rows.
    """
    problem = job.problem(world_size, rank)
    shared = job.op in (GATHER, "matmul")
    a = draw(job.seed + (0 if shared else 1 + rank), problem.m, problem.k, dtype=job.dtype)
    b = draw(job.seed + 100 + rank, problem.k, problem.columns, dtype=job.dtype)
    return a, b, draw(job.seed + 200, problem.columns, dtype=job.dtype) if job.bias else None


def piece(job, world_size, rank, rows):
    """The rank's rows of a whole matrix."""
    sizes = job.sizes(world_size)
    first = sum(sizes[:rank])
    cut = rows.view(job.outer, sum(sizes), job.inner, rows.shape[1])[:, first : first + sizes[rank]]
    return cut.reshape(job.outer * sizes[rank] * job.inner, rows.shape[1])


class Expected(NamedTuple):
    """In float64, of matmul_reduce_scatter whole. sizes: of both, see tolerance.py."""

    out: torch.Tensor
    z: torch.Tensor  # preactivation
    sizes: tuple


def expected(job, world_size, rank):
    ranks_of_sum = [rank] if job.op in (GATHER, "matmul") else range(world_size)
    parts = [operands(job, world_size, r) for r in ranks_of_sum]
    z = sum(a.double() @ b.double() for a, b, _ in parts)
    size = sum(tolerance.product(a, b) for a, b, _ in parts)
    if job.bias:
        z, size = z + parts[0][2].double(), size + parts[0][2].double().abs()
    return Expected(ACTIVATIONS[job.activation](z), z, (tolerance.activated(job.activation, z, size), size))


@contextlib.contextmanager
def guarded():
    """The matrices that torch.Tensor.new_empty(rows, columns) returns hold NaN, and bytes of 171 lie around
    them, which must stay.
    """
    plain, made = torch.Tensor.new_empty, []

    def new_empty(self, *shape, **options):
        if options or len(shape) != 2:
            return plain(self, *shape, **options)
        count = torch.Size(shape).numel()
        around = plain(self, count + 256).fill_(0)
        around.view(torch.uint8).fill_(171)
        made.append(around)
        return around[128 : 128 + count].fill_(float("nan")).view(shape)

    torch.Tensor.new_empty = new_empty
    try:
        yield
    finally:
        torch.Tensor.new_empty = plain
    for around in made:
        edges = torch.cat([around[:128], around[-128:]]).view(torch.uint8)
        assert (edges == 171).all(), (
            f"bytes outside of a result of {around.numel() - 256} elements were written"
        )


def context_of():
    """This rank's context in the default group, fresh in each case."""
    from pycomm.fused import context

    return context.of(ranks.of(None), "cpu")


def call(job, world_size, rank):
    """(out, z, gathered) of a job on this rank, unchecked."""
    from pycomm.fused import launch

    a, b, bias = operands(job, world_size, rank)
    a = lay_out(piece(job, world_size, rank, a) if job.op == GATHER else a, job.a)
    b, bias, problem = (
        lay_out(b, job.b),
        bias if bias is None else lay_out(bias, "rows"),
        job.problem(world_size, rank),
    )
    if job.op == "matmul":
        return *launch.matmul(problem, a, b, bias, job.config, save=job.save), None
    if job.op == GATHER:
        return launch.all_gather_matmul(
            problem, context_of(), a, b, bias, job.config, save=job.save, keep=job.keep
        )
    return *getattr(launch, job.op)(problem, context_of(), a, b, bias, job.config, save=job.save), None


def check(job, world_size, rank):
    """Calls, checks all that comes out, returns (out, z)."""
    with guarded():
        out, z, gathered = call(job, world_size, rank)
    if job.op != "matmul":
        assert int(context_of().record[0]) == 0, f"{job} left the record {context_of().record.tolist()}"
    wanted = expected(job, world_size, rank)
    mine = [piece(job, world_size, rank, x) for x in wanted[:2]] if job.op == SCATTER else wanted
    tolerance.near(f"{job}", out, mine[0], wanted.sizes[0], ROUNDINGS[job.dtype])
    saved = job.save and job.activation is not None
    assert (z is not None) == saved
    if saved:
        tolerance.near(f"preactivation of {job}", z, mine[1], wanted.sizes[1], ROUNDINGS[job.dtype])
    assert (gathered is not None) == job.keep
    if job.keep:
        assert torch.equal(gathered, operands(job, world_size, rank)[0]), f"gathered of {job}"
    return out, z


# --- one call after the other against float64 --------------------

DENSE = TILE._replace(tma=True)
MATMULS = [
    *[Job("matmul", activation=name, config=config) for name in ACTIVATIONS for config in (TILE, DENSE)],
    *[
        Job("matmul", activation=name, bias=bias, save=False, config=DENSE)
        for name in (None, "gelu", "swiglu")
        for bias in (False, True)
    ],
    *[
        Job("matmul", k=72, a=a, b=b, config=DENSE, activation="silu")
        for a in ("rows", "columns")
        for b in ("rows", "columns")
    ],
    Job("matmul", n=33, k=9, a="strided", b="strided", activation="relu"),
    Job("matmul", n=1, k=1, sizes=lambda n: (1,), config=DENSE),
    Job("matmul", n=97, k=33, sizes=lambda n: (130,), config=Config(32, 16, 16, group_m=2), save=False),
    Job(
        "matmul",
        n=64,
        k=64,
        sizes=lambda n: (64,),
        b="rows",
        config=Config(32, 64, 16, tma=True),
        activation="swiglu",
    ),
    Job("matmul", k=0, activation="gelu"),
]
GATHERS = [
    Job(GATHER, k=24, activation="gelu", keep=True),
    Job(
        GATHER,
        k=9,
        sizes=ragged,
        activation="swiglu",
        keep=True,
        config=Config(32, 16, 16, movers=2, tma=True),
    ),
    Job(GATHER, n=17, k=33, outer=2, sizes=ragged, inner=1, a="strided", b="strided", keep=True, bias=False),
    Job(
        GATHER,
        n=70,
        k=5,
        outer=3,
        sizes=lambda n: tuple(range(6, 6 + n)),
        inner=3,
        activation="relu",
        save=False,
        b="rows",
        config=DENSE,
    ),
    Job(GATHER, n=1, k=1, sizes=lambda n: (1,) * n, keep=True),
]
# Partial sums travel in the dtype of the result, so there are three roundings, of up to 2^-9 each for bf16.
# The seeds of the reductions give a largest value that is not just above a power of two, for which they would
# be most of what is allowed.
SCATTERS = [
    Job(SCATTER, k=24, activation="gelu", seed=11),
    Job(SCATTER, k=9, sizes=ragged, activation="swiglu", config=Config(32, 16, 16, movers=2), seed=12),
    Job(SCATTER, n=17, k=33, outer=2, sizes=ragged, a="strided", b="strided", bias=False, seed=2),
    Job(
        SCATTER,
        n=70,
        k=40,
        sizes=ragged,
        a="columns",
        b="rows",
        activation="silu",
        save=False,
        config=DENSE,
        seed=8,
    ),
    Job(
        SCATTER,
        n=32,
        k=40,
        outer=3,
        sizes=lambda n: tuple(range(6, 6 + n)),
        inner=3,
        activation="relu",
        config=DENSE,
        seed=85,
    ),
    Job(SCATTER, n=1, k=1, sizes=lambda n: (1,) + (0,) * (n - 1), seed=3),
]
REDUCES = [
    Job(REDUCE, k=24, activation="gelu", seed=11),
    Job(REDUCE, k=9, activation="swiglu", config=Config(16, 32, 16, movers=2), seed=12),
    Job(REDUCE, n=17, k=33, a="strided", b="strided", bias=False, seed=4),
    Job(REDUCE, n=70, a="columns", b="rows", activation="silu", save=False, config=DENSE, seed=8),
    Job(REDUCE, n=1, k=1, sizes=lambda n: (1,), seed=3),
]
EMPTY = [
    Job(GATHER, sizes=nothing, keep=True),
    Job(SCATTER, sizes=nothing),
    Job(REDUCE, sizes=nothing),
    *[Job(op, n=0, keep=op == GATHER) for op in (GATHER, SCATTER, REDUCE)],
    *[Job(op, k=0, keep=op == GATHER, activation="swiglu") for op in (GATHER, SCATTER, REDUCE)],
]
