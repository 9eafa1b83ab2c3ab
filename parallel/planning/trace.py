"""A step as a file for chrome://tracing or ui.perfetto.dev: a row per rank of the pipeline, a box per pass,
and what comes after the passes.
"""

import json
from pathlib import Path
from typing import TypeAlias

from pycomm.parallel.pipeline.schedules import Action, Kind
from pycomm.parallel.pipeline.timeline import Span
from pycomm.parallel.planning.search import Prediction
from pycomm.parallel.planning.time import stage_times

__all__ = ["events_of", "write_trace"]

Event: TypeAlias = dict[str, object]  # of the format of chrome://tracing
KINDS: tuple[Kind, ...] = ("F", "B", "W")
NAMES = {"F": "forward", "B": "gradient of the input", "W": "gradient of the weights", "U": "update"}


def events_of(found: Prediction) -> list[Event]:
    """Times in us. Of a long step what was played, see events.py."""
    pipeline, events, end = found.time.pipeline, list[Event](), 0.0
    if pipeline is None:
        (times,), _ = stage_times(found.job)
        rows = [list[Span]()]
        for microbatch in range(found.job.microbatches):
            for kind, seconds in zip(KINDS, times, strict=True):
                rows[0].append(Span(Action(kind, 0, microbatch), end, end + seconds))
                end += seconds
    else:
        rows = [
            [Span(action, start, stop) for action, (start, stop) in zip(actions, spans, strict=True)]
            for actions, spans in zip(pipeline.schedule.actions, pipeline.spans, strict=True)
        ]
        end = max(row[-1].end for row in rows)
    for rank, row in enumerate(rows):
        for (kind, stage, microbatch), start, stop in row:
            events.append(_box(f"{kind}{microbatch}", NAMES[kind], rank, (start, stop), stage=stage))
        at = end
        for name in ("sums of gradients", "optimizer", "gathering values"):
            took = found.time.parts()[name]
            if took > 0:
                events.append(_box(name, name, rank, (at, at + took)))
                at += took
    return events


def _box(name: str, category: str, rank: int, times: tuple[float, float], **arguments: int) -> Event:
    start, stop = times
    box: Event = {"name": name, "cat": category, "ph": "X", "ts": start * 1e6, "dur": (stop - start) * 1e6}
    return {**box, "pid": 0, "tid": rank, "args": arguments}


def write_trace(found: Prediction, path: str | Path) -> None:
    ranks = range(found.plan.pp)
    names: list[Event] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": r, "args": {"name": f"pp rank {r}"}}
        for r in ranks
    ]
    with open(path, "w") as file:
        json.dump({"traceEvents": names + events_of(found), "otherData": {"plan": str(found.plan)}}, file)
