"""pycomm.benchmarks: what pycomm does beside others, measured in one run, in turns, with checked results.

    python -m pycomm.benchmarks all_reduce --sizes 8:256M --dtype f32 --ranks 4 --backends pycomm,gloo,mpi
    python -m pycomm.benchmarks fused        products fused with collectives
    python -m pycomm.benchmarks tune         measures which algorithm is fastest here, and keeps it
    python -m pycomm.benchmarks strategies   training strategies: step time and memory

collectives/     collectives of pycomm, Gloo, MPI, NCCL, with the columns of nccl-tests
fused/           pycomm.fused beside product and collective one after the other
tune/            the fastest algorithms of this machine, for pycomm to use
strategies/      pycomm.parallel beside torch's own strategies and DeepSpeed
zero_memory.py   memory of training under ZeRO beside its closed forms
registered.py    torch.distributed on registered memory beside ordinary tensors
plot.py          a picture from the JSON of a run
common/          what all of them share: turns, ranks, oracle, report
results/         for each run that the documents cite: a page, and its figures as JSON

The four folders know nothing of each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pycomm.benchmarks.collectives.runner import Results

__all__ = ["bandwidth_demo"]


def bandwidth_demo(out_png: str, ranks: int = 2, limit: float = 40.0) -> Results:
    """See collectives/demo.py; imported when called, so that a rank under MPI does not pay for it."""
    from pycomm.benchmarks.collectives.demo import bandwidth_demo

    return bandwidth_demo(out_png, ranks, limit)
