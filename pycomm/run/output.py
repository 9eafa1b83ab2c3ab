"""What the ranks print, on this process's own streams: whole lines, each behind the name of its rank."""

import os
import selectors

__all__ = ["Output"]

BLOCK = 1 << 16


class Output:
    """Reads pipes. A context manager."""

    def __init__(self):
        self._selector = selectors.DefaultSelector()

    def add(self, pipe, name, stream):
        """pipe: a binary file to read, closed at its end. stream: a binary file to write."""
        os.set_blocking(pipe.fileno(), False)
        self._selector.register(pipe, selectors.EVENT_READ, _Lines(f"[{name}] ".encode(), stream))

    def pump(self, timeout):
        """Writes what has come; waits for it up to `timeout` seconds."""
        for key, _ in self._selector.select(timeout):
            try:
                data = os.read(key.fileobj.fileno(), BLOCK)
            except BlockingIOError:
                continue
            key.data.put(data)
            if not data:
                self._selector.unregister(key.fileobj)
                key.fileobj.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for key in list(self._selector.get_map().values()):
            key.data.put(b"")
            key.fileobj.close()
        self._selector.close()


class _Lines:
    def __init__(self, prefix, stream):
        self.prefix, self.stream, self.rest = prefix, stream, b""

    def put(self, data):
        """data: what came; empty at the end."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if not data and self.rest:
            lines, self.rest = [*lines, self.rest], b""
        if lines:
            self.stream.write(b"".join(self.prefix + line + b"\n" for line in lines))
            self.stream.flush()
