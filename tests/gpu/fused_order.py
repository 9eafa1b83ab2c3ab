"""pycomm.fused in time: calls after each other and from two streams, CUDA graphs, ranks that come late or
never; the tuner's cache.

Values are those of fused_cases.py, in one small case for each operation, in the form that fused.forms names
first.
"""

import json
import subprocess
import sys
import time

import torch

import pycomm
from gpu import fused_cases
from gpu.faults import WITHIN, usable
from gpu.fused_cases import COLLECTIVES
from gpu.fused_values import PATIENCE, forms, run_form
from gpu.ranks import delay, describe, settle, wait
from pycomm.benchmarks.common.device import capture
from pycomm.fused.ranks import of

REPLAYS = 12
LOST = 0.5  # seconds of an operation of a group whose peer is lost
# Until the error is there, at most. A kernel counts its looks at a word, not seconds: its limit is of that
# order, not exact.
LOST_WITHIN = {"cuda": 8 * LOST + WITHIN, "cpu": 2 * LOST}


def order(check):
    for op in COLLECTIVES:
        for n in (4, 2):  # compiles for 2 ranks, too: the next check leaves no time for that
            check.each(f"{op}: calls back to back, one rank late", n, _late, op, timeout=PATIENCE)
        check.each(f"{op}: one rank does not come, timeout {LOST:g} s", 2, _lost, op, timeout=LOST)
        check.each("a new group after that", 2, usable)
        if check.on == "cuda":
            for n in (2, 8):
                check.each(f"{op}: {REPLAYS} replays with new inputs", n, _replays, op, timeout=PATIENCE)
            check.each(f"{op}: replays and plain calls in turn", 4, _replays_and_calls, op, timeout=PATIENCE)
            check.each(f"{op}: two streams on one group", 4, _two_streams, op, timeout=PATIENCE)
    if check.on != "cuda" and check.now == "threads":
        check.record("graphs and streams", None, "host tensors have none")


class Calls:
    """One case on one rank: its inputs of `turns` turns, its call, and what every turn must give."""

    def __init__(self, comm, check, op, turns):
        n = comm.world_size
        case = fused_cases.collective_cases(op, n)[1]
        self.case, self.check, self.problem, self.ranks = (
            case,
            check,
            case.problem(n, comm.rank),
            of(comm, check.on),
        )
        self.form = next(iter(forms(check, case, self.problem).values()))
        drawn = [fused_cases.draw(case, n, turn) for turn in range(turns)]
        self.inputs = [
            [None if x is None else check.tensor(x) for x in tensors[comm.rank]] for tensors in drawn
        ]
        self.wanted = [fused_cases.expected(case, tensors, comm.rank) for tensors in drawn]
        self.fixed = [None if x is None else x.clone() for x in self.inputs[0]]  # what a graph reads
        for _ in range(2):  # compiles, makes room, and loads the copies of load()
            self.load(0)
            self.call(*self.fixed)
            delay(check, 1e-4)
            settle(check, comm)

    def load(self, turn):
        for target, source in zip(self.fixed, self.inputs[turn], strict=True):
            if target is not None:
                target.copy_(source)

    def call(self, a, b, bias):
        return run_form(
            self.problem, self.form, self.ranks, a, b, bias, save=self.case.save, keep=self.case.keep
        )

    def wrong(self, comm, results):
        """Waits for all ranks. results: [(turn, what a call gave)]."""
        wait(self.check)
        comm.barrier()
        found = [
            (place, fused_cases.wrong(self.case, got, self.wanted[turn]))
            for place, (turn, got) in enumerate(results)
        ]
        return "; ".join(f"call {place}: {text}" for place, text in found if text)


def _copy(result):
    return tuple(None if x is None else x.clone() for x in result)


def _late(comm, check, op):
    """Nobody waits for anybody between the calls, so ranks run ahead of each other."""
    calls = Calls(comm, check, op, 3)
    results = []
    for turn in range(9):
        if turn % comm.world_size == comm.rank:
            time.sleep(0.01)
            delay(check, 0.02)
        results.append((turn % 3, calls.call(*calls.inputs[turn % 3])))
    return calls.wrong(comm, results)


def _replays(comm, check, op):
    """Back to back, without a barrier between replays."""
    calls, held, results = Calls(comm, check, op, 4), [], []
    graph = capture(lambda: held.append(calls.call(*calls.fixed)), 1)
    comm.barrier()
    for turn in range(REPLAYS):
        calls.load(turn % 4)
        graph.replay()
        results.append((turn % 4, _copy(held[0])))
    return calls.wrong(comm, results)


def _replays_and_calls(comm, check, op):
    """Both count the launches in the same words. Two calls in the graph, so that both halves of the staging
    are in it.
    """
    calls, held, results = Calls(comm, check, op, 3), [], []
    graph = capture(lambda: held.append(calls.call(*calls.fixed)), 2)
    comm.barrier()
    for turn in range(REPLAYS):
        calls.load(turn % 3)
        graph.replay()
        results += [(turn % 3, _copy(result)) for result in held]
        if turn % 2:
            results.append(((turn + 1) % 3, calls.call(*calls.inputs[(turn + 1) % 3])))
    return calls.wrong(comm, results)


def _two_streams(comm, check, op):
    calls, results = Calls(comm, check, op, 2), []
    both = [torch.cuda.Stream(), torch.cuda.Stream()]
    for turn in range(8):
        with torch.cuda.stream(both[turn % 2]):
            if turn % 3 == comm.rank % 3:
                delay(check, 0.02)
            results.append((turn % 2, calls.call(*calls.inputs[turn % 2])))
    for side in both:
        side.synchronize()
    return calls.wrong(comm, results)


def _lost(comm, check, op):
    """Rank 1 stays away from the last call. On a GPU its launch ends by itself, and the next call raises."""
    calls = Calls(comm, check, op, 1)
    if comm.rank == 1:
        time.sleep(LOST_WITHIN[check.on] + LOST)
        return ""
    began, error = time.monotonic(), None
    try:
        calls.call(*calls.fixed)
        wait(check)
        calls.call(*calls.fixed)
    except pycomm.CommError as raised:
        error = raised
    took = time.monotonic() - began
    if not isinstance(error, pycomm.CommTimeoutError) or error.peer != 1:
        got = describe(error) or "none"
        return f"expected a CommTimeoutError that names rank 1, got {got} after {took:.2f} s"
    return "" if took < LOST_WITHIN[check.on] else f"the CommTimeoutError came after {took:.2f} s"


# --- tuner --------------------

LOOKUP = """
import json, sys, torch
from pycomm.fused import tuner
from pycomm.fused.problem import Problem
fields = json.loads(sys.argv[1])
fields["dtype"] = getattr(torch, fields["dtype"])
problem = Problem(**{**fields, "sizes": tuple(fields["sizes"])})
found = tuner.lookup(problem, torch.device("cuda", 0), int(sys.argv[2]))
print(json.dumps(found and [found.name, list(found.config) if found.config else None]))
"""


def tuned(check):
    """What the tuner finds is used from then on, by new processes too."""
    if check.on != "cuda":
        check.record("tuner", None, "host tensors have nothing to tune")
        return
    check.each("matmul: tuned, written, read by a new process", 1, _tuned, "matmul", timeout=PATIENCE)
    for op in COLLECTIVES:
        check.each(f"{op}: tuned, written, read by a new process", 2, _tuned, op, timeout=PATIENCE)


def _tuned(comm, check, op):
    from pycomm.fused import machine, tuner

    n, rank, ranks = comm.world_size, comm.rank, of(comm, check.on)
    sizes = (1024 // n,) * n if op in COLLECTIVES[:2] else (1024,)
    case = fused_cases.Case(op, sizes, 1024, 512, activation="gelu_tanh", bias=True)
    problem, tensors = case.problem(n, rank), fused_cases.draw(case, n, 0)
    a, b, bias = (check.tensor(x) for x in tensors[rank])
    settle(check, comm)
    choice = tuner.tune(problem, a, b, bias, ranks)
    result = run_form(problem, choice, ranks, a, b, bias)
    settle(check, comm)
    if problem_found := fused_cases.wrong(case, tuple(result), fused_cases.expected(case, tensors, rank)):
        return f"{choice.name}: {problem_found}"
    shared = machine.of(ranks, a.device).ranks_on_device
    read = tuner.lookup(problem, a.device, shared)
    if read is None or (read.name, read.config) != (choice.name, choice.config):
        return f"tune() returned {choice}, lookup() {read}"
    if rank:
        return ""
    check.record(f"{op}: chosen", None, choice.reason)
    text = json.dumps(problem._asdict() | {"dtype": case.dtype})
    done = subprocess.run(
        [sys.executable, "-c", LOOKUP, text, str(shared)], capture_output=True, text=True, timeout=60
    )
    wanted = [choice.name, list(choice.config) if choice.config else None]
    if done.returncode or json.loads(done.stdout.strip().splitlines()[-1]) != wanted:
        printed = done.stdout[-200:] + done.stderr[-200:]
        return f"{tuner.cache_path()}: a new process finds {printed}, not {wanted}"
    return ""
