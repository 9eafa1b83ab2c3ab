"""Whose turn it is.

Time: all variants live in the same processes, and take turns.

    once         variant A: steps to warm up    variant B ...
    round 1      A: steps    B: steps    C: steps
    round 2      B: steps    C: steps    A: steps          (the order rotates)
    ...

A step is timed on every rank between two readings of the clock, after a barrier; the slowest rank counts. Shown is the median over all
steps of all rounds; the ratio of two variants is the median over rounds of the ratios of their medians in that round, since a slow minute
hits both. Groups over pycomm and over Gloo stand in the same processes; idle ones sleep.

Memory: every variant on its own in newly forked processes (memory.py), after WARM_UP steps; the rank with most counts.

Losses of all steps of all variants are compared with those of one process.
"""

import gc
import statistics
import time
from typing import NamedTuple

import torch.distributed as dist

from pycomm.benchmarks.strategies import memory, torch_variants  # noqa: F401  imported before the fork: once, and in no rank's figures
from pycomm.benchmarks.strategies.model import make_batch
from pycomm.benchmarks.strategies.ranks import run_ranks
from pycomm.benchmarks.strategies.variants import make_variant

WARM_UP = 2
MEMORY_STEPS = 2


class Timed(NamedTuple):
    """rounds: seconds of the steps of each round, slowest rank. cpu: median over the steps of the seconds that all ranks
    together had processors. losses: of every step."""

    rounds: list
    cpu: float
    losses: list

    @property
    def seconds(self):
        return statistics.median(seconds for steps in self.rounds for seconds in steps)

    @property
    def by_round(self):
        return [statistics.median(steps) for steps in self.rounds]


class Memory(NamedTuple):
    """Bytes per rank, the largest over the ranks: peak and between steps of live tensors, and growth of the process."""

    peak: int
    held: int
    process: int


def ratio(a, b):
    """Time of a over time of b, Timed."""
    return statistics.median(x / y for x, y in zip(a.by_round, b.by_round, strict=True))


def measure_time(specs, size, world_size, rounds, steps, backend="pycomm", timeout=600.0):
    """{name: Timed}. backend: of the default group. Raises RankError."""
    ranks = run_ranks(world_size, _time_body, specs, size, rounds, steps, backend=backend, timeout=timeout)
    merged = {}
    for spec in specs:
        wall, cpu = ([r[spec.name][kind] for r in ranks] for kind in (0, 1))
        slowest = [[max(times) for times in zip(*turn, strict=True)] for turn in zip(*wall, strict=True)]
        worked = statistics.median(sum(times) for turn in zip(*cpu, strict=True) for times in zip(*turn, strict=True))
        merged[spec.name] = Timed(slowest, worked, ranks[0][spec.name][2])
    return merged


def measure_memory(spec, size, world_size, backend="pycomm", timeout=120.0):
    """Memory of one variant."""
    return Memory(*map(max, zip(*run_ranks(world_size, _memory_body, spec, size, backend=backend, timeout=timeout), strict=True)))


def _groups(specs):
    default = dist.get_backend()
    names = dict.fromkeys(spec.backend for spec in specs)
    return {name: dist.group.WORLD if name == default else dist.new_group(backend=name) for name in names}


def _time_body(rank, specs, size, rounds, steps):
    groups = _groups(specs)
    variants = {spec.name: make_variant(spec, size, groups[spec.backend]) for spec in specs}
    batches = [make_batch(size, number) for number in range(WARM_UP + rounds * steps)]
    losses, times, worked = ({name: [] for name in variants} for _ in range(3))

    def turn(name, count):
        spent = []
        for _ in range(count):
            batch = batches[len(losses[name])]
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            loss = variants[name].step(batch)
            spent.append((time.perf_counter() - start[0], time.process_time() - start[1]))
            losses[name].append(loss)
        return zip(*spent, strict=True)

    for name in variants:
        turn(name, WARM_UP)
    order = list(variants)
    for _ in range(rounds):
        for name in order:
            for kept, seconds in zip((times, worked), turn(name, steps), strict=True):
                kept[name].append(seconds)
        order = order[1:] + order[:1]
    return {name: (times[name], worked[name], losses[name]) for name in variants}


def _memory_body(rank, spec, size):
    memory.steady_heap()
    group = _groups([spec])[spec.backend]
    batches = [make_batch(size, number) for number in range(WARM_UP + MEMORY_STEPS)]
    dist.barrier(group)
    memory.reset_resident_peak()
    before = memory.resident_peak()
    live = memory.LiveBytes()
    with live:
        variant = make_variant(spec, size, group)
        for number, batch in enumerate(batches):
            if number == WARM_UP:
                gc.collect()  # what was left by making the variant
                live.reset()
                memory.reset_resident_peak()
            variant.step(batch)
        dist.barrier()
        return live.peak, live.now(), memory.resident_peak() - before
