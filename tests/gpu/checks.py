"""The checks by name. Each runs in a process of its own (one.py), from gpu-check and from pytest alike."""

import importlib
from typing import NamedTuple

from gpu import behaviour, faults, order, queues, torch_checks, values


class Definition(NamedTuple):
    run: object  # Check -> None
    seconds: float  # its limit
    about: str
    variables: tuple = ()  # NAME=value, in the environment of its process


def _of_fused(module, name):
    """A check in a file that needs the extension, which is built after this table was read."""
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
    values.matrix(
        check, (8, 2, 4, 1), "threads", {8} if check.on == "cuda" else {2}, algorithms=check.on == "cuda"
    )


def _values_processes(check):
    values.matrix(check, (4, 2, 8), "processes", (), algorithms=check.on == "cuda")


CHECKS = {
    "queues": Definition(queues.aliases, 20, "which streams share a hardware queue"),
    "smoke": Definition(
        _smoke, 45, "one all_reduce with threads and with processes; what the runtime says of the GPU"
    ),
    "values_threads": Definition(
        _values_threads, 80, "every algorithm, dtype, reduction, size, layout; 8, 2, 4, 1 threads"
    ),
    "values_processes": Definition(_values_processes, 60, "a part of that with 4, 2, 8 processes"),
    "streams": Definition(
        order.streams, 40, "asynchronous operations, side streams, two streams on one group"
    ),
    "graphs": Definition(order.graphs, 40, "CUDA graphs: capture, 100 replays with new inputs, two streams"),
    "registered": Definition(behaviour.registered, 40, "comm.empty buffers with every algorithm"),
    "messages": Definition(behaviour.messages, 40, "send and recv, batches, uneven all_to_all"),
    "barrier": Definition(behaviour.barrier, 25, "barrier blocks the host"),
    "groups": Definition(behaviour.groups, 40, "many groups, split, memory given back"),
    "arrays": Definition(behaviour.arrays, 25, "CuPy and DLPack arrays"),
    "torch": Definition(torch_checks.collectives, 45, 'torch.distributed with backend "pycomm"; DDP'),
    "mismatches": Definition(faults.mismatches, 50, "ranks that call different things"),
    "missing": Definition(faults.missing, 45, "a rank that does not come"),
    "deaths": Definition(faults.deaths, 45, "a rank that is killed"),
    "fused_values": Definition(
        _of_fused("fused_values", "values"),
        100,
        "pycomm.fused: every operation, dtype, activation; gradients; 1, 2, 4, 8 threads",
        ("PYCOMM_FUSED=fused",),
    ),
    "fused_order": Definition(
        _of_fused("fused_order", "order"), 60, "pycomm.fused: graphs, streams, ranks that come late or never"
    ),
    "fused_tuned": Definition(_of_fused("fused_order", "tuned"), 60, "pycomm.fused: the tuner and its cache"),
}
