"""Train a small byte-level GPT, data parallel, on text that every machine has: Python's own standard library.

    python examples/02_train_gpt_ddp.py --ranks 2              # starts the ranks itself
    torchrun --nproc-per-node 2 examples/02_train_gpt_ddp.py   # the same, started by torchrun

What data parallel means, for rank 0 and rank 1 of a step:

    rank 0   batch 0 -> loss 0 -> gradient 0 --+                  +-> the same AdamW step -> the same weights
                                               +- mean (all_reduce)+
    rank 1   batch 1 -> loss 1 -> gradient 1 --+                  +-> the same AdamW step -> the same weights

torch's DistributedDataParallel (DDP) does the mean, in buckets, while the backward pass is still running. The
only line that knows of pycomm is `init_process_group(backend)`; `--backend gloo` trains the same model to the
same loss.

Every random number comes from --seed: two runs on one machine print the same losses. Bytes are the tokens, so
a model that knows nothing has a loss of ln 256 = 5.55 nats per byte. With --limit 60 the training ends within
a minute, on all ranks after the same step, even if --steps are not done by then.
"""

import argparse
import json
import math
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCAB = 256  # a token is a byte
REPEATS = 3  # of a pass with and one without communication, after each validation


class Text(NamedTuple):
    train: torch.Tensor  # uint8, the bytes of nine files in ten
    validation: torch.Tensor  # uint8, the bytes of every tenth file: whole files that training never sees


class Losses(TypedDict):
    backend: str
    ranks: int
    steps: int  # done
    of_steps: int
    train_loss_first: float
    train_loss_last: float
    validation_loss_first: float
    validation_loss_last: float
    train_loss: list[float]
    validation_loss: dict[int, float]  # steps done: loss


class Speed(TypedDict):
    total_s: float  # with starting the ranks and evaluations
    tokens: int
    train_s: float
    tokens_per_s: float
    step_ms: float
    communication_ms: float
    communication_share: float  # of a forward and backward pass


class Figures(Losses, Speed):
    parameters: int


def load_text(max_bytes: int) -> Text:
    """Reads the standard library's .py files, sorted by path; at most max_bytes for training, a tenth of it
    to validate.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    files = [f for f in sorted(root.rglob("*.py")) if not skip & set(f.relative_to(root).parts)]
    train, validation = bytearray(), bytearray()
    for i, file in enumerate(files):
        part, limit = (validation, max_bytes // 10) if i % 10 == 9 else (train, max_bytes)
        if len(part) < limit:
            part += file.read_bytes()[: limit - len(part)]
    if not train or not validation:
        raise SystemExit(f"no Python sources to train on under {root}")
    return Text(*(torch.frombuffer(part, dtype=torch.uint8) for part in (train, validation)))


def windows(text: torch.Tensor, starts: list[int], block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cuts (inputs, targets), both int64 [len(starts), block]; a target is the byte that follows
    its input.
    """
    rows = torch.stack([text[i : i + block + 1] for i in starts]).long()
    return rows[:, :-1], rows[:, 1:]


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions: turns pairs of features of x [batch, heads, block, width] by angles that grow with
    the position.
    """
    block, half = x.shape[-2], x.shape[-1] // 2
    angle = torch.outer(torch.arange(block), 1000.0 ** -(torch.arange(half) / half))
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1)


class Block(nn.Module):
    """One transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, block, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, block, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True
        )  # [batch, heads, block, width/heads]
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, block, width))
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        for name, p in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight", "head.weight")):
                nn.init.zeros_(p)  # every layer starts as the identity, every byte as equally likely
            elif p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss, in nats per byte."""
        logits = self.head(self.norm(self.blocks(self.token(inputs))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up over the first twentieth of the steps, then half a cosine down to a twentieth
    of --lr.
    """
    warmup = max(1, args.steps // 20)
    progress = max(0, step - warmup) / max(1, args.steps - warmup)
    return args.lr * min((step + 1) / warmup, 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)


@torch.no_grad()
def validation_loss(model: nn.Module, text: Text, args: argparse.Namespace) -> float:
    """The mean loss over fixed windows of the validation text. Each rank takes its share; one all_reduce adds
    them up.
    """
    starts = torch.linspace(0, len(text.validation) - args.block - 1, args.val_windows).long().tolist()
    mine = starts[dist.get_rank() :: dist.get_world_size()]
    total = torch.zeros((), dtype=torch.float64)
    for part in (mine[i : i + 16] for i in range(0, len(mine), 16)):
        total += len(part) * model(*windows(text.validation, part, args.block)).item()
    dist.all_reduce(total)
    return total.item() / len(starts)


def time_communication(
    model: DistributedDataParallel,
    batch: tuple[torch.Tensor, torch.Tensor],
    times_ms: dict[str, list[float]],
) -> None:
    """Times forward and backward passes with and without DDP's synchronisation, in turn, so that both see the
    same machine.

    The difference is the communication that DDP cannot hide behind the backward pass; what is hidden costs
    nothing.
    """
    for _ in range(REPEATS):
        for kind, context in (("synchronised", nullcontext), ("local", model.no_sync)):
            dist.barrier()
            start = time.perf_counter()
            with context():
                model(*batch).backward()
            times_ms[kind].append(1e3 * (time.perf_counter() - start))
            model.zero_grad()


def random_batches(text: Text, args: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches; the generator's seed differs from rank to rank, which is all that splits the data."""
    generator = torch.Generator().manual_seed(1000 * args.seed + dist.get_rank())
    while True:
        starts = torch.randint(len(text.train) - args.block, (args.batch,), generator=generator).tolist()
        yield windows(text.train, starts, args.block)


def over_ranks(loss: torch.Tensor, time_is_up: bool) -> tuple[float, bool]:
    """The mean loss, and whether the time of any rank is up. Clocks differ from rank to rank, but all must
    take the same decision: a rank that went on alone would wait forever for the gradients of the others.
    """
    both = torch.stack((loss.detach(), torch.tensor(float(time_is_up))))
    dist.all_reduce(both)
    return both[0].item() / dist.get_world_size(), both[1].item() > 0


@dataclass
class Record:
    """What a training writes down as it goes."""

    began: float  # on time.monotonic(), which is the same in all processes of a machine
    losses: list[float] = field(default_factory=list)  # of the steps done, means over the ranks
    validation: dict[int, float] = field(default_factory=dict)  # steps done: loss
    validation_s: float = 0.0  # of the last validation
    step_s: list[float] = field(default_factory=list)
    pass_ms: dict[str, list[float]] = field(default_factory=lambda: {"synchronised": [], "local": []})

    def validate(self, model: nn.Module, text: Text, args: argparse.Namespace) -> None:
        start = time.perf_counter()
        self.validation[len(self.losses)] = validation_loss(model, text, args)
        self.validation_s = time.perf_counter() - start

    def time_is_up(self, limit: float) -> bool:
        """Whether this rank's clock leaves too little time for one more step and the evaluation at the end: a
        validation and some passes, each shorter than a step.
        """
        needed_s = self.validation_s + (1 + 2 * REPEATS) * statistics.median(self.step_s[-20:])
        return time.monotonic() - self.began + needed_s > limit

    def last_steps(self, tokens_per_step: int) -> str:
        """A line of progress."""
        speed = tokens_per_step / statistics.median(self.step_s[-20:])
        loss, validation = statistics.fmean(self.losses[-20:]), [*self.validation.values()][-1]
        return f"train {loss:.3f}  validation {validation:.3f}  {speed:,.0f} tokens/s"


def train(args: argparse.Namespace, show: Callable[[int, str], None]) -> Figures:
    """Trains and returns the figures. show(step, text) reports progress."""
    record = Record(args.began)
    text = load_text(args.text_bytes)
    batches = random_batches(text, args)
    torch.manual_seed(args.seed)
    gpt = GPT(args.layers, args.width, args.heads)
    model = DistributedDataParallel(gpt, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    tokens_per_step = dist.get_world_size() * args.batch * args.block

    record.validate(gpt, text, args)
    for done in range(1, args.steps + 1):
        batch = next(batches)
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done - 1, args)
        loss = model(*batch)
        loss.backward()  # DDP averages the gradients of all ranks in here
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        record.step_s.append(time.perf_counter() - start)
        mean_loss, stop = over_ranks(loss, record.time_is_up(args.limit))
        record.losses.append(mean_loss)
        if stop or done % args.val_every == 0 or done == args.steps:
            record.validate(gpt, text, args)
            time_communication(model, batch, record.pass_ms)
        show(done, record.last_steps(tokens_per_step))
        if stop:
            break
    parameters = sum(p.numel() for p in gpt.parameters())
    return {**losses_of(record, args), "parameters": parameters, **speed_of(record, tokens_per_step)}


def losses_of(record: Record, args: argparse.Namespace) -> Losses:
    done = len(record.losses)
    return {
        "backend": args.backend,
        "ranks": dist.get_world_size(),
        "steps": done,
        "of_steps": args.steps,
        "train_loss_first": record.losses[0],
        "train_loss_last": statistics.fmean(record.losses[-20:]),
        "validation_loss_first": record.validation[0],
        "validation_loss_last": record.validation[done],
        "train_loss": record.losses,
        "validation_loss": record.validation,
    }


def speed_of(record: Record, tokens_per_step: int) -> Speed:
    synchronised_ms, local_ms = (
        statistics.median(record.pass_ms[kind]) for kind in ("synchronised", "local")
    )
    communication_ms = max(0.0, synchronised_ms - local_ms)  # noise may make it negative where all is hidden
    tokens, train_s = len(record.losses) * tokens_per_step, sum(record.step_s)
    return {
        "total_s": time.monotonic() - record.began,
        "tokens": tokens,
        "train_s": train_s,
        "tokens_per_s": tokens / train_s,
        "step_ms": 1e3 * statistics.median(record.step_s),
        "communication_ms": communication_ms,
        "communication_share": communication_ms / synchronised_ms,
    }


def early(figures: Figures) -> str:
    """A sentence about a training that --limit ended; empty for one that did all its steps."""
    if figures["steps"] == figures["of_steps"]:
        return ""
    steps = f"step {figures['steps']} of {figures['of_steps']}"
    return f"stopped after {figures['total_s']:.0f} s at {steps}: this machine is busy or slow"


def plot(figures: Figures, path: str) -> None:
    """Draws the losses of all steps into a PNG file."""
    from matplotlib.figure import Figure

    losses, steps, values = (
        figures["train_loss"],
        [*figures["validation_loss"]],
        [*figures["validation_loss"].values()],
    )
    smooth = [statistics.fmean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
    fig = Figure(figsize=(8, 4.8), layout="constrained")
    ax = fig.subplots()
    ax.axhline(math.log(VOCAB), color="0.6", linestyle=":", label="knows nothing: ln 256 = 5.55")
    ax.plot(range(1, len(losses) + 1), losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    ax.plot(
        range(1, len(losses) + 1), smooth, color="tab:blue", label="train (mean of 10 steps; pale: each step)"
    )
    ax.plot(
        steps,
        values,
        color="tab:orange",
        marker="o",
        markersize=4,
        label="validation (files never trained on)",
    )
    ax.annotate(f"validation {values[-1]:.2f}", (steps[-1], values[-1]), xytext=(0, 14),
                textcoords="offset points", ha="right", color="tab:orange", fontweight="bold")  # fmt: skip
    stopped = f" ({early(figures)})" if early(figures) else ""
    ax.set(xlabel=f"optimizer step{stopped}", xlim=(0, 1.04 * len(losses)))
    ax.set(ylabel="loss, nats per byte", ylim=(0, 6))
    ax.set_title(f"Byte-level GPT, {figures['parameters'] / 1e6:.1f} M parameters, "
                 "on the Python standard library\n"
                 f"{figures['ranks']} ranks, data parallel over {figures['backend']}, "
                 f"{figures['tokens_per_s']:,.0f} tokens/s", fontsize=11)  # fmt: skip
    ax.grid(alpha=0.25)
    ax.legend(frameon=False, loc="lower left")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=130)


def report(f: Figures, args: argparse.Namespace) -> None:
    if stopped := early(f):
        print(stopped)
    print(
        f"{f['parameters']:,} parameters, {f['ranks']} ranks over {f['backend']}, {f['tokens']:,} tokens in "
        f"{f['train_s']:.1f} s"
    )
    print(
        f"train loss       {f['train_loss_first']:.4f} -> {f['train_loss_last']:.4f} nats per byte (mean of "
        "the last 20 steps)"
    )
    print(f"validation loss  {f['validation_loss_first']:.4f} -> {f['validation_loss_last']:.4f}")
    print(f"speed            {f['tokens_per_s']:,.0f} tokens/s, step {f['step_ms']:.1f} ms (median)")
    print(
        f"communication    {f['communication_share']:.1%} of forward and backward "
        f"({f['communication_ms']:.1f} ms) not hidden by compute"
    )
    if args.plot:
        plot(f, args.plot)
        print(f"picture          {args.plot}")
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(f, indent=1) + "\n")


def train_with_progress(args: argparse.Namespace) -> None:
    if dist.get_rank() != 0:
        train(args, show=lambda step, text: None)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    ) as progress:
        task = progress.add_task("loading", total=args.steps)
        figures = train(args, show=lambda step, text: progress.update(task, completed=step, description=text))
    report(figures, args)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="ranks to start when not started by torchrun")
    add("--layers", type=int, default=3)
    add("--width", type=int, default=192)
    add("--heads", type=int, default=6)
    add("--block", type=int, default=128, help="bytes of context")
    add("--batch", type=int, default=8, help="windows per rank and step")
    add("--seed", type=int, default=1)
    add("--text-bytes", type=int, default=8_000_000, help="bytes of training text")
    add("--json", metavar="PATH", help="write the figures here")


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", default="pycomm", help="pycomm or gloo")
    add("--steps", type=int, default=500)
    add("--limit", type=float, default=math.inf, help="seconds for all, even if steps are left then")
    add("--began", type=float, default=time.monotonic(), help=argparse.SUPPRESS)  # what --limit counts from
    add("--lr", type=float, default=2e-3)
    add("--val-every", type=int, default=50, help="steps from one validation to the next")
    add("--val-windows", type=int, default=128)
    add("--plot", metavar="PATH", default="demo/loss.png", help="the picture of the losses; '' for none")


def become_torchrun(ranks: int, *further_flags: str) -> None:
    """Replaces this process by torchrun, which starts this script again on every rank."""
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # compute threads per rank; also torchrun's own choice for two ranks and more
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    os.execv(sys.executable, [*torchrun, *sys.argv, *further_flags])


def let_go_of_collectives() -> None:
    """Comes before the end of a DDP model over Gloo, which hung about one run in twenty without it (torch
    2.13).

    Gloo's thread needs the GIL to let go of its last all_reduce; the destructor of DDP waits for that thread
    and holds the GIL. A barrier gives the GIL away, so the thread comes first.
    """
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_flags(parser)
    add_training_flags(parser)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        become_torchrun(args.ranks, f"--began={args.began}")
    dist.init_process_group(args.backend)
    train_with_progress(args)
    let_go_of_collectives()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
