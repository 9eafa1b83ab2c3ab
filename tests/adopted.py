"""What the processes that a test has started leave behind: processes, and memory of snapshots."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


@contextlib.contextmanager
def adopting(expected: Callable[[], Iterable[float]]) -> Iterator[None]:
    """What ranks leave becomes a child of this process, and is ended. Raises AssertionError where that is
    another process than the expected ones, or one that holds memory of snapshots afterwards.
    """
    call, before = ctypes.CDLL(None, use_errno=True).prctl, set(children())
    assert call(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        call(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        forked = set(expected())
        left = {pid: name for pid, name in children().items() if pid not in before}
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    left = [name for pid, name in left.items() if pid not in forked]
    assert not left, f"left over: {left}"
    assert not memories_of_others(), "memory of snapshots is left"


def children() -> dict[int, str]:
    """{pid: its state and name} of those of this process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, fields = path.read_text().rpartition(")")
            if int(fields.split()[1]) == os.getpid():
                found[int(path.parent.name)] = f"{name}) {fields.split()[0]}"
    return found


def memories_of_others() -> list[str]:
    """Descriptors of snapshots in processes that this one has started, or that were left by them."""
    found = []
    for pid in children():
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                if "pycomm snapshots" in os.readlink(link):
                    found.append(str(link))
    return found
