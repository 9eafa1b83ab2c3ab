"""The checks by name. Each runs in a process of its own (one.py), from gpu-check and from pytest alike."""

import importlib
from typing import NamedTuple

from . import behaviour, faults, order, torch_checks, values


class Entry(NamedTuple):
    run: object  # Check -> None
    seconds: float  # its limit
    about: str
    variables: tuple = ()  # NAME=value, in the environment of its process


def _of_fused(module, name):
    """A check in a file that needs the extension, which gpu-check builds after it has read this table."""
    return lambda check: getattr(importlib.import_module(f".{module}", __package__), name)(check)


def _smoke(check):
    check.each("all_reduce", 2, faults.usable)
    check.each("all_reduce", 8, faults.usable)
    check.each("all_reduce", 2, faults.usable, mode="processes")
    for n, mode in ((2, "threads"), (8, "threads"), (2, "processes")):
        check.each("comm.describe()['cuda'] after the first operation", n, _describe, mode, mode=mode)


def _describe(comm, check, mode):
    faults.usable(comm, check)
    facts = comm.describe().get("cuda")
    if comm.rank == 0:
        check.record(f"what it says with {comm.world_size} {mode}", None, facts)
    return "" if check.on == "cpu" or isinstance(facts, dict) else f"expected a dict, got {facts!r}"


def _values_threads(check):
    values.matrix(check, (8, 2, 4, 1), "threads", {8} if check.on == "cuda" else {2}, algorithms=check.on == "cuda")


def _values_processes(check):
    values.matrix(check, (4, 2, 8), "processes", (), algorithms=check.on == "cuda")


CHECKS = {
    "smoke": Entry(_smoke, 45, "one all_reduce with threads and with processes; what the runtime says of the GPU"),
    "values_threads": Entry(_values_threads, 80, "every algorithm, dtype, reduction, size, layout; 8, 2, 4, 1 threads"),
    "values_processes": Entry(_values_processes, 60, "a part of that with 4, 2, 8 processes"),
    "streams": Entry(order.streams, 40, "asynchronous operations, side streams, two streams on one group"),
    "graphs": Entry(order.graphs, 40, "CUDA graphs: capture, 100 replays with new inputs, two streams"),
    "registered": Entry(behaviour.registered, 40, "comm.empty buffers with every algorithm"),
    "messages": Entry(behaviour.messages, 40, "send and recv, batches, uneven all_to_all"),
    "barrier": Entry(behaviour.barrier, 25, "barrier blocks the host"),
    "groups": Entry(behaviour.groups, 40, "many groups, split, memory given back"),
    "arrays": Entry(behaviour.arrays, 25, "CuPy and DLPack arrays"),
    "torch": Entry(torch_checks.collectives, 45, 'torch.distributed with backend "pycomm"; DDP'),
    "mismatches": Entry(faults.mismatches, 50, "ranks that call different things"),
    "missing": Entry(faults.missing, 45, "a rank that does not come"),
    "deaths": Entry(faults.deaths, 45, "a rank that is killed"),
    "fused_values": Entry(
        _of_fused("fused", "values"),
        100,
        "pycomm.fused: every operation, dtype, activation; gradients; 1, 2, 4, 8 threads",
        ("PYCOMM_FUSED=fused",),
    ),
    "fused_order": Entry(_of_fused("fused_order", "order"), 60, "pycomm.fused: graphs, streams, ranks that come late or never"),
    "fused_tuned": Entry(_of_fused("fused_order", "tuned"), 60, "pycomm.fused: the tuner and its cache"),
}
