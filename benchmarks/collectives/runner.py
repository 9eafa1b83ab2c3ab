"""Whose turn it is: all backends measure one size before the next size begins, in rounds (common/turns.py).

    size 64K    prepare + check     pycomm          gloo            mpi
                round 1             pycomm batches  gloo batches    mpi batches
                round 2             gloo batches    mpi batches     pycomm batches
                ...
                check again         pycomm          gloo            mpi
                (with CUDA, in each round also the copy that bounds.py needs)

While one team measures, the others sleep (channel.py).
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from pycomm import env
from pycomm.benchmarks.collectives import backends, bounds, cases
from pycomm.benchmarks.collectives.cases import FORMS, OPS, Form
from pycomm.benchmarks.collectives.launch import Controller, Ranks, Team
from pycomm.benchmarks.common import device, memory, turns
from pycomm.benchmarks.common.data import ITEMSIZE
from pycomm.benchmarks.common.ranks import RankError
from pycomm.testing import emulated

if TYPE_CHECKING:
    from pycomm.benchmarks.collectives.channel import Message
    from pycomm.benchmarks.collectives.spec import Spec
    from pycomm.benchmarks.common.data import DtypeName
    from pycomm.benchmarks.common.report import Content
    from pycomm.benchmarks.common.turns import Rounds

Progress: TypeAlias = Callable[[str], object]
RanksAs: TypeAlias = Literal["processes", "threads"]

# A batch lasts at least this long: reading the clock costs nothing then. On a GPU it is longer, since ranks
# that are threads begin their batches as much as a few milliseconds apart.
BATCH_SECONDS = {"cpu": 200e-6, "cuda": 20e-3}
# of a turn: ranks that slept are often woken on one core, and the scheduler needs a moment to part them
WARMUP_SECONDS = 5e-3
MAX_ITERS = {"cpu": 200, "cuda": 1000}
MIN_BATCHES, MAX_BATCHES = 2, 40
MOST_OF_MEMORY = 0.8  # of what is free, for all buffers together
COPY_BATCHES = 3  # copies timed in a round
STORE_PREFIX = "pycomm.benchmarks"


class Options(NamedTuple):
    """What the command line says."""

    ops: list[cases.OpName]
    sizes: list[int]  # bytes
    dtypes: tuple[DtypeName, ...] = ("f32",)
    redop: cases.Redop = "sum"
    root: int = 0
    ranks: int = 2  # of all groups together
    groups: int = 1  # of consecutive ranks, all at work at once
    backends: tuple[str, ...] = ("pycomm", "gloo")
    rounds: int = 5
    seconds: float = 0.05  # of measuring, for each backend, size, form and round
    limit: float = math.inf  # seconds for all cases together: see [Note: time limit]
    timeout: float = 120.0  # seconds for one command to the ranks
    over_ranks: Literal["mean", "max"] = "mean"  # how the ranks' times become one: nccl-tests takes the mean
    sessions: bool = False  # every rank in a session of its own, as torchrun does
    mpi_root: str = ".mpi"
    device: Literal["cpu", "cuda"] = "cpu"
    ranks_per_gpu: int | None = None  # GPU of rank r is r // ranks_per_gpu; None: as few as possible
    ranks_as: RanksAs | None = None  # threads: of the backends that can; None: see resolve
    registered: bool = False  # buffers by comm.empty, of pycomm
    graph: bool = False  # a batch is one replay of a CUDA graph
    hosts: str | None = None  # emulated ones: where the ranks are, as pycomm.testing.emulated takes it
    rate: str | None = None  # of the link of each host, as tc takes it

    @property
    def group_ranks(self) -> int:
        return self.ranks // self.groups

    @property
    def sharing(self) -> int:
        """ranks_per_gpu, which resolve has filled in."""
        assert self.ranks_per_gpu is not None
        return self.ranks_per_gpu

    @property
    def one_gpu(self) -> bool:
        """All ranks share one GPU, so [Note: bytes of one GPU] in bounds.py holds."""
        return self.device == "cuda" and self.sharing >= self.ranks


class Row(NamedTuple):
    """One line of the table; a form that the backend does not have is None."""

    backend: str
    case: cases.Case
    ranks: int
    nbytes: int
    out_of_place: cases.Timing | None
    in_place: cases.Timing | None
    copy_gbps: float | None = None  # of the GPU's own copy, where all ranks share one GPU
    groups: int = 1  # of so many ranks, at work at once

    @property
    def timings(self) -> list[cases.Timing]:
        return [timing for timing in (self.out_of_place, self.in_place) if timing]

    @property
    def best_us(self) -> float:
        return min(timing.time_us for timing in self.timings)

    @property
    def wrong(self) -> int:
        return sum(timing.wrong for timing in self.timings)


class Results(NamedTuple):
    rows: list[Row]
    versions: dict[str, str]  # backend -> what it is
    notes: list[str]  # what a backend could not do


class Batches(NamedTuple):
    """calls: in a batch; batches: in a round; warmup: calls before."""

    calls: int
    batches: int
    warmup: int


def as_record(row: Row) -> Content:
    """A row of the report: the case, then out_of_place_* and in_place_* (None where the backend has no such
    form), and with one GPU the copy and the fractions of bounds.py.
    """
    op, count, dtype, redop, root = row.case
    record: Content = {"backend": row.backend, "op": op, "ranks": row.ranks}
    record |= {"size": row.nbytes, "count": count}
    record |= {"type": dtype, "redop": redop, "root": root}
    if row.groups > 1:
        record["groups"] = row.groups
    for form in FORMS:
        timing = getattr(row, form)
        record |= {f"{form}_{field}": getattr(timing, field, None) for field in cases.Timing._fields}
    if row.copy_gbps is not None:
        record["copy_gbps"] = row.copy_gbps
        for form in FORMS:
            timing, found = getattr(row, form), None
            if timing:
                inside = form == "in_place"
                found = bounds.fractions(row.case, row.ranks, timing, row.copy_gbps, inside)
            names = (f"{form}_of_bound", f"{form}_of_floor")
            record |= dict(zip(names, found or (None, None), strict=True))
    return record


def run(options: Options, progress: Progress | None = None) -> Results | None:
    """Measures as options say; under torchrun, None on all but rank 0.

    progress(text) is told each finished size. Raises RankError when a rank fails, ends or hangs, ValueError
    for wrong options.
    """
    progress = progress or (lambda text: print(text, file=sys.stderr, flush=True))
    launch = under_launcher()
    devices = device.count_devices() if options.device == "cuda" else None
    options, left_out = leave_out(resolve(options, launch, devices))
    if not options.backends:
        return Results([], {}, left_out)
    results: Results | None
    if options.hosts is not None:
        results = _run_on_hosts(options, options.hosts, progress)
    else:
        results = _run_launched(options, launch, progress) if launch else _run_alone(options, progress)
    return results and results._replace(notes=left_out + results.notes)


def resolve(options: Options, launch: env.Launch | None, devices: int | None) -> Options:
    """Fills in what depends on the machine: launch is torchrun's description, devices the number of
    GPUs (None: not used).

    Raises ValueError.
    """
    if launch is not None:
        options = options._replace(ranks=launch.world_size, ranks_as="processes")
    if options.ranks % options.groups:
        raise ValueError(f"--groups {options.groups}: {options.ranks} ranks cannot be cut into equal groups.")
    sharing = 1 if devices is None else device.ranks_per_gpu(options.ranks, devices, options.ranks_per_gpu)
    ranks_as: RanksAs = options.ranks_as or ("threads" if sharing > 1 else "processes")
    return options._replace(ranks_per_gpu=sharing, ranks_as=ranks_as)


def leave_out(options: Options) -> tuple[Options, list[str]]:
    """(options with the backends that can take part, a note for each other one)."""
    able, notes = [], []
    for name in options.backends:
        reason = backends.why_not(name, options.device, options.sharing, options.groups)
        if reason or (reason := why_not_on_hosts(name, options.hosts)):
            notes.append(f"{name} is left out: {reason}.")
        else:
            able.append(name)
    if options.ranks_as == "threads":
        text = "its ranks are processes, which is all it can do; those of pycomm are threads."
        notes += [f"{name}: {text}" for name in able if not backends.can_be_threads(name)]
    return options._replace(backends=tuple(able)), notes


def why_not_on_hosts(name: str, hosts: str | None) -> str | None:
    """Why a backend cannot take part on emulated hosts, or None."""
    placement = emulated.parse_placement(hosts) if hosts else []
    if backends.is_mpi(name) and placement != sorted(placement):
        return "mpiexec is not asked to place ranks in turns"
    if name == backends.UCX and not hosts:
        return "UCX carries bytes between hosts (--hosts)"
    if name == "deepspeed" and hosts:
        return "its kernel is for one host"
    return None


def under_launcher() -> env.Launch | None:
    """The launcher's description of this process, or None when the ranks are ours to start. Raises ValueError
    if it is incomplete.
    """
    return env.set_launch() if "RANK" in env.for_child() or env.launched() else None


def _run_alone(options: Options, progress: Progress) -> Results:
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Controller(options, "127.0.0.1", ("127.0.0.1", server.port), range(options.ranks)) as controller:
        return measure_all(options, controller.teams, progress)


def _run_on_hosts(options: Options, placement: str, progress: Progress) -> Results:
    """The controller talks to the ranks, and they meet, on the first of the emulated hosts. This process was
    started by emulated.apart().
    """
    import torch.distributed as dist

    with emulated.Hosts(placement, rate=options.rate) as hosts:
        address = hosts.address(0)
        with hosts.network_of(0):
            server = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
            at = address, server.port
            controller = Controller(options, address, at, range(options.ranks), hosts=hosts)
        with controller:
            return measure_all(options, controller.teams, progress)


def _run_launched(options: Options, launch: env.Launch, progress: Progress) -> Results | None:
    """This process starts its own rank of each torch backend; the one with rank 0 leads, and says through the
    store where it listens.
    """
    import torch.distributed as dist

    store, _, _ = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(STORE_PREFIX, store)
    address = (launch.master_addr, launch.master_port)
    if launch.rank == 0:

        def tell(spec: Spec) -> None:
            store.set("spec", json.dumps(spec))

        with Controller(options, launch.master_addr, address, [0], tell=tell) as controller:
            return measure_all(options, controller.teams, progress)
    spec: Spec = json.loads(store.get("spec"))
    ranks = Ranks()
    try:
        for name in options.backends:
            if not backends.is_mpi(name):
                ranks.start({**spec, "backend": name}, [launch.rank])
        ranks.join()  # they end when the controller closes their channels, or ends
        failed = ranks.failed()
    finally:
        ranks.end()
    if failed:
        raise RankError(f"{', '.join(failed)} on torchrun's rank {launch.rank}.")
    return None


def measure_all(options: Options, teams: list[Team], progress: Progress) -> Results:
    """[Note: time limit] A busy machine may need a hundred times as long for a call. The time that is left is
    divided equally among the cases that are left. A case that has used up its part ends after the round that
    it is in; after the limit no case begins, but for the first. Notes say which rounds and cases are missing.
    So measuring exceeds the limit by one case of one round at most.
    """
    rows, notes, n = list[Row](), list[str](), options.group_ranks
    wanted = [
        cases.make_case(op, nbytes, dtype, options.redop, options.root, n)
        for op, dtype in itertools.product(options.ops, options.dtypes)
        for nbytes in options.sizes
    ]
    remaining, end = list(dict.fromkeys(wanted)), time.monotonic() + options.limit
    shorter: dict[int, list[str]] = {}
    omitted: list[str] = []
    while remaining:
        left_s = end - time.monotonic()
        deadline = time.monotonic() + left_s / len(remaining)
        case = remaining.pop(0)
        shown = f"{case.op} {cases.format_nbytes(case.nbytes(n))} {case.dtype}"
        if problem := too_large(case, options, len(teams)):
            notes.append(problem)
        elif rows and left_s <= 0:
            omitted.append(shown)
        else:
            new, rounds = _measure_case(options, teams, case, notes, deadline)
            rows += new
            told = [f"{row.backend} {row.best_us:.1f} us" + " WRONG" * (row.wrong > 0) for row in new]
            if new:
                progress(f"{shown}: {', '.join(told)}")
            if new and rounds < options.rounds:
                shorter.setdefault(rounds, []).append(shown)
    if shorter or omitted:
        notes.append(_why_less(options, shorter, omitted))
    return Results(rows, {team.name: team.version for team in teams}, notes)


def _why_less(options: Options, shorter: dict[int, list[str]], omitted: list[str]) -> str:
    """A note on the time limit. shorter: rounds -> the cases with so few."""
    parts = [
        f"{', '.join(shown)} in {rounds} of {options.rounds} rounds"
        for rounds, shown in sorted(shorter.items(), reverse=True)
    ]
    parts += [f"not at all: {', '.join(omitted)}"] if omitted else []
    return f"The limit of {options.limit:g} s was reached, so these were measured less: {'; '.join(parts)}."


def too_large(case: cases.Case, options: Options, teams: int) -> str | None:
    """A note where the buffers of all ranks of all backends, which are there at once, do not fit into the
    machine's memory; None where they do.
    """
    n, room = options.group_ranks, memory.available_bytes()
    needed = (case.send_count(n) + case.recv_count(n)) * ITEMSIZE[case.dtype] * options.ranks * teams
    if options.device != "cpu" or room is None or needed <= MOST_OF_MEMORY * room:
        return None
    size = f"{case.op} {cases.format_nbytes(case.nbytes(n))} {case.dtype}"
    amounts = f"{needed / 2**30:.1f} GiB, {room / 2**30:.1f} GiB are free"
    return f"{size} is left out: the buffers of {options.ranks} ranks of {teams} backends take {amounts}."


def _measure_case(
    options: Options, teams: list[Team], case: cases.Case, notes: list[str], deadline: float
) -> tuple[list[Row], int]:
    """(the rows of all teams for one case, the number of rounds). After the deadline, by time.monotonic(), no
    further round begins.
    """
    parts = []
    for team in teams:
        part = Part(options, team, case)
        if refusal := part.prepare():
            note = f"{team.name} is left out: {refusal}."
            notes += [note] if note not in notes else []
        else:
            parts.append(part)
    copies, rounds = list[float](), 0
    for number, part in enumerate(turns.rotated(parts, options.rounds), 1):
        part.measure_round()
        if number % len(parts) == 0:
            rounds += 1
            copies += parts[0].measure_copy() if options.one_gpu and case.count else []
            if time.monotonic() >= deadline:
                break
    return [part.finish(statistics.median(copies) if copies else None) for part in parts], rounds


class Part:
    """One team's part in one case."""

    def __init__(self, options: Options, team: Team, case: cases.Case) -> None:
        self.options, self.team, self.case = options, team, case
        self.nbytes = case.nbytes(options.group_ranks)
        self.wrong: dict[Form, int] = {}  # elements
        self.rounds: dict[Form, Rounds] = {}
        self.batches: dict[Form, Batches] = {}

    def _ask(self, command: str, *arguments: Message) -> list[Message]:
        doing = f"{self.case.op} {cases.format_nbytes(self.nbytes)} {self.case.dtype}"
        return self.team.ask(self.options.timeout, doing, command, *arguments)

    def prepare(self) -> str | None:
        """Checks the results. Returns why the team cannot do this, or None."""
        replies = self._ask("prepare", self.case, 1)
        refusal = next((reply for reply in replies if isinstance(reply, str)), None)
        if refusal is None:
            self.wrong = {form: sum(reply[form] for reply in replies) for form in replies[0]}
            self.rounds = {form: [] for form in self.wrong}
            self.batches = {form: self._choose_batches(form) for form in self.wrong}
        return refusal

    def _sample(self, form: Form, iters: int, batches: int, warmup: int) -> list[float]:
        """Seconds of one operation, a number for each batch."""
        replies = self._ask("measure", form, iters, batches, warmup)
        merge: Callable[[tuple[float, ...]], float] = (
            max if self.options.over_ranks == "max" else lambda values: sum(values) / len(values)
        )
        return [merge(values) / OPS[self.case.op].transfers for values in zip(*replies, strict=True)]

    def _choose_batches(self, form: Form) -> Batches:
        """From a trial; a quick operation is tried again with more calls."""
        iters, transfers = 1, OPS[self.case.op].transfers
        for _ in range(2):
            one_call = max(1e-9, min(self._sample(form, iters, 3, warmup=iters)) * transfers)
            on = self.options.device
            iters = min(MAX_ITERS[on], max(1, round(BATCH_SECONDS[on] / one_call)))
            if iters == 1:
                break
        batches = int(min(MAX_BATCHES, max(MIN_BATCHES, self.options.seconds / (iters * one_call))))
        return Batches(iters, batches, max(1, int(WARMUP_SECONDS / one_call)))

    def measure_round(self) -> None:
        for form, amounts in self.batches.items():
            self.rounds[form].append(self._sample(form, *amounts))

    def measure_copy(self) -> list[float]:
        """GB/s of a copy as large as what all ranks hold together."""
        return self._ask("measure_copy", self.nbytes * self.options.ranks, COPY_BATCHES)[0]

    def finish(self, copy_gbps: float | None) -> Row:
        """Checks once more with other inputs, and returns the Row."""
        for reply in self._ask("verify", 2):
            for form, wrong in reply.items():
                self.wrong[form] += wrong
        out_of_place, in_place = map(self._timing, FORMS)
        return Row(
            self.team.name,
            self.case,
            self.options.group_ranks,
            self.nbytes,
            out_of_place,
            in_place,
            copy_gbps,
            self.options.groups,
        )

    def _timing(self, form: Form) -> cases.Timing | None:
        if form not in self.wrong:
            return None
        return cases.summarize(self.case, self.options.group_ranks, self.rounds[form], self.wrong[form])
