"""What every rank of a group runs: each algorithm of each operation at each size, checked, then in turns.

Ordinary buffers give two rows of the file at once: groups whose kernel lets ranks read each other may take
all algorithms (access `kernel`), the others all but `direct` (access `staging`). Registered buffers give the
third (access `mapped`).

All ranks must do the same calls, so whatever decides how many there are is the figure of the slowest rank,
which all of them know. The first call of each algorithm is on fresh inputs and checked; in-place reductions
are timed on zeros.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch

from pycomm import _C
from pycomm.benchmarks.common import data, oracle, turns
from pycomm.quantities import Bytes

if TYPE_CHECKING:
    from pycomm.benchmarks.common.data import DtypeName
    from pycomm.benchmarks.tune.choose import Times
    from pycomm.communicator import Communicator

OpName: TypeAlias = Literal[
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
]
Access: TypeAlias = Literal["staging", "kernel", "mapped"]  # how ranks get at each other's buffers
ByAlgorithm: TypeAlias = dict[str, list[float]]  # seconds by round
SAMPLE_SECONDS, MOST_CALLS = 2e-3, 100  # of one algorithm in a round; one call where it takes longer
LEAST_ROUNDS, MOST_ROUNDS = 3, 15
WHOLE = ("all_reduce", "reduce", "broadcast")  # in place, on a whole buffer
SMALL = 256 << 10  # above, one_shot reads too much to be tried
CANDIDATES: dict[OpName, tuple[str, ...]] = {  # no ring for sums: its last bits differ
    "all_reduce": ("one_shot", "two_shot", "direct"),
    "reduce": ("two_shot", "direct"),
    "broadcast": ("staged", "direct"),
    "all_gather": ("staged", "ring", "direct"),
    "reduce_scatter": ("staged", "direct"),
    "all_to_all": ("staged", "direct"),
    "gather": ("staged", "direct"),
    "scatter": ("staged", "direct"),
}


class Case(NamedTuple):
    """What is called, as data.py and oracle.py want it: count is of one rank's part, or of the whole."""

    op: OpName
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    dtype: DtypeName = "f32"
    redop: str = "sum"
    root: int = 0


class Found(NamedTuple):
    """What a group has measured."""

    cores: int
    times: dict[tuple[OpName, Access], Times]  # of the slowest rank
    rounds: int


class Cell(NamedTuple):
    """What is measured together. size: bytes of a rank's whole buffer."""

    op: OpName
    registered: bool
    size: int


def measure(comm: Communicator, ops: Sequence[OpName], sizes: Sequence[int], seconds: float) -> Found:
    """The same on every rank. sizes: bytes of a rank's whole buffer. Raises RuntimeError on all ranks
    where a result is wrong.
    """
    began, group = time.perf_counter(), Group(comm, max(sizes))
    cells: dict[Cell, dict[str, Call]] = {}  # by algorithm
    first: dict[Cell, dict[str, float]] = {}
    for op in ops:
        for registered in (False, True):
            for size in group.sizes(op, registered, sizes):
                cell, calls = Cell(op, registered, size), group.calls(op, registered, size)
                cells[cell] = calls
                first[cell] = {name: group.first(op, call) for name, call in calls.items()}
    numbers = {
        cell: {name: calls_in(SAMPLE_SECONDS, t) for name, t in found.items()}
        for cell, found in first.items()
    }
    cost = sum(numbers[cell][name] * first[cell][name] for cell in cells for name in cells[cell])
    left = seconds - group.slowest([time.perf_counter() - began])[0]
    rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(left / cost)))
    times: dict[tuple[OpName, Access], Times] = {}
    for cell, calls in cells.items():
        samples = group.samples(calls, numbers[cell], rounds, zero=cell.op in WHOLE)
        for access, names in group.rows(cell.registered, samples):
            times.setdefault((cell.op, access), {})[cell.size] = names
    return Found(comm.describe()["cores"], times, rounds)


def calls_in(seconds: float, one_call: float) -> int:
    return max(1, min(MOST_CALLS, round(seconds / max(1e-9, one_call))))


class Group:
    """A rank's communicator, its buffers and its clock."""

    def __init__(self, comm: Communicator, most_bytes: int) -> None:
        self.comm, self.memory = comm, data.DeviceMemory("cpu")
        self.kernel = comm.describe()["reach"] == "process_vm_readv"
        count = most_bytes // 4
        ordinary = torch.zeros(count), torch.zeros(count)
        self.buffers = {False: ordinary, True: (comm.empty(count), comm.empty(count))}

    def sizes(self, op: OpName, registered: bool, sizes: Sequence[int]) -> list[int]:
        """Those at which there is something to choose: small data travel with the header."""
        access: Access = "mapped" if registered else "staging"
        n, cores = self.comm.world_size, self.comm.describe()["cores"]
        return [size for size in sizes if built_in(op, size, n, cores, access) != "payload"]

    def calls(self, op: OpName, registered: bool, size: int) -> dict[str, Call]:
        """By algorithm, on a rank's `size` bytes."""
        n, rank = self.comm.world_size, self.comm.rank
        part = max(1, size // 4 // n)
        x, y = (buffer[: part * n] for buffer in self.buffers[registered])
        x, y = {
            "all_gather": (x[:part], y),
            "gather": (x[:part], y),
            "reduce_scatter": (x, y[:part]),
            "scatter": (x, y[:part]),
        }.get(op, (x, x) if op in WHOLE else (x, y))
        case = Case(op, part * n if op in WHOLE else part)
        names = [
            name
            for name in CANDIDATES[op]
            if (name != "direct" or registered or self.kernel) and (name != "one_shot" or size <= SMALL)
        ]
        return {name: Call(self, case, (x, y), name, rank, n) for name in names}

    def first(self, op: OpName, call: Call) -> float:
        """Seconds of a second call, when the first one was right."""
        wrong = torch.tensor([call.check()])
        self.comm.all_reduce(wrong)
        if wrong.item():
            size = call.y.numel() * call.y.element_size()
            raise RuntimeError(f"{op} by {call.algorithm}, {size} bytes: {wrong.item()} elements are wrong")
        return self.slowest([self.time(call, 1)])[0]

    def time(self, call: Call, calls: int) -> float:
        """Seconds of one call on this rank."""
        self.comm.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of the ranks' figures."""
        x = torch.tensor(values, dtype=torch.float64)
        return self.comm.all_reduce(x, "max").tolist()

    def samples(
        self, calls: Mapping[str, Call], numbers: Mapping[str, int], rounds: int, zero: bool
    ) -> ByAlgorithm:
        if zero:
            next(iter(calls.values())).x.zero_()
        take = {name: functools.partial(self.time, calls[name], numbers[name]) for name in calls}
        samples = turns.take(rounds, take)
        return {name: self.slowest(samples[name]) for name in calls}

    def rows(self, registered: bool, samples: ByAlgorithm) -> list[tuple[Access, ByAlgorithm]]:
        """(access, samples of the algorithms that it allows), for each access."""
        if registered:
            return [("mapped", samples)]
        staging = {name: times for name, times in samples.items() if name != "direct"}
        return [("staging", staging), ("kernel", samples)] if self.kernel else [("staging", staging)]


class Call:
    """One algorithm of one operation on these buffers."""

    def __init__(
        self,
        group: Group,
        case: Case,
        buffers: tuple[torch.Tensor, torch.Tensor],
        algorithm: str,
        rank: int,
        n: int,
    ) -> None:
        self.group, self.case, self.algorithm, self.rank, self.n = group, case, algorithm, rank, n
        self.x, self.y = buffers
        function = getattr(group.comm, case.op)
        (x, y), how = buffers, {"algorithm": algorithm}
        self.run: Callable[[], object] = {
            "all_reduce": lambda: function(x, **how),
            "reduce": lambda: function(x, 0, **how),
            "broadcast": lambda: function(x, 0, **how),
            "gather": lambda: function(x, y, 0, **how),
            "scatter": lambda: function(x, y, 0, **how),
        }.get(case.op, lambda: function(x, y, **how))

    def __call__(self) -> None:
        self.run()

    def check(self) -> int:
        """Wrong elements of this rank's result, on fresh inputs."""
        memory, case = self.group.memory, self.case
        if self.y is not self.x:
            memory.poison(self.y)
        if case.op not in ("broadcast", "scatter") or self.rank == case.root:
            memory.fill(self.x, data.pattern(case, self.n, self.rank, 1))
        self.group.comm.barrier()
        self.run()
        return memory.count_wrong(self.y, oracle.expected(case, self.rank, self.n), case, self.n, 1)


def built_in(op: OpName, size: int, n: int, cores: int, access: Access) -> str:
    """The algorithm that the built-in table takes."""
    nbytes = Bytes(size if op in WHOLE else size // n)
    code = _C.kinds.index(op)
    reach = cores, _C.hand_off()[1], access == "mapped", access == "kernel"
    return _C.choose(code, Bytes(nbytes), n, *reach, 0, None)[0]


def geometric_mean(ratios: Collection[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
