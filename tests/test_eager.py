"""Small messages (docs/decisions/0028): the send completes at once, the next call raises a mismatch, and
nothing is lost.
"""

import contextlib
import itertools
import os
import random
import re
import threading
import time
import warnings

import eager
import pytest
import torch
import torch.distributed as dist
from torch_ranks import meeting, spawn

import pycomm
from pycomm.testing import run_ranks

MODES = ["threads", "processes"]
CREDITS = 8  # messages to one rank that it has not taken


def floats(nbytes: int) -> int:
    return nbytes // 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nbytes", [0, 4, 956, 960])
def test_two_ranks_that_send_to_each_other_first(nbytes, mode):
    def body(comm):
        other, x = 1 - comm.rank, torch.full((floats(nbytes),), float(comm.rank))
        for _ in range(3):
            comm.send(x, other)
            kept = x.clone()
            x.fill_(7)  # it is the caller's again
            comm.recv(y := torch.full_like(x, 9), other)
            assert y.eq(other).all() and x.eq(7).all()
            x = kept

    run_ranks(2, body, mode=mode, timeout=20)


def test_large_ones_wait_for_each_other():
    """So two blocking sends end with the time limit, as docs/torch.md says."""

    def body(comm):
        with pytest.raises(pycomm.CommError) as info:
            comm.send(torch.zeros(floats(eager.MOST) + 1), 1 - comm.rank, timeout=0.3)
        return type(info.value)

    assert pycomm.CommTimeoutError in run_ranks(2, body, mode="processes", timeout=20)


@pytest.mark.parametrize("mode", MODES)
def test_the_ninth_waits_until_one_is_taken(mode):
    def body(comm):
        if comm.rank == 1:
            comm.recv(x := torch.zeros(1), 0, 1)  # comes last, and takes all before it out of their slots
            comm.barrier()
            for i in range(2 * CREDITS):
                comm.recv(y := torch.zeros(1), 0)
                assert y.item() == i
            return x.item()
        works = [comm.send(torch.tensor([float(i)]), 1, async_op=True) for i in range(2 * CREDITS)]
        comm.send(torch.tensor([5.0]), 1, 1)
        for work in works:
            work.wait()
        comm.barrier()
        return None

    assert run_ranks(2, body, mode=mode, timeout=20) == [None, 5.0]


def test_the_ninth_ends_with_its_time_limit():
    def body(comm):
        if comm.rank == 0:
            for _ in range(CREDITS):
                comm.send(torch.zeros(1), 1, timeout=0.2)
            with pytest.raises(pycomm.CommTimeoutError, match=r"rank 1 .*0\.2 s"):
                comm.send(torch.zeros(1), 1, timeout=0.2)
        else:
            time.sleep(1)

    run_ranks(2, body, mode="threads", timeout=20)


@pytest.mark.parametrize("mode", MODES)
def test_any_order_of_sizes_and_tags(mode):
    """Small and large ones in turns, taken in the order of their tags."""
    count = 120
    sizes = [random.Random(i).choice([0, 1, 7, 240, 241, 3000, 70001]) for i in range(count)]
    tags = [random.Random(-i).randrange(3) for i in range(count)]

    def body(comm):
        r, n, sent = comm.rank, comm.world_size, []
        for dst in range(n):
            if dst == r:
                continue
            works = [
                comm.send(torch.full((size,), 100.0 * r + i), dst, tag, async_op=True)
                for i, (size, tag) in enumerate(zip(sizes, tags, strict=True))
            ]
            sent += works
        for tag in (2, 0, 1):
            mine = [i for i in range(count) if tags[i] == tag]
            for i, src in itertools.product(mine, (p for p in range(n) if p != r)):
                comm.recv(y := torch.zeros(sizes[i]), src, tag)
                assert y.eq(100 * src + i).all(), f"message {i} of rank {src}"
        for work in sent:
            work.wait()

    run_ranks(3, body, mode=mode, timeout=60)


# Both ranks call it, with x = [1 / 2].
CALLS = {
    "send": lambda comm, x: comm.send(x, 1, 9) if comm.rank == 0 else comm.recv(x, 0, 9),
    "large send": lambda comm, x: (
        comm.send(torch.ones(9999), 1, 9) if comm.rank == 0 else comm.recv(torch.ones(9999), 0, 9)
    ),
    "recv": lambda comm, x: comm.recv(x, 1, 9) if comm.rank == 0 else comm.send(x, 0, 9),
    "recv, any": lambda comm, x: comm.recv(x, None, 9) if comm.rank == 0 else comm.send(x, 0, 9),
    "barrier": lambda comm, x: comm.barrier(),
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "all_reduce, asynchronous": lambda comm, x: comm.all_reduce(x, async_op=True).wait(),
    "broadcast": lambda comm, x: comm.broadcast(x, 1),
    "all_to_all": lambda comm, x: comm.all_to_all(torch.ones(2), torch.zeros(2)),
    "empty": lambda comm, x: comm.empty(3, torch.float32),
}


def differ(comm, sent=2, expected=3, tag=4):
    """A small message from rank 0 to rank 1, whose recv does not agree with it, and raises."""
    if comm.rank == 0:
        comm.send(torch.zeros(sent), 1, tag)
    if comm.rank == 1:
        match = rf"count={expected} here, {sent} on rank 0.* \(tag {tag}\)"
        with pytest.raises(pycomm.MismatchError, match=match):
            comm.recv(torch.zeros(expected), 0, tag)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_the_next_call_raises_and_does_not_begin(name, mode):
    """Whatever it is, once; repeated, it does what it would have done."""

    def body(comm, together):
        x = torch.tensor([1 / 2])
        differ(comm)
        together.wait()
        if comm.rank == 0:
            match = r"\[rank 0/2\] send: count=2 here, 3 on rank 1 \(tag 4\)"
            with pytest.raises(pycomm.MismatchError, match=match) as info:
                CALLS[name](comm, x)
            assert info.value.peer == 1 and info.value.op == "send" and x.item() == 1 / 2
        CALLS[name](comm, x)
        return x.item(), comm.all_reduce(torch.ones(1)).item()

    expected = 1 if name.startswith("all_reduce") else 1 / 2
    assert run_ranks(2, body, meeting(2), mode=mode, timeout=20) == [(expected, 2)] * 2


def test_each_is_raised_once_and_in_order():
    """More than there is room for acknowledgements; the calls between are the messages themselves."""
    count = 3 * CREDITS

    def body(comm):
        raised = []
        for i in range(count):
            if comm.rank == 0:
                while True:
                    try:
                        comm.send(torch.zeros(i), 1, i)
                        break
                    except pycomm.MismatchError as error:
                        raised.append(str(error))
            else:
                with pytest.raises(pycomm.MismatchError):
                    comm.recv(torch.zeros(i + 1), 0, i)
        for _ in range(count):  # in which rank 1 hands over those for which there was no room
            while True:
                try:
                    comm.barrier()
                    break
                except pycomm.MismatchError as error:
                    raised.append(str(error))
        return raised

    raised = run_ranks(2, body, mode="processes", timeout=20)[0]
    assert len(raised) == count
    for i, text in enumerate(raised):
        assert f"count={i} here, {i + 1} on rank 1 (tag {i})" in text, raised


@pytest.mark.parametrize("hosts", [None, "2+1"])
def test_of_three_ranks_each_hears_its_own(hosts):
    """Errors use the group's rank numbers, also over hosts; rank 2 has sent nothing wrong."""

    def body(comm, together):
        differ(comm)
        together.wait()
        if comm.rank == 0:
            where = r" \(host0\)" if hosts else ""
            with pytest.raises(pycomm.MismatchError, match=rf"\[rank 0/3\] send: .* on rank 1{where} \(tag"):
                comm.barrier()
        return comm.all_reduce(torch.ones(1)).item()

    assert run_ranks(3, body, meeting(3), mode="threads", hosts=hosts, timeout=20) == [3] * 3


def test_close_raises_it():
    """And has closed the group."""

    def body(comm, together):
        differ(comm)
        together.wait()
        if comm.rank == 0:
            with pytest.raises(pycomm.MismatchError, match="count=2 here, 3 on rank 1"):
                comm.close()
            comm.close()
            with pytest.raises(pycomm.CommError, match="closed"):
                comm.barrier()

    run_ranks(2, body, meeting(2), mode="processes", timeout=20)


def through_torch(r, n, together):
    x = torch.zeros(2 + r)
    for send in (dist.send, lambda x, dst: dist.isend(x, dst).wait()):
        if r == 0:
            send(x, 1)
        else:
            with pytest.raises(pycomm.MismatchError, match="count=3 here, 2 on rank 0"):
                dist.recv(x, 0)
        together.wait()
        # Not in a batch: torch would then only collect all later calls.
        calls = [dist.P2POp(each, torch.zeros(1), 1 - r) for each in (dist.isend, dist.irecv)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        if r == 0:
            with pytest.raises(pycomm.MismatchError, match="count=2 here, 3 on rank 1") as info:
                dist.all_reduce(x) if send is dist.send else dist.monitored_barrier()
            assert isinstance(info.value, dist.DistBackendError)
    dist.all_reduce(y := torch.ones(1))
    assert y.item() == 2
    dist.send(y, 1 - r)
    dist.recv(y, 1 - r)


def test_through_torch():
    spawn(2, through_torch, meeting(2))


@pytest.mark.parametrize("mode", MODES)
def test_what_was_sent_before_the_sender_closed_arrives(mode):
    def body(comm, together):
        if comm.rank == 0:
            for i in range(CREDITS):
                comm.send(torch.tensor([float(i)]), 1)
            comm.close()
        together.wait()
        if comm.rank == 1:
            for i in range(CREDITS):
                comm.recv(x := torch.zeros(1), 0)
                assert x.item() == i
            with pytest.raises(pycomm.PeerError, match="rank 0 closed"):
                comm.recv(x, 0)

    run_ranks(2, body, meeting(2), mode=mode, timeout=20)


@pytest.mark.parametrize("mode", MODES)
def test_a_send_to_a_rank_that_has_closed_is_no_success(mode):
    def body(comm, together):
        if comm.rank == 1:
            comm.close()
        together.wait()
        if comm.rank == 0:
            with pytest.raises(pycomm.PeerError, match="rank 1 closed the group"):
                comm.send(torch.zeros(1), 1)

    run_ranks(2, body, meeting(2), mode=mode, timeout=20)


def send_to_the_dead(r, n, together):
    dist.barrier()
    if r == 1:
        os._exit(1)
    began = time.monotonic()
    with pytest.raises(pycomm.PeerError, match="rank 1 died"):
        while time.monotonic() - began < 10:
            dist.send(torch.zeros(1), 1)
            time.sleep(0.02)  # a look at the receiver every 10 ms, and it takes eight at most
    with contextlib.suppress(pycomm.CommError):
        dist.destroy_process_group()


def test_a_send_to_a_rank_that_has_died_is_no_success_for_long():
    spawn(2, send_to_the_dead, None, expect_deaths=[1])


def never_received(comm, together, closes_first):
    comm.barrier()
    if comm.rank == 0:
        comm.send(torch.zeros(5), 1, 3)
        comm.send(torch.zeros(1), 1, 4)
        comm.send(torch.zeros(1), 1, 3)
        together.wait()
    else:
        together.wait()
        comm.recv(torch.zeros(1), 0, 4)  # the first is put aside, the last stays in its slot
    if comm.rank != closes_first:
        together.wait()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm.close()
    if comm.rank == closes_first:
        together.wait()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("closes_first", [0, 1])
def test_close_warns_of_what_was_never_received(closes_first):
    """The receiver always; the sender once the receiver has closed, as until then it may take them."""
    texts = run_ranks(2, never_received, meeting(2), closes_first, mode="processes", timeout=20)
    assert len(texts[1]) == 1 and re.search(
        r"\[rank 1/2\] .*never received: 2 messages from rank 0 \(the first: tag 3, 5 of f32\)", texts[1][0]
    )
    if closes_first == 0:
        assert texts[0] == []
    else:
        assert len(texts[0]) == 1 and "[rank 0/2]" in texts[0][0]
        assert "never received: 2 messages to rank 1." in texts[0][0]


def test_growth_raises_before_it_begins(tmp_path):
    """And not in its middle, where the others wait for this rank."""

    def body(comm, together):
        store = dist.FileStore(str(tmp_path / "store"), -1)
        if comm is None:
            return pycomm.Communicator.replacement(store, timeout=20).all_reduce(torch.ones(1)).item()
        differ(comm)
        together.wait()
        if comm.rank == 0:
            with pytest.raises(pycomm.MismatchError, match="count=2 here, 3 on rank 1"):
                comm.grow(store, timeout=20)
        differ(comm) if comm.rank == 0 else None  # this one is refused while rank 0 is in grow()
        if comm.rank == 1:
            differ(comm)
        return comm.grow(store, timeout=20).all_reduce(torch.ones(1)).item()

    together, found = meeting(2), []
    waits = threading.Thread(target=lambda: found.append(body(None, together)), daemon=True)
    waits.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the second one, by the end of the old group
        assert run_ranks(2, body, together, mode="threads", timeout=30) == [3, 3]
    waits.join(20)
    assert found == [3]


def test_the_error_of_a_body_comes_before_it():
    def body(comm, together):
        differ(comm)
        together.wait()
        if comm.rank == 0:
            with pytest.raises(KeyError), pytest.warns(RuntimeWarning, match="count=2 here, 3 on rank 1"):
                with comm:
                    raise KeyError
        together.wait()

    run_ranks(2, body, meeting(2), mode="processes", timeout=20)


def test_close_raises_all_of_them():
    def body(comm, together):
        if comm.rank == 0:
            for i in range(3):
                comm.send(torch.zeros(i), 1, i)
        together.wait()
        if comm.rank == 1:
            for i in range(3):
                with pytest.raises(pycomm.MismatchError):
                    comm.recv(torch.zeros(i + 1), 0, i)
        together.wait()
        if comm.rank == 0:
            match = ".*Also .*".join(rf"count={i} here, {i + 1} on rank 1 \(tag {i}\)" for i in range(3))
            with pytest.raises(pycomm.MismatchError, match=match):
                comm.close()
            comm.close()

    run_ranks(2, body, meeting(2), mode="processes", timeout=20)


def test_close_reports_both():
    def body(comm, together):
        differ(comm)
        if comm.rank == 1:
            comm.send(torch.zeros(1), 0, 8)
        together.wait()
        if comm.rank == 0:
            match = (
                r"count=2 here, 3 on rank 1 .*Also never received: 1 message from rank 1 \(the first: tag 8,"
            )
            with pytest.raises(pycomm.MismatchError, match=match):
                comm.close()
        together.wait()

    run_ranks(2, body, meeting(2), mode="processes", timeout=20)


def test_a_rank_that_refuses_many_of_one_that_has_left_leaves_at_once():
    """More than there is room for acknowledgements, which its sender does not read any more."""
    count = 3 * CREDITS

    def body(comm, together):
        if comm.rank == 0:
            works = [comm.send(torch.zeros(1), 1, async_op=True) for _ in range(count)]
            comm.send(torch.zeros(1), 1, 1)
            for work in works:
                work.wait()
            comm.close()
            together.wait()
            return 0
        comm.recv(torch.zeros(1), 0, 1)  # puts the others aside
        together.wait()
        for _ in range(count):
            with pytest.raises(pycomm.MismatchError):
                comm.recv(torch.zeros(2), 0)
        start = time.monotonic()
        comm.close()
        return time.monotonic() - start

    assert min(run_ranks(2, body, meeting(2), mode="processes", timeout=20)[1] for _ in range(3)) < 0.5


def leaves_a_batch(r, n, together):
    with contextlib.suppress(KeyError):
        with dist.distributed_c10d._coalescing_manager(None, torch.device("cpu")):
            raise KeyError
    if r == 0:
        dist.send(torch.zeros(2), 1)
    else:
        with pytest.raises(pycomm.MismatchError):
            dist.recv(torch.zeros(3), 0)
    together.wait()
    if r == 0:
        with pytest.raises(pycomm.MismatchError, match="count=2 here, 3 on rank 1"):
            dist.destroy_process_group()


def test_destroying_a_group_raises_after_a_batch_that_was_left():
    spawn(2, leaves_a_batch, meeting(2))


def test_close_is_silent_where_all_was_received():
    def body(comm):
        for size in (0, 1, 240, 241, 9999):
            works = [comm.send(torch.zeros(size), p, async_op=True) for p in range(3) if p != comm.rank]
            for p in range(3):
                if p != comm.rank:
                    comm.recv(torch.zeros(size), p)
            for work in works:
                work.wait()
        comm.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            comm.close()

    run_ranks(3, body, mode="processes", timeout=20)
