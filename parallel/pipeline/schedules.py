"""Pipeline schedules: for every rank, the order in which it runs the passes of its stages. Data only; nothing
is executed here.

The layers of a model are cut into pp * chunks virtual stages. A microbatch passes each of them three times: F
(forward), B (gradient of the input) and W (gradient of the weights); PipeDream adds U (optimizer update).
What a schedule may choose is the order on each rank; that is what Schedule.actions holds, and what decides
idle time (bubble) and memory, never the result: see [Note: order].

    print(make_schedule("1f1b", 3, 4).text())
    rank 0  F0 F1 F2 .  .  .  .  B0 W0 F3 B1 W1 .  B2 W2 .  B3 W3
    rank 1  .  F0 F1 .  .  B0 W0 F2 B1 W1 F3 B2 W2 .  B3 W3
    rank 2  .  .  F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3
    print(make_schedule("zb-h1", 3, 4).text())
    rank 0  F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3       W postponed into the gaps at the end; a
    rank 1  .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3       gradient goes on before the W of its microbatch
    rank 2  .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

                                           virtual stages      bubble at unit       live activations,
    name         source                    per rank            cost (F = B = W)     rank r
    gpipe        Huang et al. 2019         1                   (p-1)/(m+p-1)        m
    1f1b         Narayanan et al. 2019     1                   (p-1)/(m+p-1)        min(m, p-r)
    interleaved  Narayanan et al. 2021     v >= 2              (p-1)/(vm+p-1)       1f1b + (p-1)/(pv) of it
    zb-h1        Qi et al. 2024            1                   (p-1)/(3m+p-1)       min(m, p)
    zbv          Qi et al. 2024, sec. 6    2, placed as a V    0 from m = 2p-1 on   2p halves
    pipedream    Narayanan et al. 2019     1                   as 1f1b, no flush    min(m, p-r)

[Note: order] Floating-point sums depend on their order, so in every schedule the F, the B and the W of one
stage come in order of microbatch. Gradients are then added in the same order, and all schedules give the same
bits (as long as every contribution is a pass of its own, which is what split_backward.py sees to). The
generators number the passes of a stage by counting them, so it holds by construction.

[Note: dropping] The patterns of interleaved and zbv need m >= p and m >= 2p-1. For fewer microbatches the
pattern of the least possible m is made and the passes of the surplus microbatches are left out. Passes of
different microbatches depend on each other only through their order on a rank, so what is left of a schedule
without deadlock has none, and needs no more memory.

Schedules that do not split the backward have W directly behind its B, as data; the gradient of the input then
leaves after both.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias, TypeVar, cast, get_args

from pycomm.parallel.ground import comm
from pycomm.parallel.ground.plan import Schedule as Name
from pycomm.parallel.ground.plan import ScheduleName

__all__ = [
    "NAMES",
    "Action",
    "Kind",
    "Schedule",
    "make_schedule",
    "peak_activations",
    "play",
    "source_of",
    "validate",
]

NAMES: tuple[Name, ...] = get_args(Name)
# Forward, gradient of the input, gradient of the weights, update.
Kind: TypeAlias = Literal["F", "B", "W", "U"]
UNIT: dict[Kind, int] = {"F": 1, "B": 1, "W": 1, "U": 1}
_BEHIND: dict[Kind, Kind] = {"W": "B", "U": "W"}  # which pass of the same stage and microbatch
Time = TypeVar("Time", int, float)


class Action(NamedTuple):
    """One pass. stage: of the whole model."""

    kind: Kind
    stage: int
    microbatch: int


class Schedule(NamedTuple):
    """actions[rank]: what the rank does, in order. placement[stage]: the rank that holds a virtual stage.
    split: W may leave its B.
    """

    name: Name | ScheduleName
    pp: int
    chunks: int
    microbatches: int
    split: bool
    actions: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return self.pp * self.chunks

    def stages_of(self, rank: int) -> list[int]:
        """The virtual stages of a rank, in order of the model: chunk 0, 1, ..."""
        return [stage for stage, holder in enumerate(self.placement) if holder == rank]

    def text(self) -> str:
        """A grid, one line per rank and one column per unit of time: `F3` is F of microbatch 3, and `F3.1`
        that of chunk 1.
        """
        rows = []
        for rank, spans in enumerate(play(self, UNIT)):
            mine, cells = self.stages_of(rank), {}
            for action, (start, _) in zip(self.actions[rank], spans, strict=True):
                chunk = f".{mine.index(action.stage)}" if self.chunks > 1 else ""
                cells[start] = f"{action.kind}{action.microbatch}{chunk}"
            rows.append([cells.get(time, ".") for time in range(spans[-1][1])])
        width = max(len(cell) for row in rows for cell in row)
        lines = [f"{self.name}: pp {self.pp}, chunks {self.chunks}, microbatches {self.microbatches}"]
        lines += [
            f"rank {rank:<2} " + " ".join(cell.ljust(width) for cell in row).rstrip()
            for rank, row in enumerate(rows)
        ]
        return "\n".join(lines)


class _Row:
    """The actions of one rank while they are made; counts the passes of each stage to number them, see [Note:
    order].
    """

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.counts: dict[tuple[str, int], int] = {}

    def count(self, kind: Kind, stage: int) -> int:
        return self.counts.get((kind, stage), 0)

    def add(self, kinds: str, stage: int) -> None:
        for letter in kinds:
            kind = cast(Kind, letter)
            microbatch = self.count(kind, stage)
            self.counts[kind, stage] = microbatch + 1
            self.actions.append(Action(kind, stage, microbatch))


def _gpipe(row: _Row, pp: int, chunks: int, m: int, rank: int) -> None:
    row.add("F" * m, rank)
    row.add("BW" * m, rank)


def _one_forward_one_backward(row: _Row, pp: int, m: int, rank: int, backward: Callable[[int], str]) -> None:
    """Forwards until the pipe is full, then in turn; backward(i): the passes that follow F once the i-th
    backward can run.
    """
    warm_up = min(m, pp - rank - 1)
    row.add("F" * warm_up, rank)
    for i in range(m):
        row.add("F" if warm_up + i < m else "", rank)
        row.add(backward(i), rank)


def _1f1b(row: _Row, pp: int, chunks: int, m: int, rank: int) -> None:
    _one_forward_one_backward(row, pp, m, rank, lambda i: "BW")


def _pipedream(row: _Row, pp: int, chunks: int, m: int, rank: int) -> None:
    _one_forward_one_backward(row, pp, m, rank, lambda i: "BWU")


def _zb_h1(row: _Row, pp: int, chunks: int, m: int, rank: int) -> None:
    """W stays `rank` microbatches behind B: every rank then holds pp activations, and the later ranks have W
    left when B has run out.
    """
    _one_forward_one_backward(row, pp, m, rank, lambda i: "BW" if i >= rank else "B")
    row.add("W" * min(m, rank), rank)


def _interleaved(row: _Row, pp: int, chunks: int, m: int, rank: int) -> None:
    """Groups of microbatches go through all chunks in turn; the rank with the longest way back starts with
    the most forwards.

    The published groups are of pp. Where pp does not divide m they are up to twice as long, the longer ones
    first: a group shorter than pp leaves gaps, a later group longer than the first one can deadlock, and this
    has the bubble of the table for every m >= pp.
    """
    groups = comm.even_sizes(max(m, pp), max(1, m // pp))
    stages = [chunk * pp + rank for chunk in range(chunks)]
    forwards = [stage for size in groups for stage in stages for _ in range(size)]
    backwards = [stage for size in groups for stage in reversed(stages) for _ in range(size)]
    warm_up = min(len(forwards), 2 * (pp - rank - 1) + (chunks - 1) * groups[0])
    for stage in forwards[:warm_up]:
        row.add("F", stage)
    for i, stage in enumerate(backwards):
        if warm_up + i < len(forwards):
            row.add("F", forwards[warm_up + i])
        row.add("BW", stage)


def _zbv(row: _Row, pp: int, chunks: int, m: int, rank: int) -> None:
    """Down one side of the V and up the other; all ranks fill with forwards until the first B reaches them,
    and W ends the pipe.
    """
    down, up = rank, 2 * pp - 1 - rank
    padded = max(m, 2 * pp - 1)
    row.add("F" * (2 * (pp - rank) - 1), down)
    for _ in range(rank):
        row.add("F", up)
        row.add("F", down)
    for _ in range(pp - rank):
        row.add("FBW", up)
    while row.count("F", up) < padded:
        row.add("F" if row.count("F", down) < padded else "", down)
        row.add("BW", down)
        row.add("FBW", up)
    for _ in range(rank):
        row.add("B", down)
        row.add("B", up)
    row.add("BW" * (pp - rank), down)
    row.add("W" * (padded - row.count("W", up)), up)
    row.add("W" * (padded - row.count("W", down)), down)


_GENERATORS: dict[str, Callable[[_Row, int, int, int, int], None]] = {  # of row, pp, chunks, m, rank
    ScheduleName.GPIPE: _gpipe,
    ScheduleName.ONE_F_ONE_B: _1f1b,
    ScheduleName.INTERLEAVED: _interleaved,
    ScheduleName.ZB_H1: _zb_h1,
    ScheduleName.ZBV: _zbv,
    ScheduleName.PIPEDREAM: _pipedream,
}


def _checked_chunks(name: Name | ScheduleName, pp: int, microbatches: int, chunks: int | None) -> int:
    if name not in NAMES:
        raise ValueError(f"schedule {name!r} is not known; choose one of {', '.join(NAMES)}")
    if pp < 1 or microbatches < 1:
        raise ValueError(
            f"schedule {name!r}: pp={pp} and microbatches={microbatches}, both must be at least 1"
        )
    if name == ScheduleName.INTERLEAVED:
        if chunks is not None and chunks < 2:
            raise ValueError(
                f"schedule 'interleaved': chunks={chunks} per rank, needs at least 2; '1f1b' is the schedule "
                "with 1"
            )
        return chunks or 2
    only = 2 if name == ScheduleName.ZBV else 1
    if chunks not in (None, only):
        raise ValueError(
            f"schedule {name!r}: chunks={chunks} per rank, it has {only}; leave chunks out or choose "
            "'interleaved'"
        )
    return only


def make_schedule(
    name: Name | ScheduleName, pp: int, microbatches: int, chunks: int | None = None
) -> Schedule:
    """The schedule `name` (see NAMES) for pp ranks and any number of microbatches >= 1, also fewer than
    stages.

    chunks: virtual stages per rank; only "interleaved" leaves a choice (>= 2, default 2). Raises ValueError
    for what cannot be.
    """
    return _made(name, pp, microbatches, chunks)


@functools.lru_cache(maxsize=256)
def _made(name: Name | ScheduleName, pp: int, microbatches: int, chunks: int | None) -> Schedule:
    chunks = _checked_chunks(name, pp, microbatches, chunks)
    rows = []
    for rank in range(pp):
        row = _Row()
        _GENERATORS[name](row, pp, chunks, microbatches, rank)
        rows.append(
            tuple(action for action in row.actions if action.microbatch < microbatches)
        )  # [Note: dropping]
    placement = [stage % pp for stage in range(pp * chunks)]
    if name == ScheduleName.ZBV:
        placement[pp:] = reversed(placement[:pp])
    split = name in (ScheduleName.ZB_H1, ScheduleName.ZBV)
    return Schedule(name, pp, chunks, microbatches, split, tuple(rows), tuple(placement))


def source_of(schedule: Schedule, action: Action) -> Action | None:
    """The action that must have ended before `action` can start, beside those before it on its rank; None for
    the first forward.

    In a schedule that does not split, the gradient of the input is there when B and W of the stage behind are
    both done.
    """
    kind, stage, microbatch = action
    if kind == "F":
        return Action("F", stage - 1, microbatch) if stage else None
    if kind == "B":
        if stage == schedule.num_stages - 1:
            return Action("F", stage, microbatch)
        return Action("B" if schedule.split else "W", stage + 1, microbatch)
    return Action(_BEHIND[kind], stage, microbatch)


def play(
    schedule: Schedule, duration: Mapping[Kind, Time] | Callable[[Action], Time], message: Time = 0
) -> list[list[tuple[Time, Time]]]:
    """(start, end) of every action, per rank in its order, when each starts as soon as its rank is free and
    its input has come.

    duration: time of each kind, {"F": ..., "B": ..., "W": ..., "U": ...}, or a function of the Action;
    message: time from one rank to another, which occupies neither. Raises ValueError when the actions wait
    for each other for ever.
    """
    time_of = duration if callable(duration) else lambda action: duration[action.kind]
    spans: list[list[tuple[Time, Time]]] = [[] for _ in schedule.actions]
    ended: dict[Action, tuple[Time, int]] = {}  # when, and on which rank
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            for action in row[len(spans[rank]) :]:
                source, start = source_of(schedule, action), spans[rank][-1][1] if spans[rank] else 0
                if source is not None:
                    if source not in ended:
                        break
                    time, where = ended[source]
                    start = max(start, time + (message if where != rank else 0))
                end = start + time_of(action)
                spans[rank].append((start, end))
                ended[action] = (end, rank)
                moved = True
    for rank, row in enumerate(schedule.actions):
        if len(spans[rank]) < len(row):
            stuck = row[len(spans[rank])]
            raise ValueError(
                f"[rank {rank}/{schedule.pp}] schedule {schedule.name!r}: {stuck} waits for "
                f"{source_of(schedule, stuck)}, which never "
                "ends: the orders of the ranks contradict each other. Reorder them so that no action "
                "precedes what it needs."
            )
    return spans


def validate(schedule: Schedule) -> None:
    """Raises ValueError unless the schedule is complete, placed, in order of microbatch per stage and kind,
    and free of deadlock.
    """
    where = f"schedule {schedule.name!r} for pp={schedule.pp}, microbatches={schedule.microbatches}"
    held = [schedule.placement.count(rank) for rank in range(schedule.pp)]
    if len(schedule.actions) != schedule.pp or held != [schedule.chunks] * schedule.pp:
        raise ValueError(
            f"{where}: {len(schedule.actions)} rows of actions; ranks hold {held} stages, each must hold "
            f"{schedule.chunks}"
        )
    kinds: tuple[Kind, ...] = ("F", "B", "W")
    if schedule.name == ScheduleName.PIPEDREAM:
        kinds = (*kinds, "U")
    wanted = list(range(schedule.microbatches))
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if (
                action.kind not in kinds
                or not 0 <= action.stage < schedule.num_stages
                or schedule.placement[action.stage] != rank
            ):
                raise ValueError(
                    f"{where}: rank {rank} has {action}; kinds are {', '.join(kinds)}, its stages "
                    f"{schedule.stages_of(rank)}"
                )
        for stage in schedule.stages_of(rank):
            for kind in kinds:
                got = [action.microbatch for action in row if action[:2] == (kind, stage)]
                if got != wanted:
                    raise ValueError(
                        f"{where}: {kind} of stage {stage} on rank {rank} runs microbatches {got}; must be "
                        "each once, in order"
                    )
        if not schedule.split:
            for action, behind in zip(row, (*row[1:], None), strict=True):
                if action.kind == "B" and behind != Action("W", *action[1:]):
                    raise ValueError(
                        f"{where}: {action} on rank {rank} is followed by {behind}; W must follow unless the "
                        "schedule is split"
                    )
    play(schedule, UNIT)


def peak_activations(schedule: Schedule) -> list[int]:
    """Per rank, the largest number of (stage, microbatch) pairs between F and W: activations of one virtual
    stage held at once.
    """
    peaks = []
    for row in schedule.actions:
        live = peak = 0
        for action in row:
            live += {"F": 1, "W": -1}.get(action.kind, 0)
            peak = max(peak, live)
        peaks.append(peak)
    return peaks
