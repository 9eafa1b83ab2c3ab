"""python -m pycomm.benchmarks planned: seconds of a step as pycomm.parallel.planning.simulate predicts
them, beside those that a run takes.

The machine is calibrated first, by `python -m pycomm.plan calibrate`, or read from --machine; then the model
of the strategies' benchmark trains under every plan, in turns (benchmarks/strategies/measure.py). An error is
predicted over measured, less 1. Order: of the pairs of plans whose measured steps differ by more than 10%,
those that are predicted in the other order.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pycomm.benchmarks.common import report
from pycomm.benchmarks.common.options import add_files, new_parser
from pycomm.benchmarks.common.ranks import RankError
from pycomm.benchmarks.common.report import Content, Page, Pyplot, Table
from pycomm.benchmarks.strategies import measure
from pycomm.benchmarks.strategies.command import add_sizes, plan_specs, size_of
from pycomm.benchmarks.strategies.model import Size, make_batch, make_model, make_optimizer
from pycomm.parallel import Plan
from pycomm.parallel.planning import simulate
from pycomm.parallel.planning.calibrate import calibrate
from pycomm.parallel.planning.machine import Machine, from_toml, load_machine, tomllib

if TYPE_CHECKING:
    import argparse

    from matplotlib.figure import Figure

    from pycomm.parallel.planning.search import Prediction

__all__ = ["main", "misplaced"]

PLANS = (
    "dp={n};dp={n},zero=1;dp={n},zero=2;dp={n},zero=3;tp={n};tp={n},megatron_sp;"
    "pp={n};pp={n},schedule=gpipe;pp={n},schedule=zb-h1;ulysses={n}"
)
SIZE = Size(dim=256, layers=8, vocab=1024, rows=16, length=128)
APART = 1.1  # steps that differ by more have an order


class Compared(NamedTuple):
    """machine: TOML text, or the file it came from."""

    rows: list[Content]
    machine: str


def misplaced(rows: Sequence[Content]) -> list[tuple[str, str]]:
    """Pairs of plans whose measured steps are APART, and whose predicted ones are the other way round."""
    return [
        (a["plan"], b["plan"])
        for a, b in itertools.permutations(rows, 2)
        if b["measured_ms"] > APART * a["measured_ms"] and b["predicted_ms"] <= a["predicted_ms"]
    ]


def predicted(text: str, size: Size, machine: Machine) -> Prediction:
    """text: a plan."""
    plan = Plan.parse(text)
    model = make_model(size)
    microbatches = size.microbatches if plan.pp > 1 else 1
    opt = make_optimizer(model.parameters())
    batch = make_batch(size, 0)
    return simulate(plan, model, batch=batch, microbatches=microbatches, machine=machine, opt=opt)


def run(options: argparse.Namespace) -> Compared:
    torch.set_num_threads(1)
    specs = plan_specs(options.plans or PLANS, options.ranks)
    source = options.machine or calibrate(options.ranks)
    machine = load_machine(source) if options.machine else from_toml(tomllib.loads(source))
    settings = measure.Settings(options.rounds, options.steps)
    timed = measure.measure_time(specs, options.size, options.ranks, settings, timeout=options.timeout)
    rows: list[Content] = []
    for text in (spec.name for spec in specs):
        found, seconds = predicted(text, options.size, machine), timed[text].seconds
        parts = {name: 1e3 * part for name, part in found.time.parts().items()}
        row = {"plan": text, "measured_ms": 1e3 * seconds, "predicted_ms": 1e3 * found.seconds}
        rows.append(row | {"error": found.seconds / seconds - 1, "parts_ms": parts})
    return Compared(rows, source)


def table(content: Content) -> Table:
    parts = list(content["rows"][0]["parts_ms"])
    lines = []
    for row in content["rows"]:
        cells = [f"{row['measured_ms']:.1f}", f"{row['predicted_ms']:.1f}", f"{row['error']:+.0%}"]
        lines.append([row["plan"], *cells, *(f"{row['parts_ms'][part]:.1f}" for part in parts)])
    return Table(None, ["plan", "measured ms", "predicted ms", "error", *parts], lines)


def summary(content: Content) -> str:
    errors = [abs(row["error"]) for row in content["rows"]]
    wrong = misplaced(content["rows"])
    told = "; ".join(f"{first} before {second}" for first, second in wrong)
    return (
        f"Mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}; in the wrong order: "
        f"{len(wrong)} pairs{': ' if wrong else ''}{told}."
    )


def page(content: Content) -> Page:
    size = ", ".join(f"{name} {value}" for name, value in content["size"].items())
    intro = [f"Steps of par on {content['ranks']} ranks, GPT: {size}.", "", summary(content)]
    return Page(intro, [table(content)], ["```", *content["machine_file"].splitlines(), "```"])


def draw(content: Content, pyplot: Pyplot) -> Figure:
    """Measured and predicted ms of every plan, the predicted ones by their parts."""
    rows = content["rows"]
    figure, axes = pyplot.subplots(figsize=(10, 0.8 + 0.55 * len(rows)), layout="constrained")
    places = range(len(rows))
    axes.barh([place - 0.2 for place in places], [row["measured_ms"] for row in rows], 0.36, label="measured")
    left = [0.0] * len(rows)
    for number, part in enumerate(rows[0]["parts_ms"]):
        widths = [row["parts_ms"][part] for row in rows]
        label = f"predicted: {part}"
        axes.barh(
            [place + 0.2 for place in places], widths, 0.36, left=left, label=label, color=f"C{number + 1}"
        )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(places, [row["plan"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms of a step")
    figure.legend(fontsize=8, loc="outside lower center", ncols=4, frameon=False)
    axes.set_title(summary(content), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0, 1 when a rank failed, 2 for a wrong argument."""
    parser = new_parser("python -m pycomm.benchmarks planned", __doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes (default %(default)s)")
    add("--plans", help="with ; between them (default: ten)")
    add("--machine", help="a name or a TOML file (default: this machine is calibrated)")
    add_sizes(add, SIZE)
    add("--rounds", type=int, default=6, help="turns of each plan (default %(default)s)")
    add("--steps", type=int, default=3, help="of a turn (default %(default)s)")
    add("--timeout", type=float, default=600, help="seconds of all turns (default %(default)s)")
    add_files(add, "measured beside predicted")
    options = parser.parse_args(arguments)
    options.size = size_of(options, parser)
    try:
        rows, source = run(options)
    except ValueError as error:
        parser.error(str(error))
    except RankError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    content = {**report.context("planned"), "ranks": options.ranks, "size": options.size._asdict()}
    content |= {"machine_file": source, "rows": rows}
    report.write(content, options, page, draw)
    report.show([report.machine_line(content), table(content), summary(content)])
    return 0
