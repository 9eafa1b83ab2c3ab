"""[Note: bytes of one GPU] Where all ranks share one GPU, nothing crosses a link: what limits a large
collective is how many bytes it reads from and writes to that GPU's memory, all ranks together, and how fast
the GPU copies. With n ranks and k bytes per chunk, reads + writes:

    operation        floor               algorithm of pycomm (its steps: csrc/cuda/kernels)
    all_reduce       nk + nk             two_shot  the same as the floor   ring  (6n-4)k   one_shot  n(4n-2)k
    reduce           nk + k              two_shot  the same as the floor
    broadcast        k + (n-1)k          move  (n-1)k + (n-1)k: every rank reads the root's buffer
    reduce_scatter   n*nk + nk           two_shot  the same as the floor
    all_gather       nk + n*nk           move  n*nk + n*nk: every rank reads all; in place all but its own
    all_to_all       n*nk + n*nk         move  the same as the floor
    gather, scatter  nk + nk             move  the same as the floor
    send_recv        nk + nk             the same        pingpong: half of the ranks send at a time

    floor   no algorithm can move less: every input is read once, every output written once.
    bound   the least among the algorithms above, over the copy bandwidth: what `of bound` refers to

    two_shot:  n ranks reduce one n-th each: n inputs of k read in all. Each stores its result from registers
               to all who want it.
    ring:      per rank and part k/n: 3n-2 reads (own, slot + own, slot) and 3n-2 writes (slots, results).
    one_shot:  words are half flag: 2k bytes written to and read from each of n-1 areas, and k read and k
               written, on each rank.

The ranks address each other's buffers. Staging adds to these figures, but it is small enough to stay in the
L2 cache. The copy counts what it reads and what it writes, too. Caches serve some of these reads, of small
sizes all of them, so a fraction can exceed 1.
"""

from typing import NamedTuple

from pycomm.benchmarks.collectives.cases import GB, Case, OpName, Timing
from pycomm.benchmarks.common.data import ITEMSIZE


class Fractions(NamedTuple):
    of_bound: float
    of_floor: float


def device_floor(op: OpName, n: int, k: int, in_place: bool = False) -> int:
    """Bytes that any algorithm must read and write for n ranks on one GPU with chunks of k bytes."""
    match op:
        case "all_reduce" | "gather" | "scatter" | "send_recv":
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


def device_traffic(op: OpName, n: int, k: int, in_place: bool = False) -> dict[str, int]:
    """Bytes that each algorithm of pycomm reads and writes, by name."""
    match op:
        case "all_reduce":
            return {"two_shot": 2 * n * k, "ring": (6 * n - 4) * k, "one_shot": n * (4 * n - 2) * k}
        case "reduce" | "reduce_scatter":
            return {"two_shot": device_floor(op, n, k)}
        case "broadcast":
            return {"move": 2 * (n - 1) * k}
        case "all_gather":
            return {"move": 2 * n * (n - 1) * k if in_place else 2 * n * n * k}
    return {"move": device_floor(op, n, k, in_place)}


def fractions(case: Case, n: int, timing: Timing, copy_gbps: float, in_place: bool) -> Fractions | None:
    """The least time that the bytes need at copy_gbps over the measured one. None for
    one rank, and for barrier.
    """
    k = case.count * ITEMSIZE[case.dtype]
    if n < 2 or not k:
        return None
    seconds = timing.time_us / 1e6
    bound = min(device_traffic(case.op, n, k, in_place).values())
    floor = device_floor(case.op, n, k, in_place)
    return Fractions(*(nbytes / (copy_gbps * GB) / seconds for nbytes in (bound, floor)))
