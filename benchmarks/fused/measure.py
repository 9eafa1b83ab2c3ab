"""One rank's part: makes the tensors of a case, checks every variant, and times them in turns.

Once: every variant's results against the exact ones, calls to warm up, calls in a turn agreed on. Then the
rounds of common/turns.py.

CPU: every call is timed between two readings of the clock, after a barrier. CUDA: a batch of calls between
two events on the rank's stream (common/device.py); with graph a batch is one replay of a CUDA graph that
holds its calls. Results are checked before the timing and after it. The controller takes the slowest rank of
every sample.
"""

import functools
import time

import torch

from pycomm.benchmarks.common import device as gpu
from pycomm.benchmarks.common import turns
from pycomm.benchmarks.fused import variants
from pycomm.benchmarks.fused.cases import make_tensors

WARM_UP = 2
MOST_CALLS = 200  # in a turn
GRAPH_CALLS = 50  # in a graph, at most
BATCH_SECONDS = 0.02  # CUDA: of a batch, at least; the host's part of the first call is not hidden


def measure_cases(peers, cases, options):
    """Body of a rank. Returns a list of records, one for each case that was reached, and the text of what
    stopped it, or "".

    A record: {"choice", "variants": {name: {"missing": reason} or {"rounds": [[seconds, ...], ...],
    "error"}}}.
    """
    found, stop_at = [], time.monotonic() + options["limit"]
    for case in cases:
        settle(peers)  # all have let go of the last case's graphs, which waits for the kernels that run
        if not _agreed(peers, float(time.monotonic() < stop_at)):
            return found, f"{case}: not reached within {options['limit']:g} s"
        try:
            found.append(measure_case(peers, case, options))
        except Exception as error:  # the group cannot go on; what was measured is kept
            return found, f"{case}: {type(error).__name__}: {error}"
    return found, ""


def measure_case(peers, case, options):
    tensors = make_tensors(case, peers.size, peers.rank, peers.device)
    if peers.device.type == "cuda":
        variants.load_kernels(case, tensors, peers, options["backward"])
    settle(peers)
    first = variants.make("pycomm.fused", case, tensors, peers, options["backward"])
    first()  # on CUDA it measures which form is best
    settle(peers)
    calls, found = {}, {}
    for name in variants.names(case, peers):
        found[name] = {}
        try:
            calls[name] = variants.make(name, case, tensors, peers, options["backward"])
        except variants.Unavailable as reason:
            found[name] = {"missing": str(reason)}
    wanted = variants.exact(case, tensors, peers, options["backward"])
    before = {name: _error(peers, call, wanted) for name, call in calls.items()}
    batches = {name: _prepare(peers, call, options) for name, call in calls.items()}
    take = {name: functools.partial(_turn, peers, *batch) for name, batch in batches.items()}
    rounds = turns.take(options["rounds"], take)
    for name, call in calls.items():
        found[name] = {"rounds": rounds[name], "error": max(before[name], _error(peers, call, wanted))}
    return {"choice": variants.choice_of(case, peers), "variants": found}


def settle(peers):
    """Waits for this rank's stream, then for all ranks. See [Note: ranks that share a GPU] in device.py."""
    if peers.device.type == "cuda":
        gpu.synchronize()
    peers.ours.barrier()


def _error(peers, call, wanted):
    """Largest difference from the exact results, of each over its largest entry; infinite for NaN or a wrong
    shape.
    """
    settle(peers)
    results = call()
    settle(peers)
    worst = 0.0
    for got, want in zip(results, wanted, strict=True):
        if got.shape != want.shape:
            return float("inf")
        difference = (got.to(want.dtype) - want).abs().max() / want.abs().max().clamp(min=1e-6)
        worst = max(worst, difference.nan_to_num(float("inf")).item())
    return worst


def _agreed(peers, value):
    """Rank 0's value, on all ranks."""
    word = torch.tensor([value], dtype=torch.float64, device=peers.device)
    peers.ours.broadcast(word)
    return word.item()


def _prepare(peers, call, options):
    """(what a batch runs, calls in it, how often a batch runs it, batches of a turn, gate at which it begins
    or None). All ranks alike: rank 0's clock decides.
    """
    cuda = peers.device.type == "cuda"
    for _ in range(WARM_UP):
        call()
    settle(peers)
    began = time.perf_counter()
    call()
    if cuda:
        gpu.synchronize()
    seconds = _agreed(peers, max(1e-7, time.perf_counter() - began))
    calls = max(1, min(MOST_CALLS, int(options["seconds"] / seconds)))
    if not cuda:
        return call, 1, 1, calls, None
    size = max(1, min(calls, round(BATCH_SECONDS / seconds)))
    batches = max(2, calls // size)
    if not options["graph"]:
        return call, size, size, batches, None
    size = min(size, GRAPH_CALLS)
    graph = gpu.capture(call, size)
    peers.ours.host_barrier()
    graph.replay()
    settle(peers)
    repeats = max(1, calls // batches // size)
    return graph.replay, size * repeats, repeats, batches, peers.gate


def _turn(peers, run, calls, repeats, batches, gate):
    """Seconds of one call, for each batch."""
    if peers.device.type == "cuda":
        samples = gpu.time_batches(run, repeats, batches, peers.ours.barrier, gate, peers.rank == 0)
        return [seconds * repeats / calls for seconds in samples]
    samples = []
    for _ in range(batches):
        peers.ours.barrier()
        began = time.perf_counter()
        run()
        samples.append(time.perf_counter() - began)
    return samples
