"""One rank's part: makes the tensors of a case, checks every variant, and times them in turns.

Once: every variant's results against the exact ones, calls to warm up, calls in a turn agreed on. Then the
rounds of common/turns.py.

CPU: every call is timed between two readings of the clock, after a barrier. CUDA: a batch of calls between
two events on the rank's stream (common/device.py); with graph a batch is one replay of a CUDA graph that
holds its calls. Results are checked before the timing and after it. The controller takes the slowest rank of
every sample.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict

import torch

from pycomm.benchmarks.common import device as gpu
from pycomm.benchmarks.common import turns
from pycomm.benchmarks.common.turns import Rounds
from pycomm.benchmarks.fused import variants
from pycomm.benchmarks.fused.cases import Case, make_tensors
from pycomm.benchmarks.fused.peers import Peers
from pycomm.benchmarks.fused.variants import Variant

WARM_UP = 2
MOST_CALLS = 200  # in a turn
GRAPH_CALLS = 50  # in a graph, at most
BATCH_SECONDS = 0.02  # CUDA: of a batch, at least; the host's part of the first call is not hidden


class Settings(NamedTuple):
    """limit: no case is begun after so many seconds."""

    rounds: int
    seconds: float  # of measuring in a turn
    limit: float
    backward: bool
    graph: bool


class VariantRecord(TypedDict, total=False):
    """Either why it is missing, or the others."""

    missing: str
    rounds: Rounds
    error: float


class CaseRecord(TypedDict):
    choice: str
    variants: dict[str, VariantRecord]


class Measured(NamedTuple):
    """A record for each case that was reached, and the text of what stopped the rank, or ""."""

    records: list[CaseRecord]
    stopped: str


class Batches(NamedTuple):
    """run: what a batch runs; calls: in a batch; repeats: how often a batch runs it; gate: at which it
    begins.
    """

    run: Callable[[], object]
    calls: int
    repeats: int
    batches: int
    gate: gpu.Gate | None


def measure_cases(peers: Peers, cases: Sequence[Case], options: Settings) -> Measured:
    """Body of a rank."""
    found: list[CaseRecord] = []
    stop_at = time.monotonic() + options.limit
    for case in cases:
        settle(peers)  # all have let go of the last case's graphs, which waits for the kernels that run
        if not _agreed(peers, float(time.monotonic() < stop_at)):
            return Measured(found, f"{case}: not reached within {options.limit:g} s")
        try:
            found.append(measure_case(peers, case, options))
        except Exception as error:  # the group cannot go on; what was measured is kept
            return Measured(found, f"{case}: {type(error).__name__}: {error}")
    return Measured(found, "")


def measure_case(peers: Peers, case: Case, options: Settings) -> CaseRecord:
    tensors = make_tensors(case, peers.size, peers.rank, peers.device)
    if peers.device.type == "cuda":
        variants.load_kernels(case, tensors, peers, options.backward)
    settle(peers)
    first = variants.make("pycomm.fused", case, tensors, peers, options.backward)
    first()  # on CUDA it measures which form is best
    settle(peers)
    calls: dict[str, Variant] = {}
    found: dict[str, VariantRecord] = {}
    for name in variants.names(case, peers):
        found[name] = {}
        try:
            calls[name] = variants.make(name, case, tensors, peers, options.backward)
        except variants.Unavailable as reason:
            found[name] = {"missing": str(reason)}
    wanted = variants.exact(case, tensors, peers, options.backward)
    before = {name: _error(peers, call, wanted) for name, call in calls.items()}
    batches = {name: _prepare(peers, call, options) for name, call in calls.items()}
    take = {name: functools.partial(_turn, peers, batch) for name, batch in batches.items()}
    rounds = turns.take(options.rounds, take)
    for name, call in calls.items():
        found[name] = {"rounds": rounds[name], "error": max(before[name], _error(peers, call, wanted))}
    return {"choice": variants.choice_of(case, peers), "variants": found}


def settle(peers: Peers) -> None:
    """Waits for this rank's stream, then for all ranks. See [Note: ranks that share a GPU] in device.py."""
    if peers.device.type == "cuda":
        gpu.synchronize()
    peers.ours.barrier()


def _error(peers: Peers, call: Variant, wanted: Sequence[torch.Tensor]) -> float:
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


def _agreed(peers: Peers, value: float) -> float:
    """Rank 0's value, on all ranks."""
    word = torch.tensor([value], dtype=torch.float64, device=peers.device)
    peers.ours.broadcast(word)
    return word.item()


def _prepare(peers: Peers, call: Variant, options: Settings) -> Batches:
    """All ranks alike: rank 0's clock decides."""
    cuda = peers.device.type == "cuda"
    for _ in range(WARM_UP):
        call()
    settle(peers)
    began = time.perf_counter()
    call()
    if cuda:
        gpu.synchronize()
    seconds = _agreed(peers, max(1e-7, time.perf_counter() - began))
    calls = max(1, min(MOST_CALLS, int(options.seconds / seconds)))
    if not cuda:
        return Batches(call, 1, 1, calls, None)
    size = max(1, min(calls, round(BATCH_SECONDS / seconds)))
    batches = max(2, calls // size)
    if not options.graph:
        return Batches(call, size, size, batches, None)
    size = min(size, GRAPH_CALLS)
    graph = gpu.capture(call, size)
    peers.ours.host_barrier()
    graph.replay()
    settle(peers)
    repeats = max(1, calls // batches // size)
    return Batches(graph.replay, size * repeats, repeats, batches, peers.gate)


def _turn(peers: Peers, how: Batches) -> list[float]:
    """Seconds of one call, for each batch."""
    if peers.device.type == "cuda":
        first = peers.rank == 0
        samples = gpu.time_batches(how.run, how.repeats, how.batches, peers.ours.barrier, how.gate, first)
        return [seconds * how.repeats / how.calls for seconds in samples]
    samples = []
    for _ in range(how.batches):
        peers.ours.barrier()
        began = time.perf_counter()
        how.run()
        samples.append(time.perf_counter() - began)
    return samples
