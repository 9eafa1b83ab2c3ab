"""Runs a program: its processes, forked, with the ranks of each as threads; its fault, and its limit of time.

    this process                          process 0: ranks 0 1         process 1: rank 2
    progress[0] <-- operation under way -- |  strands 0 1, each
    fault due: SIGKILL, or SIGSTOP ------> |  rank's own threads
    <------------------ report ----------- |
    ------------------- go --------------> |   closes its groups, ends

Survivors of a SIGKILL stay until all have reported: one that left would be missed by the rest.
"""

import datetime
import faulthandler
import functools
import mmap
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

import pycomm
from pycomm import env
from pycomm.testing import RankProcesses
from random_programs.strand import Strand
from random_programs.waiting import WrongError

LIMIT = 90.0  # seconds for a program; most take a tenth of one
GROUP_TIMEOUT = 40.0  # of an operation; nothing here should come near it
GRACE = 3.0


class Outcome(NamedTuple):
    """failures: what was wrong, as text. operations: results that were compared. errors: PeerErrors that the
    fault explains. struck: the fault came before its process had ended.
    """

    failures: list
    operations: int
    errors: int
    struck: bool
    seconds: float


class Progress:
    """In memory that all share: what operation each process has come to, and which ranks have made the groups
    of the beginning.
    """

    def __init__(self, processes, ranks):
        self.view = memoryview(mmap.mmap(-1, 8 * processes)).cast("q")
        self.joined = memoryview(mmap.mmap(-1, ranks))
        for i in range(processes):
            self.view[i] = -1

    def all_joined(self):
        """No fault comes before, since a death is an error of whoever is still making a group."""
        return all(self.joined)


def run(program, limit=LIMIT, grace=GRACE, gdb=True):
    """gdb: where it is there and a program hangs, the stacks in C++ too, which takes half a minute."""
    start, progress = time.monotonic(), Progress(len(program.processes), program.world_size)
    with tempfile.TemporaryDirectory(prefix="pycomm-") as folder:
        args = (program, folder, progress)
        with RankProcesses(len(program.processes), _process, *args, limit=limit + 30) as processes:
            watch = _Watch(program, processes, progress, folder, (start + limit, grace), gdb)
            watch.run()
    counts = watch.reports.values()
    operations, errors = (sum(report[name] for report in counts) for name in ("operations", "errors"))
    return Outcome(
        watch.failures, operations, errors, watch.fault_state not in ("none", "due"), time.monotonic() - start
    )


class _Watch:
    """What the process that started the others does until they have ended."""

    def __init__(self, program, processes, progress, folder, limits, gdb):
        self.program, self.processes, self.progress = program, processes, progress
        self.folder, self.fault, (self.deadline, self.grace) = folder, program.fault, limits
        self.fault_state, self.reports, self.failures = "due" if program.fault else "none", {}, []
        self.killed = set()
        self.gdb = gdb

    def run(self):
        waiting = set(range(len(self.program.processes)))
        self.until_empty(waiting, self.take_report)
        if self.failures:
            return
        ending = set(self.reports) - self.killed
        for process in ending:
            self.processes.links[process].send("go")
        self.until_empty(ending, self.take_end)

    def until_empty(self, waiting, take):
        while waiting:
            self.strike()
            for process in sorted(waiting):
                try:
                    message = self.processes.recv(process, 0)
                except TimeoutError:
                    continue
                except ChildProcessError as death:
                    waiting.discard(process)
                    if process not in self.killed:
                        self.fail(f"process {process}, ranks {self.program.processes[process]}: {death}")
                    continue
                if take(process, message):
                    waiting.discard(process)
            if waiting and time.monotonic() > self.deadline:
                if not self.failures:
                    ranks = sorted(rank for process in waiting for rank in self.program.processes[process])
                    stacks = "\n".join(self.stacks(process) for process in sorted(waiting))
                    self.failures.append(f"ranks {ranks} are not done at the limit of time\n{stacks}")
                return
            time.sleep(0.0001 if self.fault_state in ("due", "stopped") else 0.001)

    def take_report(self, process, message):
        """True once the process has said all. A message is a failure, as text, or the last one."""
        if isinstance(message, str):
            self.fail(message)
            return False
        if not isinstance(message, dict):
            self.fail(f"process {process}: {message.value!r}")
            return True
        self.reports[process] = message
        return True

    def take_end(self, process, message):
        if isinstance(message, str) or not message.ok:
            self.fail(f"process {process}, at its end: {message}")
        return not isinstance(message, str)

    def fail(self, text):
        self.failures.append(text)
        self.deadline = min(self.deadline, time.monotonic() + self.grace)

    def strike(self):
        """The fault, when it is due."""
        fault = self.fault
        if fault and fault.kind == "leave":
            self.fault_state = "left" if self.progress.view[fault.process] >= fault.at else "due"
        elif (
            self.fault_state == "due"
            and self.progress.view[fault.process] >= fault.at
            and self.progress.all_joined()
        ):
            time.sleep(fault.delay)
            number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
            self.processes.kill(fault.process, number)
            self.continues = time.monotonic() + fault.seconds
            self.fault_state = "stopped" if fault.kind == "stop" else "killed"
            self.killed |= {fault.process} if fault.kind == "kill" else set()
        if self.fault_state == "stopped" and time.monotonic() >= self.continues:
            self.processes.kill(fault.process, signal.SIGCONT)
            self.fault_state = "continued"

    def stacks(self, process):
        """Of all threads: in Python, and in C++ where there is gdb."""
        pid = self.processes.processes[process].pid
        if self.processes.processes[process].exitcode is not None:
            return f"--- process {process} has ended"
        text = ""
        if self.gdb and shutil.which("gdb"):
            command = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all bt 30"]
            result = subprocess.run(command, capture_output=True, text=True, timeout=60)
            text = "\n".join(line for line in result.stdout.splitlines() if line.startswith(("#", "Thread")))
        self.processes.kill(process, signal.SIGUSR1)
        time.sleep(0.5)
        ranks = self.program.processes[process]
        return f"--- process {process}, ranks {ranks}\n{_stack_file(self.folder, process).read_text()}{text}"


def _stack_file(folder, process):
    return Path(folder) / f"stacks.{process}"


# --- in the processes --------------------


class Place:
    """One rank: its groups, and the strands that run on it."""

    def __init__(self, program, rank, progress, note, fail):
        """note(number): says where this rank is. fail(text): says what is wrong."""
        self.program, self.rank, self.progress, self.note, self.fail = program, rank, progress, note, fail
        self.handles, self.strands = {}, []
        self.left = False
        self.ends_together = program.seed % 4 != 0

    def join(self, folder):
        """All groups of the beginning, in one order."""
        program, size = self.program, self.program.world_size
        store = dist.FileStore(os.path.join(folder, "store"), size)
        if program.torch:
            own, limit = dist.PrefixStore("torch", store), datetime.timedelta(seconds=GROUP_TIMEOUT)
            dist.init_process_group("pycomm", store=own, rank=self.rank, world_size=size, timeout=limit)
        for group in program.groups:
            if group.front == "torch":
                made = dist.new_group(list(group.members))
            elif group.made_by is None and self.rank in group.members:
                mine = group.members.index(self.rank)
                options = {"name": f"g{group.number}", "timeout": GROUP_TIMEOUT, **program.options}
                made = pycomm.Communicator(store, mine, len(group.members), **options)
            else:
                continue
            self.handles[group.number] = made

    def run(self, folder):
        self.guarded("making its groups", self.join, folder)
        self.progress.joined[self.rank] = 1
        self.strands = [Strand(self, i) for i in sorted({group.strand for group in self.program.groups})]
        at_once(self.strands, self.run_strand)

    def run_strand(self, strand):
        self.guarded(lambda: f"strand {strand.number}, {strand.doing}", strand.run)

    def leave(self):
        """Other strands of this rank may be in the middle of an operation."""
        while not self.progress.all_joined():
            time.sleep(0.001)
        self.left = True
        for handle in self.handles.values():
            handle.close()

    def guarded(self, what, act, *args):
        """What one rank raises ends it, and soon the program."""
        try:
            act(*args)
        except BaseException as error:
            what = what if isinstance(what, str) else what()
            where = "" if isinstance(error, WrongError) else "".join(traceback.format_exception(error))
            self.fail(f"rank {self.rank}, {what}: {error}\n{where}")
            threading.Event().wait()

    def close(self):
        """In an order of its own."""
        handles = sorted(self.handles)
        random.Random(self.rank).shuffle(handles)
        for number in handles:
            if self.program.groups[number].front == "native":
                self.guarded(f"closing group {number}", self.handles[number].close)
        self.handles.clear()
        if self.program.torch:
            self.guarded("destroying torch's groups", dist.destroy_process_group)


def _process(process, link, program, folder, progress):
    if program.hosts > 1:
        env.simulate_host(f"host{program.host_of(process)}")
    os.environ["PYCOMM_CMA"] = "1" if program.cma else "0"
    stacks = open(_stack_file(folder, process), "w")  # as long as the process
    faulthandler.register(signal.SIGUSR1, stacks)
    note, sending = functools.partial(progress.view.__setitem__, process), threading.Lock()

    def fail(text):
        with sending:
            link.send(text)

    ranks = program.processes[process]
    places = [
        Place(program, rank, progress, note if rank == ranks[0] else lambda at: None, fail) for rank in ranks
    ]
    at_once(places, lambda place: place.run(folder))
    if not program.fault:
        at_once(places, Place.close)
    strands = [strand for place in places for strand in place.strands]
    link.send({name: sum(getattr(strand, name) for strand in strands) for name in ("operations", "errors")})
    link.recv()
    if program.fault:
        at_once(places, Place.close)


def at_once(items, act):
    """act(item) for each: the first in this thread, the others in threads of their own."""
    threads = [threading.Thread(target=act, args=(item,)) for item in items[1:]]
    for thread in threads:
        thread.start()
    act(items[0])
    for thread in threads:
        thread.join()
