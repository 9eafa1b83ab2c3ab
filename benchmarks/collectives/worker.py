"""One rank of one backend: waits for its turn, then prepares, measures or checks as it is told.

What is timed: a batch is `iters` calls back to back between two readings of the clock, on every rank; a
sample is the batch's time divided by iters. A barrier of the backend precedes every batch, outside of the
timed region, so that all ranks begin together. Inputs are filled and results checked outside of it, too.
In-place reductions are timed on zeros: their result is their next input, and must not run into infinity.

On a GPU the clock is a pair of events on the rank's stream, so what is timed is what the GPU did; with
--graph a batch is replays of a graph that holds up to GRAPH_CALLS calls, and ranks that are threads begin it
together, at a gate (device.Gate). Ranks are processes, or with --ranks-as threads the threads of one process
(main), each with its own channel: to the controller both are the same.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from pycomm import env
from pycomm.benchmarks.collectives.backends import Adapter, Call, Unsupported, make_adapter
from pycomm.benchmarks.collectives.cases import FORMS, OPS, Case, Form
from pycomm.benchmarks.collectives.channel import Channel, connect
from pycomm.benchmarks.common import data, device, oracle
from pycomm.benchmarks.common.ranks import GRACE_S
from pycomm.quantities import GlobalRank
from pycomm.testing import emulated

if TYPE_CHECKING:
    import torch

    from pycomm.benchmarks.collectives.spec import Spec
    from pycomm.benchmarks.common.data import Buffer

SALT_OF_GROUP = 1000
GRAPH_CALLS = 100  # in a graph, at most; a longer batch replays it several times


class Rank:
    """The rank's buffers and calls. Public methods are the commands; what they return must be JSON."""

    case: Case

    def __init__(self, adapter: Adapter, graph: bool = False, gate: device.Gate | None = None) -> None:
        self.adapter, self.graph, self.gate = adapter, graph, gate
        # the rank takes all its buffers from this memory, on the host or on a device
        self.memory = cast(data.Memory[Any], adapter.make_memory())
        self._forget()

    def _forget(self) -> None:
        self.calls: dict[Form, Call] = {}
        self.buffers: dict[Form, tuple[Buffer, Buffer]] = {}
        self.graphs: dict[tuple[Form, int], torch.cuda.CUDAGraph] = {}  # by the calls in one, too

    def prepare(self, case: Sequence[Any], salt: int) -> dict[Form, int] | str:
        """Makes the buffers and calls of a case and checks each form. Returns what verify() does, or as text
        why it cannot.
        """
        self.case = Case(*case)
        self._forget()
        op, rank, n = OPS[self.case.op], self.adapter.rank, self.adapter.world_size
        k, inside = self.case.count, slice(rank * self.case.count, (rank + 1) * self.case.count)
        send = self.memory.empty(self.case.send_count(n), self.case.dtype)
        recv = self.memory.empty(self.case.recv_count(n), self.case.dtype)
        whole = send if op.in_place == "send" else recv
        part = whole[inside] if len(whole) != k else whole  # the rank's own chunk of a buffer with n of them
        self.buffers["out_of_place"] = send, recv
        if op.in_place:
            self.buffers["in_place"] = (whole, part) if op.in_place == "send" else (part, whole)
        try:
            for form in FORMS:
                if form in self.buffers:
                    call = self.adapter.make_call(self.case, form, *self.buffers[form])
                    if call is not None:
                        self.calls[form] = call
        except Unsupported as error:
            return str(error)
        return self.verify(salt)

    def verify(self, salt: int) -> dict[Form, int]:
        """Runs each form once on fresh inputs. Returns the wrong elements on this rank."""
        wrong: dict[Form, int] = {}
        case, rank, n = self.case, self.adapter.rank, self.adapter.world_size
        salt += SALT_OF_GROUP * self.adapter.group  # so that groups that mix their data are found
        for form, call in self.calls.items():
            send, recv = self.buffers[form]
            self.memory.poison(recv)
            if case.op not in ("broadcast", "scatter") or rank == case.root:
                self.memory.fill(send, data.pattern(case, n, rank, salt))
            self.adapter.settle()
            # a rank may read the buffer of another in the call: all must have been filled
            self.adapter.barrier()
            call()
            self.adapter.settle()
            wrong[form] = self.memory.count_wrong(recv, oracle.expected(case, rank, n), case, n, salt)
        return wrong

    def measure(self, form: Form, iters: int, batches: int, warmup: int) -> list[float]:
        """Seconds of one call for each batch, after warmup calls."""
        call, barrier = self.calls[form], self.adapter.barrier
        if form == "in_place" and OPS[self.case.op].reduces:
            self.memory.zero(self.buffers[form][0])
        self.adapter.settle()
        per_call = 1
        if self.graph:
            per_call = min(iters, GRAPH_CALLS)
            call, warmup, iters = self._replay(form, per_call), 1, max(1, iters // per_call)
            self.adapter.host_barrier()
        barrier()
        for _ in range(warmup):
            call()
        if self.adapter.device == "cuda":
            first = self.adapter.global_rank == 0
            samples = device.time_batches(call, iters, batches, barrier, self.gate, first)
        else:
            samples = time_on_host(call, iters, batches, barrier)
        return [seconds / per_call for seconds in samples]

    def _replay(self, form: Form, iters: int) -> Call:
        if (form, iters) not in self.graphs:
            self.graphs[form, iters] = device.capture(self.calls[form], iters)
        return self.graphs[form, iters].replay

    def measure_copy(self, nbytes: int, batches: int) -> list[float]:
        """GB/s of the GPU's own copy, on rank 0 alone. See device.copy_gbps."""
        return device.copy_gbps(nbytes, batches) if self.adapter.rank == 0 else []


def time_on_host(call: Call, iters: int, batches: int, barrier: Callable[[], None]) -> list[float]:
    """Seconds of one call for each batch."""
    clock, samples = time.perf_counter_ns, []
    for _ in range(batches):
        barrier()
        start = clock()
        for _ in range(iters):
            call()
        samples.append((clock() - start) / iters / 1e9)
    return samples


class Watchdog:
    """Ends the process, with the stacks of its threads on stderr, when a command takes longer than the
    timeout. One for all its ranks.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.busy, self.lock = seconds, 0, threading.Lock()

    def start(self) -> None:
        with self.lock:
            self.busy += 1
            if self.busy == 1:
                faulthandler.dump_traceback_later(self.seconds, exit=True)

    def stop(self) -> None:
        with self.lock:
            self.busy -= 1
            if self.busy == 0:
                faulthandler.cancel_dump_traceback_later()


def serve(channel: Channel, spec: Spec, watchdog: Watchdog, gate: device.Gate | None = None) -> None:
    """Answers commands until the controller closes the channel. gate: a device.Gate that the ranks of this
    process share, or None.
    """
    watchdog.start()
    adapter = make_adapter(spec["backend"])
    adapter.start(spec)
    rank = Rank(adapter, spec["graph"], gate)
    who = {"hello": spec["token"], "backend": spec["backend"], "rank": adapter.global_rank}
    channel.send({**who, "version": adapter.version()})
    while True:
        watchdog.stop()  # the turns of others may take any time
        try:
            command, *arguments = channel.recv()
        except (EOFError, ConnectionError):
            break
        watchdog.start()
        channel.send({"ok": getattr(rank, command)(*arguments)})
    watchdog.start()  # closing waits for peers, which may be gone
    adapter.close()
    watchdog.stop()


def serve_or_die(spec: Spec, watchdog: Watchdog, gate: device.Gate | None = None) -> None:
    """Connects and serves. An error is told to the controller and ends the process: an orderly exit would
    wait for peers.
    """
    channel = connect(spec["address"], spec["timeout"])
    try:
        serve(channel, spec, watchdog, gate)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        text = f"{type(error).__name__}: {error}"
        try:
            channel.send({"error": text, "hello": spec["token"], "backend": spec["backend"]})
        except OSError:
            pass  # the controller has gone; the text is on stderr
        if threading.current_thread() is not threading.main_thread():
            time.sleep(GRACE_S / 2)  # the other ranks of this process may have more to say
        os._exit(1)


def main(rank: GlobalRank | None, link: object, spec: Spec) -> None:
    """Runs a rank, or all ranks of a backend as threads. rank: None under mpiexec, which knows it.
    link: to the process that started this one; not used.
    """
    keepers = spec["keepers"]
    if keepers and rank is not None:  # mpiexec has started its ranks where they belong
        emulated.enter(keepers[rank])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the controller, which ends us
    if spec["sessions"] and os.getsid(0) != os.getpid():
        if os.getpgrp() == os.getpid():  # the leader of a process group must leave it first
            os.setpgid(0, os.getpgid(os.getppid()))
        os.setsid()
    watchdog = Watchdog(spec["timeout"])
    if not spec["threads"]:
        serve_or_die(spec if rank is None else {**spec, "rank": rank}, watchdog)
        return
    if spec["device"] == "cuda":
        env.allow_thread_ranks()
    gate = device.Gate() if spec["device"] == "cuda" and spec["graph"] else None
    ranks = [
        threading.Thread(target=serve_or_die, args=({**spec, "rank": number}, watchdog, gate))
        for number in range(spec["ranks"])
    ]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()


if __name__ == "__main__":  # started by mpiexec, which gives it its rank
    spec = json.loads(sys.argv[1])
    if spec["site"]:
        sys.path.append(spec["site"])
    main(None, None, spec)
