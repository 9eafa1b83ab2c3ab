"""Messages between the controller and its ranks: one JSON object per line over TCP.

A rank without a turn sleeps in a blocking read here, outside of its backend, so the ranks of other backends
have the cores to themselves. A socket that closes says that the other side ended, however it did. Every wait
has a deadline.
"""

import json
import select
import socket
import time
from collections.abc import Iterable
from typing import Any, TypeAlias

from pycomm.benchmarks.common.ranks import GRACE_S, RankError

Message: TypeAlias = Any  # what JSON holds


class Channel:
    """One side of a connection. Close it to tell the other side to end."""

    def __init__(self, sock: socket.socket, label: str = "") -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.label, self._received = sock, label, b""

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Message) -> None:
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def recv(self, timeout: float | None = None) -> Message:
        """The next message. Raises EOFError when the other side ended, TimeoutError after timeout seconds."""
        self.sock.settimeout(timeout)
        while (message := self.poll()) is None:
            pass
        return message

    def poll(self) -> Message | None:
        """Reads once; returns a message when it is complete, else None."""
        if b"\n" not in self._received:
            data = self.sock.recv(1 << 16)
            if not data:
                raise EOFError(f"{self.label} ended")
            self._received += data
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        return json.loads(line)

    def close(self) -> None:
        self.sock.close()


def connect(address: tuple[str, int], timeout: float) -> Channel:
    """The rank's side of a channel."""
    host, port = address
    return Channel(socket.create_connection((host, port), timeout=timeout))


def gather(channels: Iterable[Channel], timeout: float, doing: str) -> list[Message]:
    """One reply from each channel, in their order. A reply is {"ok": value} or {"error": text}; doing is for
    messages.

    Raises RankError with the errors of all ranks that reported one, or named those that ended or did not
    answer in time.
    """
    replies: dict[Channel, Message] = {}
    errors, deadline = list[str](), time.monotonic() + timeout
    asked = list(channels)
    waiting = list(asked)
    while waiting and time.monotonic() < deadline:
        ready, _, _ = select.select(waiting, [], [], max(0, deadline - time.monotonic()))
        for channel in ready:
            try:
                reply = channel.poll()
            except (EOFError, OSError):
                reply = {"error": "the process ended; it may have said why on stderr"}
            if reply is None:
                continue
            waiting.remove(channel)
            if "error" in reply:
                errors.append(f"{channel.label}: {reply['error']}")
                deadline = min(deadline, time.monotonic() + GRACE_S)
            else:
                replies[channel] = reply["ok"]
    if errors:
        errors += [f"{channel.label}: no answer" for channel in waiting]
        raise RankError(f"{doing} failed.\n" + "\n".join(errors))
    if waiting:
        raise RankError(
            f"{doing}: no answer within {timeout:g} s from {', '.join(channel.label for channel in waiting)}."
        )
    return [replies[channel] for channel in asked]
