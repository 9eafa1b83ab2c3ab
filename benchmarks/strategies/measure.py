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
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch.distributed as dist

# torch_variants: imported before the fork, once, and in no rank's figures
from pycomm.benchmarks.common import ranks, turns
from pycomm.benchmarks.common.turns import Rounds
from pycomm.benchmarks.strategies import memory, torch_variants
from pycomm.benchmarks.strategies.model import Size, make_batch
from pycomm.benchmarks.strategies.variants import OneProcess, Ours, Spec, Variant

T = TypeVar("T")
WARM_UP = 2
MEMORY_STEPS = 2


class Timed(NamedTuple):
    """rounds: seconds of the steps of each round, slowest rank. cpu: median over the steps of the seconds
    that all ranks together had processors. losses: of every step."""

    rounds: Rounds
    cpu: float
    losses: list[float]

    @property
    def seconds(self) -> float:
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


class Turn(NamedTuple):
    """Seconds of the steps of a turn, on one rank."""

    wall: tuple[float, ...]
    processor: tuple[float, ...]


class Ran(NamedTuple):
    """One variant on one rank."""

    turns: list[Turn]
    losses: list[float]


def run(world_size: int, body: Callable[..., T], *args: object, backend: str, timeout: float) -> list[T]:
    """On forked processes with a default group of this backend."""
    return ranks.run(world_size, body, *args, mode="processes", backend=backend, timeout=timeout)


def make_variant(spec: Spec, size: Size, group: dist.ProcessGroup) -> Variant:
    if spec.family == "torch":
        return torch_variants.STRATEGIES[spec.strategy](spec, size, group)
    if spec.family == "deepspeed":
        from pycomm.benchmarks.strategies.deepspeed_variants import DeepSpeed  # a package of its own

        return DeepSpeed(spec, size, group)
    return OneProcess(spec, size, group) if spec.family == "one process" else Ours(spec, size, group)


def measure_time(
    specs: Sequence[Spec],
    size: Size,
    world_size: int,
    settings: Settings,
    backend: str = "pycomm",
    timeout: float = 600.0,
) -> dict[str, Timed]:
    """By the names of the variants. backend: of the default group. Raises RankError."""
    by_rank = run(world_size, _time_body, specs, size, settings, backend=backend, timeout=timeout)
    merged: dict[str, Timed] = {}
    for spec in specs:
        found = [rank[spec.name] for rank in by_rank]
        rounds = turns.slowest([[turn.wall for turn in ran.turns] for ran in found])
        cpu = zip(*([turn.processor for turn in ran.turns] for ran in found), strict=True)
        worked = [sum(times) for turn in cpu for times in zip(*turn, strict=True)]
        merged[spec.name] = Timed(rounds, statistics.median(worked), found[0].losses)
    return merged


def measure_memory(
    spec: Spec, size: Size, world_size: int, backend: str = "pycomm", timeout: float = 120.0
) -> Memory:
    by_rank = run(world_size, _memory_body, spec, size, backend=backend, timeout=timeout)
    return Memory(*map(max, zip(*by_rank, strict=True)))


def _groups(specs: Iterable[Spec]) -> dict[str, dist.ProcessGroup]:
    world, default = dist.group.WORLD, dist.get_backend()
    assert world is not None  # run() has made it
    names = dict.fromkeys(spec.backend for spec in specs)
    return {name: world if name == default else dist.new_group(backend=name) for name in names}


def _time_body(_: int, specs: Sequence[Spec], size: Size, settings: Settings) -> dict[str, Ran]:
    groups = _groups(specs)
    variants = {spec.name: make_variant(spec, size, groups[spec.backend]) for spec in specs}
    batches = [make_batch(size, number) for number in range(WARM_UP + settings.rounds * settings.steps)]
    losses: dict[str, list[float]] = {name: [] for name in variants}

    def turn(name: str, count: int) -> Turn:
        spent = list[tuple[float, float]]()
        for _ in range(count):
            batch = batches[len(losses[name])]
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            loss = variants[name].step(batch)
            spent.append((time.perf_counter() - start[0], time.process_time() - start[1]))
            losses[name].append(loss)
        return Turn(tuple(wall for wall, _ in spent), tuple(processor for _, processor in spent))

    for name in variants:
        turn(name, WARM_UP)
    taken = turns.take(
        settings.rounds, {name: functools.partial(turn, name, settings.steps) for name in variants}
    )
    return {name: Ran(taken[name], losses[name]) for name in variants}


def _memory_body(_: int, spec: Spec, size: Size) -> tuple[int, int, int]:
    """(peak, held, process) of this rank, as in Memory."""
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
