"""python -m pycomm.benchmarks strategies: the command line. See --help."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pycomm.benchmarks.common import report
from pycomm.benchmarks.common.options import Add, add_files
from pycomm.benchmarks.common.ranks import RankError

if TYPE_CHECKING:
    from pycomm.benchmarks.strategies.columns import Result, Results
    from pycomm.benchmarks.strategies.model import Size
    from pycomm.benchmarks.strategies.variants import Spec

PLANS = (
    "dp={n};dp={n},zero=1;dp={n},zero=2;dp={n},zero=3;tp={n};"
    "pp={n},schedule=gpipe;pp={n};pp={n},schedule=zb-h1;ulysses={n};ring={n}"
)
TORCH = "ddp,ddp-zero1,fsdp2-zero2,fsdp2,tp,pp-gpipe,pp-1f1b"
DEEPSPEED_STAGES = (1, 2, 3)
# relative, fp32 over the steps of a run; a wrong gradient differs by more than 1e-3 after two steps
LOSS_LIMIT = 1e-4
DESCRIPTION = """\
Step time and peak memory of pycomm.parallel beside torch's own strategies over pycomm and over Gloo, and
DeepSpeed where it is installed: the same GPT, the same batches, in turns, on this machine's CPU. Losses of
all variants are compared with those of one process.
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit status: 0, 1 when a rank failed or a loss is wrong; argparse exits
    with 2.
    """
    from pycomm.benchmarks.strategies.model import Size

    parser = make_parser(Size())
    options = parser.parse_args(arguments)
    options.size = size_of(options, parser)
    if options.rows % options.ranks or options.rows % options.microbatches:
        parser.error(
            f"--rows {options.rows}: must be a multiple of --ranks and --microbatches; torch's strategies "
            "take equal parts"
        )
    warnings.simplefilter("ignore", FutureWarning)  # torch renames collectives that its own strategies call
    try:
        results = run(options, make_specs(options))
    except ValueError as error:
        parser.error(str(error))
    except RankError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return show(results, options)


def show(results: Results, options: argparse.Namespace) -> int:
    from pycomm.benchmarks.strategies import columns

    content = columns.make_report(results, options)
    report.write(content, options, columns.page, columns.draw)
    columns.show(content)
    wrong = [row.spec.name for row in results.rows if not row.loss_error <= LOSS_LIMIT]
    if wrong:
        print(f"error: losses differ from those of one process: {', '.join(wrong)}.", file=sys.stderr)
    return 1 if wrong else 0


def make_parser(size: Size) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pycomm.benchmarks strategies", description=DESCRIPTION)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes (default %(default)s)")
    add("--plans", help="of pycomm.parallel, with ; between them (default: one for each strategy)")
    add("--torch", default=TORCH, help="torch's strategies, with commas; empty: none (default %(default)s)")
    add("--backends", default="pycomm,gloo", help="under torch's strategies (default %(default)s)")
    add_sizes(add, size)
    add("--rounds", type=int, default=6, help="turns of each variant (default %(default)s)")
    add("--steps", type=int, default=2, help="of a turn (default %(default)s)")
    add("--no-memory", action="store_true", help="leave out the pass that measures memory")
    add(
        "--timeout",
        type=float,
        default=600,
        help="seconds that all turns together may take (default %(default)s)",
    )
    add_files(add, "ratios")
    return parser


def add_sizes(add: Add, size: Size) -> None:
    """Options for the fields of a Size, whose values are the defaults."""
    for name, meaning in (
        ("dim", "width of the model"),
        ("layers", "blocks"),
        ("vocab", "tokens it knows"),
        ("rows", "sequences per step, of all ranks together"),
        ("length", "tokens of a sequence"),
        ("microbatches", "of pipelines"),
    ):
        add(f"--{name}", type=int, default=getattr(size, name), help=f"{meaning} (default %(default)s)")


def size_of(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Size:
    """The Size that was asked for; refused by the parser where there is none."""
    from pycomm.benchmarks.strategies.model import HEAD_DIM, Size

    size = Size(*(getattr(options, field) for field in Size._fields))
    if options.dim % HEAD_DIM or min(options.ranks, options.rounds, options.steps, *size) < 1:
        parser.error(f"--dim must be a multiple of {HEAD_DIM}, and all numbers 1 or more")
    return size


def plan_specs(plans: str, ranks: int) -> list[Spec]:
    """Variants of pycomm.parallel. plans: with ; between them and {n} for the ranks. Raises ValueError."""
    from pycomm.benchmarks.strategies.variants import Spec
    from pycomm.parallel import Plan

    specs = []
    for text in filter(None, plans.format(n=ranks).split(";")):
        if (plan := Plan.parse(text)).world_size != ranks:
            raise ValueError(f"--plans {text!r} is for {plan.world_size} ranks, but --ranks is {ranks}")
        specs.append(Spec(text, "pycomm.parallel", text, "pycomm"))
    return specs


def make_specs(options: argparse.Namespace) -> list[Spec]:
    """The variants of the first launch, one process first. Raises ValueError."""
    from pycomm.benchmarks.strategies.torch_variants import STRATEGIES
    from pycomm.benchmarks.strategies.variants import Spec

    specs = [Spec("one process", "one process", "", "pycomm")]
    specs += plan_specs(options.plans or PLANS, options.ranks)
    for strategy in filter(None, options.torch.split(",")):
        if strategy not in STRATEGIES:
            raise ValueError(f"--torch {strategy!r}: must be of {', '.join(STRATEGIES)}")
        specs += [
            Spec(f"torch {strategy}, {backend}", "torch", strategy, backend)
            for backend in options.backends.split(",")
        ]
    return specs


def run(options: argparse.Namespace, specs: Sequence[Spec]) -> Results:
    """Measures all variants. DeepSpeed's run in separate launches. Raises RankError."""
    import torch

    from pycomm.benchmarks.strategies.columns import Results
    from pycomm.benchmarks.strategies.model import make_model

    torch.set_num_threads(1)  # in this process, too: its threads would not outlive the forks
    rows, notes = launch(options, "pycomm", specs), []
    if importlib.util.find_spec("deepspeed") is None:
        notes.append("DeepSpeed is left out: it is not installed (requirements-frameworks.txt has it).")
    else:
        for backend in options.backends.split(","):
            rows += launch(options, backend, [specs[0]._replace(backend=backend), *deepspeed(backend)])[1:]
        notes.append("DeepSpeed ran in processes of its own, after the others and not in turns with them.")
    parameters = make_model(options.size).parameters()
    return Results(rows, sum(parameter.numel() * parameter.element_size() for parameter in parameters), notes)


def launch(options: argparse.Namespace, backend: str, specs: Sequence[Spec]) -> list[Result]:
    """Rows of variants that take turns in the same processes; the first one is one process."""
    from pycomm.benchmarks.strategies import measure
    from pycomm.benchmarks.strategies.columns import Result, loss_error

    memories, where = dict[str, measure.Memory](), (options.size, options.ranks)
    if not options.no_memory:
        memories = {spec.name: measure.measure_memory(spec, *where, backend) for spec in specs}
    settings = measure.Settings(options.rounds, options.steps)
    timed = measure.measure_time(specs, *where, settings, backend, options.timeout)
    expected = timed[specs[0].name].losses
    return [
        Result(spec, timed[spec.name], memories.get(spec.name), loss_error(timed[spec.name].losses, expected))
        for spec in specs
    ]


def deepspeed(backend: str) -> list[Spec]:
    from pycomm.benchmarks.strategies.variants import Spec

    return [
        Spec(f"deepspeed zero={stage}, {backend}", "deepspeed", f"zero={stage}", backend)
        for stage in DEEPSPEED_STAGES
    ]
