"""Messages between ranks that are threads of one process, in the place of what pycomm.parallel sends.

A message moves as late as a backend may move it: when both sides have posted it and, with `waits`, when its
receiver waits for it. Then the sent tensor is read, and the send is over. So what is freed or written too
early shows, and what nobody waits for.
"""

import threading
import weakref
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed import ReduceOp

from pycomm.groups import Group
from pycomm.parallel.ground import comm

LIMIT = 20.0  # seconds


class Mailbox:
    """waits: whether a message moves when its receiver waits, not before."""

    def __init__(self, monkeypatch, waits=True):
        self.changed, self.sent, self.waits, self.works = threading.Condition(), defaultdict(deque), waits, []
        monkeypatch.setattr(comm, "isend", self.isend)
        monkeypatch.setattr(comm, "irecv", self.irecv)

    def run(self, ranks, body):
        """[body(group)] of all ranks. Afterwards every message has come and was waited for on both sides."""
        groups = [Group("pp", ranks, rank, None) for rank in range(ranks)]
        with ThreadPoolExecutor(ranks) as pool:
            found = [each.result() for each in [pool.submit(body, group) for group in groups]]
        assert not any(self.sent.values()), "messages that nobody received"
        assert all(work.waited for work in self.works), "messages that nobody waited for"
        self.works.clear()
        return found

    def isend(self, tensor, dst, group, tag=0):
        assert tensor.is_contiguous() and dst != group.rank
        return self._post(_Work(self, tensor, (group.rank, dst, tag)), self.sent)

    def irecv(self, tensor, src, group, tag=0):
        return self._post(_Received(self, tensor, (src, group.rank, tag)), None)

    def _post(self, work, queues):
        with self.changed:
            self.works.append(work)
            if queues is not None:
                queues[work.key].append(work)
            for other in () if self.waits else self.works:
                other.move()
            self.changed.notify_all()
        return work


class _Work:
    def __init__(self, box, tensor, key):
        self.box, self.key, self.waited, self.done = box, key, False, False
        self.tensor, self.version = weakref.ref(tensor), tensor._version

    def wait(self, timeout=None):
        with self.box.changed:
            self.waited = True
            assert self.box.changed.wait_for(self.move, LIMIT), f"no message from, to, with tag {self.key}"
            self.box.changed.notify_all()
        return True

    def move(self):
        return self.done


class _Received(_Work):
    def move(self):
        queue = self.box.sent[self.key]
        if not self.done and queue:
            other = queue.popleft()
            given, into = other.tensor(), self.tensor()
            assert given is not None and into is not None, "a tensor was freed before its message came"
            assert given._version == other.version, "a tensor was written before its message came"
            assert (given.shape, given.dtype) == (into.shape, into.dtype)
            into.copy_(given)
            self.done = other.done = True
        return self.done


class Meeting:
    """all_reduce and broadcast between ranks that are threads."""

    def __init__(self, monkeypatch):
        self.given = {}
        monkeypatch.setattr(comm, "all_reduce", self.all_reduce)
        monkeypatch.setattr(comm, "broadcast", self.broadcast)

    def run(self, ranks, body):
        """[body(group)] of all ranks."""
        self.barrier = threading.Barrier(ranks, timeout=LIMIT)
        groups = [Group("world", ranks, rank, None) for rank in range(ranks)]
        with ThreadPoolExecutor(ranks) as pool:
            return [each.result() for each in [pool.submit(body, group) for group in groups]]

    def _all(self, tensor, group):
        """What all ranks have given, in order."""
        self.given[group.rank] = tensor.clone()
        self.barrier.wait()
        found = [self.given[rank] for rank in range(group.size)]
        self.barrier.wait()
        return found

    def all_reduce(self, tensor, group, op=ReduceOp.SUM, async_op=False):
        found = torch.stack(self._all(tensor, group))
        tensor.copy_({ReduceOp.SUM: found.sum, ReduceOp.MAX: found.amax, ReduceOp.MIN: found.amin}[op](0))
        return comm.Done() if async_op else None

    def broadcast(self, tensor, src, group):
        tensor.copy_(self._all(tensor, group)[src])
