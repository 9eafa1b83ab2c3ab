"""What the extension has counted in a group, as Communicator.statistics() and the metrics give it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from pycomm import _C

__all__ = ["SIZES", "Statistics", "statistics_of"]

# operation -> size class -> field -> value
Statistics: TypeAlias = dict[str, dict[str, dict[str, float]]]

# csrc/trace/counters.h
SIZES = ("64 B", "1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB", "more")
FIELDS = ("operations", "bytes", "measured", "waiting_s", "moving_s")


def statistics_of(counters: _C._Counters) -> Statistics:
    """As Communicator.statistics() has them."""
    found: Statistics = {}
    for prefix, cells in zip(("", "cuda "), counters, strict=True):
        for operation, size, operations, nbytes, measured, waiting_ns, moving_ns in cells:
            values = operations, nbytes, measured, waiting_ns / 1e9, moving_ns / 1e9
            cell = found.setdefault(prefix + operation, {}).setdefault(SIZES[size], dict.fromkeys(FIELDS, 0))
            for field, value in zip(FIELDS, values, strict=True):
                cell[field] += value  # messages inside a host and between hosts are counted apart
    return found
