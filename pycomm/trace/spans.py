"""Recording from Python: when a trace begins and ends, spans, and the names of axes.

Where nothing is recorded a span costs a call and an attribute; csrc/trace/record.h has the rest.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import time
from typing import TYPE_CHECKING

from pycomm import _C, env

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["begin", "begin_if_asked", "end", "folder", "name_axis", "span"]

_now = time.monotonic_ns  # the clock of csrc/trace/times.h
_NOTHING = contextlib.nullcontext()
_axes: dict[str, str] = {}  # name of a group -> that of its axis, for traces that begin later
_told: dict[int, set[tuple[str, str]]] = {}  # generation -> names of groups, and axes, that it has
_asked: dict[int, bool] = {}  # pid -> whether this process has looked at PYCOMM_TRACE


def begin(folder: str | os.PathLike[str], ring_bytes: int | None = None) -> None:
    """Begins to record what this process does into a new file in `folder`, which is made if it is not there.
    Each begin() has its end().

    Raises OSError (no right, no room), ValueError while this process records into another folder.
    """
    os.makedirs(folder, exist_ok=True)
    _C.trace_begin(os.path.abspath(folder), ring_bytes or env.trace_bytes())
    _tell_axes()


def end() -> None:
    """Ends what begin() began; the last of several ends the file."""
    _C.trace_end()


def folder() -> str | None:
    """Where this process records to."""
    return _C.trace_folder() or None


def begin_if_asked() -> None:
    """What PYCOMM_TRACE and PYCOMM_STATISTICS ask for, once in a process (and in a forked child again). A
    folder that cannot be written to is a warning: the program goes on.
    """
    pid = os.getpid()
    if pid in _asked:
        return
    _asked[pid] = True
    if env.statistics():
        _C.measure(True)
    where = env.trace_folder()
    if where is None:
        return
    try:
        begin(where)
    except OSError as error:
        env.logger().warning("PYCOMM_TRACE=%s: this process records no trace: %s", where, error)
        return
    atexit.register(_end_of_process, pid)


def _end_of_process(pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child, which has no trace of its parent's
        end()


def name_axis(group: str, axis: str) -> None:
    """The operations of the group with this name are those of `axis` (dp, tp, ...) in the tables."""
    _axes[group] = axis
    _tell_axes()


def _tell_axes() -> None:
    if not _C.trace_active():
        return
    told = _told.setdefault(_C.trace_generation(), set())
    for group, axis in list(_axes.items()):
        if (group, axis) not in told:
            told.add((group, axis))
            _C.trace_axis(group, axis)


def span(
    name: str, stage: int | None = None, microbatch: int | None = None, bucket: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """A context: what happens inside it has this name in the timeline, with these numbers."""
    if not _C.trace_active():
        return _NOTHING
    return _Span(name, stage, microbatch, bucket)


class _Span:
    __slots__ = ("name", "numbers", "begun")

    def __init__(self, name: str, *numbers: int | None) -> None:
        self.name, self.numbers = name, numbers

    def __enter__(self) -> None:
        self.begun = _now()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        number = _number(_C.trace_generation(), self.name)
        if number is not None:
            _C.trace_span(number, self.begun, _now(), *(-1 if n is None else n for n in self.numbers))


@functools.lru_cache(4096)
def _number(generation: int, name: str) -> int | None:
    return _C.trace_name(name)
