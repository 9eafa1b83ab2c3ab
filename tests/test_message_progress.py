"""Messages whatever their receiver does: it computes, waits in another group, dies, or leaves; and what waits
behind an operation that does not end, or for a thread that the system refuses.

No rank here says by a clock that it is done: it waits for an event that only the right behaviour sets, and a
limit (LIMIT) makes a failure of what would be a hang.
"""

import ctypes
import functools
import os
import random
import threading
import time

import pytest
import torch
from forked import Group
from tiers import tier

from pycomm import CommError, CommTimeoutError
from pycomm.testing import run_ranks

LIMIT = 20
# bytes: in a slot; in place, or poured at once; above 64 KiB, too; streamed, or by the kernel (a small ring)
SIZES = [0, 8, 5000, 60000, 1 << 18, 5 << 17]


@pytest.fixture(params=["threads", "kernel", "streamed"])
def route(request, monkeypatch):
    monkeypatch.setenv("PYCOMM_CMA", "0" if request.param == "streamed" else "1")
    small = {"staging_bytes": 1 << 17} if request.param == "kernel" else {}
    return {"mode": "threads" if request.param == "threads" else "processes", "timeout": LIMIT, **small}


def filled(size, value):
    return torch.full((size,), value, dtype=torch.uint8)


def across_groups(comm, size):
    """One stage of a pipeline with data parallel: the receiver has posted its recv on one group and waits in
    an all_reduce on the other, to which the sender comes only when its send is done.
    """
    a, b = comm.split(0), comm.split(0)
    out = filled(size, 0)
    for step in range(3):
        sender = step % 2
        if comm.rank == sender:
            a.send(filled(size, step + 1), 1 - sender, async_op=True).wait()
            total = b.all_reduce(torch.ones(1))
        else:
            work = a.recv(out, sender, async_op=True)
            total = b.all_reduce(torch.ones(1))
            work.wait()
            assert torch.equal(out, filled(size, step + 1))
        assert total.item() == 2
    return True


@pytest.mark.parametrize("size", SIZES)
def test_a_recv_progresses_while_its_rank_waits_in_another_group(route, size):
    assert run_ranks(2, across_groups, size, **route) == [True, True]


def computing_receiver(comm, size, pipe):
    """The receiver posts recvs and then makes no call of pycomm's until the sender's sends are done."""
    if comm.rank == 0:
        outs = [filled(size, 9) for _ in range(12)]
        works = [comm.recv(out, 1, async_op=True) for out in outs]
        comm.barrier()
        done = wait_for_byte(pipe[0])
        for key, (work, out) in enumerate(zip(works, outs, strict=True)):
            work.wait()
            assert torch.equal(out, filled(size, key))
        return done
    comm.barrier()
    for key in range(12):  # more than a channel has slots
        comm.send(filled(size, key), 0)
    os.write(pipe[1], b"x")
    return True


def computing_sender(comm, size, pipe):
    """The sender issues more than a channel holds, then makes no call of pycomm until all is received."""
    if comm.rank == 1:
        works = [comm.send(filled(size, key), 0, async_op=True) for key in range(30)]
        done = wait_for_byte(pipe[0])
        for work in works:
            work.wait()
        return done
    for key in range(30):
        comm.recv(out := filled(size, 99), 1)
        assert torch.equal(out, filled(size, key))
    os.write(pipe[1], b"x")
    return True


def wait_for_byte(pipe):
    """Whether one comes: this rank computes meanwhile."""
    os.set_blocking(pipe, False)
    got, deadline = [], threading.Event()

    def look():
        try:
            got.append(os.read(pipe, 1))
        except BlockingIOError:
            return False
        return True

    for _ in range(LIMIT * 200):
        if look():
            return True
        deadline.wait(0.005)
    return False


@tier(quick=1 / 2)
@pytest.mark.parametrize("body", [computing_receiver, computing_sender])
@pytest.mark.parametrize("size", SIZES)
def test_messages_move_while_one_side_computes(route, body, size):
    pipe = os.pipe()
    try:
        assert run_ranks(2, body, size, pipe, **route) == [True, True]
    finally:
        for end in pipe:
            os.close(end)


def left_in_the_middle(comm, link, closes):
    """Rank 1's message to rank 0 begins and can never end; rank 2 stays, and could still send."""
    if comm.rank == 1:
        assert link.recv() == "go"
        comm.send(filled(8 << 20, 1), 0, async_op=True)
        if closes:
            comm.close()
        link.send("sent")
    if comm.rank == 0:
        link.send("receiving")
        comm.recv(filled(16 << 20, 0)[::2])  # not contiguous: the result would be copied back at the end
    return None


@pytest.mark.parametrize("closes", [True, False])
def test_the_end_of_a_matched_sender_is_seen_by_a_recv_from_any(monkeypatch, closes):
    monkeypatch.setenv("PYCOMM_CMA", "0")  # streamed
    body = functools.partial(left_in_the_middle, closes=closes)
    with Group(3, body, operation_timeout=6.0, staging_bytes=1 << 17) as group:
        assert group.get(0) == "receiving"
        time.sleep(0.1)  # most likely in recv() now; right either way
        group.send(1)
        if not closes:
            time.sleep(0.001)
            group.kill(1)
        report = group.get(0)
        assert (report["kind"], report["peer"]) == ("PeerError", 1), report


def sender_of_one_that_leaves(comm, rounds, polls):
    """The receiver takes its messages and leaves at once, about when the sender looks whether it is there."""
    errors = []
    for _ in range(rounds):
        group = comm.split(0)
        if comm.rank == 0:
            works = [group.send(filled(512, key), 1, async_op=True) for key in range(4)]
            each(works, functools.partial(poll_and_wait if polls else wait, errors))
        else:
            out = filled(512, 9)
            time.sleep(0.0094 + random.random() * 0.0010)  # looks come every 10 ms
            for key in range(4):
                group.recv(out, 0)
                assert torch.equal(out, filled(512, key))
        group.close()
    return errors


def each(items, act):
    """act(item) in a thread for each."""
    threads = [threading.Thread(target=act, args=(item,), daemon=True) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)


def wait(errors, work):
    try:
        work.wait()
    except CommError as error:
        errors.append(str(error))


def poll_and_wait(errors, work):
    deadline = time.monotonic() + LIMIT
    while not work.done() and time.monotonic() < deadline:
        time.sleep(0)
    wait(errors, work)


@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_a_receiver_that_leaves_is_not_missed_by_what_it_took(mode, polls):
    """A poll took the close for one before its message, whose acknowledgement it had not looked at."""
    assert run_ranks(2, sender_of_one_that_leaves, 60, polls, mode=mode, timeout=LIMIT) == [[], []]


def refuse_threads():
    """From now on no thread of this process can start: none finds the memory for its stack."""
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = ctypes.create_string_buffer(64)
    assert libc.pthread_attr_init(attributes) == 0
    assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 46)) == 0
    assert libc.pthread_setattr_default_np(attributes) == 0


def without_threads(comm, link):
    refuse_threads()
    with pytest.raises(RuntimeError):
        threading.Thread(target=print).start()
    x = torch.ones(1 << 20)
    comm.all_reduce(x)  # two lanes
    work = comm.all_reduce(y := torch.ones(1 << 20), async_op=True)
    work.wait()
    out = filled(1 << 18, 0)
    other = 1 - comm.rank
    sent = comm.send(filled(1 << 18, 7), other, async_op=True)
    comm.recv(out, other, async_op=True).wait()
    sent.wait()
    return bool((x == 2).all() and (y == 2).all() and (out == 7).all())


def test_a_thread_that_cannot_start():
    with Group(2, without_threads, threads=2) as group:
        group.expect(True)


def waits_behind(comm, over, small):
    """An operation that does not end stands before the one that is waited for."""
    if comm.rank == 1:
        return over.wait(LIMIT)
    count = 3 if small else 70001
    comm.all_reduce(torch.ones(count), async_op=True)
    second = comm.all_reduce(torch.ones(3), async_op=True)
    with pytest.raises(CommTimeoutError) as caught:
        second.wait(timeout=0.25)
    over.set()
    return "0.25" in str(caught.value), str(caught.value)


@pytest.mark.parametrize("small", [True, False])
def test_a_limit_holds_behind_an_unfinished_operation(small):
    right, text = run_ranks(2, waits_behind, threading.Event(), small, timeout=5)[0]
    assert right, text
