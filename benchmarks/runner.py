"""Whose turn it is: all backends measure one size before the next size begins, in rounds.

    size 64K    prepare + check     pycomm          gloo            mpi
                round 1             pycomm batches  gloo batches    mpi batches
                round 2             gloo batches    mpi batches     pycomm batches      (the order rotates)
                ...
                check again         pycomm          gloo            mpi
                (with CUDA, in each round also the copy that the bounds of metrics.py are made of)

A machine's speed drifts by the minute, and a slow minute hits all backends alike this way; medians are over the batches of all rounds.
While one team measures, the others sleep (channel.py).
"""

import json
import statistics
import sys
from typing import NamedTuple

from pycomm import env

from . import backends, device, metrics
from .backends import is_mpi
from .channel import RankError
from .launch import Controller, Ranks
from .metrics import FORMS, OPS

BATCH_SECONDS = 200e-6  # a batch lasts at least this long: reading the clock costs nothing then
WARMUP_SECONDS = 5e-3  # of a turn: ranks that slept are often woken on one core, and the scheduler needs a moment to part them
MAX_ITERS, MIN_BATCHES, MAX_BATCHES = 200, 2, 40
COPY_BATCHES = 3  # copies timed in a round
STORE_PREFIX = "pycomm.benchmarks"


class Options(NamedTuple):
    """What the command line says."""

    ops: list
    sizes: list  # bytes
    dtype: str = "f32"
    redop: str = "sum"
    root: int = 0
    ranks: int = 2
    backends: tuple = ("pycomm", "gloo")
    rounds: int = 5
    seconds: float = 0.05  # of measuring, for each backend, size, form and round
    timeout: float = 120.0  # seconds for one command to the ranks
    over_ranks: str = "mean"  # how the ranks' times become one: "mean" as nccl-tests by default, or "max"
    sessions: bool = False  # every rank in a session of its own, as torchrun does
    mpi_root: str = ".mpi"
    device: str = "cpu"  # or "cuda"
    ranks_per_gpu: int | None = None  # with CUDA: GPU of rank r is r // ranks_per_gpu; None: as few as possible
    ranks_as: str | None = None  # "processes", or "threads" of the backends that can; None: threads where ranks share a GPU
    registered: bool = False  # buffers by comm.empty, of pycomm
    graph: bool = False  # a batch is one replay of a CUDA graph

    @property
    def one_gpu(self):
        """All ranks share one GPU, so [Note: bytes of one GPU] in metrics.py holds."""
        return self.device == "cuda" and self.ranks_per_gpu >= self.ranks


class Row(NamedTuple):
    """One line of the table; a form that the backend does not have is None."""

    backend: str
    case: metrics.Case
    ranks: int
    nbytes: int
    out_of_place: metrics.Timing | None
    in_place: metrics.Timing | None
    copy_gbps: float | None = None  # of the GPU's own copy, where all ranks share one GPU

    def fractions(self, form):
        """(of bound, of floor) of a form, or None where they have no meaning."""
        timing = getattr(self, form)
        if timing is None or self.copy_gbps is None:
            return None
        return metrics.fractions(self.case, self.ranks, timing, self.copy_gbps, form == "in_place")

    @property
    def best_us(self):
        """The faster form: what comparisons between backends use, since not every backend has both."""
        return min(timing.time_us for timing in (self.out_of_place, self.in_place) if timing)

    @property
    def wrong(self):
        return sum(timing.wrong for timing in (self.out_of_place, self.in_place) if timing)


class Results(NamedTuple):
    rows: list
    versions: dict  # backend -> what it is
    notes: list  # what a backend could not do


def run(options, progress=None):
    """Measures as options say and returns Results; under torchrun, None on all but rank 0.

    progress(text) is told each finished size. Raises RankError when a rank fails, ends or hangs, ValueError for wrong options.
    """
    progress = progress or (lambda text: print(text, file=sys.stderr, flush=True))
    launch = under_launcher()
    devices = device.count_devices() if options.device == "cuda" else None
    options, left_out = leave_out(resolve(options, launch, devices))
    if not options.backends:
        return Results([], {}, left_out)
    results = _run_launched(options, launch, progress) if launch else _run_alone(options, progress)
    return results and results._replace(notes=left_out + results.notes)


def resolve(options, launch, devices):
    """Fills in what depends on the machine: launch is torchrun's description or None, devices the number of GPUs (None: not used).

    Raises ValueError.
    """
    if launch is not None:
        options = options._replace(ranks=launch.world_size, ranks_as="processes")
    sharing = 1 if devices is None else device.ranks_per_gpu(options.ranks, devices, options.ranks_per_gpu)
    return options._replace(ranks_per_gpu=sharing, ranks_as=options.ranks_as or ("threads" if sharing > 1 else "processes"))


def leave_out(options):
    """(options with the backends that can take part, a note for each other one)."""
    reasons = {name: backends.why_not(name, options.device, options.ranks_per_gpu) for name in options.backends}
    notes = [f"{name} is left out: {reason}." for name, reason in reasons.items() if reason]
    able = tuple(name for name, reason in reasons.items() if not reason)
    if options.ranks_as == "threads":
        apart = [name for name in able if not backends.can_be_threads(name)]
        notes += [f"{name}: its ranks are processes, which is all it can do; those of pycomm are threads." for name in apart]
    return options._replace(backends=able), notes


def under_launcher():
    """torchrun's description of this process, or None when the ranks are ours to start. Raises ValueError if it is incomplete."""
    return env.launch() if "RANK" in env.for_child() else None


def _run_alone(options, progress):
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Controller(options, "127.0.0.1", ("127.0.0.1", server.port), range(options.ranks)) as controller:
        return measure_all(options, controller.teams, progress)


def _run_launched(options, launch, progress):
    """This process starts its own rank of each torch backend; the one with rank 0 leads, and says through the store where it listens."""
    import torch.distributed as dist

    store, _, _ = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(STORE_PREFIX, store)
    address = (launch.master_addr, launch.master_port)
    if launch.rank == 0:
        with Controller(options, launch.master_addr, address, [0], tell=lambda spec: store.set("spec", json.dumps(spec))) as controller:
            return measure_all(options, controller.teams, progress)
    spec, ranks = json.loads(store.get("spec")), Ranks()
    try:
        for name in options.backends:
            if not is_mpi(name):
                ranks.start_team({**spec, "backend": name}, [launch.rank])
        ranks.join()  # they end when the controller closes their channels, or ends
    finally:
        ranks.end()
    if failed := ranks.failed():
        raise RankError(f"{', '.join(failed)} on torchrun's rank {launch.rank}.")
    return None


def measure_all(options, teams, progress):
    rows, notes = [], []
    for op in options.ops:
        cases = dict.fromkeys(
            metrics.make_case(op, nbytes, options.dtype, options.redop, options.root, options.ranks) for nbytes in options.sizes
        )
        for case in cases:
            new = _measure_case(options, teams, case, notes)
            rows += new
            if not new:
                continue
            size = metrics.format_nbytes(case.nbytes(options.ranks))
            progress(f"{op} {size}: " + ", ".join(f"{row.backend} {row.best_us:.1f} us" + " WRONG" * (row.wrong > 0) for row in new))
    return Results(rows, {team.name: team.version for team in teams}, notes)


def _measure_case(options, teams, case, notes):
    """The rows of all teams for one case."""
    turns = []
    for team in teams:
        replies = team.ask(options.timeout, _describe(case, options.ranks), "prepare", case, 1)
        refusal = next((reply for reply in replies if isinstance(reply, str)), None)
        if refusal is None:
            turns.append(Turn(options, team, case, replies))
        elif (note := f"{team.name} is left out: {refusal}.") not in notes:
            notes.append(note)
    copies = []
    for number in range(options.rounds):
        first = number % max(1, len(turns))
        for turn in turns[first:] + turns[:first]:
            turn.measure_round()
        if turns and options.one_gpu and case.count:
            copies += turns[0].measure_copy()
    return [turn.finish(statistics.median(copies) if copies else None) for turn in turns]


class Turn:
    """One team's part in one case."""

    def __init__(self, options, team, case, replies):
        self.options, self.team, self.case = options, team, case
        self.wrong = {form: sum(reply[form] for reply in replies) for form in replies[0]}
        self.rounds = {form: [] for form in self.wrong}
        self.batches = {form: self._choose_batches(form) for form in self.wrong}

    def _ask(self, *command):
        return self.team.ask(self.options.timeout, _describe(self.case, self.options.ranks), *command)

    def _sample(self, form, iters, batches, warmup):
        """Seconds of one operation, a number for each batch."""
        replies = self._ask("measure", form, iters, batches, warmup)
        merge = max if self.options.over_ranks == "max" else lambda values: sum(values) / len(values)
        return [merge(values) / OPS[self.case.op].transfers for values in zip(*replies, strict=True)]

    def _choose_batches(self, form):
        """(calls in a batch, batches in a round, calls to warm up), from a trial; a quick operation is tried again with more calls."""
        iters = 1
        for _ in range(2):
            one_call = max(1e-9, min(self._sample(form, iters, 3, warmup=iters)) * OPS[self.case.op].transfers)
            iters = min(MAX_ITERS, max(1, round(BATCH_SECONDS / one_call)))
            if iters == 1:
                break
        batches = int(min(MAX_BATCHES, max(MIN_BATCHES, self.options.seconds / (iters * one_call))))
        return iters, batches, max(1, int(WARMUP_SECONDS / one_call))

    def measure_round(self):
        for form, amounts in self.batches.items():
            self.rounds[form].append(self._sample(form, *amounts))

    def measure_copy(self):
        """GB/s of a copy as large as what all ranks hold together."""
        return self._ask("measure_copy", self.case.nbytes(self.options.ranks) * self.options.ranks, COPY_BATCHES)[0]

    def finish(self, copy_gbps):
        """Checks once more with other inputs, and returns the Row."""
        for reply in self._ask("verify", 2):
            for form, wrong in reply.items():
                self.wrong[form] += wrong
        n = self.options.ranks
        timings = {form: metrics.summarize(self.case, n, self.rounds[form], self.wrong[form]) for form in self.wrong}
        return Row(self.team.name, self.case, n, self.case.nbytes(n), *(timings.get(form) for form in FORMS), copy_gbps)


def _describe(case, n):
    return f"{case.op} {metrics.format_nbytes(case.nbytes(n))} {case.dtype}"
