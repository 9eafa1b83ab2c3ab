"""What snapshots cost a training: steps under par.recovery.resilient beside the same without, in turns.

    python -m pycomm.benchmarks snapshots [--plan dp=2,zero=1] [--every 10] [--turns 20] [--width 256]

A turn is `every` steps of one, then `every` steps of the other, so that each turn of the first has one
snapshot; odd turns begin with the other. Printed are the medians, and the medians of the quotients of turns,
in time and in processor time of rank 0 (all threads), which other load on the machine moves least. The losses
of both must be equal. The model is a GPT with the sizes of examples/train_gpt.py: 256 symbols, 4 blocks,
windows of 128, 16 rows.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import pycomm.parallel as par
from pycomm.testing import run_ranks

__all__ = ["measure"]

VOCAB, ROWS, LENGTH, LAYERS, LIMIT = 256, 16, 128, 4, 3600.0


class Spent(NamedTuple):
    """Seconds of a turn."""

    wall: float
    processor: float  # of all threads


class Measured(NamedTuple):
    """The turns, and the bytes of the state."""

    with_snapshots: list[Spent]
    without: list[Spent]
    nbytes: int


class Decoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(width: int) -> tuple[Decoder, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Decoder(width)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def measure(rank: int, options: argparse.Namespace) -> Measured:
    plan = par.Plan.parse(options.plan)
    plain, its_optimizer = make(options.width)
    model, opt = par.parallelize(plain, its_optimizer, plan)
    plain, its_optimizer = make(options.width)
    run = par.recovery.resilient(plain, its_optimizer, plan, snapshot_every=options.every)
    generator = torch.Generator().manual_seed(1)
    times: tuple[list[Spent], list[Spent]] = ([], [])
    losses: tuple[list[float], list[float]] = ([], [])
    takes: tuple[Callable[..., torch.Tensor | None], ...] = (
        run.step,
        lambda batch: par.step(model, opt, batch),
    )
    for turn in range(options.turns + 1):
        rows = torch.randint(VOCAB, (options.every, ROWS, LENGTH + 1), generator=generator)
        for which in (0, 1) if turn % 2 else (1, 0):
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            for batch in rows:
                loss = takes[which]((batch[:, :-1], batch[:, 1:]))
            times[which].append(Spent(time.perf_counter() - start, time.process_time() - used))
            assert loss is not None  # no rank is left out of the plan
            losses[which].append(loss.item())
    assert losses[0] == losses[1], "the losses differ"
    count = sum(param.numel() for param in make(options.width)[0].parameters())
    run.close()
    return Measured(times[0][1:], times[1][1:], 12 * count)  # the first turn makes the optimizer's state


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", default="dp=2,zero=1")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args(arguments)
    ranks = par.Plan.parse(options.plan).world_size
    found: Measured = run_ranks(ranks, measure, options, mode="processes", backend="pycomm", timeout=LIMIT)[0]
    with_snapshots, without, nbytes = found
    turns = list(zip(with_snapshots, without, strict=True))
    quotients = [statistics.median(a[kind] / b[kind] for a, b in turns) for kind in (0, 1)]
    step = [
        1e3 * statistics.median(turn.wall for turn in times) / options.every
        for times in (with_snapshots, without)
    ]
    print(f"Plan({options.plan}), a snapshot of {nbytes / 1e6:.1f} MB every {options.every} steps:")
    print(f"  {step[0]:.1f} ms a step, without {step[1]:.1f} ms")
    print(f"  quotient of turns, median: time {quotients[0]:.3f}, processor time {quotients[1]:.3f}")
    return 0


if __name__ == "__main__":
    main()
