"""The command `python -m pycomm.plan`: the best plans for a model on so many GPUs, and why; see
docs/planning.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.planning.asked import check_job, check_request, fixed_fields, whole
from pycomm.parallel.planning.costs import table as cost_table
from pycomm.parallel.planning.job import Job, recompute_of
from pycomm.parallel.planning.machine import known, load_machine
from pycomm.parallel.planning.named import from_config, named
from pycomm.parallel.planning.quantities import MeanBytes
from pycomm.parallel.planning.report import even_experts, explain_job, famous, reason, short, table
from pycomm.parallel.planning.search import NoPlan, Prediction, Request, search

if TYPE_CHECKING:
    from pycomm.parallel.planning.model import Model

GIB = 2**30


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m pycomm.plan",
        description="Predicts time and memory of plans and prints the best; or `calibrate` this machine.",
    )
    add = found.add_argument
    add("--model", required=True, help="a name (gpt3-175b, llama-3-70b ...) or a config.json of transformers")
    add("--gpus", type=int, required=True, help="ranks")
    add("--machine", default="h100", help=f"{', '.join(known())}, or a .toml file")
    add("--batch", type=int, required=True, help="sequences of a step, over all ranks")
    add("--sequence", type=int, help="positions, else those the model was trained with")
    add("--memory", type=float, help="GiB of a rank that may be used, else the machine's")
    add("--fix", default="", metavar="PLAN", help='fields that the plan must have: "tp=8,zero=1"')
    add("--microbatch", type=int, default=16, help="most rows of one microbatch")
    add("--top", type=int, default=10, help="how many plans")
    add("--explain", metavar="PLAN", help="explain this plan instead, with --microbatches")
    add("--microbatches", type=int, default=1, help="of --explain")
    add("--costs", action="store_true", help="a table of every strategy alone on a node, instead")
    add("--json", action="store_true", help="the plans as JSON")
    add("--trace", metavar="FILE", help="a step of the best plan, for chrome://tracing or ui.perfetto.dev")
    add("--plot", metavar="FOLDER", help="pictures: the pipeline, tp x pp, time over the number of GPUs")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 where nothing is possible or an argument is wrong."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["calibrate"]:
        from pycomm.parallel.planning.calibrate import main as calibrate

        return calibrate(arguments[1:])
    given = parser().parse_args(arguments)
    try:
        code = _run(given)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who reads, as head does, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"{'no plan' if isinstance(error, NoPlan) else 'error'}: {error}", file=sys.stderr)
        return 2


def _model(given: argparse.Namespace) -> Model:
    if given.model.endswith(".json"):
        return from_config(_config(given.model), sequence=given.sequence)
    return named(given.model, sequence=given.sequence)


def _config(path: str) -> dict[str, object]:
    try:
        found = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must hold one config of transformers, a {{...}}")
    return found


def _run(given: argparse.Namespace) -> int:
    machine = load_machine(given.machine)
    memory = None if given.memory is None else MeanBytes(given.memory * GIB)
    request = Request(
        _model(given), machine, given.gpus, given.batch, memory, fixed_fields(given.fix), given.microbatch
    )
    check_request(request)
    whole("--top", given.top)
    if given.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed")
    if given.explain is not None:
        plan = Plan.parse(given.explain)
        if plan.world_size != given.gpus:
            raise ValueError(f"Plan({plan}) is for {plan.world_size} ranks, --gpus says {given.gpus}")
        job = Job(request.model, machine, plan, given.batch, given.microbatches, recompute_of(plan))
        check_job(job)
        print(explain_job(job, memory))
        return 0
    if given.costs:
        print("\n".join(cost_table(request)))
        return 0
    start = time.perf_counter()
    with _progress() as progress:
        found = search(request, given.top, progress)
    if given.json:
        print(json.dumps([_as_json(each) for each in found], indent=1))
    else:
        _print(request, found, time.perf_counter() - start)
    _pictures(given, request, found[0])
    return 0


def _pictures(given: argparse.Namespace, request: Request, best: Prediction) -> None:
    if given.trace:
        from pycomm.parallel.planning.trace import write_trace

        write_trace(best, given.trace)
        print(f"trace: {given.trace}", file=sys.stderr)
    if given.plot:
        from pycomm.parallel.planning.plot import plot_all

        for path in plot_all(request, best, Path(given.plot)):
            print(f"picture: {path}", file=sys.stderr)


def _print(request: Request, found: Sequence[Prediction], seconds: float) -> None:
    model, limit = request.model, request.limit
    print(
        f"{model.name}, {model.parameters / 1e9:.1f}e9 parameters, {request.rows} x {model.sequence} "
        "tokens on "
        f"{request.world} ranks of {request.machine.name} (searched in {seconds:.1f} s)"
    )
    print("\n".join(table(found, limit)))
    print("\n".join([f"\nthe first: {reason(found[0])}", *even_experts(model), "\nwhy others lose"]))
    for name, each, why in famous(request, found[0]):
        plan = f" [{short(each.plan)}; {each.job.microbatches} x {each.job.microbatch_rows}]" if each else ""
        print(f"  {name}: {why}{plan}")


def _as_json(each: Prediction) -> dict[str, object]:
    return {
        "plan": str(each.plan),
        "microbatches": each.job.microbatches,
        "seconds": each.seconds,
        "mfu": each.mfu,
        "time": each.time.parts(),
        "memory": {**each.memory.parts(), "peak": each.memory.peak, "where": each.memory.where},
    }


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, where rich is installed; else nothing."""
    if importlib.util.find_spec("rich") is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("searching")
        yield lambda done, of_all: bar.update(task, completed=done, total=of_all)


if __name__ == "__main__":
    sys.exit(main())
