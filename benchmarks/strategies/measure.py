"""Step time and memory of the variants.

Time: all variants live in the same processes, and take turns (common/turns.py) after some steps to warm up. A
step is timed on every rank between two readings of the clock, after a barrier; the slowest rank counts.
Groups over pycomm and over Gloo stand in the same processes; idle ones sleep.

Memory: every variant on its own in newly forked processes (memory.py), after WARM_UP steps; the rank with
most counts.

Losses of all steps of all variants are compared with those of one process.
"""

import functools
import gc
import statistics
import time
from typing import NamedTuple

import torch.distributed as dist

# torch_variants: imported before the fork, once, and in no rank's figures
from pycomm.benchmarks.common import ranks, turns
from pycomm.benchmarks.strategies import memory, torch_variants
from pycomm.benchmarks.strategies.model import make_batch
from pycomm.benchmarks.strategies.variants import OneProcess, Ours

WARM_UP = 2
MEMORY_STEPS = 2


class Timed(NamedTuple):
    """rounds: seconds of the steps of each round, slowest rank. cpu: median over the steps of the seconds
    that all ranks together had processors. losses: of every step."""

    rounds: list
    cpu: float
    losses: list

    @property
    def seconds(self):
        return statistics.median(turns.samples_of(self.rounds))


class Memory(NamedTuple):
    """Bytes per rank, the largest over the ranks: peak and between steps of live tensors, and growth of the
    process.
    """

    peak: int
    held: int
    process: int


class Settings(NamedTuple):
    rounds: int
    steps: int  # of a turn


def run(world_size, body, *args, backend, timeout):
    """On forked processes with a default group of this backend."""
    return ranks.run(world_size, body, *args, mode="processes", backend=backend, timeout=timeout)


def make_variant(spec, size, group):
    if spec.family == "torch":
        return torch_variants.STRATEGIES[spec.strategy](spec, size, group)
    if spec.family == "deepspeed":
        from pycomm.benchmarks.strategies.deepspeed_variants import DeepSpeed  # a package of its own

        return DeepSpeed(spec, size, group)
    return {"one process": OneProcess, "pycomm.parallel": Ours}[spec.family](spec, size, group)


def measure_time(specs, size, world_size, settings, backend="pycomm", timeout=600.0):
    """{name: Timed}. backend: of the default group. Raises RankError."""
    by_rank = run(world_size, _time_body, specs, size, settings, backend=backend, timeout=timeout)
    merged = {}
    for spec in specs:
        found = [rank[spec.name] for rank in by_rank]
        rounds = turns.slowest([[wall for wall, _ in turn_list] for turn_list, _ in found])
        cpu = zip(*([used for _, used in turn_list] for turn_list, _ in found), strict=True)
        worked = [sum(times) for turn in cpu for times in zip(*turn, strict=True)]
        merged[spec.name] = Timed(rounds, statistics.median(worked), found[0][1])
    return merged


def measure_memory(spec, size, world_size, backend="pycomm", timeout=120.0):
    """Memory of one variant."""
    by_rank = run(world_size, _memory_body, spec, size, backend=backend, timeout=timeout)
    return Memory(*map(max, zip(*by_rank, strict=True)))


def _groups(specs):
    default = dist.get_backend()
    names = dict.fromkeys(spec.backend for spec in specs)
    return {name: dist.group.WORLD if name == default else dist.new_group(backend=name) for name in names}


def _time_body(_, specs, size, settings):
    """{name: ([(seconds, seconds on a processor) of the steps of each turn], losses)} of this rank."""
    groups = _groups(specs)
    variants = {spec.name: make_variant(spec, size, groups[spec.backend]) for spec in specs}
    batches = [make_batch(size, number) for number in range(WARM_UP + settings.rounds * settings.steps)]
    losses = {name: [] for name in variants}

    def turn(name, count):
        spent = []
        for _ in range(count):
            batch = batches[len(losses[name])]
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            loss = variants[name].step(batch)
            spent.append((time.perf_counter() - start[0], time.process_time() - start[1]))
            losses[name].append(loss)
        return tuple(zip(*spent, strict=True))

    for name in variants:
        turn(name, WARM_UP)
    taken = turns.take(
        settings.rounds, {name: functools.partial(turn, name, settings.steps) for name in variants}
    )
    return {name: (taken[name], losses[name]) for name in variants}


def _memory_body(_, spec, size):
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
