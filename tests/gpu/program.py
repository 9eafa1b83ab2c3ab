"""python tests/gpu: builds, checks and measures on this machine's GPU, and writes the
report. See --help.
"""

import argparse
import json
import shlex
import sys

from gpu import summary
from gpu.steps import PARTS, ROOT, TOTAL_SECONDS, built, choose, run_all
from pycomm import env
from pycomm.benchmarks.common import device

DESCRIPTION = """\
Builds the extension for this machine's GPU unless it is there, checks everything that needs one, measures,
and writes benchmarks/results/<date>_<gpu>.md and .json after every step; also into the folder that the
variable OUT names, if it is set. With --part a part of the steps, of eight minutes at most, and _<part> in
these names; with --only _steps.
It takes the packages of the Python that runs it: no virtual environment, nothing is installed.
Exit status: 0 all passed and every target met; 1 a step failed, was cut short or not run; 2 only a target was
missed.
"""


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python tests/gpu",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="show the steps and stop")
    parser.add_argument(
        "--part", choices=PARTS, help="a part of the steps; the parts need nothing of each other"
    )
    parser.add_argument("--only", metavar="STEP,...", help="these steps alone")
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"limit for all steps together (default {TOTAL_SECONDS:g} for each part)",
    )
    parser.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="cpu: tries the program itself on host tensors",
    )
    parser.add_argument(
        "--results", default=str(ROOT / "benchmarks" / "results"), help="folder of the report"
    )
    given = parser.parse_args(arguments)
    if missing := device.why_no_torch() if given.device == "cpu" or given.list else device.why_no_cuda():
        print(
            f"gpu-check: {missing}. It runs with {sys.executable}; another Python: make gpu-check PYTHON=...",
            file=sys.stderr,
        )
        return 1
    try:
        steps = choose(given.part, given.only and given.only.split(","))
    except ValueError as error:
        parser.error(str(error))
    if given.list:
        for step in steps:
            print(f"{step.name:18} {step.seconds:4.0f} s  {step.about}")
        return 0
    return check(steps, given, arguments)


def check(steps, given, arguments=None):
    """Runs the steps and writes the report. Returns the exit status."""
    seconds = given.seconds or TOTAL_SECONDS * (1 if given.part else len(PARTS))
    command = shlex.join(["python3", "tests/gpu", *(sys.argv[1:] if arguments is None else arguments)])
    out = env.for_child().get("OUT")
    folders = [given.results] + ([out] if out else [])
    if given.device == "cuda" and built():
        steps = [step for step in steps if step.name != "build"]

    def report_of(outcomes):
        printed = next((outcome.log for outcome in outcomes if outcome.step.name == "versions"), "")
        part = given.part or ("steps" if given.only else None)  # a part does not replace the whole report
        return summary.contents(outcomes, last_object(printed), command, part=part)

    outcomes = run_all(
        steps,
        ROOT / "build" / "gpu_check",
        seconds,
        given.device,
        lambda text: print(text, flush=True),
        lambda outcomes: summary.write(report_of(outcomes), folders),
    )
    report = report_of(outcomes)
    for path in summary.write(report, folders):
        print(f"wrote {path}")
    for target in report["targets"]:
        print(
            f"{'met' if target['met'] else 'MISSED' if target['met'] is False else 'not measured'}: "
            f"{target['target']}"
        )
    counts = {
        status: sum(step["status"] == status for step in report["steps"])
        for status in ("pass", "fail", "cut short", "not run")
    }
    print(", ".join(f"{number} {status}" for status, number in counts.items()))
    return summary.exit_code(report)


def last_object(printed):
    """The JSON object in the last line of a text; {} if there is none."""
    try:
        found = json.loads(printed.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
