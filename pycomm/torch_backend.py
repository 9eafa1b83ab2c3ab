"""Makes the torch.distributed backend of a group: what init_process_group("pycomm") and new_group() call,
through pycomm/_autoload.py.
"""

from __future__ import annotations

import functools
import json
import pickle
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from pycomm import _C, env, hosts, metrics, trace, values
from pycomm.groups import waits_to_join
from pycomm.options import transport_options
from pycomm.quantities import GlobalRank

Record: TypeAlias = dict[str, Any]  # of an operation, as the extension has it
Trace: TypeAlias = dict[str, Any]  # as torch has it

# Names of our operations as torch.distributed.flight_recorder knows them. It refuses backends that it has not
# heard of, so the trace says "gloo", whose operations have the same names and meaning.
_TRACE_PREFIX = "gloo:"

# It also takes neighbours with the same number for one coalesced call, even if one is a collective and the
# other a message, which are counted apart; so messages are counted from here.
_FIRST_MESSAGE = 1 << 32


def create(options: Any, pg_options: object) -> _C.Backend:
    """Returns the backend of one group; blocks until all ranks of it have come, at most the group's timeout.

    options: torch's DistributedBackendOptions: store, group_rank, group_size, timeout, group_id,
    global_ranks_in_group.
    pg_options: what the caller gave as pg_options; there is nothing to set, and options meant for another
    backend are ignored.
    """
    if pg_options is not None:
        env.logger().info(
            "pg_options of type %s are ignored by the backend pycomm", type(pg_options).__name__
        )
    settings = env.settings()
    timeout = _seconds(options.timeout.total_seconds())
    if waits_to_join():
        return _without_peers(settings, options.group_id, timeout)
    transport = transport_options(settings, options.group_id, timeout, options.group_size)
    show_in_flight_recorder()
    show_in_ddp_logs()
    gather_sharded_tensors_on_cpu()
    trace.begin_if_asked()
    backend = _C.create_backend(
        options.store,
        options.group_rank,
        options.group_size,
        timeout,
        transport,
        {_C.kinds.index(op): _algorithm(name) for op, name in settings.algorithm.items()},
        list(options.global_ranks_in_group) or [GlobalRank(rank) for rank in range(options.group_size)],
        hosts.makers(),
    )
    metrics.watch(backend.communicator, options.group_id)
    return backend


def _without_peers(settings: env.Settings, name: str, timeout: float) -> _C.Backend:
    """Of a process that takes the place of a dead one, as long as it waits: the others have no such group.
    torch knows rank and size; every operation raises.
    """
    transport = transport_options(settings, name, timeout, 1)
    backend = _C.create_backend(
        dist.HashStore(), 0, 1, timeout, transport, {}, [GlobalRank(0)], hosts.makers()
    )
    backend.communicator.abort(
        "this process takes the place of a dead one, and has no peers before par.resilient() has taken it in."
        " Call that first, and make groups of your own behind it"
    )
    return backend


def _seconds(timeout: float) -> float:
    """The time limit of a group. Programs written for other backends ask for a century to say "for ever"."""
    if not timeout > 0:
        raise ValueError(
            f"the group's timeout of {timeout:g} s is not above 0; nothing in pycomm waits without a limit"
        )
    if timeout > values.LONGEST_TIMEOUT:
        env.logger().info("the group's timeout of %g s is cut to 1e8 s (three years)", timeout)
    return min(timeout, values.LONGEST_TIMEOUT)


def _algorithm(name: str) -> int:
    if name not in _C.algorithms:
        raise ValueError(
            f"PYCOMM_ALGORITHM names the algorithm {name!r}; there are {', '.join(_C.algorithms)}"
        )
    return _C.algorithms.index(name)


@functools.cache
def show_in_ddp_logs() -> None:
    """Lets DDP's logging data name pycomm: torch's logger, in C++, knows only that it is a plug-in."""
    original = DistributedDataParallel._get_ddp_logging_data

    @functools.wraps(original)
    def with_our_name(self: DistributedDataParallel) -> dict[str, Any]:
        logged = original(self)
        if logged.get("backend_name") == "custom" and dist.get_backend(self.process_group) == "pycomm":
            logged["backend_name"] = "pycomm"
        return logged

    DistributedDataParallel._get_ddp_logging_data = with_our_name  # type: ignore[method-assign]  # on purpose


@functools.cache
def gather_sharded_tensors_on_cpu() -> None:
    """Lets ShardedTensor.gather go through the CPU where there is no accelerator: of the devices that a
    plug-in serves torch takes the one that is not the CPU, whether it is there or not.
    """
    from torch.distributed._shard.sharded_tensor import ShardedTensor  # not loaded by torch.distributed

    original = getattr(ShardedTensor, "_get_preferred_device", None)
    if original is None:  # another version of torch
        return

    @functools.wraps(original)
    def preferred_device(self: ShardedTensor) -> torch.device:
        without = torch.accelerator.current_accelerator(check_available=True) is None
        if without and dist.get_backend(self._process_group) == "pycomm":
            return torch.device("cpu")
        return original(self)

    ShardedTensor._get_preferred_device = preferred_device  # type: ignore[method-assign]  # on purpose


# [Note: two flight recorders] torch's recorder is out of reach of a backend built outside torch
# (csrc/torch/flight_recorder.h), so ours are two functions around torch's dump functions, which add our
# entries to what torch has. Whoever reads traces calls these functions or reads files written from what they
# return (torchfrtrace).


@functools.cache
def show_in_flight_recorder() -> None:
    """Adds the operations of pycomm to torch._C._distributed_c10d._dump_fr_trace and its JSON form."""
    pickled, in_json = getattr(c10d, "_dump_fr_trace", None), getattr(c10d, "_dump_fr_trace_json", None)
    if pickled is None or in_json is None:  # a build of torch without the recorder
        return

    @functools.wraps(pickled)
    def dump(
        includeCollectives: bool = True, includeStackTraces: bool = True, onlyActive: bool = False
    ) -> bytes:
        trace = pickle.loads(pickled(includeCollectives, includeStackTraces, onlyActive))
        return pickle.dumps(_with_ours(trace, includeCollectives, onlyActive))

    @functools.wraps(in_json)
    def dump_json(includeCollectives: bool = True, onlyActive: bool = False) -> bytes:
        trace = json.loads(in_json(includeCollectives, onlyActive))
        return json.dumps(_with_ours(trace, includeCollectives, onlyActive)).encode()

    recorder: Any = c10d  # whose stub does not have these two
    recorder._dump_fr_trace, recorder._dump_fr_trace_json = dump, dump_json


def _with_ours(trace: Trace, include_collectives: bool, only_active: bool) -> Trace:
    records = _C.flight_records()
    for record in records:
        name = record["group_name"]
        trace["pg_config"].setdefault(
            name, {"name": name, "desc": record["group_desc"], "ranks": str(record["global_ranks"])}
        )
    if include_collectives:
        entries = trace.setdefault("entries", [])
        entries += [_entry(record) for record in records if not (only_active and record["completed_ns"])]
        entries.sort(key=lambda entry: entry["time_created_ns"])
    return trace


def _entry(record: Record) -> Record:
    """A record in torch's format, version 2.10."""
    done = record["completed_ns"]
    entry = {
        "frames": [],
        "record_id": record["id"] - 1,
        "pg_id": record["group_id"],
        "process_group": (record["group_name"], record["group_desc"]),
        "thread_name": "",
        "thread_id": "",
        "collective_seq_id": 0 if record["is_p2p"] else record["sequence"],
        "p2p_seq_id": _FIRST_MESSAGE + record["sequence"] if record["is_p2p"] else 0,
        "op_id": record["sequence"],
        "profiling_name": _trace_name(record),
        "time_created_ns": record["created_ns"],
        "input_sizes": record["input_sizes"],
        "input_dtypes": record["input_dtypes"],
        "output_sizes": record["output_sizes"],
        "output_dtypes": record["output_dtypes"],
        "state": "completed" if done else "started",
        "time_discovered_started_ns": record["created_ns"],
        "time_discovered_completed_ns": done,
        "retired": bool(done) or record["failed"],
        "timeout_ms": record["timeout_ms"],
        "is_p2p": record["is_p2p"],
    }
    if done:
        entry["duration_ms"] = (done - record["created_ns"]) / 1e6
    return entry


def _trace_name(record: Record) -> str:
    name = _TRACE_PREFIX + record["name"].partition(":")[2]
    if not record["is_p2p"]:
        return name
    return f"{name} {record['rank']}{'->' if name.endswith('send') else '<-'}{record['peer']}"
