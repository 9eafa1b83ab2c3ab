"""Train a byte-level GPT on real text under any plan: data, tensor, pipeline, sequence parallelism, ZeRO, and
their products.

    python examples/train_gpt.py --plan dp=2,tp=2,pp=2,zero=1      # starts the eight ranks itself
    torchrun --nproc-per-node 8 examples/train_gpt.py --plan dp=2,tp=2,pp=2,zero=1
    python examples/train_gpt.py --plan ""                         # a single process, the same losses

Every rank runs the same lines; the plan is an argument and nothing else. The text is Python's own standard
library, as in 02_train_gpt_ddp.py, so a model that knows nothing has a loss of ln 256 = 5.55 nats per byte.
Options of the plan, such as schedule=zbv, checkpoint or megatron_sp, are part of it: docs/strategies.md.
"""

import argparse
import importlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from common import GPT, Batch, on_ranks
from torch import nn

import pycomm.parallel as par

text_example = importlib.import_module(
    "02_train_gpt_ddp"
)  # a module's name may not start with a digit, a file's may
VOCAB = text_example.VOCAB

History: TypeAlias = dict[str, dict[int, float]]  # "train" or "validation" -> step -> loss


class Text(Protocol):
    """What 02_train_gpt_ddp.load_text gives."""

    train: torch.Tensor
    validation: torch.Tensor


def random_batches(text: Text, args: argparse.Namespace, first: int) -> Iterator[tuple[int, Batch]]:
    """The number of every step and its whole batch, the same on all ranks; steps before `first` were done by
    the run that is resumed.
    """
    for step in range(first, args.steps):
        generator = torch.Generator().manual_seed(1_000_000 * args.seed + step)
        starts = torch.randint(len(text.train) - args.sequence, (args.batch,), generator=generator).tolist()
        yield step, text_example.windows(text.train, starts, args.sequence)


def validation_loss(model: nn.Module, text: Text, args: argparse.Namespace) -> float:
    starts = torch.linspace(0, len(text.validation) - args.sequence - 1, args.batch * 4).long().tolist()
    model.eval()
    loss = par.evaluate(
        model, text_example.windows(text.validation, starts, args.sequence), microbatches=args.microbatches
    )
    model.train()
    return loss.item()


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up over the first twentieth of the steps, then half a cosine down to a twentieth
    of --lr.
    """
    warmup = max(1, args.steps // 20)
    progress = max(0, step - warmup) / max(1, args.steps - warmup)
    return args.lr * min((step + 1) / warmup, 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)


def train(
    args: argparse.Namespace, plan: par.Plan, show: Callable[[int, str], None]
) -> tuple[History, float]:
    """Trains; returns the losses and tokens per second. show(step, text) reports progress."""
    text = text_example.load_text(args.text_bytes)
    torch.manual_seed(args.seed)
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    model = GPT(VOCAB, args.sequence, args.layers, args.dim, args.heads).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    model, optimizer = par.parallelize(model, optimizer, plan)
    history: History = {"train": {}, "validation": {}}
    if args.resume:
        history = par.load(model, optimizer, args.resume)
    first = max(history["validation"], default=0)
    if not first:
        history["validation"][0] = validation_loss(model, text, args)
    seconds, tokens = 0.0, args.batch * args.sequence
    for step, batch in random_batches(text, args, first):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        loss = par.step(model, optimizer, batch, par.cross_entropy, microbatches=args.microbatches, clip=1.0)
        history["train"][step + 1] = loss.item()
        seconds += time.perf_counter() - start
        if (step + 1) % args.validate_every == 0 or step + 1 == args.steps:
            history["validation"][step + 1] = validation_loss(model, text, args)
            if args.save:
                par.save(model, optimizer, args.save, extra=history)
        speed = (step + 1 - first) * tokens / seconds
        show(
            step + 1,
            f"train {loss:.3f}  validation {[*history['validation'].values()][-1]:.3f}  {speed:,.0f} "
            "tokens/s",
        )
    return history, max(0, args.steps - first) * tokens / max(seconds, 1e-9)


def plot(history: History, args: argparse.Namespace, plan: par.Plan, path: str) -> None:
    """Draws the losses into a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    axes.axhline(math.log(VOCAB), color="0.6", linestyle=":", label="knows nothing: ln 256 = 5.55")
    axes.plot(
        *zip(*sorted(history["train"].items()), strict=True), color="tab:blue", linewidth=1, label="train"
    )
    axes.plot(
        *zip(*sorted(history["validation"].items()), strict=True),
        color="tab:orange",
        marker="o",
        label="validation (other files)",
    )
    axes.set(
        xlabel="step",
        ylabel="loss, nats per byte",
        ylim=(0, 6),
        title=f"Byte-level GPT, plan: {plan} (ranks: {plan.world_size})",
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower left")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(args: argparse.Namespace, plan: par.Plan) -> None:
    if dist.is_initialized() and dist.get_rank():
        train(args, plan, show=lambda step, text: None)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    ) as progress:
        task = progress.add_task("loading", total=args.steps)
        history, speed = train(
            args, plan, lambda step, text: progress.update(task, completed=step, description=text)
        )
    losses, validation = history["train"], history["validation"]
    print(f"plan             {plan} (ranks: {plan.world_size})")
    print(
        f"train loss       {losses[min(losses)]:.4f} -> {losses[max(losses)]:.4f} nats per byte, "
        f"{len(losses)} steps"
    )
    print(f"validation loss  {validation[min(validation)]:.4f} -> {validation[max(validation)]:.4f}")
    print(f"speed            {speed:,.0f} tokens/s")
    if args.plot:
        plot(history, args, plan, args.plot)
        print(f"picture          {args.plot}")


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, par.Plan]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--plan", default="dp=2", help="fields of pycomm.parallel.Plan; '' is a single process")
    add(
        "--precision",
        choices=["bf16"],
        help="compute in bfloat16, fp32 master copies; the same as precision=bf16 in the plan",
    )
    add("--steps", type=int, default=200)
    add("--batch", type=int, default=16, help="rows of the whole batch, all ranks together")
    add("--microbatches", type=int, default=2)
    add("--sequence", type=int, default=128, help="bytes of context")
    add("--layers", type=int, default=4)
    add("--dim", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--lr", type=float, default=2e-3)
    add("--seed", type=int, default=1)
    add("--validate-every", type=int, default=50, help="steps from one validation, and --save, to the next")
    add("--text-bytes", type=int, default=2_000_000, help="bytes of training text")
    add("--save", metavar="FOLDER", help="write checkpoints there")
    add("--resume", metavar="FOLDER", help="go on from a checkpoint, of any plan")
    add("--plot", metavar="PATH", default="demo/train_gpt.png", help="the picture of the losses; '' for none")
    args = parser.parse_args(argv)
    text = ",".join(filter(None, [args.plan, f"precision={args.precision}" if args.precision else ""]))
    return args, par.Plan.parse(text)


if __name__ == "__main__":
    args, plan = parse()
    on_ranks(plan.world_size, main, args, plan)
