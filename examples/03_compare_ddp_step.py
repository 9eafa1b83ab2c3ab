"""How much faster is a training step when only the backend changes? pycomm and gloo, in one job, in turns.

    python examples/03_compare_ddp_step.py --ranks 2
    torchrun --nproc-per-node 2 examples/03_compare_ddp_step.py --backends pycomm,gloo

Two runs, one after the other, would compare two moments of the machine, and its clock, its neighbours and its
caches change.
So all variants live in one job and take turns of a few steps, in an order that turns too:

    round 1   pycomm pycomm .. | gloo gloo ..    | compute compute ..
    round 2   gloo gloo ..     | compute ..      | pycomm ..
    ...

A variant is a copy of the model of 02_train_gpt_ddp.py, with the same weights and batches, wrapped in DDP
over a group of its own. "compute" is the same step under no_sync(), that is, without communication: what a
perfect backend would reach. So

    communication share = (step - compute) / step
    no backend can beat gloo by more than gloo's step / compute
"""

import argparse
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

gpt_example = importlib.import_module(
    "02_train_gpt_ddp"
)  # a module's name may not start with a digit, a file's may


class Variant:
    """A model, its optimizer and its data; `times_ms` collects the duration of its steps."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        synchronise: bool,
        batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
        args: argparse.Namespace,
    ) -> None:
        torch.manual_seed(args.seed)
        gpt = gpt_example.GPT(args.layers, args.width, args.heads)
        self.model = DistributedDataParallel(gpt, process_group=group, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.batches = batches
        self.context: Callable[[], AbstractContextManager[None]] = (
            nullcontext if synchronise else self.model.no_sync
        )
        self.times_ms: list[float] = []

    def step(self) -> None:
        inputs, targets = next(self.batches)
        start = time.perf_counter()
        with self.context():
            loss = self.model(inputs, targets)
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = loss.item()
        self.times_ms.append(1e3 * (time.perf_counter() - start))


def take_turns(variants: list[Variant], rounds: int, steps_per_turn: int) -> None:
    """Runs steps_per_turn steps of each variant in every round; each round starts with another one."""
    for i in range(rounds + 1):
        for variant in variants[i % len(variants) :] + variants[: i % len(variants)]:
            dist.barrier()  # "compute" lets ranks drift apart; the next variant must not pay for it
            for _ in range(steps_per_turn):
                variant.step()
        if i == 0:  # warm-up: first touches of memory, DDP's rebuilding of its buckets
            for variant in variants:
                variant.times_ms.clear()


def report(variants: dict[str, Variant], compute: Variant, args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    compute_ms = statistics.median(compute.times_ms)
    backends: dict[str, dict[str, float]] = {}
    figures = {"ranks": dist.get_world_size(), "compute_ms": compute_ms, "backends": backends}
    title = f"DDP step, {dist.get_world_size()} ranks, medians of {len(compute.times_ms)} steps in turns"
    table = Table("backend", "step ms", "communication ms", "share of the step", "loss", title=title)
    for name, variant in variants.items():
        step_ms = statistics.median(variant.times_ms)
        share = (step_ms - compute_ms) / step_ms
        backends[name] = {"step_ms": step_ms, "communication_share": share, "loss": variant.loss}
        table.add_row(
            name, f"{step_ms:.1f}", f"{step_ms - compute_ms:.1f}", f"{share:.1%}", f"{variant.loss:.4f}"
        )
    table.add_row("compute only", f"{compute_ms:.1f}", "", "", "")
    Console().print(table)
    (first, first_ms), *others = ((name, f["step_ms"]) for name, f in backends.items())
    for other, other_ms in others:
        print(
            f"{first} over {other}: {other_ms / first_ms:.3f}x; a perfect backend: "
            f"{other_ms / compute_ms:.3f}x"
        )
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpt_example.add_model_flags(parser)
    parser.add_argument("--backends", default="pycomm,gloo", help="names separated by commas")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each variant, after one to warm up")
    parser.add_argument("--steps-per-turn", type=int, default=5)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        gpt_example.become_torchrun(args.ranks)
    dist.init_process_group("gloo")  # for barriers only: each variant talks over a group of its own
    text = gpt_example.load_text(args.text_bytes)
    variants = {
        name: Variant(dist.new_group(backend=name), True, gpt_example.random_batches(text, args), args)
        for name in args.backends.split(",")
    }
    compute = Variant(None, False, gpt_example.random_batches(text, args), args)
    take_turns([*variants.values(), compute], args.rounds, args.steps_per_turn)
    if dist.get_rank() == 0:
        report(variants, compute, args)
    gpt_example.let_go_of_collectives()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
