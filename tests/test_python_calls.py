"""The methods of _C.Communicator that read their arguments themselves (csrc/bindings/python_call.h), and
_C.Work: references, wrong arguments, cycles.
"""

import copy
import gc
import pickle
import sys
import time
import weakref

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import pycomm
from pycomm import _C, premul_sum
from pycomm.testing import run_ranks


def alone(body):
    """body(comm) on a group of one rank."""
    return run_ranks(1, body)[0]


def calls(comm, x, out):
    """Every way in which a call keeps and lets go of what it was given."""
    comm.all_reduce(x)
    comm.all_reduce(x, out=out)
    comm.all_reduce(x, out=out, async_op=True).wait()
    comm.all_reduce(x, async_op=True)  # dropped
    comm.all_gather(x, [out], async_op=True).wait()
    comm.all_to_all([x], [out])
    comm.all_to_all(x, out, in_splits=[len(x)], out_splits=(len(x),))
    comm.reduce_scatter([x], out, premul_sum(2.0))
    comm.gather(x, [out])
    comm.scatter([x], out, async_op=True).wait(5)
    comm.all_reduce(x.numpy(), out=out.numpy(), async_op=True).wait()
    for wrong in ({"op": "mean"}, {"timeout": -1}, {"algorithm": "fastest"}, {"out": torch.zeros(1)}):
        with pytest.raises(ValueError):
            comm.all_reduce(x, **wrong)
    with pytest.raises(TypeError):
        comm.broadcast(x, None)
    with pytest.raises(ValueError):
        comm.send(x, 0, async_op=True)
    comm.barrier()


def test_calls_let_go_of_what_they_were_given():
    def body(comm):
        x, out = torch.ones(3), torch.zeros(3)
        calls(comm, x, out)
        things = x, out, comm._comm, None, "sum"
        gc.collect()
        before = [sys.getrefcount(thing) for thing in things]
        for _ in range(50):
            calls(comm, x, out)
        gc.collect()
        after = [sys.getrefcount(thing) for thing in things]
        return [n - m for n, m in zip(after, before, strict=True)]

    *arrays_and_group, none, name = alone(body)
    assert arrays_and_group == [0, 0, 0]
    assert abs(none) < 50 and abs(name) < 50  # the interpreter's own come and go


def test_messages_let_go_of_what_they_were_given():
    def body(comm):
        x, before, peer = torch.ones(3), None, 1 - comm.rank
        for i in range(60):
            work = comm.send(x, peer, async_op=True)
            if comm.recv(torch.zeros(3), peer if i % 2 else None) != peer:
                return "from nobody"
            work.wait()
            work = comm.recv(torch.zeros(3), async_op=True)
            comm.send(x, peer)
            if work.wait().tolist() != [1.0] * 3 or work.source() != peer or not work.done():
                return "wrong"
            del work
            before = before or sys.getrefcount(x)
        return sys.getrefcount(x) - before

    assert run_ranks(2, body) == [0, 0]


def test_a_work_is_collected_with_its_result():
    def body(comm):
        out = [torch.zeros(3)]
        work = comm.all_gather(torch.ones(3), out, async_op=True)
        out.append(work)
        gone = weakref.ref(work)
        if work.wait() is not out:
            return "another list"
        del work, out
        gc.collect()
        return gone() is None

    assert alone(body) is True


@pytest.mark.parametrize("count", [3, 100_000])
def test_a_tensor_that_holds_its_own_work_is_collected(count):
    """The operation lets go of its tensors when it is over, whoever still has its handle."""

    def body(comm):
        x = torch.ones(count)
        x.work = comm.all_reduce(x, async_op=True)
        x.work.wait()
        gone = weakref.ref(x.work)
        del x
        gc.collect()
        return gone() is None

    assert run_ranks(2, body, mode="processes") == [True, True]


def test_a_work_comes_from_an_operation_only():
    def body(comm):
        work = comm.all_reduce(torch.ones(1), async_op=True)
        work.wait()
        makers = [pycomm.Work, _C.Work, lambda: object.__new__(pycomm.Work), lambda: copy.copy(work)]
        for make in (*makers, lambda: pickle.loads(pickle.dumps(work))):
            with pytest.raises(TypeError):
                make()
        return isinstance(work, pycomm.Work)

    assert alone(body)


class Odd(str):
    """Equal to a name of a reduce operation, but another object."""


def test_names_of_operations_by_value():
    names = ["".join(["s", "um"]), Odd("sum"), "max", Odd("max"), premul_sum(0.5)]

    def body(comm):
        return [comm.all_reduce(torch.full((2,), comm.rank + 1.0), op).tolist() for op in names]

    assert run_ranks(2, body) == [[[3.0] * 2, [3.0] * 2, [2.0] * 2, [2.0] * 2, [1.5] * 2]] * 2


class Index:
    def __init__(self, value):
        self.value = value

    def __index__(self):
        if self.value is None:
            raise KeyError("no index")
        return self.value


class Disguised:
    __class__ = torch.Tensor


def replaced_during_the_call(comm, arrays):
    class Timeout:
        def __float__(self):
            arrays[:] = [None, 3]
            return 5.0

    comm.reduce_scatter(arrays, torch.zeros(3), timeout=Timeout())


def fake():
    with FakeTensorMode():
        return torch.ones(3)


WRONG = [
    (TypeError, lambda c, x: c.all_reduce(None)),
    (TypeError, lambda c, x: c.all_reduce([x, x])),  # not a list
    (TypeError, lambda c, x: c.all_reduce(x, out=[x])),
    (TypeError, lambda c, x: c.all_gather(x, [x, None])),
    (TypeError, lambda c, x: c.broadcast(x, 0.0)),
    (TypeError, lambda c, x: c.broadcast(x, "0")),
    (KeyError, lambda c, x: c.broadcast(x, Index(None))),
    (ValueError, lambda c, x: c.broadcast(x, 1 << 40)),
    (ValueError, lambda c, x: c.broadcast(x, 1 << 80)),
    (ValueError, lambda c, x: c.all_reduce(x, timeout=10**400)),
    (TypeError, lambda c, x: c.all_reduce(Disguised())),
    (TypeError, lambda c, x: _C.Communicator.__new__(_C.Communicator).barrier(None, False, None, None)),
    (TypeError, lambda c, x: replaced_during_the_call(c, [x, x])),
    (ValueError, lambda c, x: c.all_reduce(fake())),
    (ValueError, lambda c, x: c.recv(x)),
    (TypeError, lambda c, x: c.all_to_all(x, x, in_splits=3, out_splits=[3])),
    (TypeError, lambda c, x: c.all_to_all(x, x, in_splits=["a"], out_splits=[3])),
    (ValueError, lambda c, x: c.all_to_all(x, x, in_splits=[1, 2], out_splits=[3])),
    ((TypeError, ValueError), lambda c, x: c.all_reduce(x, op=["sum"])),
    (ValueError, lambda c, x: c.all_reduce(x, op="premul_sum")),
    (ValueError, lambda c, x: c.all_reduce(x, timeout=float("nan"))),
    (TypeError, lambda c, x: c.all_reduce(x, timeout="soon")),
    (TypeError, lambda c, x: c._comm.all_reduce(x)),
    (TypeError, lambda c, x: c._comm.all_reduce(x, x, "sum", x, False, None, None, None)),
    (TypeError, lambda c, x: _C.Communicator.all_reduce(x, x, x, "sum", x, False, None, None)),
    (ValueError, lambda c, x: c.all_reduce(torch.ones(3, device="meta"))),
]


NUMBERS = [1 << 31, -(1 << 31) - 1, 1 << 63, -(1 << 63) - 1, 1 << 80, -(1 << 80)]
INTEGERS = {
    "root": lambda c, x, number: c.broadcast(x, number),
    "root of reduce": lambda c, x, number: c.reduce(x, number),
    "root of gather": lambda c, x, number: c.gather(x, root=number),
    "root of scatter": lambda c, x, number: c.scatter([x], torch.ones(3), number),
    "dst": lambda c, x, number: c.send(x, number),
    "src": lambda c, x, number: c.recv(x, number),
    "tag of send": lambda c, x, number: c.send(x, 0, tag=number),
    "tag of recv": lambda c, x, number: c.recv(x, 0, tag=number),
    "in_splits": lambda c, x, number: c.all_to_all(x, x, in_splits=[number], out_splits=[3]),
    "out_splits": lambda c, x, number: c.all_to_all(x, x, in_splits=[3], out_splits=[number]),
}


def test_integers_that_do_not_fit():
    """None of them wraps round to a rank, a tag, a size or `any`."""

    def body(comm):
        for name, call in INTEGERS.items():
            for number in NUMBERS:
                text = "splits" if "splits" in name else str(number)
                with pytest.raises(ValueError, match=text if number.bit_length() < 64 else "64 bits"):
                    call(comm, torch.ones(3), number)
                    raise AssertionError((name, number))
        return comm.all_reduce(torch.ones(1)).item()

    assert alone(body) == 1


def test_a_successor_has_a_limit_of_its_own():
    def body(comm):
        options = comm._comm.successor_options("next", 3.5)
        after = _C.connect(_C.LocalStore(), 0, 1, options, None, ())
        try:
            return comm._comm.timeout, after.timeout, after.describe()["name"]
        finally:
            after.close()

    before, after, name = alone(body)
    assert (after, name) == (3.5, "next") and before != after


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_arguments(number):
    kind, call = WRONG[number]

    def body(comm):
        with pytest.raises(kind):
            call(comm, torch.ones(3))
        return comm.all_reduce(torch.ones(1)).item()

    assert alone(body) == 1


def test_roots_and_ranks_by_index():
    def body(comm):
        x = np.full(2, float(comm.rank))
        return comm.broadcast(x, np.int64(1)) is x and x.tolist(), comm.broadcast(x * 2, Index(1)).tolist()

    assert run_ranks(2, body) == [([1.0, 1.0], [2.0, 2.0])] * 2


STAGED = {"all_reduce": "two_shot", "reduce_scatter": "staged", "all_gather": "staged", "broadcast": "staged"}


@pytest.mark.parametrize("staging", [1 << 17, 1 << 20])
def test_steps_go_round_in_the_staging(staging):
    """Operations of changing sizes, one behind the other."""
    sizes = torch.randint(1, 60_000, (160,), generator=torch.Generator().manual_seed(3)).tolist()

    def body(comm):
        wrong, n = [], comm.world_size
        for i, size in enumerate(sizes):
            ops, x = list(STAGED), torch.arange(size * n, dtype=torch.float64) + comm.rank * 7 + i
            total = sum(torch.arange(size * n, dtype=torch.float64) + r * 7 + i for r in range(n))
            op = ops[i % len(ops)]
            how = {"algorithm": STAGED[op]}
            if op == "all_reduce":
                good = torch.equal(comm.all_reduce(x, **how), total)
            elif op == "reduce_scatter":
                good = torch.equal(comm.reduce_scatter(x, **how), total.chunk(n)[comm.rank])
            elif op == "all_gather":
                good = torch.equal(comm.all_gather(x[:size], **how)[:, 0], torch.arange(n) * 7.0 + i)
            else:
                good = torch.equal(comm.broadcast(x, i % n, **how)[:2], torch.arange(2) + i % n * 7.0 + i)
            wrong += [] if good else [(i, op, size)]
        return wrong

    assert run_ranks(3, body, mode="processes", staging_bytes=staging) == [[]] * 3


@pytest.mark.parametrize(
    ("kernel_ahead", "op", "nbytes", "algorithm"),
    [
        (True, "all_reduce", 64 << 10, "direct"),
        (False, "all_reduce", 64 << 10, "two_shot"),
        (True, "broadcast", 1 << 20, "direct"),
        (False, "broadcast", 1 << 20, "staged"),
        (False, "all_gather", 2 << 20, "direct"),
        (False, "all_gather", 64 << 10, "staged"),
    ],
)
def test_the_kernels_copies_are_taken_where_they_are_ahead(kernel_ahead, op, nbytes, algorithm):
    chosen = _C.choose(_C.kinds.index(op), nbytes, 2, 2, kernel_ahead, False, True, 0, None)
    assert chosen[0] == algorithm


def measured(comm):
    """After operations for longer than a measure holds."""
    x, found = torch.ones(64 << 10), []
    for _ in range(3):
        until = time.monotonic() + 0.3
        while comm.broadcast(torch.tensor([float(time.monotonic() < until)]), 0).item():
            comm.all_reduce(x.fill_(1.0))
            assert x[-1] == comm.world_size
        comm.barrier()
        facts = comm.describe()
        found.append((facts["kernel_ahead"], facts["hand_off_ns"]))
        comm.barrier()
    return found


@pytest.mark.parametrize("mode", ["processes", "threads"])
def test_all_ranks_have_the_same_answer(mode):
    """Which route is ahead, and the time of a hand-off between cores that decides it."""
    answers = run_ranks(2, measured, mode=mode)
    assert answers[0] == answers[1]
    for kernel_ahead, hand_off in answers[0]:
        assert isinstance(kernel_ahead, bool)
        assert hand_off is None or (mode == "processes" and 1 < hand_off < 20_000)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_a_small_part_of_each_rank_is_worth_a_measure(op):
    """The route of such an operation goes by the bytes of all ranks."""

    def body(comm):
        facts, until = comm.describe(), time.monotonic() + 20
        if facts["reach"] != "process_vm_readv" or facts["oversubscribed"]:
            return None
        x = torch.ones((10 if op == "all_gather" else 20) << 10, dtype=torch.uint8)
        while True:
            getattr(comm, op)(x)
            again = comm.describe()["hand_off_ns"] != facts["hand_off_ns"]
            if comm.broadcast(torch.tensor([float(again or time.monotonic() > until)]), 0).item():
                return again

    assert run_ranks(2, body, mode="processes") in ([True, True], [None, None])
