"""Ranks as forked processes for the tests of faults: a test can kill, stop and question each.

Each child runs body(comm, link); the test talks to it through a pipe (`link`). Every wait has a limit, in the test (LIMIT) and in the
children (an alarm that ends them), so a hang is a failure and not a stuck machine.

[Note: how fast is fast] The contract is 0.2 s from the death to the error on every survivor. Both moments are read from CLOCK_MONOTONIC,
which all processes of a machine share. The tests run with more ranks than cores beside other jobs, so they ask for the contract in the
median over all survivors and tries of a test, and for HARD_LIMIT always.
"""

import contextlib
import os
import signal
import statistics
import tempfile
import time
from multiprocessing.connection import Pipe

import torch

from pycomm import Communicator

CONTRACT, HARD_LIMIT = 0.2, 1.0  # seconds, see the note above
LIMIT = 20.0  # seconds that a test waits for a message of a child


class Group:
    """`world_size` forked ranks of a group, each running body(comm, link). What is left of them is killed at the end."""

    def __init__(self, world_size, body, **options):
        self.world_size = world_size
        self.pids, self.links = [], []
        self._folder = tempfile.TemporaryDirectory(prefix="pycomm-")
        for rank in range(world_size):
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                for link in [*self.links, ours]:
                    link.close()
                _child(rank, world_size, body, theirs, os.path.join(self._folder.name, "store"), options)
            theirs.close()
            self.pids.append(pid)
            self.links.append(ours)

    def __enter__(self):
        self.expect("ready")
        return self

    def __exit__(self, *ignored):
        for rank in range(self.world_size):
            self.kill(rank)
        for link in self.links:
            link.close()
        for pid in self.pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._folder.cleanup()

    def get(self, rank):
        assert self.links[rank].poll(LIMIT), f"rank {rank} said nothing for {LIMIT} s: it hangs"
        return self.links[rank].recv()

    def expect(self, message):
        """The next message of every rank is this one."""
        for rank in range(self.world_size):
            answer = self.get(rank)
            assert answer == message, f"rank {rank}: {answer}"

    def send(self, *ranks):
        for rank in ranks:
            self.links[rank].send("go")

    def kill(self, rank, number=signal.SIGKILL):
        """Returns the moment just before the signal."""
        now = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], number)
        return now

    def others(self, *ranks):
        return [rank for rank in range(self.world_size) if rank not in ranks]


def _child(rank, world_size, body, link, path, options):
    """Never returns. Says what the body returned or raised, then stays until it is killed, so that its own end disturbs nobody."""
    signal.alarm(60)
    torch.set_num_threads(1)
    try:
        options.setdefault("timeout", 30.0)
        comm = Communicator(torch.distributed.FileStore(path, world_size), rank, world_size, **options)
        link.send("ready")
        result = body(comm, link)
    except BaseException as error:
        result = failure(error)
    link.send(result)
    signal.pause()
    os._exit(0)


def failure(error):
    """What a test wants to know about an error, and when it came."""
    facts = {name: getattr(error, name, None) for name in ("peer", "op", "rank")}
    return {"kind": type(error).__name__, "text": str(error), "when": time.monotonic(), **facts}


def attempt(call, *args, **options):
    """(seconds, failure or result) of a call."""
    start = time.monotonic()
    try:
        result = call(*args, **options)
    except Exception as error:
        result = failure(error)
    return time.monotonic() - start, result


def check_named(report, dead, phase=""):
    assert isinstance(report, dict), f"{phase}: a survivor raised nothing: {report!r}"
    assert (report["kind"], report["peer"]) == ("PeerError", dead), report
    assert f"rank {dead} " in report["text"] and f"[rank {report['rank']}/" in report["text"], report


def check_delays(delays):
    assert max(delays) <= HARD_LIMIT, delays
    assert statistics.median(delays) <= CONTRACT, delays
