"""Starts the ranks of every backend and keeps a channel to each.

    controller --+-- team "pycomm"   rank 0, rank 1, ...    forked from one process that has imported torch
                 +-- team "gloo"     rank 0, rank 1, ...    the same
                 +-- team "mpi"      mpiexec -- rank 0, rank 1, ...
                 +-- with CUDA       a new interpreter for each rank, or one for ranks that are threads

CUDA's settings are read when it is first used, and a process that has used it must not fork: hence new
interpreters. All teams live for the whole run and take turns (runner.py). Under torchrun each of its
processes starts its own rank of every torch backend, and the one with RANK 0 is the controller as well; MPI's
ranks are then started by mpiexec on that node. Ranks are told where the controller listens, and torch's
store, through `spec` (worker.main); only processes that were started here are ended here.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pycomm import env
from pycomm.benchmarks.collectives import deepspeed_shm, mpi, worker
from pycomm.benchmarks.collectives.backends import can_be_threads, is_mpi
from pycomm.benchmarks.collectives.channel import Channel, Message, gather
from pycomm.benchmarks.common.ranks import RankError
from pycomm.testing import RankProcesses

if TYPE_CHECKING:
    from types import TracebackType

    from pycomm.benchmarks.collectives.runner import Options
    from pycomm.benchmarks.collectives.spec import Spec
    from pycomm.testing import emulated
    from pycomm.testing.processes import Method
# for all ranks to import, connect and form groups; many ranks on few cores are slow
START_TIMEOUT_S, START_TIMEOUT_OF_RANK_S = 90.0, 2.0
# after a rank's own limit (worker.serve): it prints where it hangs before the controller gives up
WATCHDOG_LEAD_S = 3.0
END_TIMEOUT_S = 15.0  # for ranks to end by themselves


class Team:
    """The ranks of one backend."""

    def __init__(self, name: str, version: str, channels: Sequence[Channel]) -> None:
        self.name, self.version, self.channels = name, version, channels

    def ask(self, timeout: float, doing: str, command: str, *arguments: Message) -> list[Message]:
        """Sends a command to every rank and returns their replies by rank. Raises RankError."""
        try:
            for channel in self.channels:
                channel.send([command, *arguments])
        except OSError:
            pass  # that rank ended; gather says which
        return gather(self.channels, timeout + WATCHDOG_LEAD_S, f"{self.name}: {doing}")


class Ranks:
    """The processes started by this one: all ranks when it works alone, one of each torch backend under
    torchrun.
    """

    def __init__(self) -> None:
        self.teams: list[RankProcesses] = []
        self.commands: list[subprocess.Popen[bytes]] = []

    def start(self, spec: Spec, ranks: Iterable[int]) -> None:
        """The ranks of a backend of torch's or ours."""
        if spec["threads"]:
            ranks = [0]
        # torch is imported once, in a process that has no threads yet
        multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "numpy"])
        fresh = spec["threads"] or spec["device"] == "cuda"
        method: Method = "spawn" if fresh else "forkserver"
        self.teams.append(RankProcesses(ranks, worker.main, spec, method=method))

    def start_mpi(self, spec: Spec, found: mpi.Mpi) -> None:
        text = json.dumps({**spec, "site": found.site})
        command = [*found.before, found.mpiexec, *found.flags, "-n", str(spec["ranks"])]
        command += [sys.executable, "-m", worker.__name__, text]
        child_env = env.for_child(MPI4PY_LIBMPI=found.library, OMP_NUM_THREADS=1, **found.variables)
        self.commands.append(
            subprocess.Popen(command, env=child_env, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        )

    def failed(self) -> list[str]:
        """What ended with an error so far."""
        found = [
            f"rank process {process.pid} (exit status {process.exitcode})"
            for team in self.teams
            for process in team.processes.values()
            if process.exitcode
        ]
        return found + [
            f"{Path(cast(list[str], p.args)[0]).name} {p.pid} (exit status {p.returncode})"
            for p in self.commands
            if p.poll()
        ]

    def join(self, timeout: float | None = None) -> None:
        """Waits until all have ended, for timeout seconds at most."""
        deadline = None if timeout is None else time.monotonic() + timeout
        waits: list[Callable[[float | None], object]] = [team.join for team in self.teams]
        waits += [process.wait for process in self.commands]
        for wait in waits:
            try:
                wait(None if deadline is None else max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass

    def end(self) -> None:
        """Ends those that are still there; mpiexec gently at first: it passes SIGTERM on to its ranks."""
        for team in self.teams:
            team.close()
        for stop in ("terminate", "kill"):
            for process in self.commands:
                if process.poll() is None:
                    getattr(process, stop)()
            self.join(5)
        self.teams = []


class Controller:
    """Has all teams. A context manager: leaving it ends every rank."""

    start_limit: float

    def __init__(
        self,
        options: Options,
        host: str,
        store: tuple[str, int],
        ranks: Iterable[int],
        *,
        tell: Callable[[Spec], object] = lambda spec: None,
        hosts: emulated.Hosts | None = None,
    ) -> None:
        """Listens on host; store is torch's; ranks are those to start here; tell(spec) lets
        others start theirs; hosts: emulated ones for the ranks, or None.
        """
        self.hosts, self.opened = hosts, contextlib.ExitStack()
        self.options, self.ranks_here = options, ranks
        self.ranks, self.teams = Ranks(), list[Team]()
        self.pending: list[Channel] = []  # of ranks that have not said who they are
        # backend -> rank -> channel
        self.found: dict[str, dict[int, Channel]] = {name: {} for name in options.backends}
        self.versions: dict[str, str] = {}
        self.listener = socket.create_server((host, 0))
        self.spec: Spec = {
            "address": self.listener.getsockname()[:2],
            "token": secrets.token_hex(16),
            "store": store,
            "threads": False,
            "site": None,
            "keepers": None if hosts is None else [hosts.keepers[host].pid for host in hosts.placement],
            "hosts": None if hosts is None else [hosts.names[host] for host in hosts.placement],
            "ranks": options.ranks,
            "groups": options.groups,
            "timeout": options.timeout,
            "sessions": options.sessions,
            "device": options.device,
            "ranks_per_gpu": options.sharing,
            "registered": options.registered,
            "graph": options.graph,
        }
        tell(self.spec)

    def __enter__(self) -> Controller:
        try:
            self._start()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def _start(self) -> None:
        names, options = self.options.backends, self.options
        installations = {name: mpi.find_mpi(name, options.mpi_root) for name in names if is_mpi(name)}
        hosts = self.hosts
        if hosts is not None:
            installations = {
                name: mpi.over_hosts(found, hosts, self.folder()) for name, found in installations.items()
            }
        for name in names:
            threads = options.ranks_as == "threads" and can_be_threads(name)
            spec: Spec = {**self.spec, "backend": name, "threads": threads}
            if name == "deepspeed":
                deepspeed_shm.build()
            if name in installations:
                self.ranks.start_mpi(spec, installations[name])
            else:
                self.ranks.start(spec, self.ranks_here)
        self.start_limit = START_TIMEOUT_S + START_TIMEOUT_OF_RANK_S * options.ranks * len(names)
        deadline = time.monotonic() + self.start_limit
        while any(len(channels) < options.ranks for channels in self.found.values()):
            self._accept(deadline)
        self.teams = [
            Team(name, self.versions[name], [channels[rank] for rank in sorted(channels)])
            for name, channels in self.found.items()
        ]

    def folder(self) -> str:
        """For what an MPI must read; gone with the controller."""
        return self.opened.enter_context(tempfile.TemporaryDirectory(prefix="pycomm-mpi-"))

    def _accept(self, deadline: float) -> None:
        """Takes ranks in. A rank connects before it forms its group, so its hello may be far behind."""
        self.pending += self._connected()
        for channel in list(self.pending):
            channel.sock.settimeout(0.01)
            try:
                hello = channel.poll()
            except TimeoutError:
                continue
            except (EOFError, OSError):
                self.pending.remove(channel)
                continue
            if hello is not None and hello.get("hello") == self.spec["token"]:
                self.pending.remove(channel)
                self._welcome(channel, hello)
        missing = [
            f"{name} rank {r}"
            for name, ranks in self.found.items()
            for r in range(self.options.ranks)
            if r not in ranks
        ]
        names = ", ".join(missing)
        if missing and (failed := self.ranks.failed()):
            raise RankError(f"{', '.join(failed)} ended before the ranks were there; missing: {names}.")
        if missing and time.monotonic() > deadline:
            raise RankError(f"not there after {self.start_limit:g} s: {names}.")

    def _connected(self) -> list[Channel]:
        self.listener.settimeout(0.05)
        try:
            return [Channel(self.listener.accept()[0])]
        except TimeoutError:
            return []

    def _welcome(self, channel: Channel, hello: Mapping[str, Message]) -> None:
        name = hello["backend"]
        if "error" in hello:
            raise RankError(f"{name}: a rank could not start.\n{hello['error']}")
        channel.sock.settimeout(self.options.timeout)
        channel.label = f"rank {hello['rank']}"
        self.found[name][hello["rank"]] = channel
        self.versions[name] = hello["version"]

    def __exit__(
        self,
        *error: type[BaseException] | BaseException | TracebackType | None,
    ) -> None:
        connected = [channel for channels in self.found.values() for channel in channels.values()]
        for channel in self.pending + connected:
            channel.close()
        self.listener.close()
        if error[0] is None:
            self.ranks.join(END_TIMEOUT_S)
        self.ranks.end()
        self.opened.close()
