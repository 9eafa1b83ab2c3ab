"""Offload: optimizer state, and with zero=3 the parameters, lie in host memory and not on the device.

    python examples/13_offload.py
    torchrun --nproc-per-node 2 examples/13_offload.py

    device      parameters in use | gradients -+              +-> new values
                                               v              |
    host                            master copies, moments: the optimizer's step runs here

    offload="optimizer"     master copies and moments: with bf16 that is 12 of the 16 bytes per parameter
    offload="parameters"    and the parameter shards of zero=3, copied to the device one block at a time

On a machine without a device the host is the device, so the same plan runs and nothing is copied: a script
written on a laptop runs unchanged on GPUs. This one says where things lie.
"""

import torch
from common import batches, make, on_ranks, same, say, train_alone

import pycomm.parallel as par

RANKS = 2


def train(plan: par.Plan, device: str) -> tuple[list[float], set[str]]:
    """The losses, and the kinds of devices on which the optimizer's parameters and state lie."""
    model, optimizer = make()
    model.to(device)
    model, optimizer = par.parallelize(model, optimizer, plan)
    losses = [par.step(model, optimizer, batch, clip=1.0).item() for batch in batches()]
    places = {p.device.type for group in optimizer.param_groups for p in group["params"]}
    places |= {
        value.device.type
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    }
    return losses, places


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    expected = train_alone()
    difference = 0.0
    plans = (
        par.Plan(dp=RANKS, zero=1),
        par.Plan(dp=RANKS, zero=1, offload="optimizer"),
        par.Plan(dp=RANKS, zero=3, offload="optimizer"),
        par.Plan(dp=RANKS, zero=3, offload="parameters"),
    )
    for plan in plans:
        losses, places = train(plan, device)
        assert places == {"cpu" if plan.offload else device}
        difference = max(difference, same(losses, expected))
        say(
            f"zero={plan.zero}, offload={plan.offload!s:10}: model on {device}, optimizer and its state on "
            f"{', '.join(places)}"
        )
    say(f"offload on {RANKS} ranks equals one process: losses differ by {difference:.0e}")


if __name__ == "__main__":
    on_ranks(RANKS, main)
