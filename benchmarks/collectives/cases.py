"""What is measured, and how bytes and seconds become the figures of the table. Definitions of nccl-tests (its
doc/PERFORMANCE.md).

    size     bytes of the whole buffer: what a rank holds before or after the operation, whichever is larger
    count    elements; of one rank's chunk for operations that cut the buffer into world_size chunks
    algbw    size / time, GB/s with GB = 1e9
    busbw    algbw * factor: the rate at which the busiest link would have to carry the bytes, comparable
             between numbers of ranks

    operation                            before -> after, in chunks of count        factor
    all_reduce                           1 -> 1                                     2(n-1)/n
    reduce_scatter, all_gather           n -> 1, 1 -> n                             (n-1)/n
    all_to_all                           n -> n                                     (n-1)/n
    gather, scatter                      1 -> n at the root, n at the root -> 1     (n-1)/n
    broadcast, reduce                    1 -> 1                                     1
    send_recv (rank r sends to r+1)      1 -> 1                                     1
    pingpong (rank r with r^1)           1 -> 1, half of a round trip               1
    barrier                              no data                                    0

A size that does not divide is rounded down to whole elements for each rank, but to one element at least: 8
bytes of f32 on 4 ranks are 16.
"""

import re
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from pycomm.benchmarks.common import turns
from pycomm.benchmarks.common.data import ITEMSIZE, DtypeName
from pycomm.benchmarks.common.turns import Rounds

GB = 1e9
UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
OpName: TypeAlias = Literal[
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
    "send_recv",
    "pingpong",
    "gather",
    "scatter",
    "barrier",
]
Redop: TypeAlias = Literal["sum", "avg", "product", "min", "max", "none"]  # none: it reduces nothing
Form: TypeAlias = Literal["out_of_place", "in_place"]
Chunks: TypeAlias = Literal["one", "all"] | None  # of a buffer: one, or one for each rank
REDOPS: tuple[Redop, ...] = ("sum", "avg", "product", "min", "max")
FORMS: tuple[Form, ...] = ("out_of_place", "in_place")


class Op(NamedTuple):
    """What the benchmark must know of an operation."""

    busbw_factor: Callable[[int], float]  # of the world size
    send: Chunks  # that a rank puts in
    recv: Chunks  # that it gets
    reduces: bool = False
    in_place: Literal["send", "recv"] | None = None  # the buffer of the in-place form, if there is one
    transfers: int = 1  # messages after each other in one call; the time of one is reported
    min_ranks: int = 1
    in_pairs: bool = False  # the world size must be even


def _link(n: int) -> float:
    return (n - 1) / n


OPS: dict[OpName, Op] = {
    "all_reduce": Op(lambda n: 2 * _link(n), "one", "one", reduces=True, in_place="recv"),
    "reduce_scatter": Op(_link, "all", "one", reduces=True, in_place="send"),
    "all_gather": Op(_link, "one", "all", in_place="recv"),
    "all_to_all": Op(_link, "all", "all"),
    "broadcast": Op(lambda n: 1, "one", "one", in_place="recv"),
    "reduce": Op(lambda n: 1, "one", "one", reduces=True, in_place="recv"),
    "send_recv": Op(lambda n: 1, "one", "one", min_ranks=2),
    "pingpong": Op(lambda n: 1, "one", "one", transfers=2, in_pairs=True),
    "gather": Op(_link, "one", "all"),
    "scatter": Op(_link, "all", "one"),
    "barrier": Op(lambda n: 0, None, None),
}
# `all`
MAIN_OPS: tuple[OpName, ...] = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "send_recv",
)
OTHER_NAMES: dict[str, tuple[str, ...]] = {"all": MAIN_OPS, "sendrecv": ("send_recv",)}


class Case(NamedTuple):
    """One line of the table, the same for all backends."""

    op: OpName
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    dtype: DtypeName
    redop: Redop
    root: int

    def send_count(self, n: int) -> int:
        return self.count * _chunks(OPS[self.op].send, n)

    def recv_count(self, n: int) -> int:
        return self.count * _chunks(OPS[self.op].recv, n)

    def nbytes(self, n: int) -> int:
        return max(self.send_count(n), self.recv_count(n)) * ITEMSIZE[self.dtype]


def _chunks(which: Chunks, n: int) -> int:
    return {None: 0, "one": 1, "all": n}[which]


class Timing(NamedTuple):
    """The figures of one form of one case. Times are of one operation."""

    time_us: float
    p99_us: float
    algbw: float
    busbw: float
    wrong: int  # elements, summed over ranks and checks
    spread: float  # largest over smallest median of a round


def parse_ops(text: str) -> list[OpName]:
    """Operations with commas. Raises ValueError."""
    names = dict.fromkeys(op for name in text.split(",") for op in OTHER_NAMES.get(name, (name,)))
    for name in names:
        if name not in OPS:
            raise ValueError(f"operation {name!r}: must be all or of {', '.join(OPS)}.")
    return [op for name in names for op in OPS if op == name]


def make_case(op: OpName, nbytes: int, dtype: DtypeName, redop: Redop, root: int, n: int) -> Case:
    """The case whose buffer has about nbytes. Raises ValueError if the operation needs more ranks or the root
    is none of them.
    """
    spec = OPS[op]
    if n < spec.min_ranks:
        raise ValueError(f"{op} needs {spec.min_ranks} ranks or more, here {n}.")
    if spec.in_pairs and n % 2:
        raise ValueError(f"{op} needs an even number of ranks, here {n}.")
    if not 0 <= root < n:
        raise ValueError(f"root={root}: must be a rank, 0 to {n - 1}.")
    parts = n if "all" in (spec.send, spec.recv) else 1
    count = 0 if spec.send is None else max(1, nbytes // ITEMSIZE[dtype] // parts)
    return Case(op, count, dtype, redop if spec.reduces else "none", root)


def summarize(case: Case, n: int, rounds: Rounds, wrong: int) -> Timing:
    """rounds: of seconds per operation, one for each batch."""
    samples, medians = turns.samples_of(rounds), turns.medians(rounds)
    seconds = turns.medians([samples])[0]
    algbw = case.nbytes(n) / seconds / GB
    return Timing(
        time_us=seconds * 1e6,
        p99_us=turns.percentile(samples, 0.99) * 1e6,
        algbw=algbw,
        busbw=algbw * OPS[case.op].busbw_factor(n),
        wrong=wrong,
        spread=max(medians) / min(medians),
    )


def parse_nbytes(text: str) -> int:
    """ "64K" -> 65536. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,12})([KMG]?)B?", text.strip().upper(), re.ASCII)
    if not match or int(match[1]) == 0:
        raise ValueError(
            f"size {text!r}: must be a number of bytes above 0, which may end in K, M or G (powers of 1024)."
        )
    return int(match[1]) << UNITS[match[2]]


def parse_sizes(text: str, factor: int = 2) -> list[int]:
    """ "8:1K" -> [8, 16, ... 1024]; "8,4K" -> [8, 4096]; both may be mixed. factor is the step of a range.
    Raises ValueError.
    """
    if factor < 2:
        raise ValueError(f"factor={factor}: must be 2 or more.")
    sizes = []
    for part in text.split(","):
        first, colon, last = part.partition(":")
        nbytes, end = parse_nbytes(first), parse_nbytes(last if colon else first)
        if nbytes > end:
            raise ValueError(f"sizes {part!r}: the first must not be larger than the last.")
        while nbytes <= end:
            sizes.append(nbytes)
            nbytes *= factor
    return sorted(set(sizes))


def format_nbytes(nbytes: int) -> str:
    """65536 -> "64K"; a number without a whole unit stays as it is."""
    for unit, shift in reversed(UNITS.items()):
        if nbytes >= 1 << shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return str(nbytes)
