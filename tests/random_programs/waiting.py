"""How the works of a strand are waited for."""

import threading
import time


class WrongError(AssertionError):
    """Something is not as the program says it must be."""


class Left(Exception):
    """This rank has left its groups: the strand is at its end."""


class All:
    """Several works of torch as one."""

    def __init__(self, works):
        self.works = works

    def wait(self):
        for work in self.works:
            work.wait()


class Wait:
    """How one work is waited for: at its moment, by polling first, by a thread of its own from the start, or
    by its future.
    """

    def __init__(self, work, style, may_fail):
        self.work, self.error, self.thread = work, None, None
        self.style = "wait" if style == "future" and (may_fail or not hasattr(work, "get_future")) else style
        if style == "thread":
            self.thread = threading.Thread(target=self._in_thread, daemon=True)
            self.thread.start()

    def _in_thread(self):
        try:
            self.work.wait()
        except BaseException as error:
            self.error = error

    def finish(self):
        if self.thread:
            self.thread.join()
            if self.error:
                raise self.error
        if self.style == "poll":
            done = getattr(self.work, "done", None) or getattr(self.work, "is_completed", None)
            while done and not done():
                time.sleep(0)
        if self.style == "future":
            self.work.get_future().wait()
        self.work.wait()

    def source(self):
        """The sender's rank in the group; None where nobody can say."""
        if hasattr(self.work, "source"):
            return self.work.source()
        return self.work._source_rank() if hasattr(self.work, "_source_rank") else None
