"""What `make demo` runs: a bandwidth table beside Gloo, then a small GPT trained on two ranks; two pictures.
About two minutes.

python examples/demo.py [--out demo] [--steps 500 and other flags of 02_train_gpt_ddp.py]
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from pycomm.benchmarks import bandwidth_demo

RANKS = 2


def train(out, flags):
    """Runs the training example in a process of its own and returns its figures. Raises CalledProcessError
    when it fails.
    """
    script = Path(__file__).with_name("02_train_gpt_ddp.py")
    pictures = [f"--plot={out / 'loss.png'}", f"--json={out / 'loss.json'}"]
    subprocess.run([sys.executable, str(script), f"--ranks={RANKS}", *pictures, *flags], check=True)
    return json.loads((out / "loss.json").read_text())


def speedups(results):
    """A line of text for the smallest, the middle and the largest size of the table."""
    times_us = {(row.backend == "gloo", row.nbytes): row.best_us for row in results.rows}
    sizes = sorted({row.nbytes for row in results.rows})
    for nbytes in (sizes[0], sizes[len(sizes) // 2], sizes[-1]):
        ours, gloo = times_us.get((False, nbytes)), times_us.get((True, nbytes))
        if ours and gloo:
            yield f"{nbytes:,} bytes: {ours:,.1f} us, Gloo {gloo:,.1f} us = {gloo / ours:.1f}x"


def summary(results, figures, out):
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for i, line in enumerate(speedups(results)):
        table.add_row("" if i else "all_reduce", line)
    table.add_row(
        "training",
        f"{figures['tokens']:,} tokens in {figures['train_s']:.0f} s: {figures['tokens_per_s']:,.0f} "
        "tokens/s",
    )
    for loss in ("train_loss", "validation_loss"):
        table.add_row(
            loss.replace("_", " "),
            f"{figures[loss + '_first']:.2f} -> {figures[loss + '_last']:.2f} nats per byte",
        )
    share = figures["communication_share"]
    table.add_row(
        "step", f"{figures['step_ms']:.0f} ms; communication not hidden: {share:.0%} of forward and backward"
    )
    table.add_row("pictures", f"{out / 'bandwidth.png'}  {out / 'loss.png'}")
    Console().print(Panel(table, title=f"pycomm on this machine, {RANKS} ranks", expand=False))


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of the pictures")
    args, training_flags = parser.parse_known_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    console.rule(f"1. Bandwidth: all_reduce on {RANKS} ranks, pycomm beside Gloo")
    results = bandwidth_demo(str(args.out / "bandwidth.png"), ranks=RANKS)
    console.rule("2. Training: a byte-level GPT on the Python standard library, data parallel over pycomm")
    figures = train(args.out, training_flags)
    summary(results, figures, args.out)


if __name__ == "__main__":
    main()
