"""What a group tells of itself while it works: Communicator.trace() and Communicator.statistics()."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TypeVar

from pycomm import trace
from pycomm.counters import Statistics, statistics_of
from pycomm.member import Member

Self = TypeVar("Self", bound="Observed")

__all__ = ["Observed"]


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
