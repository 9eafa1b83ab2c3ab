"""What `make demo` runs: a bandwidth table beside Gloo, then a small GPT trained on two ranks; two pictures.
One to three minutes.

python examples/demo.py [--out demo] [--steps 120 and other flags of 02_train_gpt_ddp.py]
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from pycomm.benchmarks import bandwidth_demo

if TYPE_CHECKING:
    from pycomm.benchmarks.collectives.runner import Results

RANKS, STEPS = 2, 120
# Limits for a busy machine. Starting ranks and drawing pictures come on top of the first two, so the training
# gets less where less is left of the time for all.
BANDWIDTH_S, TRAINING_S, ALL_S = 40, 60, 160
LEAST_S = 20  # of training
FIRST = (
    f"You will see all_reduce of pycomm beside Gloo, then a small GPT trained on {RANKS} ranks. "
    "This takes one to three minutes."
)
NEXT = (  # arguments of Python, and what they show
    ("examples/22_ddp_goes_on.py", "a rank is killed, DDP continues"),
    ("examples/24_plan_itself.py", "pycomm chooses a parallel plan"),
    ("-m pycomm.doctor", "what is slow or missing here"),
)


def train(out: Path, limit: float, flags: list[str]) -> dict[str, Any]:
    """Runs the training example in its own processes and returns its figures. Raises CalledProcessError when
    it fails. limit: seconds, from now.
    """
    # torchrun at once: the script itself would import torch first, 10 seconds on a busy machine
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    script = str(Path(__file__).with_name("02_train_gpt_ddp.py"))
    pictures = [f"--plot={out / 'loss.png'}", f"--json={out / 'loss.json'}"]
    usual = [f"--steps={STEPS}", f"--limit={limit:.0f}", f"--began={time.monotonic()}"]
    threads = {"OMP_NUM_THREADS": "1"} | os.environ  # torchrun's own choice, of which it would tell
    subprocess.run([*torchrun, script, *usual, *pictures, *flags], check=True, env=threads)
    return json.loads((out / "loss.json").read_text())


def speedups(results: "Results") -> Iterator[str]:
    """A line of text for the smallest, the middle and the largest size of the table."""
    times_us = {(row.backend == "gloo", row.nbytes): row.best_us for row in results.rows}
    sizes = sorted({row.nbytes for row in results.rows})
    for nbytes in dict.fromkeys((sizes[0], sizes[len(sizes) // 2], sizes[-1])):
        ours, gloo = times_us.get((False, nbytes)), times_us.get((True, nbytes))
        if ours and gloo:
            yield f"{nbytes:,} bytes: {ours:,.1f} us, Gloo {gloo:,.1f} us = {gloo / ours:.1f}x"


def summary(results: "Results", figures: dict[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for i, line in enumerate(speedups(results)):
        table.add_row("" if i else "all_reduce", line)
    table.add_row(
        "training",
        f"{figures['steps']} of {figures['of_steps']} steps, {figures['tokens']:,} tokens in "
        f"{figures['train_s']:.0f} s: {figures['tokens_per_s']:,.0f} tokens/s",
    )
    for loss in ("train_loss", "validation_loss"):
        table.add_row(
            loss.replace("_", " "),
            f"{figures[loss + '_first']:.2f} -> {figures[loss + '_last']:.2f} nats per byte",
        )
    share = figures["communication_share"]
    table.add_row(
        "step", f"{figures['step_ms']:.0f} ms; exposed communication: {share:.0%} of forward and backward"
    )
    Console().print(Panel(table, title=f"pycomm on this machine, {RANKS} ranks", expand=False))


def typed(path: str | Path) -> str:
    """The path as one types it in this folder."""
    path = Path(path).absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def commands() -> dict[str, str]:
    """What to try next: command -> what it shows."""
    root, found = Path(__file__).parent.parent, {}
    for arguments, shows in NEXT:
        first, *rest = arguments.split()
        script = [typed(root / first)] if first.endswith(".py") else [first]
        found[shlex.join([typed(sys.executable), *script, *rest])] = shows
    return found


def last_lines(out: Path) -> Iterator[str]:
    yield f"Pictures: {typed(out / 'bandwidth.png')} and {typed(out / 'loss.png')}"
    yield "Three commands to try next:"
    width = max(map(len, commands()))
    for command, shows in commands().items():
        yield f"  {command:{width}}  # {shows}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of the pictures")
    args, training_flags = parser.parse_known_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    console, began = Console(), time.monotonic()
    print(FIRST, flush=True)
    console.rule(f"1. Bandwidth: all_reduce on {RANKS} ranks, pycomm beside Gloo")
    results = bandwidth_demo(str(args.out / "bandwidth.png"), ranks=RANKS, limit=BANDWIDTH_S)
    console.rule("2. Training: a byte-level GPT, data parallel over pycomm")
    left_s = ALL_S - (time.monotonic() - began)
    figures = train(args.out, max(LEAST_S, min(TRAINING_S, left_s)), training_flags)
    summary(results, figures)
    print(*last_lines(args.out), sep="\n")


if __name__ == "__main__":
    main()
