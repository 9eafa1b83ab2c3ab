"""A store in the point of a rank: values by key, for the ranks of its group and for groups that they make.

    rank 2   PointStore(point, 0)  ---- {"ask": "store", "do": "add", "key": ..., "value": 1} ---->  point of
    rank 0
    rank 0   PointStore(point, 0)       asks itself

It is there as long as the point ([Note: how long a point lives]), and raises as soon as that has ended.

What lost: a TCPStore of torch's. A client tries for its whole time limit to reach one that has just ended,
and prints what it thinks of that.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch.distributed as dist

from pycomm.errors import PeerError
from pycomm.survivors.door import WORD, hello_of, is_reply
from pycomm.survivors.points import ASK, Point
from pycomm.survivors.slots import Question

__all__ = ["PointStore"]

LIMIT_S = 30.0  # for an answer of a point
LONGEST_WAIT_S = 300.0
POLL_S = 0.005

Do: TypeAlias = Literal["set", "get", "add", "check", "number", "delete"]


class PointStore(dist.Store):  # names of methods: signature of torch.distributed's
    """point: of this rank. rank: whose point has the values. host: its address. watcher: called by who waits,
    may raise; None: nobody is watched.
    """

    def __init__(self, point: Point, rank: int, watcher: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.point, self.rank, self.watcher = point, rank, watcher
        self.host = point.places[rank].ip
        self._socket: socket.socket | None = None
        self._read, self._number, self._lock = b"", 0, threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._ask("set", key, data.decode("latin-1"))

    def get(self, key: str) -> bytes:
        self.wait([key])
        text: str = self._ask("get", key)
        return text.encode("latin-1")

    def add(self, key: str, value: int) -> int:
        self._watch()
        return int(self._ask("add", key, value))

    def check(self, keys: list[str]) -> bool:
        self._watch()
        return bool(self._ask("check", list(keys)))

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        limit = datetime.timedelta(seconds=LONGEST_WAIT_S) if timeout is None else timeout
        end = time.monotonic() + limit.total_seconds()
        while not self.check(keys):
            if time.monotonic() > end:
                raise dist.DistStoreError(f"wait timeout after {limit.total_seconds():g} s, keys: {keys}")
            time.sleep(POLL_S)

    def num_keys(self) -> int:
        return int(self._ask("number", ""))

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        return bool(self._ask("delete", key))

    delete_key = deleteKey

    def close(self) -> None:
        with self._lock:
            self._end()

    def _watch(self) -> None:
        if self.watcher is not None:
            self.watcher()

    def _ask(self, do: Do, key: str | list[str], value: str | int | None = None) -> Any:
        question = {"ask": "store", "do": do, "key": key, "value": value}
        if self.rank == self.point.rank:
            return self.point.answer(question)["value"]
        with self._lock:
            try:
                return self._exchange(question)
            except (OSError, ValueError, KeyError) as error:
                self._end()
                name = self.point.name(self.rank)
                text = f"the store of {name} does not answer: {error or type(error).__name__}"
                raise PeerError(text, rank=self.point.rank, peer=self.rank) from error

    def _exchange(self, question: Question) -> Any:
        self._number += 1
        question = {"id": self._number, **question}
        connection = self._socket or self._connect()
        connection.sendall(json.dumps(question).encode() + b"\n")
        while b"\n" not in self._read:
            data = connection.recv(1 << 16)
            if not data:
                raise ConnectionError("the other side has ended")
            self._read += data
        line, self._read = self._read.split(b"\n", 1)
        return json.loads(line)["value"]

    def _connect(self) -> socket.socket:
        token, rank, said = self.point.token, self.rank, b""
        connection = socket.create_connection(self.point.places[rank][:2], LIMIT_S)
        self._socket, self._read = connection, b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(hello_of(token, rank, ASK, self.point.rank))
        while is_reply(said, token, rank, ASK) is None:
            data = connection.recv(WORD - len(said))
            if not data:
                raise ConnectionError("the other side has ended")
            said += data
        if not is_reply(said, token, rank, ASK):
            raise ConnectionError("somebody else answers there")
        return connection

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._end()
