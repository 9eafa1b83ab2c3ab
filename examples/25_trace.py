"""Who waits for whom: a trace of a training in which one rank is slower than the others.

    python examples/25_trace.py
    torchrun --nproc-per-node 3 examples/25_trace.py

The second block of rank 1 takes 5 ms more than it should. The trace says who is late, what the others lose by
it, and in which part of the step. A program that is not to be changed is traced by

    PYCOMM_TRACE=folder torchrun ... train.py
    python -m pycomm.trace folder --html
"""

import tempfile
import time

import torch.distributed as dist
from common import batches, make, on_ranks, say

import pycomm.parallel as par
from pycomm import trace
from pycomm.trace import stragglers, waits
from pycomm.trace.joined import load

RANKS, SLOW, DELAY, STEPS = 3, 1, 0.005, 12


def main() -> None:
    model, optimizer = make()
    if dist.get_rank() == SLOW:
        model.get_submodule("blocks.1").register_forward_pre_hook(lambda *_: time.sleep(DELAY))
    model, optimizer = par.parallelize(model, optimizer, par.Plan(dp=RANKS))
    folder = [tempfile.mkdtemp(prefix="trace-", dir=".") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    trace.begin(folder[0])
    for batch in batches(STEPS):
        par.step(model, optimizer, batch, clip=1.0)
    trace.end()
    dist.barrier()  # all files are whole
    if dist.get_rank() == 0:
        found = load(folder[0])
        print(waits.show(waits.table(found)))
        for straggler in stragglers.find(found):
            print(stragglers.sentence(straggler))
    say(f"python -m pycomm.trace {folder[0]} draws it")


if __name__ == "__main__":
    on_ranks(RANKS, main)
