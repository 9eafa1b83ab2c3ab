"""A store in the point of a rank: values by key, for the ranks of its group and for groups that they make.

    rank 2   PointStore(point, 0)  ---- {"ask": "store", "do": "add", "key": ..., "value": 1} ---->  point of
    rank 0
    rank 0   PointStore(point, 0)       asks itself

It is there as long as the point ([Note: how long a point lives]), and raises as soon as that has ended.

What lost: a TCPStore of torch's. A client tries for its whole time limit to reach one that has just ended,
and prints what it thinks of that.
"""

import contextlib
import datetime
import json
import socket
import threading
import time

import torch.distributed as dist

from pycomm.errors import PeerError
from pycomm.survivors.door import WORD, hello_of, is_reply
from pycomm.survivors.points import ASK

__all__ = ["PointStore"]

LIMIT_S = 30.0  # for an answer of a point
LONGEST_WAIT_S = 300.0
POLL_S = 0.005


class PointStore(dist.Store):  # names of methods: signature of torch.distributed's
    """point: of this rank. rank: whose point has the values. host: its address. watcher: called by who waits,
    may raise; None: nobody is watched.
    """

    def __init__(self, point, rank, watcher=None):
        super().__init__()
        self.point, self.rank, self.watcher = point, rank, watcher
        self.host = point.places[rank].ip
        self._socket, self._read, self._number, self._lock = None, b"", 0, threading.Lock()

    def set(self, key, value):
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._ask("set", key, data.decode("latin-1"))

    def get(self, key):
        self.wait([key])
        return self._ask("get", key).encode("latin-1")

    def add(self, key, value):
        self._watch()
        return self._ask("add", key, value)

    def check(self, keys):
        self._watch()
        return self._ask("check", list(keys))

    def wait(self, keys, timeout=None):
        limit = datetime.timedelta(seconds=LONGEST_WAIT_S) if timeout is None else timeout
        end = time.monotonic() + limit.total_seconds()
        while not self.check(keys):
            if time.monotonic() > end:
                raise dist.DistStoreError(f"wait timeout after {limit.total_seconds():g} s, keys: {keys}")
            time.sleep(POLL_S)

    def num_keys(self):
        return self._ask("number", "")

    def deleteKey(self, key):  # noqa: N802
        return self._ask("delete", key)

    delete_key = deleteKey

    def close(self):
        with self._lock:
            self._end()

    def _watch(self):
        if self.watcher is not None:
            self.watcher()

    def _ask(self, do, key, value=None):
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

    def _exchange(self, question):
        self._number += 1
        question = {"id": self._number, **question}
        if self._socket is None:
            self._connect()
        self._socket.sendall(json.dumps(question).encode() + b"\n")
        while b"\n" not in self._read:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionError("the other side has ended")
            self._read += data
        line, self._read = self._read.split(b"\n", 1)
        return json.loads(line)["value"]

    def _connect(self) -> None:
        token, rank, said = self.point.token, self.rank, b""
        self._socket, self._read = socket.create_connection(self.point.places[rank][:2], LIMIT_S), b""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(hello_of(token, rank, ASK, self.point.rank))
        while is_reply(said, token, rank, ASK) is None:
            data = self._socket.recv(WORD - len(said))
            if not data:
                raise ConnectionError("the other side has ended")
            said += data
        if not is_reply(said, token, rank, ASK):
            raise ConnectionError("somebody else answers there")

    def _end(self):
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def __del__(self):
        with contextlib.suppress(Exception):
            self._end()
