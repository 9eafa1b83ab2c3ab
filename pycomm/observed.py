"""What a group tells of itself while it works: Communicator.trace() and Communicator.statistics()."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from pycomm import trace
from pycomm.member import Member

if TYPE_CHECKING:
    from pycomm import _C

Self = TypeVar("Self", bound="Observed")
# operation -> size class -> field -> value
Statistics: TypeAlias = dict[str, dict[str, dict[str, float]]]

__all__ = ["SIZES", "Observed", "statistics_of"]

# csrc/trace/counters.h
SIZES = ("64 B", "1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB", "more")
FIELDS = ("operations", "bytes", "measured", "waiting_s", "moving_s")


class Observed(Member):
    """The part of a Communicator that is about watching it."""

    @contextlib.contextmanager
    def trace(self: Self, folder: str | os.PathLike[str]) -> Iterator[Self]:
        """A context: in it this process writes what it does in all of its groups into a new file in `folder`,
        which `python -m pycomm.trace folder` reads. Call it on every rank of whom something is to be known.

        Raises OSError where the folder cannot be written to, ValueError while the process writes a trace into
        another folder.
        """
        trace.begin(folder)
        try:
            yield self
        finally:
            trace.end()

    def statistics(self) -> Statistics:
        """What this rank has done in the group so far, as {operation: {size: {...}}}, with sizes "64 B",
        "1 KiB", ... up to which the operations go, and in each:

            operations, bytes         that have completed; bytes of the whole buffer
            measured                  of them, while a trace or PYCOMM_STATISTICS=1 measured
            waiting_s, moving_s       of those: until the last rank had come, and from then on

        Operations on a device have "cuda " before their name, and no seconds.
        """
        return statistics_of(self._comm.counters())


def statistics_of(counters: _C._Counters) -> Statistics:
    """The same from the extension's counters."""
    found: Statistics = {}
    for prefix, cells in zip(("", "cuda "), counters, strict=True):
        for operation, size, operations, nbytes, measured, waiting_ns, moving_ns in cells:
            values = operations, nbytes, measured, waiting_ns / 1e9, moving_ns / 1e9
            cell = found.setdefault(prefix + operation, {}).setdefault(SIZES[size], dict.fromkeys(FIELDS, 0))
            for field, value in zip(FIELDS, values, strict=True):
                cell[field] += value  # messages inside a host and between hosts are counted apart
    return found
