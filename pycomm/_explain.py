"""pycomm.explain: which algorithm an operation would use, how it moves the bytes, and why."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch

from pycomm import _C, env, tuned
from pycomm._over_hosts import explain_over_hosts
from pycomm.fused.choice import choose
from pycomm.fused.form import has_triton
from pycomm.fused.problem import ACTIVATIONS, OPS, Op, Problem
from pycomm.groups import even_sizes, hosts_of
from pycomm.quantities import Bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pycomm.fused.choice import Choice

__all__ = ["explain"]

Device: TypeAlias = Literal["cpu", "cuda"]


class _Reach(NamedTuple):
    """How ranks reach each other's memory: arguments of explain()."""

    cores: int
    kernel_ahead: bool  # whether the kernel's copies are ahead
    mapped: bool
    kernel_reads: bool


_COLLECTIVES = [kind for kind in _C.kinds[1:-1] if kind not in ("send", "recv")]
_DTYPES = ("float32", "float16", "bfloat16", "float64")

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


def explain(
    op: str,
    size: int | tuple[int, int, int],
    world_size: int,
    *,
    device: Device = "cpu",
    cores: int | None = None,
    mapped: bool = False,
    kernel_reads: bool = True,
    algorithm: str | None = None,
    dtype: Literal["float32", "float16", "bfloat16", "float64"] = "float32",
    activation: str | None = None,
    hosts: str | Sequence[int] | None = None,
) -> str:
    """Says which algorithm would run `op`, and why.

    Args:
        op: name of a collective ("all_reduce") or of a function of pycomm.fused ("all_gather_matmul").
        size: bytes of a rank's whole buffer; for all_gather, gather, reduce_scatter, scatter and all_to_all
            of one part. pycomm.fused: (M, N, K) of this rank's product, M the gathered rows, N the columns of
            the result; the rows are cut evenly.
        world_size: ranks of the group, all on one host, or on those of `hosts`.
        device: "cuda": f32 sums; `mapped` means buffers from Communicator.empty; ranks have a GPU each.
        cores: that the ranks may run on; None: this process's.
        mapped: all ranks can address the buffers (threads, or Communicator.empty).
        kernel_reads: process_vm_readv works between the ranks (describe()["reach"]).
        algorithm: as the caller would ask for it; None: PYCOMM_ALGORITHM, then the table measured on this
            machine (PYCOMM_TUNED), then the built-in one.
        dtype, activation: of pycomm.fused; None, or with a bias one of its activations. What is said is what
            PYCOMM_FUSED, the tuner's figures for this machine or the table have; for "cuda" one GPU per rank.
        hosts: where the ranks are: "2x4" (two hosts of four ranks), "3+5", "0101" (the host of each rank);
            for collectives on CPU tensors. None: on one host.

    Returns one line; where a table has decided it says which, over hosts the steps and the bytes on a link.
    How fast cores hand over a line and the kernel copies is measured in each call.
    Raises ValueError for an unknown op or algorithm, hosts that are not of world_size ranks, and where
    PYCOMM_TUNED names a file that does not count.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: must be 'cpu' or 'cuda'")
    placement = _several(hosts, world_size, op in OPS or device == "cuda")
    if (fused := next((one for one in OPS if one == op), None)) is not None:
        return _explain_fused(fused, size, world_size, device, dtype, activation)
    if op not in _COLLECTIVES:
        raise ValueError(f"unknown op {op!r}; expected one of {', '.join((*_COLLECTIVES, *OPS))}")
    cores = cores or len(os.sched_getaffinity(0))
    algorithm = algorithm or env.settings().algorithm.get(op, "automatic")
    if algorithm not in _C.algorithms:
        raise ValueError(f"unknown algorithm {algorithm!r}; expected one of {', '.join(_C.algorithms)}")
    if isinstance(size, (tuple, list)):
        raise ValueError(f"size={size!r}: {op} takes a number of bytes")
    nbytes = Bytes(size)
    if placement:
        return explain_over_hosts(op, nbytes, placement)
    if device == "cuda":
        code = _C.algorithms.index(algorithm)
        name, reason = _C.choose_on_device(_C.kinds.index(op), nbytes, world_size, False, mapped, code)
        how = f"{name} ({_STEPS_ON_DEVICE[name]})"
        return f"{op} of {size} bytes on {world_size} GPUs: {how}, because: {reason}."
    return _explain_on_cpu(op, nbytes, world_size, _Reach(cores, False, mapped, kernel_reads), algorithm)


def _of_cores(hand_off: float | None, kernel_ahead: bool) -> str:
    """What was measured just now, and may be otherwise later (csrc/transport/hand_off.h)."""
    passes = "Unknown how fast a line passes" if hand_off is None else f"A line passes in {hand_off:.0f} ns"
    return f" {passes} between cores: {'the kernel' if kernel_ahead else 'shared memory'} copies faster."


def _several(hosts: str | Sequence[int] | None, world_size: int, on_one: bool) -> list[int] | None:
    """For each rank its host, of ranks on several hosts; None on one. on_one: there can be no others."""
    placement = [] if hosts is None else hosts_of(hosts, world_size)
    if len(set(placement)) < 2:
        return None
    if on_one:
        raise ValueError(f"hosts={hosts!r}: groups over hosts do collectives on CPU tensors")
    return placement


def _explain_on_cpu(op: str, size: Bytes, world_size: int, reach: _Reach, algorithm: str) -> str:
    """Whether the kernel's copies are ahead is found here."""
    hand_off, kernel_ahead = _C.hand_off()
    reach = reach._replace(kernel_ahead=kernel_ahead)
    known, code = tuned.load(), _C.algorithms.index(algorithm)
    name, block, reason, measured = _C.choose(_C.kinds.index(op), size, world_size, *reach, code, known.rows)
    blocks = f", blocks of {block} bytes" if block else ""
    text = f"{op} of {size} bytes on {world_size} ranks: {name} ({_STEPS[name]}{blocks}), because: {reason}."
    if name == "payload" or algorithm != "automatic":
        return text
    table = known.path if measured else _built_in(known, world_size, reach.cores)
    cores = _of_cores(hand_off, reach.kernel_ahead) if reach.kernel_reads and not reach.mapped else ""
    return f"{text} Table: {table}.{cores}"


def _built_in(known: tuned.Tuned, world_size: int, cores: int) -> str:
    """That the built-in table decides, and why a measured one does not."""
    if known.problem:
        return f"built-in; {known.path} is not used: {known.problem}"
    if known.rows is None:
        return "built-in"
    if known.rows.has(world_size, cores):
        return f"built-in; {known.path} has no figures for this operation and size"
    return f"built-in; {known.path} has no figures for {world_size} ranks on {cores} cores"


def _explain_fused(
    op: Op, size: object, world_size: int, device: Device, dtype: str, activation: str | None
) -> str:
    if not isinstance(size, (tuple, list)) or len(size) != 3:
        raise ValueError(f"size={size!r}: {op} takes (M, N, K)")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(_DTYPES)}")
    if activation not in (None, *ACTIVATIONS):
        raise ValueError(f"activation={activation!r}: must be None or one of {', '.join(ACTIVATIONS)}")
    m, n, k = size
    sizes = tuple(even_sizes(m, world_size)) if op in ("all_gather_matmul", "matmul_reduce_scatter") else ()
    problem = Problem(
        op, m, n, k, getattr(torch, dtype), world_size, 0, activation, activation is not None, sizes=sizes
    )
    choice = _measured(problem, device) or choose(problem, device, forced=env.fused())
    chunks = f" in {choice.chunks} chunks" if choice.chunks > 1 else ""
    what = f"{op} of ({m}, {n}, {k}) in {dtype} on {world_size} ranks"
    return f"{what}: {choice.name}{chunks}, because: {choice.reason}."


def _measured(problem: Problem, device: Device) -> Choice | None:
    """What the tuner knows of the problem on this machine's GPU, for one rank per GPU; None where it knows
    nothing or is not asked.
    """
    if device != "cuda" or env.fused() != "auto" or not torch.cuda.is_available() or not has_triton():
        return None
    from pycomm.fused import tuner  # imports Triton

    return tuner.lookup(problem, torch.device("cuda", torch.cuda.current_device()))
