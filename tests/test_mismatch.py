"""Calls that do not match: every rank of the group raises and names both sides, no output is touched, and the
group goes on.

The table holds the kinds of section 4.2 of collectives.md and what our own options add. The last rank of the
group is the odd one.
"""

import itertools
import re
import time
from typing import Any, NamedTuple

import eager
import pytest
import torch
from tiers import tier

import pycomm
from pycomm.testing import run_ranks
from pycomm.testing.groups import hosts_of

UNTOUCHED = 77
MiB = 1 << 20


def filled(count, dtype=torch.float32):
    return torch.full((count,), UNTOUCHED).to(dtype)


class Case(NamedTuple):
    """usual(comm, x, how) and odd(comm, x, how) issue the call; every output goes through x(). The values are
    what texts must say.

    "field=value" and "value": every side says "field=mine here, theirs on rank"; without a field both texts
    are in the message.
    """

    usual: Any
    odd: Any
    usual_value: str
    odd_value: str


def reduces(count, op="sum", dtype=torch.float32, **options):
    return lambda comm, x, how: comm.all_reduce(x(filled(count, dtype)), op, **options, **how)


def broadcasts(count, root=0, dtype=torch.float32, **options):
    return lambda comm, x, how: comm.broadcast(x(filled(count, dtype)), root, **options, **how)


def gathers(count, **options):
    return lambda comm, x, how: comm.all_gather(
        torch.ones(count), x(filled(count * comm.world_size)), **options, **how
    )


def gathers_uneven(counts, **options):
    def call(comm, x, how):
        sizes = counts(comm.world_size)
        return comm.all_gather(
            torch.ones(sizes[comm.rank]), [x(filled(size)) for size in sizes], **options, **how
        )

    return call


def scatters(count, **options):
    return lambda comm, x, how: comm.reduce_scatter(
        torch.ones(count * comm.world_size), x(filled(count)), **options, **how
    )


def scatters_uneven(counts, op="sum"):
    def call(comm, x, how):
        sizes = counts(comm.world_size)
        ins = [torch.ones(size) for size in sizes]
        return comm.reduce_scatter(ins, x(filled(sizes[comm.rank])), op, **how)

    return call


def to_root(operation, root, count=3):
    def call(comm, x, how):
        if operation == "reduce":
            return comm.reduce(torch.ones(count), root, out=x(filled(count)), **how)
        if operation == "gather":
            return comm.gather(
                torch.ones(count),
                x(filled(count * comm.world_size)) if comm.rank == root else None,
                root,
                **how,
            )
        return comm.scatter(torch.ones(count * comm.world_size), x(filled(count)), root, **how)

    return call


def exchanges(in_splits, out_splits, **options):
    def call(comm, x, how):
        ins, outs = in_splits(comm), out_splits(comm)
        return comm.all_to_all(
            torch.ones(sum(ins)), x(filled(sum(outs))), in_splits=ins, out_splits=outs, **options, **how
        )

    return call


def parts(count):
    return lambda comm, x, how: comm.all_to_all(
        torch.ones(count * comm.world_size), x(filled(count * comm.world_size)), **how
    )


def barrier(comm, x, how):
    return comm.barrier(**how)


def ones(comm):
    return [1] * comm.world_size


def many(comm):
    return [MiB // 8] * comm.world_size


def one_more_for_rank_0(size):
    return lambda comm: [size + 1] + [size] * (comm.world_size - 1)


def rising(n):
    return [5 + i for i in range(n)]


def falling(n):
    return rising(n)[::-1]


BIG = 9 * MiB // 16  # elements; staged, and beyond what the kernel copies
SOME = MiB // 8  # two steps of a staged operation
HALF = pycomm.premul_sum(0.5)
CASES = {
    # section 4.2
    "size 1 and 2": Case(reduces(1), reduces(2), "count=1", "2"),
    "size 1000 and 2000": Case(reduces(1000), reduces(2000), "count=1000", "2000"),
    "size 2^20 and 2^20+512": Case(reduces(MiB), reduces(MiB + 512), f"count={MiB}", f"{MiB + 512}"),
    "size small and large": Case(reduces(10), reduces(BIG), "count=10", f"{BIG}"),
    "size 0 and 1": Case(reduces(0), reduces(1), "count=0", "1"),
    "all_gather 4 and 6": Case(gathers(4), gathers(6), "count=4", "6"),
    "dtype": Case(reduces(8), reduces(8, dtype=torch.int32), "dtype=f32", "i32"),
    "dtype large": Case(reduces(BIG), reduces(BIG, dtype=torch.int32), "dtype=f32", "i32"),
    "dtype of other size": Case(broadcasts(8), broadcasts(4, dtype=torch.float64), "dtype=f32", "f64"),
    "reduce op": Case(reduces(4, "sum"), reduces(4, "max"), "reduce op=sum", "max"),
    "reduce op large": Case(reduces(BIG, "sum"), reduces(BIG, "avg"), "reduce op=sum", "avg"),
    "operation": Case(reduces(2), broadcasts(2), "operation=all_reduce", "broadcast"),
    "operation and route": Case(reduces(2), broadcasts(MiB // 4), "operation=all_reduce", "broadcast"),
    "operation and route, other way": Case(broadcasts(BIG), reduces(2), "operation=broadcast", "all_reduce"),
    "operation barrier": Case(barrier, reduces(BIG), "operation=barrier", "all_reduce"),
    "root": Case(broadcasts(4, 0), broadcasts(4, 1), "root=0", "1"),
    "root large": Case(broadcasts(BIG, 0), broadcasts(BIG, 1), "root=0", "1"),
    # our own
    "root of reduce": Case(to_root("reduce", 0), to_root("reduce", 1), "root=0", "1"),
    "root of gather": Case(to_root("gather", 1), to_root("gather", 0), "root=1", "0"),
    "root of scatter": Case(to_root("scatter", 0, 5000), to_root("scatter", 1, 5000), "root=0", "1"),
    "factor": Case(reduces(4, pycomm.premul_sum(2.5)), reduces(4, pycomm.premul_sum(4.25)), "2.5", "4.25"),
    "algorithm": Case(reduces(BIG, algorithm="ring"), reduces(BIG, algorithm="two_shot"),
                      "algorithm=ring", "two_shot"),
    "algorithm of small": Case(reduces(4), reduces(4, algorithm="one_shot"),
                               "algorithm=automatic", "one_shot"),
    "staged size": Case(gathers(BIG, algorithm="staged"), gathers(BIG + 1, algorithm="staged"),
                        f"count={BIG}", f"{BIG + 1}"),
    "two_shot size": Case(reduces(BIG, algorithm="two_shot"), reduces(BIG - 1, algorithm="two_shot"),
                          f"count={BIG}", f"{BIG - 1}"),
    "direct size": Case(reduces(BIG, algorithm="direct"), reduces(BIG // 2, algorithm="direct"),
                        f"count={BIG}", f"{BIG // 2}"),
    "reduce_scatter": Case(scatters(5), scatters(6), "count=5", "6"),
    "reduce_scatter large": Case(scatters(BIG), scatters(BIG // 2), f"count={BIG}", f"{BIG // 2}"),
    "uneven sum": Case(gathers_uneven(lambda n: [2] + [0] * (n - 1)),
                       gathers_uneven(lambda n: [1] * (n - 1) + [20 - n]), "count=2", "19"),
    "uneven order": Case(gathers_uneven(rising), gathers_uneven(falling), "list of sizes", "list of sizes"),
    "uneven reduce_scatter": Case(scatters_uneven(rising), scatters_uneven(falling),
                                  "list of sizes", "list of sizes"),
    "uneven and factor": Case(scatters_uneven(rising, HALF), scatters_uneven(falling, HALF),
                              "list of sizes", "list of sizes"),
    "factor where uneven": Case(scatters_uneven(rising, HALF),
                                scatters_uneven(rising, pycomm.premul_sum(0.25)), "", ""),
    "all_to_all": Case(parts(4), parts(5), "count=4", "5"),
    "splits": Case(exchanges(ones, ones), exchanges(one_more_for_rank_0(1), ones), "expects 1", "sends 2"),
    "splits large": Case(exchanges(many, many), exchanges(one_more_for_rank_0(MiB // 8), many),
                         f"expects {MiB // 8}", "sends 131073"),
    # a call with sizes has no count to differ from another
    "splits and algorithm": Case(parts(1), exchanges(ones, ones, algorithm="staged"),
                                 "algorithm=automatic", "staged"),
}  # fmt: skip


def goes_on(comm):
    """The group is right after an error: every route, with values that differ from step to step, and every
    pair of ranks.
    """
    n, rank = comm.world_size, comm.rank
    for step in range(2):
        for algorithm, count in ((None, 3), ("two_shot", SOME), ("ring", SOME)):
            x = torch.full((count,), float(rank + step))
            comm.all_reduce(x, algorithm=algorithm)
            assert x.eq(n * (n - 1) / 2 + n * step).all(), (
                f"all_reduce {algorithm} {count} after the mismatch"
            )
        root = step % n
        x = torch.full((SOME,), float(rank * 10 + step))
        assert comm.broadcast(x, root, algorithm="staged").eq(root * 10 + step).all(), (
            "broadcast after the mismatch"
        )
        y = torch.zeros(5)
        works = [
            comm.send(torch.full((5,), float(rank + step)), (rank + 1) % n, async_op=True),
            comm.recv(y, (rank - 1) % n, async_op=True),
        ]
        for work in works:
            work.wait()
        assert y.eq((rank - 1) % n + step).all(), "message after the mismatch"


def check_error(error, comm, case, odd):
    text, others = str(error), [rank for rank in range(comm.world_size) if rank != odd]
    assert error.rank == comm.rank and error.world_size == comm.world_size, text
    assert text.startswith(f"[rank {comm.rank}/{comm.world_size}] {error.op} #{error.sequence}: "), text
    assert error.peer in (others if comm.rank == odd else [odd]) and f"rank {error.peer}" in text, text
    field, _, usual = case.usual_value.rpartition("=")
    mine, theirs = (case.odd_value, usual) if comm.rank == odd else (usual, case.odd_value)
    expected = [f"{field}={mine} here, {theirs} on rank {error.peer}."] if field else [mine, theirs]
    assert all(part in text for part in expected), f"expected {expected} in: {text}"


def caught(call, wait):
    """The MismatchError of a call, at issue or in wait()."""
    with pytest.raises(pycomm.MismatchError) as info:
        work = call()
        if wait:
            work.wait()
    return info.value


@tier(quick=1 / 6, slow=1 / 2)
@pytest.mark.parametrize("mode", ["threads", "processes"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_mismatch(name, world_size, mode):
    case = CASES[name]

    def body(comm):
        odd = comm.rank == comm.world_size - 1
        for async_op in (False, True):
            outputs = []

            def keep(tensor, outputs=outputs):
                outputs.append(tensor)
                return tensor

            error = caught(
                lambda keep=keep, how=dict(async_op=async_op): (case.odd if odd else case.usual)(
                    comm, keep, how
                ),
                async_op,
            )
            check_error(error, comm, case, comm.world_size - 1)
            for output in outputs:
                assert output.eq(UNTOUCHED).all(), "an output was written"
            goes_on(comm)

    run_ranks(world_size, body, mode=mode, timeout=20.0)


@pytest.mark.parametrize("odd", [0, 2])
def test_one_mismatch_after_the_other(odd):
    """All cases in one group, where the first rank is the odd one, or the last."""

    def body(comm):
        for i, (name, case) in enumerate(CASES.items()):
            if odd == 0 and "splits" in name:  # they are of two other ranks
                continue
            outputs, how = [], dict(async_op=i % 2 == 0)
            call = case.odd if comm.rank == odd else case.usual
            keep = lambda tensor, outputs=outputs: outputs.append(tensor) or tensor  # noqa: E731
            error = caught(lambda call=call, keep=keep, how=how: call(comm, keep, how), how["async_op"])
            check_error(error, comm, case, odd)
            assert all(output.eq(UNTOUCHED).all() for output in outputs), f"{name}: an output was written"
        goes_on(comm)

    run_ranks(3, body, timeout=40.0)


@pytest.mark.parametrize("hosts", [None, "2+1", "1+1+1"])
def test_the_sizes_of_every_pair_are_compared(hosts):
    """Each rank sends one element too many to each."""

    def body(comm):
        n, r = comm.world_size, comm.rank
        for src, dst in itertools.product(range(n), repeat=2):
            ins, x = [1 + (r == src and p == dst) for p in range(n)], filled(n)
            with pytest.raises(pycomm.MismatchError) as info:
                comm.all_to_all(torch.ones(sum(ins)), x, in_splits=ins, out_splits=[1] * n)
            where = ["", ""] if hosts is None else [rf" \(host{hosts_of(hosts, n)[p]}\)" for p in (src, dst)]
            pattern = rf"rank {src}{where[0]} sends 2 elements to rank {dst}{where[1]}, which expects 1\."
            assert re.search(pattern, str(info.value)) and x.eq(UNTOUCHED).all(), str(info.value)
        goes_on(comm)

    run_ranks(3, body, hosts=hosts, timeout=30.0)


# --- messages --------------------

SIZES = {
    "in_slot": 20,
    "in_place": MiB // 4,
    "streamed": 6 * MiB // 4,
}  # elements; in_place through the kernel, where it allows that
MESSAGES = {
    "send more": lambda n: (
        (2 * n, torch.float32),
        (n, torch.float32),
        f"count={2 * n} here, {n} on",
        f"count={n} here, {2 * n} on",
    ),
    "recv more": lambda n: (
        (n, torch.float32),
        (n + 1, torch.float32),
        f"count={n} here, {n + 1} on",
        f"count={n + 1} here, {n} on",
    ),
    "dtype": lambda n: (
        (n, torch.float32),
        (n, torch.int32),
        "dtype=f32 here, i32 on",
        "dtype=i32 here, f32 on",
    ),
    "nothing sent": lambda n: (
        (0, torch.float32),
        (n, torch.float32),
        f"count=0 here, {n} on",
        f"count={n} here, 0 on",
    ),
    "nothing expected": lambda n: (
        (n, torch.float32),
        (0, torch.float32),
        f"count={n} here, 0 on",
        f"count=0 here, {n} on",
    ),
}


def error_of_send(comm, x, dst, async_op):
    def send():
        return comm.send(x, dst, 5, async_op=async_op)

    if x.nbytes > eager.MOST:
        return caught(send, async_op)
    return eager.caught_later(comm, dst, lambda: send().wait() if async_op else send())


@pytest.mark.parametrize("mode", ["threads", "processes"])
@pytest.mark.parametrize("way", SIZES)
@pytest.mark.parametrize("kind", MESSAGES)
def test_message_mismatch(kind, way, mode):
    """Both ends raise, in both directions, for each order of arrival and with or without a named source. The
    sender of a small message raises in its next call. The next message arrives.
    """
    (sent, sent_dtype), (expected, expected_dtype), sender_says, receiver_says = MESSAGES[kind](SIZES[way])

    def body(comm):
        for async_op in (False, True):
            for src, dst, recv_first in ((0, 1, False), (1, 0, True)):
                if recv_first != (comm.rank == dst):
                    time.sleep(0.01)
                if comm.rank == src:
                    error = error_of_send(comm, filled(sent, sent_dtype), dst, async_op)
                    says, peer = sender_says, dst
                else:
                    out = torch.zeros(expected).to(expected_dtype)
                    source = src if recv_first else None
                    error = caught(
                        lambda out=out, source=source, how=async_op: comm.recv(out, source, 5, async_op=how),
                        async_op,
                    )
                    says, peer = receiver_says, src
                    assert out.eq(0).all(), "the buffer of the recv was written"
                    if sent * sent_dtype.itemsize <= eager.MOST:
                        eager.confirm_to(comm, src)
                assert (
                    error.peer == peer
                    and f"{says} rank {peer}" in str(error)
                    and f"[rank {comm.rank}/2]" in str(error)
                ), str(error)
                y = torch.ones(SIZES[way])
                if comm.rank == src:
                    comm.send(y * 3, dst)
                else:
                    comm.recv(y, src)
                    assert y.eq(3).all()
        goes_on(comm)

    run_ranks(2, body, mode=mode, timeout=20.0)
