"""Threads and descriptors of this process, for the tests that nothing is left of what was closed."""

import os
import time
from typing import NamedTuple


class Held(NamedTuple):
    threads: int
    files: int


def held() -> Held:
    """Now."""
    return Held(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))


def held_after(before: Held, seconds: float = 5.0) -> Held:
    """Looks again until it sees no more than `before`, for at most `seconds`. Returns the smallest numbers.
    /proc shows a joined thread and a socket of Gloo's for some milliseconds after their group has closed.
    """
    least, deadline = held(), time.monotonic() + seconds
    while (least.threads > before.threads or least.files > before.files) and time.monotonic() < deadline:
        time.sleep(0.01)
        least = Held(*map(min, least, held()))
    return least
