"""Ranks as forked processes for the tests of faults: a test can kill, stop and question each.

Each child runs body(comm, link); the test talks to it through a pipe (`link`). Every wait has a limit, in the
test (LIMIT) and in the children (an alarm that ends them), so a hang is a failure and not a stuck machine.

[Note: how fast is fast] The contract is 0.2 s from the death to the error on every survivor. Both moments are
read from CLOCK_MONOTONIC, which all processes of a machine share. The tests ask for the contract in the
median over all survivors and tries of a test, and for HARD_LIMIT always. They run with more ranks than cores
beside other jobs: the time for which a process was ready and had no core (Linux counts it in schedstat) is
nobody's delay, and is taken off. So a busy machine fails no test, and on a free one next to nothing is taken
off.
"""

import contextlib
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from pycomm import Communicator
from pycomm.testing import RankProcesses
from pycomm.testing.groups import hosts_of

CONTRACT, HARD_LIMIT = 0.2, 1.0  # seconds, see the note above
LIMIT = 20.0  # seconds that a test waits for a message of a child


def queued(pid="self"):
    """Seconds for which the threads of a process were ready and had no core, since it began."""
    total = 0
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with (
                contextlib.suppress(OSError, IndexError),
                open(f"/proc/{pid}/task/{thread}/schedstat") as stat,
            ):
                total += int(stat.read().split()[1])
    return total * 1e-9


def state_of(pid):
    """R, S, ... of the main thread of a process, as in proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Seconds(NamedTuple):
    wall: float
    own: float  # without the time without a core


class Moment(NamedTuple):
    when: float
    queued: dict  # by process


class Group:
    """`world_size` forked ranks of a group, each running body(comm, link); hosts: of each rank, as for
    run_ranks. operation_timeout: seconds, once the group is there. What is left of them is killed at the end.
    """

    def __init__(self, world_size, body, hosts=None, **options):
        self.world_size = world_size
        options["hosts"] = None if hosts is None else hosts_of(hosts, world_size)
        self._folder = tempfile.TemporaryDirectory(prefix="pycomm-")
        store = os.path.join(self._folder.name, "store")
        self._ranks = RankProcesses(world_size, _rank, world_size, body, store, options, limit=60)
        self.links = self._ranks.links
        self.pids = [process.pid for process in self._ranks.processes.values()]

    def __enter__(self):
        self.expect("ready")
        return self

    def __exit__(self, *ignored):
        self._ranks.close()
        self._folder.cleanup()

    def get(self, rank):
        return self._ranks.recv(rank, LIMIT)

    def expect(self, message):
        """The next message of every rank is this one."""
        for rank in range(self.world_size):
            answer = self.get(rank)
            assert answer == message, f"rank {rank}: {answer}"

    def send(self, *ranks):
        for rank in ranks:
            self.links[rank].send("go")

    def moment(self, when=None):
        """Now, or `when`, which a rank has just sent."""
        at = {pid: queued(pid) for pid in self.pids}
        return Moment(time.monotonic() if when is None else when, at)

    def delays(self, then, reports, dead=None):
        """Seconds from `then` to the failures that survivors report; dead: who had to end first."""
        victim = 0.0 if dead is None else max(0.0, queued(self.pids[dead]) - then.queued[self.pids[dead]])
        return [
            report["when"] - then.when - victim - (report["queued"] - then.queued[report["pid"]])
            for report in reports
        ]

    def asleep(self, *ranks):
        """Returns when their main threads sleep, as in a wait: after a while, two looks in a row. A rank that
        has no core to come to its wait is ready, not asleep.
        """
        deadline = time.monotonic() + LIMIT
        for rank in ranks:
            looks = 0
            while looks < 2:
                time.sleep(0.03)
                looks = looks + 1 if state_of(self.pids[rank]) == "S" else 0
                assert time.monotonic() < deadline, f"rank {rank} does not sleep"

    def kill(self, rank, number=signal.SIGKILL):
        """Returns the moment just before the signal."""
        now = self.moment()
        self._ranks.kill(rank, number)
        return now

    def join(self, rank):
        self._ranks.processes[rank].join(LIMIT)

    def others(self, *ranks):
        return [rank for rank in range(self.world_size) if rank not in ranks]


def _rank(rank, link, world_size, body, path, options):
    """Says what the body returned or raised, then stays until it is killed, so that its own end disturbs
    nobody.
    """
    try:
        store = torch.distributed.FileStore(path, world_size)
        hosts = options.pop("hosts")
        options["_host"] = None if hosts is None else f"host{hosts[rank]}"
        limit = options.pop("operation_timeout", None)
        comm = Communicator(store, rank, world_size, **{"timeout": 30.0, **options})
        if limit is not None:
            comm._set_timeout(limit)
        link.send("ready")
        result = body(comm, link)
    except BaseException as error:
        result = failure(error)
    link.send(result)
    signal.pause()


def failure(error):
    """What a test wants to know about an error, and when it came."""
    facts = {name: getattr(error, name, None) for name in ("peer", "op", "rank", "world_size")}
    when = {"when": time.monotonic(), "queued": queued(), "pid": os.getpid()}
    return {"kind": type(error).__name__, "text": str(error), **when, **facts}


def attempt(call, *args, **options):
    """(Seconds, failure or result) of a call."""
    before, start = queued(), time.monotonic()
    try:
        result = call(*args, **options)
    except Exception as error:
        result = failure(error)
    wall = time.monotonic() - start
    return Seconds(wall, max(0.0, wall - (queued() - before))), result


def check_named(report, dead, phase=""):
    assert isinstance(report, dict), f"{phase}: a survivor raised nothing: {report!r}"
    assert (report["kind"], report["peer"]) == ("PeerError", dead), report
    assert f"rank {dead} " in report["text"] and f"[rank {report['rank']}/" in report["text"], report


def check_delays(delays):
    assert max(delays) <= HARD_LIMIT, delays
    assert statistics.median(delays) <= CONTRACT, delays
