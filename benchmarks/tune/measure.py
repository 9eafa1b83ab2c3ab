"""What every rank of a group runs: each algorithm of each operation at each size, checked, then in turns.

Ordinary buffers give two rows of the file at once: groups whose kernel lets ranks read each other may take
all algorithms (access `kernel`), the others all but `direct` (access `staging`). Registered buffers give the
third (access `mapped`).

All ranks must do the same calls, so whatever decides how many there are is the figure of the slowest rank,
which all of them know. The first call of each algorithm is on fresh inputs and checked; in-place reductions
are timed on zeros.
"""

import math
import time
from typing import NamedTuple

import torch

from pycomm import _C
from pycomm.benchmarks.common import data, oracle, turns

SAMPLE_SECONDS, MOST_CALLS = 2e-3, 100  # of one algorithm in a round; one call where it takes longer
LEAST_ROUNDS, MOST_ROUNDS = 3, 15
WHOLE = ("all_reduce", "reduce", "broadcast")  # in place, on a whole buffer
SMALL = 256 << 10  # above, one_shot reads too much to be tried
CANDIDATES = {  # without the ring for sums, which has last bits of its own
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

    op: str
    count: int
    dtype: str = "f32"
    redop: str = "sum"
    root: int = 0


class Found(NamedTuple):
    """What a group has measured."""

    cores: int
    times: dict  # (op, access) -> size -> algorithm -> seconds by round, of the slowest rank
    rounds: int


def measure(comm, ops, sizes, seconds):
    """Found, the same on every rank. sizes: bytes of a rank's whole buffer. Raises RuntimeError on all ranks
    where a result is wrong.
    """
    began, group = time.perf_counter(), Group(comm, max(sizes))
    cells = {}  # (op, registered, size) -> {algorithm: call without arguments}
    first = {}
    for op in ops:
        for registered in (False, True):
            for size in group.sizes(op, registered, sizes):
                calls = group.calls(op, registered, size)
                cells[op, registered, size] = calls
                first[op, registered, size] = {name: group.first(op, call) for name, call in calls.items()}
    numbers = {
        cell: {name: calls_in(SAMPLE_SECONDS, t) for name, t in found.items()}
        for cell, found in first.items()
    }
    cost = sum(numbers[cell][name] * first[cell][name] for cell in cells for name in cells[cell])
    left = seconds - group.slowest([time.perf_counter() - began])[0]
    rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(left / cost)))
    times = {}
    for cell, calls in cells.items():
        samples = group.samples(calls, numbers[cell], rounds, zero=cell[0] in WHOLE)
        for access, names in group.rows(cell[1], samples):
            times.setdefault((cell[0], access), {})[cell[2]] = names
    return Found(comm.describe()["cores"], times, rounds)


def calls_in(seconds, one_call):
    return max(1, min(MOST_CALLS, round(seconds / max(1e-9, one_call))))


class Group:
    """A rank's communicator, its buffers and its clock."""

    def __init__(self, comm, most_bytes):
        self.comm, self.memory = comm, data.DeviceMemory("cpu")
        self.kernel = comm.describe()["reach"] == "process_vm_readv"
        count = most_bytes // 4
        ordinary = torch.zeros(count), torch.zeros(count)
        self.buffers = {False: ordinary, True: (comm.empty(count), comm.empty(count))}

    def sizes(self, op, registered, sizes):
        """Those at which there is something to choose: small data travel with the header."""
        access = "mapped" if registered else "staging"
        n, cores = self.comm.world_size, self.comm.describe()["cores"]
        return [size for size in sizes if built_in(op, size, n, cores, access) != "payload"]

    def calls(self, op, registered, size):
        """{algorithm: a call of the operation on a rank's `size` bytes}; its attribute check() says how many
        elements of a fresh result are wrong.
        """
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

    def first(self, op, call):
        """Seconds of a second call, when the first one was right."""
        wrong = torch.tensor([call.check()])
        self.comm.all_reduce(wrong)
        if wrong.item():
            size = call.y.numel() * call.y.element_size()
            raise RuntimeError(f"{op} by {call.algorithm}, {size} bytes: {wrong.item()} elements are wrong")
        return self.slowest([self.time(call, 1)])[0]

    def time(self, call, calls):
        """Seconds of one call on this rank."""
        self.comm.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    def slowest(self, values):
        """The largest of the ranks' figures, which are lists."""
        x = torch.tensor(values, dtype=torch.float64)
        return self.comm.all_reduce(x, "max").tolist()

    def samples(self, calls, numbers, rounds, zero):
        """{algorithm: seconds by round}."""
        if zero:
            next(iter(calls.values())).x.zero_()
        samples = turns.take(
            rounds, {name: lambda name=name: self.time(calls[name], numbers[name]) for name in calls}
        )
        return {name: self.slowest(samples[name]) for name in calls}

    def rows(self, registered, samples):
        """(access, samples of the algorithms that it allows), for each access."""
        if registered:
            return [("mapped", samples)]
        staging = ("staging", {name: times for name, times in samples.items() if name != "direct"})
        return [staging, ("kernel", samples)] if self.kernel else [staging]


class Call:
    """One algorithm of one operation on these buffers."""

    def __init__(self, group, case, buffers, algorithm, rank, n):
        self.group, self.case, self.algorithm, self.rank, self.n = group, case, algorithm, rank, n
        self.x, self.y = buffers
        function = getattr(group.comm, case.op)
        x, y, how = *buffers, {"algorithm": algorithm}
        self.run = {
            "all_reduce": lambda: function(x, **how),
            "reduce": lambda: function(x, 0, **how),
            "broadcast": lambda: function(x, 0, **how),
            "gather": lambda: function(x, y, 0, **how),
            "scatter": lambda: function(x, y, 0, **how),
        }.get(case.op, lambda: function(x, y, **how))

    def __call__(self):
        self.run()

    def check(self):
        """Wrong elements of this rank's result, on fresh inputs."""
        memory, case = self.group.memory, self.case
        if self.y is not self.x:
            memory.poison(self.y)
        if case.op not in ("broadcast", "scatter") or self.rank == case.root:
            memory.fill(self.x, data.pattern(case, self.n, self.rank, 1))
        self.group.comm.barrier()
        self.run()
        return memory.count_wrong(self.y, oracle.expected(case, self.rank, self.n), case, self.n, 1)


def built_in(op, size, n, cores, access):
    """The algorithm that the built-in table takes."""
    nbytes = size if op in WHOLE else size // n
    code = _C.kinds.index(op)
    reach = cores, _C.kernel_ahead(), access == "mapped", access == "kernel"
    return _C.choose(code, nbytes, n, *reach, 0, None)[0]


def geometric_mean(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
