"""Options of groups and operations, as the extension takes them."""

from __future__ import annotations

import math
import os
from typing import Literal, NamedTuple, SupportsFloat, TypeAlias

from pycomm import _C, env, tuned
from pycomm.values import LONGEST_TIMEOUT

# _C.reduce_ops, _C.algorithms (tests/test_stub.py)
ReduceName: TypeAlias = Literal["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
Algorithm: TypeAlias = Literal[
    "automatic", "one_shot", "two_shot", "ring", "staged", "direct", "copy_engine", "multimem"
]

DEFAULT_HOST_TIMEOUT = 10.0  # seconds

_OPS = {name: index for index, name in enumerate(_C.reduce_ops)}
_PLAIN = {name: (code, 1.0) for name, code in _OPS.items() if name != "premul_sum"}
_ALGORITHMS = {name: index for index, name in enumerate(_C.algorithms)}


class PremulSum(NamedTuple):
    """Reduce op: every rank's input is multiplied by `factor` before it is added."""

    factor: float


Reduction: TypeAlias = ReduceName | PremulSum


def premul_sum(factor: SupportsFloat) -> PremulSum:
    """Reduce op for `op=`: the sum of all inputs, each multiplied by `factor` (equal on all ranks; floating
    and complex dtypes).
    """
    return PremulSum(float(factor))


def reduction(op: Reduction) -> tuple[int, float]:
    """Code and factor of a reduce op."""
    if isinstance(op, str) and op in _PLAIN:
        return _PLAIN[op]
    if isinstance(op, PremulSum):
        return _OPS["premul_sum"], op.factor
    raise ValueError(
        f"unknown reduce op {op!r}; expected one of {', '.join(_PLAIN)} or pycomm.premul_sum(factor)"
    )


def seconds(timeout: float | None, own: str = "the group's own limit") -> float:
    """A time limit in seconds as the extension takes it, where 0.0 (None here) means `own`. Raises ValueError
    for what is not above 0, too long to be added to a clock (inf, 1e11) or no number (nan), TypeError.
    """
    if timeout is None:
        return 0.0
    try:
        limit = float(timeout)
    except (TypeError, ValueError):
        raise TypeError(f"timeout={timeout!r}: expected a number of seconds, or None") from None
    except OverflowError:  # an integer beyond all floats
        limit = math.inf
    if not 0 < limit <= LONGEST_TIMEOUT:
        raise ValueError(
            f"timeout={timeout}: must be a number of seconds above 0 and at most 1e8 (three years): nothing "
            f"waits without a limit. None means {own}."
        )
    return limit


def algorithm_code(name: Algorithm | None) -> int:
    if name is None:
        return 0
    if name not in _ALGORITHMS:
        raise ValueError(f"unknown algorithm {name!r}; expected None or one of {', '.join(_ALGORITHMS)}")
    return _ALGORITHMS[name]


def transport_options(
    settings: env.Settings,
    name: str,
    timeout: float,
    world_size: int,
    staging_bytes: int | None = None,
    threads: int | None = None,
) -> _C.TransportOptions:
    """Settings of the environment and arguments of the caller; arguments win."""
    staging_bytes = staging_bytes or settings.staging_bytes or 0
    threads = threads or settings.threads or default_threads(world_size)
    cuda = (settings.cuda_protocol or "", settings.cuda_connections or 0, settings.cuda_staging_bytes or 0)
    host_id, cma = settings.host_id or "", settings.cma is not False
    limit = settings.host_timeout or DEFAULT_HOST_TIMEOUT
    return _C.transport_options(
        name, timeout, staging_bytes, host_id, cma, threads, *cuda, tuned.load().rows, limit
    )


def default_threads(world_size: int) -> int:
    """Threads per rank that fill the memory bandwidth: the cores that a rank may call its own, at most 4."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // max(1, world_size)))
