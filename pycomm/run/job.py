"""The ranks of a job on one host: started, watched, replaced, ended.

    place      0              1                       2
    process    runs           killed                  runs
                              |-- replacement 1 --> waits in the store -> taken in at a snapshot -> runs
    end        status 0       status 0                status 0            job: 0

The store of the ranks is in this process, so that it outlives any of them. Each rank has a session of its
own: Ctrl-C comes to this process alone, which passes it on, and what a rank has started ends with it.

A replacement is a process of the same command with PYCOMM_REPLACEMENT. It is of use to a script that takes it
in (pycomm.parallel.resilient); with any other the ranks fail after a death, and the replacement, which nobody
has taken in, ends with them.

The job's status is 0 if a rank ended with 0 and none with an error of its own: ranks that were killed are
what the others go on without. Else it is that of the first error, 128 + n for a signal n.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from types import FrameType

from pycomm import env
from pycomm.groups import has_joined
from pycomm.ports import make_store
from pycomm.run.output import Output

__all__ = ["Job", "Settings"]

LOOPBACK = "127.0.0.1"
POLL_S = 0.05
GRACE_S = 5.0  # between SIGINT or SIGTERM and SIGKILL
SIGNALLED = 128


@dataclasses.dataclass(frozen=True)
class Settings:
    """nproc: ranks. replacements: how many processes may take the places of dead ones, in all. command: the
    script, or -m and a module, with its arguments.
    """

    nproc: int
    replacements: int
    command: list[str]


@dataclasses.dataclass
class _Process:
    place: int  # the rank at first
    number: int  # of the replacement; 0: one of the first processes
    popen: subprocess.Popen[bytes]

    def __str__(self) -> str:
        return f"rank {self.place}" if not self.number else f"rank {self.place}, replacement {self.number}"


class Job:
    def __init__(self, settings: Settings) -> None:
        self.settings, self.started, self.error, self.finished = settings, 0, 0, False
        self.running: list[_Process] = []
        self.store = make_store(LOOPBACK)
        self.output = Output()
        self.stopping: tuple[int, float] | None = None  # signal passed on, when the rest is killed

    def run(self) -> int:
        """Until all have ended. Returns the status."""
        kept = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with self.output:
                for place in range(self.settings.nproc):
                    self._start(place, 0)
                while self.running:
                    self.output.pump(POLL_S)
                    self._look()
                self._drain()
        finally:
            self._kill()
            for number, handler in kept.items():
                signal.signal(number, handler)
        if self.stopping:
            return SIGNALLED + self.stopping[0]
        return self.error

    def _start(self, place: int, number: int) -> None:
        command = [sys.executable, "-u", "-m", "pycomm.run.rank", str(os.getpid()), *self.settings.command]
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=self._environment(place, number),
        )
        assert popen.stdout is not None and popen.stderr is not None  # pipes
        process = _Process(place, number, popen)
        self.running.append(process)
        name = f"rank {place}" + (f"'{number}" if number else "")
        self.output.add(popen.stdout, name, sys.stdout.buffer)
        self.output.add(popen.stderr, name, sys.stderr.buffer)

    def _environment(self, place: int, number: int) -> dict[str, str]:
        nproc = self.settings.nproc
        return env.for_child(
            RANK=place,
            LOCAL_RANK=place,
            WORLD_SIZE=nproc,
            LOCAL_WORLD_SIZE=nproc,
            MASTER_ADDR=LOOPBACK,
            MASTER_PORT=self.store.port,
            TORCHELASTIC_USE_AGENT_STORE=True,  # torch: rank 0 need not make the store
            TORCHELASTIC_RESTART_COUNT=0,
            TORCHELASTIC_RUN_ID="pycomm.run",
            PYCOMM_REPLACEMENT=number,
            **env.threads_of_ranks(nproc),
        )

    def _look(self) -> None:
        """Who has ended, and what follows from it."""
        for process in [process for process in self.running if process.popen.poll() is not None]:
            self.running.remove(process)
            _end_session(process, signal.SIGKILL)  # what it has started, and left
            if not self.stopping:
                self._ended(process, process.popen.returncode)
        if self.stopping and time.monotonic() > self.stopping[1]:
            self._kill()
        elif not self.stopping and self.running and all(map(self._waits, self.running)):
            self._say("nobody is left to take a replacement in")
            self._kill()

    def _ended(self, process: _Process, status: int) -> None:
        if status == 0:
            self.finished = True
            return
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        if self._waits(process):
            how += " before it was taken in"
        if not self.finished and self.running and self.started < self.settings.replacements:
            self.started += 1
            self._say(f"{process} {how}: replacement {self.started} of {self.settings.replacements} at most")
            self._start(process.place, self.started)
            return
        self._say(f"{process} {how}, and is not replaced")
        if status > 0 or not self.running:
            self.error = self.error or (status if status > 0 else SIGNALLED - status)

    def _waits(self, process: _Process) -> bool:
        return process.number > 0 and not has_joined(self.store, process.number)

    def _say(self, text: str) -> None:
        print(f"pycomm.run: {text}", file=sys.stderr, flush=True)

    def _drain(self) -> None:
        """What the last of them have printed."""
        self.output.pump(0)
        self.output.pump(0)

    def _stop(self, number: int, _: FrameType | None) -> None:
        """Ctrl-C or SIGTERM: the ranks get it, too, and a moment to end; the second time they are killed."""
        first = self.stopping is None
        self.stopping = self.stopping or (number, time.monotonic() + GRACE_S)
        for process in self.running:
            _end_session(process, number if first else signal.SIGKILL)

    def _kill(self) -> None:
        for process in self.running:
            _end_session(process, signal.SIGKILL)
        for process in self.running:
            process.popen.wait()
        self.running = []


def _end_session(process: _Process, number: int) -> None:
    """A signal to a rank and to what it has started."""
    try:
        os.killpg(process.popen.pid, number)
    except ProcessLookupError:
        return
