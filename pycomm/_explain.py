"""pycomm.explain: which algorithm an operation would use, how it moves the bytes, and why."""

import os

from pycomm import _C, env

__all__ = ["explain"]

# What a rank sends and receives per call; B = nbytes, n = world_size. docs/algorithms.md derives them.
_STEPS = {
    "payload": "1 exchange through the operation slots",
    "one_shot": "1 exchange per block; every rank reads n*B",
    "two_shot": "2 exchanges per block; every rank moves 2(n-1)/n*B",
    "ring": "neighbours only; n-1 steps (all_reduce: 2(n-1)), each of B/n",
    "staged": "1 exchange per block through the staging",
    "direct": "2 synchronisations in all; peers' buffers are read and written in place",
}


_STEPS_ON_DEVICE = {
    "one_shot": "data and flag in one word: 1 trip; every rank reads (n-1)*B",
    "two_shot": "every rank reduces its part and hands the result round; every rank moves 2(n-1)/n*B",
    "ring": "neighbours only; 2(n-1) steps, each of B/n",
    "staged": "peers read through staging, segment by segment",
    "direct": "peers read in place",
    "copy_engine": "copies without a multiprocessor, between two exchanges",
    "multimem": "the switch adds; every rank moves B/n",
}


def explain(op, nbytes, world_size, *, device="cpu", cores=None, mapped=False, kernel_reads=True, algorithm=None):
    """Says which algorithm would run `op`, and why.

    Args:
        op: name of a collective, e.g. "all_reduce".
        nbytes: a rank's whole buffer; for all_gather, gather, reduce_scatter, scatter and all_to_all the bytes of one part.
        world_size: ranks of the group, all on one node.
        device: "cpu" or "cuda" (f32 sums; `mapped` then means buffers from Communicator.empty; ranks have a GPU each).
        cores: that the ranks may run on; None: those of this process.
        mapped: the buffers can be addressed by all ranks (ranks are threads, or buffers come from Communicator.empty).
        kernel_reads: process_vm_readv works between the ranks (Communicator.describe()["reach"]).
        algorithm: as the caller would ask for it; None: PYCOMM_ALGORITHM, then the table.

    Returns a text of one line. Raises ValueError for an unknown op or algorithm.
    """
    if op not in _C.kinds[1:-1] or op in ("send", "recv"):
        raise ValueError(f"unknown op {op!r}; expected one of {', '.join(k for k in _C.kinds[1:-1] if k not in ('send', 'recv'))}")
    cores = cores or len(os.sched_getaffinity(0))
    algorithm = algorithm or env.settings().algorithm.get(op, "automatic")
    if algorithm not in _C.algorithms:
        raise ValueError(f"unknown algorithm {algorithm!r}; expected one of {', '.join(_C.algorithms)}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: must be 'cpu' or 'cuda'")
    if device == "cuda":
        name, reason = _C.choose_on_device(_C.kinds.index(op), nbytes, world_size, False, mapped, _C.algorithms.index(algorithm))
        return f"{op} of {nbytes} bytes on {world_size} GPUs: {name} ({_STEPS_ON_DEVICE[name]}), because: {reason}."
    name, block, reason = _C.choose(_C.kinds.index(op), nbytes, world_size, cores, mapped, kernel_reads, _C.algorithms.index(algorithm))
    blocks = f", blocks of {block} bytes" if block else ""
    return f"{op} of {nbytes} bytes on {world_size} ranks: {name} ({_STEPS[name]}{blocks}), because: {reason}."
