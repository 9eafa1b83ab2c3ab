"""Arguments of the methods of a Communicator, and what comes of them on every rank: each root, asynchronous
or not, lists of parts of different sizes, named senders; limits, names and members of groups made of groups.
"""

import copy
import itertools
import json
import pickle
import re
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm import membership
from pycomm.testing import run_ranks

N = 3
LIMIT = 60.0  # seconds; never reached where the code is right


def rows(rank, *shape):
    """What a rank passes: other numbers on each."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) + 100 * rank + 1).reshape(shape)


def done(result, async_op):
    if async_op:
        assert isinstance(result, pycomm.Work)
        return result.wait()
    return result


# --- one root --------------------


def every_root(comm, shape, async_op):
    """Texts of what is wrong, for each rank in the part of the root."""
    wrong, n, me = [], comm.world_size, comm.rank
    every = [rows(rank, *shape) for rank in range(n)]
    stack, total = torch.stack(every), sum(every)
    how = {"async_op": async_op}

    def check(name, root, got, given, expected):
        """got: what the call returned; given: an array that all passed, which the root alone gets back."""
        if me != root:
            if got is not None:
                wrong.append(f"{name} of root {root} returned {got} on rank {me}")
        elif not (got is given if given is not None else isinstance(got, torch.Tensor)):
            wrong.append(f"{name} of root {root} returned another object")
        elif not torch.equal(torch.stack(list(got)) if isinstance(got, list) else got, expected):
            wrong.append(f"{name} of root {root}: {got}, not {expected}")

    for root in range(n):
        x = every[me].clone()
        got = done(comm.broadcast(x, root, **how), async_op)
        wrong += [] if got is x and torch.equal(x, every[root]) else [f"broadcast of {root}: {x}"]
        x = every[me].clone()
        check("reduce", root, done(comm.reduce(x, root, **how), async_op), x, total)
        wrong += [] if me == root or torch.equal(x, every[me]) else [f"reduce changed x of rank {me}"]
        x, out = every[me].clone(), torch.full(shape, -1.0, dtype=torch.float64)
        check("reduce out", root, done(comm.reduce(x, root, "max", out=out, **how), async_op), out, every[-1])
        untouched = torch.equal(x, every[me]) and (me == root or bool((out == -1).all()))
        wrong += [] if untouched else [f"reduce out, root {root}, changed what is not its own on rank {me}"]
        check("gather", root, done(comm.gather(x, root=root, **how), async_op), None, stack)
        flat, parts = torch.zeros(n, *shape, dtype=torch.float64), [torch.zeros_like(x) for _ in range(n)]
        for out in (flat, parts, tuple(parts)):
            got = done(comm.gather(x, out if me == root else None, root, **how), async_op)
            check("gather out", root, got, out, stack) if not isinstance(out, tuple) else None
        for given in (stack + root, [one + root for one in every]):
            out = torch.full(shape, -1.0, dtype=torch.float64)
            got = done(comm.scatter(given if me == root else None, out, root, **how), async_op)
            if got is not out or not torch.equal(out, every[me] + root):
                wrong.append(f"scatter of root {root} on rank {me}: {got}")
    return wrong


@pytest.mark.parametrize("shape", [(), (1,), (0,), (5, 3), (70_001,)], ids=str)
def test_every_root(shape):
    for async_op in (False, True):
        assert run_ranks(N, every_root, shape, async_op) == [[]] * N


def test_arrays_of_all_parts():
    """A root passes one array with a place for every rank."""

    def body(comm):
        x, root = torch.ones(2), comm.rank
        for wrong, text in (
            (torch.ones(5), "has 5 elements, expected world_size . 2"),
            (torch.ones(3), "has 3 elements, expected world_size . 2"),
            (torch.ones(2, 2).t(), "must be contiguous; or pass a list of arrays"),
            (torch.ones(8)[::2], "must be contiguous; or pass a list of arrays"),
        ):
            with pytest.raises(ValueError, match=rf"^\[rank {root}/2\] gather: .*{text}"):
                comm.gather(x, wrong, root)
            with pytest.raises(ValueError, match=rf"^\[rank {root}/2\] scatter: .*{text}"):
                comm.scatter(wrong, x, root)
        with pytest.raises(TypeError, match="got NoneType"):
            comm.scatter(None, x, comm.rank)
        return comm.all_reduce(torch.ones(1)).item()

    assert run_ranks(2, body) == [2.0] * 2


# --- parts of different sizes --------------------


@pytest.mark.parametrize("kind", ["tensor", "numpy", "transposed"])
def test_new_parts_have_the_shape_of_their_own(kind):
    """Lists whose arrays differ, and splits; the result is a new array."""

    def made(x):
        return {"tensor": lambda: x, "numpy": x.numpy, "transposed": lambda: x.t().contiguous().t()}[kind]()

    def body(comm):
        n, me = comm.world_size, comm.rank
        own = [made(rows(me, 2 + rank, 3 - rank)) for rank in range(n)]
        total = sum(rows(rank, 2 + me, 3 - me) for rank in range(n))
        part = comm.reduce_scatter(own)
        assert torch.equal(torch.as_tensor(part), total) and part.shape == (2 + me, 3 - me)
        assert isinstance(part, np.ndarray) is (kind == "numpy")
        sends = [[2, 0, 3], [1, 4, 0], [0, 5, 2]]
        takes = [row[me] for row in sends]
        x = rows(me, sum(sends[me]), 2)
        got = comm.all_to_all(made(x), in_splits=sends[me], out_splits=takes)
        every = [rows(rank, sum(sends[rank]), 2).split(sends[rank])[me] for rank in range(n)]
        assert torch.equal(torch.as_tensor(got), torch.cat(every)) and got.shape == (sum(takes), 2)
        return True

    assert run_ranks(N, body) == [True] * N


# --- senders --------------------


def test_a_named_sender_is_the_one_that_is_heard():
    """Another rank's message of the same tag is there before; also where the named one is rank 0."""

    def body(comm):
        n, me = comm.world_size, comm.rank
        for taker, named in itertools.permutations(range(n), 2):
            other = n - taker - named
            for tag in (0, 255, 256, 70_000):
                x, y = torch.zeros(2), torch.zeros(2)
                if me == other:
                    first = comm.send(torch.full((2,), 1.0 + other), taker, tag, async_op=True)
                if me == taker:
                    work = comm.recv(x, named, tag, async_op=True)
                comm.barrier()
                if me == named:
                    comm.send(torch.full((2,), 1.0 + named), taker, tag)
                if me == taker:
                    assert work.wait() is x and x.tolist() == [1.0 + named] * 2 and work.source() == named
                    assert comm.recv(y, other, tag) == other and y.tolist() == [1.0 + other] * 2
                if me == other:
                    assert first.wait() is None
        return True

    assert run_ranks(N, body, timeout=LIMIT) == [True] * N


# --- groups of groups --------------------


def test_parts_of_a_group_differ_in_name_and_members():
    """Also where a rank took no part in a split before."""

    def body(comm):
        me, found = comm.rank, []
        colors = [[None, 0, 0], [1, None, 1], [None, None, 5], [0, 0, 0], [np.int64(7), True, 7]]
        for number, color in enumerate(colors, 1):
            part = comm.split(color[me], key=-me)
            if color[me] is None:
                assert part is None
                continue
            mates = [rank for rank in reversed(range(comm.world_size)) if color[rank] == color[me]]
            assert part.rank == mates.index(me) and part.world_size == len(mates)
            assert part.all_gather(torch.tensor([me])).flatten().tolist() == mates
            assert part.name == f"default/{number}.{int(color[me])}"
            inner = part.split(0)
            assert inner.name == f"{part.name}/1.0" and inner.all_reduce(torch.ones(1)) == len(mates)
            found.append(part.name)
        with pytest.raises(ValueError, match=rf"^\[rank {me}/3\] split: color=-1 must not be negative"):
            comm.split(-1)
        return found, comm.all_reduce(torch.ones(1)).item()

    for names, total in run_ranks(N, body):
        assert len(set(names)) == len(names) and total == N


def limits(comm):
    return comm._comm.timeout, comm._timeout


def test_groups_of_a_group_have_its_limit():
    """A group of few ranks is made within another limit than its operations have."""

    def body(comm):
        made = [comm, comm.split(0), comm.split(comm.rank), comm.split(0).split(1)]
        if comm.rank < 2:
            made.append(comm.split(0).shrink([2], timeout=LIMIT))
            made.append(made[-1].split(0))
        else:
            comm.split(0)
        return [limits(one) for one in made]

    for found in run_ranks(N, body, timeout=LIMIT, operation_timeout=47.5):
        assert found == [(47.5, 47.5)] * len(found) and len(found) >= 4


def test_groups_that_grow_twice():
    """A replacement that asked and died is skipped and counted as served, so that no rank waits."""
    store = dist.HashStore()
    store.add("pycomm/grow/tickets", 1)
    grown = threading.Event()

    def body(comm):
        waiting = pycomm.Communicator.waiting
        if comm.rank == 0:
            part = comm.split(0)
            assert waiting(store) >= 1
            new = part.grow(store, timeout=LIMIT)
            grown.set()
        else:
            comm.split(None)
            if comm.rank == 2:
                assert grown.wait(LIMIT)
                store.add("pycomm/grow/tickets", 1)  # dies as well
            new = pycomm.Communicator.replacement(store, timeout=LIMIT)
        if comm.rank != 2:
            assert new.all_gather(torch.tensor([comm.rank])).flatten().tolist() == [0, 1]
            assert new.name.endswith("/grown1") and new.rank == comm.rank
            new = new.grow(store, timeout=LIMIT)
        assert new.all_gather(torch.tensor([comm.rank])).flatten().tolist() == [0, 1, 2]
        assert new.name.endswith("/grown1/grown2") and new.rank == comm.rank
        facts = limits(new), new.describe()["staging_bytes"], new.split(0)._timeout
        comm.barrier()
        assert waiting(store) == 0
        return facts

    found = run_ranks(N, body, timeout=LIMIT, operation_timeout=47.5)
    assert found == [found[0]] * N and found[0][0] == (47.5, 47.5) and found[0][2] == 47.5


def test_a_group_that_grows_is_made_within_what_is_left(monkeypatch):
    """At least a second; its operations have the limit of the group that grew."""
    joined = []
    monkeypatch.setattr(membership, "_join", lambda cls, *given: joined.append(given) or "the group")
    for limit, least in ((500.0, 490.0), (0.05, 1.0)):
        store = dist.HashStore()
        terms = {"name": "a/grown1", "world_size": 3, "staging_bytes": 1 << 20, "timeout": 47.5}
        store.set("pycomm/grow/place/1", json.dumps({**terms, "rank": 2}))
        assert pycomm.Communicator.replacement(store, timeout=limit) == "the group"
        given, rank, found, left, timeout = joined.pop()
        assert (given, rank, timeout) == (store, 2, 47.5) and terms.items() <= found.items()
        assert least <= left <= max(limit, 1.0)


# --- errors --------------------


def test_an_error_has_its_facts_and_keeps_them():
    """op, sequence, rank, world_size, peer; in copies and in other processes, too."""

    def body(comm):
        for _ in range(3):
            comm.all_reduce(torch.ones(1))
        found = []
        with pytest.raises(pycomm.MismatchError) as caught:
            comm.all_reduce(torch.ones(2 + (comm.rank == 2)))
        found.append(caught.value)
        part = comm.split(0)
        if comm.rank == 1:
            with pytest.raises(pycomm.CommTimeoutError) as caught:
                part.recv(torch.ones(1), 2, timeout=0.05)
        found.append(caught.value)
        comm.barrier()
        comm.close()
        with pytest.raises(pycomm.AbortedError) as caught:
            comm.barrier()
        found.append(caught.value)
        return found

    def facts(error):
        return type(error), str(error), vars(error)

    for rank, (mismatch, late, closed) in enumerate(run_ranks(N, body)):
        assert [one.op for one in (mismatch, late, closed)] == [
            "all_reduce",
            "recv" if rank == 1 else "all_reduce",
            "barrier",
        ]
        for error in (mismatch, late, closed):
            assert (error.rank, error.world_size) == (rank, N)
            assert re.match(rf"\[rank {rank}/{N}.*\] {error.op}", str(error))
            for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
                assert facts(other) == facts(error)
        assert mismatch.sequence == 4 and "all_reduce #4: " in str(mismatch)
        assert (mismatch.peer == 2) is (rank != 2) and mismatch.peer != rank
        assert rank != 1 or (late.peer == 2 and isinstance(late, TimeoutError))


def test_a_with_block_that_raises_tells_the_others_why():
    """In 200 characters at most; the user's own error is what is raised."""

    def body(comm):
        other, long = comm.split(0), "x" * 1000
        if comm.rank == 1:
            with pytest.raises(KeyError, match=long), other:
                raise KeyError(long)
            return None
        with pytest.raises(pycomm.AbortedError, match="rank 1 aborted the group: KeyError: 'xxx") as caught:
            other.barrier()
        return str(caught.value).count("x")

    assert run_ranks(2, body) == [200 - len("KeyError: '"), None]
