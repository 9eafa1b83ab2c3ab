"""How much of the communication runs beside the computation.

Of the time in which a rank has an operation under way, begun and not ended, the part in which no caller of
that rank is blocked by one: what the computation does not wait for. Operations that are issued and wait for
their turn in the queue count from their turn on. Operations on a device do not count: what waits for them
there, streams of the program, is in no trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pycomm.trace.files import DEVICE
from pycomm.trace.joined import ended
from pycomm.trace.steps import blocked, length_within, union

if TYPE_CHECKING:
    from pycomm.trace.joined import Row

__all__ = ["Overlap", "of_row"]


class Overlap(NamedTuple):
    communication_ms: float
    blocked_ms: float

    @property
    def percent(self) -> float | None:
        """None where there was no communication."""
        if not self.communication_ms:
            return None
        return 100 * (1 - self.blocked_ms / self.communication_ms)


def of_row(row: Row) -> Overlap:
    done = ended(row.operations)
    done = done[(done["begun"] > 0) & (done["type"] != DEVICE)]  # on a device: streams wait, not callers
    under_way = union(np.stack([done["begun"], done["ended"]], axis=1)) if len(done) else union([])
    waits = blocked(row)
    hidden = sum(length_within(waits, begin, end) for begin, end in under_way)
    return Overlap(float((under_way[:, 1] - under_way[:, 0]).sum()) / 1e6, hidden / 1e6)
