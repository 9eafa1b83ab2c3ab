"""One rank of one backend: waits for its turn, then prepares, measures or checks as it is told.

What is timed: a batch is `iters` calls back to back between two readings of the clock, on every rank; a sample is the batch's time divided
by iters. A barrier of the backend precedes every batch, outside of the timed region, so that all ranks begin together. Inputs are filled
and results checked outside of it, too. In-place reductions are timed on zeros: their result is their next input, and must not run into
infinity.
"""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback

from . import backends, data
from .channel import connect
from .metrics import FORMS, OPS, Case


class Rank:
    """The rank's buffers and calls. Public methods are the commands; what they return must be JSON."""

    def __init__(self, adapter):
        self.adapter, self.calls = adapter, {}

    def prepare(self, case, salt):
        """Makes the buffers and calls of a case and checks each form. Returns what verify() does, or as text why it cannot."""
        self.case, self.calls, self.buffers = Case(*case), {}, {}
        op, rank, n = OPS[self.case.op], self.adapter.rank, self.adapter.world_size
        k, inside = self.case.count, slice(rank * self.case.count, (rank + 1) * self.case.count)
        send = data.empty(self.case.send_count(n), self.case.dtype)
        recv = data.empty(self.case.recv_count(n), self.case.dtype)
        whole = send if op.in_place == "send" else recv
        part = whole[inside] if len(whole) != k else whole  # the rank's own chunk of a buffer with n of them
        self.buffers["out_of_place"] = send, recv
        if op.in_place:
            self.buffers["in_place"] = (whole, part) if op.in_place == "send" else (part, whole)
        try:
            for form in FORMS:
                call = self.adapter.make_call(self.case, form, *self.buffers[form]) if form in self.buffers else None
                if call is not None:
                    self.calls[form] = call
        except backends.Unsupported as error:
            return str(error)
        return self.verify(salt)

    def verify(self, salt):
        """Runs each form once on fresh inputs. Returns {form: wrong elements on this rank}."""
        wrong, case, rank, n = {}, self.case, self.adapter.rank, self.adapter.world_size
        for form, call in self.calls.items():
            send, recv = self.buffers[form]
            data.poison(recv)
            if case.op not in ("broadcast", "scatter") or rank == case.root:
                data.fill(send, data.pattern(case, n, rank, salt))
            self.adapter.barrier()  # a rank may read the buffer of another in the call: all must have been filled
            call()
            wrong[form] = data.count_wrong(recv, data.expected(case, rank, n), case, n, salt)
        return wrong

    def measure(self, form, iters, batches, warmup):
        """Seconds of one call for each batch, after warmup calls."""
        call, barrier, clock = self.calls[form], self.adapter.barrier, time.perf_counter_ns
        if form == "in_place" and OPS[self.case.op].reduces:
            self.buffers[form][0][:] = 0
        barrier()
        for _ in range(warmup):
            call()
        samples = []
        for _ in range(batches):
            barrier()
            start = clock()
            for _ in range(iters):
                call()
            samples.append((clock() - start) / iters / 1e9)
        return samples


def serve(channel, spec):
    """Answers commands until the controller closes the channel. A command that takes longer than the timeout ends this process."""
    faulthandler.dump_traceback_later(spec["timeout"], exit=True)
    adapter = backends.make_adapter(spec["backend"])
    adapter.start(spec)
    rank = Rank(adapter)
    channel.send({"hello": spec["token"], "backend": spec["backend"], "rank": adapter.rank, "version": adapter.version()})
    while True:
        faulthandler.cancel_dump_traceback_later()  # the turns of others may take any time
        try:
            command, *arguments = channel.recv()
        except (EOFError, ConnectionError):
            break
        faulthandler.dump_traceback_later(spec["timeout"], exit=True)
        channel.send({"ok": getattr(rank, command)(*arguments)})
    faulthandler.dump_traceback_later(10, exit=True)  # closing waits for peers, which may be gone
    adapter.close()
    faulthandler.cancel_dump_traceback_later()


def main(spec):
    """Runs a rank. spec: address and token of the controller, store (host, port), backend, rank, ranks, timeout, sessions, site."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the controller, which ends us
    if spec["sessions"] and os.getsid(0) != os.getpid():
        if os.getpgrp() == os.getpid():  # the leader of a process group must leave it first
            os.setpgid(0, os.getpgid(os.getppid()))
        os.setsid()
    channel = connect(spec["address"], spec["timeout"])
    try:
        serve(channel, spec)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        try:
            channel.send({"error": f"{type(error).__name__}: {error}", "hello": spec["token"], "backend": spec["backend"]})
        except OSError:
            pass  # the controller has gone; the text is on stderr
        os._exit(1)  # an orderly exit would wait for peers


if __name__ == "__main__":  # started by mpiexec
    spec = json.loads(sys.argv[1])
    if spec["site"]:
        sys.path.append(spec["site"])
    main(spec)
