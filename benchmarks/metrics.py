"""What is measured, and how bytes and seconds become the numbers of the table. Definitions of nccl-tests (its doc/PERFORMANCE.md).

    size     bytes of the whole buffer: what a rank holds before or after the operation, whichever is larger
    count    elements; of one rank's chunk for operations that cut the buffer into world_size chunks
    algbw    size / time, GB/s with GB = 1e9
    busbw    algbw * factor: the rate at which the busiest link would have to carry the bytes, comparable between rank numbers

    operation                            before -> after, in chunks of count        factor
    all_reduce                           1 -> 1                                     2(n-1)/n
    reduce_scatter, all_gather           n -> 1, 1 -> n                             (n-1)/n
    all_to_all                           n -> n                                     (n-1)/n
    gather, scatter                      1 -> n at the root, n at the root -> 1     (n-1)/n
    broadcast, reduce                    1 -> 1                                     1
    sendrecv (rank r sends to r+1)       1 -> 1                                     1
    pingpong (rank r with r^1)           1 -> 1, half of a round trip               1
    barrier                              no data                                    0

[Note: bytes of one GPU] Where all ranks share one GPU, nothing crosses a link: what limits a large collective is how many bytes it reads
from and writes to that GPU's memory, all ranks together, and how fast the GPU copies. With n ranks and k bytes per chunk, reads + writes:

    operation        floor               algorithm of pycomm, peers address each other's buffers (its steps: csrc/cuda/*.cuh)
    all_reduce       nk + nk             two_shot  the same as the floor       ring  (6n-4)k      one_shot  n(4n-2)k
    reduce           nk + k              two_shot  the same as the floor
    broadcast        k + (n-1)k          move  (n-1)k + (n-1)k: every rank reads the root's buffer
    reduce_scatter   n*nk + nk           two_shot  the same as the floor
    all_gather       nk + n*nk           move  n*nk + n*nk: every rank reads every chunk; in place all but its own
    all_to_all       n*nk + n*nk         move  the same as the floor
    gather, scatter  nk + nk             move  the same as the floor
    sendrecv         nk + nk             the same        pingpong: half of the ranks send at a time

    floor   no algorithm can move less: every input is read once, every output written once.
    bound   the least among the algorithms above, over the copy bandwidth: the time that the fraction `of bound` refers to

    two_shot:  n ranks reduce one n-th each: n inputs of k read in all. Each stores its result from registers to all who want it.
    ring:      per rank and part k/n: 3n-2 reads (own, slot + own, slot) and 3n-2 writes (slots, results).
    one_shot:  words are half flag: 2k bytes written to and read from each of n-1 areas, and k read and k written, on each rank.
    Staging adds to these, but it is small enough to stay in the L2 cache. The copy counts what it reads and what it writes, too. Caches
    serve some of these reads, of small sizes all of them, so a fraction can exceed 1.

A size that does not divide is rounded down to whole elements for each rank, but to one element at least: 8 bytes of f32 on 4 ranks are 16.
"""

import re
import statistics
from typing import NamedTuple

GB = 1e9
UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
ITEMSIZE = {"i8": 1, "u8": 1, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}
REDOPS = ("sum", "avg", "product", "min", "max")


class Op(NamedTuple):
    """What the harness must know of an operation; n is the world size."""

    busbw_factor: object  # n -> float
    send: str | None  # elements that a rank puts in: "one" chunk, "all" n chunks, None
    recv: str | None  # elements that it gets
    reduces: bool = False
    in_place: str | None = None  # the buffer that the in-place form works in: "send" or "recv"; None: there is no such form
    transfers: int = 1  # messages after each other in one call; the time of one is reported
    min_ranks: int = 1
    in_pairs: bool = False  # the world size must be even


def _link(n):
    return (n - 1) / n


OPS = {
    "all_reduce": Op(lambda n: 2 * _link(n), "one", "one", reduces=True, in_place="recv"),
    "reduce_scatter": Op(_link, "all", "one", reduces=True, in_place="send"),
    "all_gather": Op(_link, "one", "all", in_place="recv"),
    "all_to_all": Op(_link, "all", "all"),
    "broadcast": Op(lambda n: 1, "one", "one", in_place="recv"),
    "reduce": Op(lambda n: 1, "one", "one", reduces=True, in_place="recv"),
    "sendrecv": Op(lambda n: 1, "one", "one", min_ranks=2),
    "pingpong": Op(lambda n: 1, "one", "one", transfers=2, in_pairs=True),
    "gather": Op(_link, "one", "all"),
    "scatter": Op(_link, "all", "one"),
    "barrier": Op(lambda n: 0, None, None),
}
MAIN_OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "sendrecv")  # what `all` means
FORMS = ("out_of_place", "in_place")


class Case(NamedTuple):
    """One line of the table, the same for all backends."""

    op: str
    count: int
    dtype: str
    redop: str
    root: int

    def send_count(self, n):
        return self.count * {None: 0, "one": 1, "all": n}[OPS[self.op].send]

    def recv_count(self, n):
        return self.count * {None: 0, "one": 1, "all": n}[OPS[self.op].recv]

    def nbytes(self, n):
        return max(self.send_count(n), self.recv_count(n)) * ITEMSIZE[self.dtype]


class Timing(NamedTuple):
    """The figures of one form of one case. Times are of one operation."""

    time_us: float
    p99_us: float
    algbw: float
    busbw: float
    wrong: int  # elements, summed over ranks and checks
    spread: float  # largest over smallest median of a round


def make_case(op, nbytes, dtype, redop, root, n):
    """The case whose buffer has about nbytes. Raises ValueError if the operation needs more ranks or the root is none of them."""
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


def busbw_factor(op, n):
    return OPS[op].busbw_factor(n)


def device_floor(op, n, k, in_place=False):
    """Bytes that any algorithm must read and write for n ranks on one GPU with chunks of k bytes. See [Note: bytes of one GPU]."""
    match op:
        case "all_reduce" | "gather" | "scatter" | "sendrecv":
            return 2 * n * k
        case "reduce":
            return (n + 1) * k
        case "broadcast" | "pingpong":
            return n * k
        case "reduce_scatter":
            return n * (n + 1) * k
        case "all_gather":
            return n * n * k if in_place else n * (n + 1) * k
        case "all_to_all":
            return 2 * n * n * k
        case "barrier":
            return 0
    raise AssertionError(op)


def device_traffic(op, n, k, in_place=False):
    """Bytes that each algorithm of pycomm reads and writes, {name: bytes}. See [Note: bytes of one GPU]."""
    match op:
        case "all_reduce":
            return {"two_shot": 2 * n * k, "ring": (6 * n - 4) * k, "one_shot": n * (4 * n - 2) * k}
        case "reduce":
            return {"two_shot": (n + 1) * k}
        case "broadcast":
            return {"move": 2 * (n - 1) * k}
        case "all_gather":
            return {"move": 2 * n * (n - 1) * k if in_place else 2 * n * n * k}
        case "reduce_scatter":
            return {"two_shot": device_floor(op, n, k)}
    return {"move": device_floor(op, n, k, in_place)}


def fractions(case, n, timing, copy_gbps, in_place):
    """(of bound, of floor): the least time that the bytes need at copy_gbps over the measured one. None for one rank, and for barrier."""
    k = case.count * ITEMSIZE[case.dtype]
    if n < 2 or not k:
        return None
    seconds = timing.time_us / 1e6
    bound = min(device_traffic(case.op, n, k, in_place).values())
    return tuple(nbytes / (copy_gbps * GB) / seconds for nbytes in (bound, device_floor(case.op, n, k, in_place)))


def summarize(case, n, rounds, wrong):
    """Turns rounds (a list of lists of seconds per operation, one for each batch) into a Timing."""
    samples = sorted(sample for batches in rounds for sample in batches)
    medians = [statistics.median(batches) for batches in rounds]
    seconds = statistics.median(samples)
    algbw = case.nbytes(n) / seconds / GB
    return Timing(
        time_us=seconds * 1e6,
        p99_us=samples[min(len(samples) - 1, int(0.99 * len(samples)))] * 1e6,
        algbw=algbw,
        busbw=algbw * busbw_factor(case.op, n),
        wrong=wrong,
        spread=max(medians) / min(medians),
    )


def parse_nbytes(text):
    """ "64K" -> 65536. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,12})([KMG]?)B?", text.strip().upper(), re.ASCII)
    if not match or int(match[1]) == 0:
        raise ValueError(f"size {text!r}: must be a number of bytes above 0, which may end in K, M or G (powers of 1024).")
    return int(match[1]) << UNITS[match[2]]


def parse_sizes(text, factor=2):
    """ "8:1K" -> [8, 16, ... 1024]; "8,4K" -> [8, 4096]; both may be mixed. factor is the step of a range. Raises ValueError."""
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


def format_nbytes(nbytes):
    """65536 -> "64K"; a number without a whole unit stays as it is."""
    for unit, shift in reversed(UNITS.items()):
        if nbytes >= 1 << shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return str(nbytes)
