"""An average of the weights (EMA) while training, evaluated, saved and resumed under another plan.

    python examples/27_ema.py
    torchrun --nproc-per-node 2 examples/27_ema.py

Each rank keeps the average of what its optimizer updates, here one half of it (zero=1), then its shard of
each layer (tp=2). The result equals torch's AveragedModel in one process.
"""

import tempfile

import torch.distributed as dist
import torch.nn.functional as F
from common import batches, make, on_ranks, same, say
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pycomm.parallel as par

RANKS, DECAY, STEPS = 2, 0.9, 4


def alone() -> tuple[float, float]:
    """Losses of the model and of its average, in one process."""
    model, optimizer = make()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average.update_parameters(model)
    for inputs, targets in batches(STEPS):
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    inputs, targets = next(batches())
    found = [F.cross_entropy(each(inputs).flatten(0, 1), targets.flatten()) for each in (model, average)]
    return found[0].item(), found[1].item()


def main() -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    expected = alone()

    model, optimizer = par.parallelize(*make(), par.Plan(dp=RANKS, zero=1))
    ema = par.ema(model, DECAY)
    ema.update()  # begins with the values of now
    for batch in list(batches(STEPS))[:2]:
        par.step(model, optimizer, batch)
        ema.update()
    par.save(model, optimizer, f"{folder[0]}/checkpoint")

    model, optimizer = par.parallelize(*make(), par.Plan(tp=RANKS))
    ema = par.ema(model, DECAY)
    par.load(model, optimizer, f"{folder[0]}/checkpoint")
    for batch in list(batches(STEPS))[2:]:
        par.step(model, optimizer, batch)
        ema.update()
    with ema.applied():
        of_average = par.evaluate(model, next(batches())).item()
    of_model = par.evaluate(model, next(batches())).item()
    say(f"{ema.updates} updates; loss of the model {of_model:.4f}, of its average {of_average:.4f}")
    difference = same([of_model, of_average], list(expected))
    say(
        f"an average saved under dp=2,zero=1 and resumed under tp=2 equals one process: losses differ by "
        f"{difference:.0e}"
    )


if __name__ == "__main__":
    on_ranks(RANKS, main)
