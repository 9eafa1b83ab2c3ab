"""Work beside the program: one piece at a time, in a thread of its own.

    program   start(write) ---- goes on ---- wait() or the next start() ----
    thread         write() ............ ended

What the work raises is raised by the next wait() or start(), once. The end of the interpreter waits for it,
and then shows an error that nobody has asked for.
"""

import atexit
import threading
from collections.abc import Callable

__all__ = ["Background"]


class Background:
    """name: of the thread."""

    def __init__(self, name: str) -> None:
        self.name, self._registered = name, False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Waits for the work before, then runs work() beside the caller. Raises as wait()."""
        self.wait()
        if not self._registered:  # threads are waited for before these functions are called
            self._registered = True
            atexit.register(self.wait)
        self._thread = threading.Thread(target=self._run, args=(work,), name=self.name)
        self._thread.start()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Whether nothing is under way; never blocks."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Blocks until the work has ended. Raises what it raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
