"""A step as a file for chrome://tracing or ui.perfetto.dev: a row per rank of the pipeline, a box per pass,
and what comes after the passes.
"""

import json

from pycomm.parallel.planning.time import stage_times

__all__ = ["events_of", "write_trace"]

NAMES = {"F": "forward", "B": "gradient of the input", "W": "gradient of the weights", "U": "update"}


def events_of(found):
    """Trace events (times in us) of a Prediction. Of a long step what was played, see events.py."""
    pipeline, events, end = found.time.pipeline, [], 0.0
    if pipeline is None:
        (times,), _ = stage_times(found.job)
        rows = [[]]
        for microbatch in range(found.job.microbatches):
            for kind, seconds in zip("FBW", times, strict=True):
                rows[0].append((kind, 0, microbatch, end, end + seconds))
                end += seconds
    else:
        rows = [
            [(*action, start, stop) for action, (start, stop) in zip(actions, spans, strict=True)]
            for actions, spans in zip(pipeline.schedule.actions, pipeline.spans, strict=True)
        ]
        end = max(row[-1][4] for row in rows)
    for rank, row in enumerate(rows):
        for kind, stage, microbatch, start, stop in row:
            events.append(_box(f"{kind}{microbatch}", NAMES[kind], rank, (start, stop), stage=stage))
        at = end
        for name in ("sums of gradients", "optimizer", "gathering values"):
            seconds = found.time.parts()[name]
            if seconds > 0:
                events.append(_box(name, name, rank, (at, at + seconds)))
                at += seconds
    return events


def _box(name, category, rank, times, **arguments):
    start, stop = times
    box = {"name": name, "cat": category, "ph": "X", "ts": start * 1e6, "dur": (stop - start) * 1e6}
    return {**box, "pid": 0, "tid": rank, "args": arguments}


def write_trace(found, path):
    ranks = range(found.plan.pp)
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": r, "args": {"name": f"pp rank {r}"}}
        for r in ranks
    ]
    with open(path, "w") as file:
        json.dump({"traceEvents": names + events_of(found), "otherData": {"plan": str(found.plan)}}, file)
