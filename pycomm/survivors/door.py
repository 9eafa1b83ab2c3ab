"""How a rank tells ranks of its group from strangers at a port: both sides send a word that only ranks of the
group know, and compare it before they parse anything.

    rank a, which connects                     the door of rank b, which listens
    hello: a word of b's, and a's number  ---> reads so many bytes and no more, compares
    reads so many bytes, compares         <--- reply: another word of b's
    now both may send what they like

A connection that has not sent its word has three limits: SECONDS; the bytes of a hello; and there are never
more than MOST of them, of which the oldest is closed for a new one. A rank sends its word as soon as it is
connected, so it is let in although strangers fill the port.
"""

import contextlib
import errno
import hashlib
import hmac
import socket
import time

__all__ = ["Door", "connect", "hello_of", "is_reply", "reply_of"]

SECONDS = 5.0  # for the word
MOST = 64  # connections without it, of one port
MOST_AT_ONCE = 1024  # connections that one look takes
FULL_S = 0.02  # until the next look, where the process has no descriptor left
WORD, NUMBER = 32, 8  # bytes
HELLO = WORD + NUMBER


def _word(*parts: object) -> bytes:
    return hashlib.sha256(" ".join(map(str, ("pycomm", *parts))).encode()).hexdigest()[:WORD].encode()


def hello_of(token: str, rank: int, kind: str, number: int) -> bytes:
    """What the rank `number` sends to the door of `rank`. kind: what it wants there."""
    return _word("hello", kind, token, rank) + b"%0*d" % (NUMBER, number)


def reply_of(token: str, rank: int, kind: str) -> bytes:
    return _word("reply", kind, token, rank)


def is_reply(said: bytes, token: str, rank: int, kind: str) -> bool | None:
    """Whether bytes begin with the reply of a door; None: too few of them."""
    return None if len(said) < WORD else hmac.compare_digest(said[:WORD], reply_of(token, rank, kind))


def connect(own_ip: str, ip: str, port: int) -> tuple[socket.socket, int]:
    """(a socket that connects to a port, 0 or an error number), without waiting."""
    connection = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # the system chooses
        connection.bind((own_ip, 0))
    status = connection.connect_ex((ip, port))
    return connection, 0 if status == errno.EINPROGRESS else status


class _Guest:
    """A connection that has not sent its word. number: of the rank once it has, -1: it will not."""

    def __init__(self) -> None:
        self.since, self.read = time.monotonic(), bytearray()
        self.number: int | None = None


class Door:
    """Of one port and one kind of visits. listening: a socket. Attribute: waiting: {connection: _Guest}."""

    def __init__(self, listening: socket.socket, token: str, rank: int, kind: str) -> None:
        self.socket = listening
        self.waiting: dict[socket.socket, _Guest] = {}
        self._word, self._reply = _word("hello", kind, token, rank), reply_of(token, rank, kind)

    def look(self) -> tuple[list[tuple[socket.socket, int]], list[socket.socket]]:
        """([(connection, number of the rank)] that are let in, [connection] that are closed), without
        waiting.
        """
        let_in: list[tuple[socket.socket, int]] = []
        ended, now = self._accept(), time.monotonic()
        for connection, guest in list(self.waiting.items()):
            self._read(connection, guest)
            if guest.number is None and now - guest.since < SECONDS:
                continue
            del self.waiting[connection]
            if guest.number is None or guest.number < 0:
                connection.close()
                ended.append(connection)
            else:
                let_in.append((connection, guest.number))
        return let_in, ended

    def close(self) -> None:
        """Ends those that wait; the port stays."""
        for connection in self.waiting:
            connection.close()
        self.waiting.clear()

    def _accept(self) -> list[socket.socket]:
        """Takes who waits at the port. Returns those that it has closed for others."""
        ended = []
        for _ in range(MOST_AT_ONCE):
            try:
                connection, _ = self.socket.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # it is still there at the next look
                    time.sleep(FULL_S)
                if error.errno == errno.ECONNABORTED:
                    continue
                break
            connection.setblocking(False)
            if len(self.waiting) >= MOST and (oldest := self._oldest()) is not None:
                del self.waiting[oldest]
                oldest.close()
                ended.append(oldest)
            guest = self.waiting[connection] = _Guest()
            self._read(connection, guest)
        return ended

    def _oldest(self) -> socket.socket | None:
        return next((one for one, guest in self.waiting.items() if guest.number is None), None)

    def _read(self, connection: socket.socket, guest: _Guest) -> None:
        if guest.number is not None:
            return
        try:
            while len(guest.read) < HELLO:
                data = connection.recv(HELLO - len(guest.read))
                if not data:
                    raise ConnectionError("the other side has ended")
                guest.read += data
            if not hmac.compare_digest(bytes(guest.read[:WORD]), self._word):
                raise ConnectionError("a stranger")
            number = int(guest.read[WORD:])
            connection.sendall(self._reply)  # the first bytes, and few: there is room
            guest.number = number
        except BlockingIOError:
            return
        except (OSError, ValueError):
            guest.number = -1
