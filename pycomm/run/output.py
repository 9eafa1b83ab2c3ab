"""What the ranks print, on this process's own streams: whole lines, each behind the name of its rank."""

import os
import selectors
from types import TracebackType
from typing import IO

__all__ = ["Output"]

BLOCK = 1 << 16


class Output:
    """Reads pipes. A context manager."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, pipe: IO[bytes], name: str, stream: IO[bytes]) -> None:
        """pipe: to read, closed at its end. stream: to write."""
        os.set_blocking(pipe.fileno(), False)
        self._selector.register(pipe, selectors.EVENT_READ, _Lines(pipe, f"[{name}] ".encode(), stream))

    def pump(self, timeout: float) -> None:
        """Writes what has come; waits for it up to `timeout` seconds."""
        for key, _ in self._selector.select(timeout):
            lines: _Lines = key.data
            try:
                data = os.read(key.fd, BLOCK)
            except BlockingIOError:
                continue
            lines.put(data)
            if not data:
                self._selector.unregister(lines.pipe)
                lines.pipe.close()

    def __enter__(self) -> "Output":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for key in list(self._selector.get_map().values()):
            lines: _Lines = key.data
            lines.put(b"")
            lines.pipe.close()
        self._selector.close()


class _Lines:
    def __init__(self, pipe: IO[bytes], prefix: bytes, stream: IO[bytes]) -> None:
        self.pipe, self.prefix, self.stream, self.rest = pipe, prefix, stream, b""

    def put(self, data: bytes) -> None:
        """data: what came; empty at the end."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if not data and self.rest:
            lines, self.rest = [*lines, self.rest], b""
        if lines:
            self.stream.write(b"".join(self.prefix + line + b"\n" for line in lines))
            self.stream.flush()
