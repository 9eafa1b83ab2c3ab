"""The end of a program with callbacks of operations that are running, or have not begun: it ends with the
status that it was to have ([Note: the end of the interpreter] in csrc/torch/interpreter.h).
"""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from tiers import tier

LIMIT = 60.0  # seconds of a program that takes 3

SCRIPT = """
    import os, sys, time, torch, torch.distributed as dist, pycomm

    kind, folder = sys.argv[1:]
    rank = 0 if os.fork() else 1
    store = dist.FileStore(folder + "/store", 2)
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=2)
    dist.barrier()

    def computes(future):  # Python code, which gives its lock back and takes it again
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            sum(range(1000))
        return future.value()

    def sleeps(future):
        time.sleep(0.3)
        return future.value()

    def calls_torch(future):  # which gives the lock back around its work
        for _ in range(200):
            torch.ones(1000).sum()
            time.sleep(0.001)
        return future.value()

    def calls_a_collective(future):
        dist.all_reduce(torch.ones(1 << 18))
        return future.value()

    def calls_back(future):
        return future.then(sleeps)

    def writes(future):
        time.sleep(0.4)
        os.write(1, b"written ")

    several = (computes, sleeps, calls_torch, calls_a_collective, calls_back, writes)
    callbacks = {f.__name__: f for f in several}
    if kind == "hook":
        dist.group.WORLD._register_on_completion_hook(lambda info: time.sleep(0.2))
    keep = []
    for i in range(1 if kind == "writes" else 6):
        work = dist.all_reduce(torch.ones(1 << 18), async_op=True)
        if kind in callbacks:
            keep.append(work.get_future().then(callbacks[kind]))
        elif kind == "done":
            work.get_future().add_done_callback(lambda future: time.sleep(0.1))
        elif kind == "messages":
            x = torch.ones(1 << 16)
            message = dist.isend(x, 1 - rank) if rank else dist.irecv(x, 1 - rank)
            message.get_future().then(sleeps)
        elif kind == "arrays":  # memory that Python owns, freed by the group's thread
            dist.all_reduce(torch.from_numpy(torch.ones(1 << 18).numpy().copy()), async_op=True)
    store.set(f"issued by {rank}", "")  # a rank that ends before breaks the group for the other's next call
    store.wait(["issued by 0", "issued by 1"])
    time.sleep(float(os.environ["LATER"]))
    if rank == 1:
        os.write(1, b"here ")
        sys.exit(3)
    sys.exit(4 if os.waitstatus_to_exitcode(os.wait()[1]) == 3 else 5)
"""


def run(kind, folder, later):
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT), kind, str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "LATER": str(later)}
    process = subprocess.Popen(command, **pipes, env=environment, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        return "not within the limit", output, errors
    return process.returncode, output, errors


KINDS = "computes sleeps calls_torch calls_a_collective calls_back hook done messages arrays".split()


@tier(quick=1 / 27, slow=1 / 2)
@pytest.mark.parametrize("later", [0, 0.05, 0.2])
@pytest.mark.parametrize("kind", KINDS)
def test_callbacks_at_the_end(kind, later, tmp_path):
    status, output, errors = run(kind, tmp_path, later)
    assert (status, output) == (4, b"here "), (status, output, errors[-2000:])


@tier(slow=1)
def test_a_callback_that_runs_comes_to_its_end(tmp_path):
    """What it has begun is done: a checkpoint that is being written is whole."""
    status, output, errors = run("writes", tmp_path, 0.2)
    assert status == 4 and sorted(output.split()) == [b"here", b"written", b"written"], (output, errors)


FORKED = """
    import os, sys, threading, time, torch, torch.distributed as dist, pycomm

    dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1)
    inside = threading.Event()

    def callback(future):
        inside.set()
        time.sleep(1.0)

    work = dist.all_reduce(torch.ones(1 << 18), async_op=True)
    threading.Thread(target=lambda: work.get_future().then(callback), daemon=True).start()
    inside.wait(10)
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        sys.exit(3)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(1, f"{status} {time.monotonic() - began:.1f}".encode())
"""


@tier(slow=1)
def test_a_forked_child_waits_for_no_callback_of_its_parent(tmp_path):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORKED)], capture_output=True, timeout=LIMIT
    )
    status, seconds = done.stdout.split()
    assert done.returncode == 0 and status == b"3" and float(seconds) < 10, done
    assert time.monotonic() - began < LIMIT
