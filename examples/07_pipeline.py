"""Pipeline parallelism: the blocks are cut into stages, the batch into microbatches, and all stages work at
the same time.

    python examples/07_pipeline.py --pictures pipeline     # prints schedules, writes pipeline/<schedule>.png
    torchrun --nproc-per-node 2 examples/07_pipeline.py

A schedule is data: for each rank, the order of its passes. F is forward, B the gradient of the input, W the
gradient of the weights, a number is the microbatch, "." is idle time. All schedules give the same bits, so
the choice is one of time and memory:

    gpipe         simplest; holds the activations of all microbatches
    1f1b          the same bubble, holds at most pp microbatches
    interleaved   two stages per rank: half the bubble, twice the messages
    zb-h1         W fills the gaps of 1f1b, in the same memory
    zbv           two stages per rank placed as a V: no bubble when all passes take the same time
"""

import argparse
from pathlib import Path

from common import batches, make, on_ranks, same, say, train_alone

import pycomm.parallel as par
from pycomm.parallel.ground.plan import Schedule
from pycomm.parallel.pipeline import peak_activations, simulate

RANKS, MICROBATCHES = 2, 6
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")


def show_schedules(folder: str | None) -> None:
    for name in SCHEDULES:
        schedule = par.pipeline.make_schedule(name, 4, 8)
        timeline = simulate(schedule, forward=1, backward=1, weight=1)
        peak = max(peak_activations(schedule)) / schedule.chunks
        print(
            f"{schedule.text()}\nbubble {timeline.bubble:.0%}, activations of {peak:g} microbatches at most\n"
        )
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            timeline.plot(Path(folder) / f"{name}.png")


def train(schedule: str) -> list[float]:
    """Stages of 2 blocks each, or of 1 where a rank has two; the embedding is tied to the head, so both ends
    hold it.
    """
    model, optimizer = par.parallelize(*make(), f"pp={RANKS},schedule={schedule}")
    return [
        par.step(model, optimizer, batch, microbatches=MICROBATCHES, clip=1.0).item() for batch in batches()
    ]


def main() -> None:
    losses = {schedule: train(schedule) for schedule in SCHEDULES}
    difference = same(losses["1f1b"], train_alone())
    assert all(other == losses["1f1b"] for other in losses.values()), "a schedule changed the result"
    say(
        f"{len(SCHEDULES)} schedules on {RANKS} ranks give the same bits; losses differ from one process by "
        f"{difference:.0e}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", metavar="FOLDER", help="write the timelines there")
    folder = parser.parse_args().pictures
    on_ranks(RANKS, main)
    show_schedules(folder)
