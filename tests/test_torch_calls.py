"""Each call of torch.distributed in each of its forms, once: what it returns, what its work and its future
say, what the flight recorder keeps; batches that fail, groups within groups, more calls than records.
"""

import datetime
import functools
import time

import pytest
import torch
import torch.distributed as dist
from test_torch_backend import OPERATIONS
from torch_ranks import data, equal, spawn

import pycomm
from pycomm import _C

Options = torch._C._distributed_c10d
CPU = torch.device("cpu")


def backend_of(group=None):
    return (group or dist.group.WORLD)._get_backend(CPU)


# --- every operation --------------------


def finished(work, form):
    """Ends the work in one of the ways that there are; it says that it is well."""
    if form == "poll":
        while not work.is_completed():
            time.sleep(0)
    elif form == "future":
        value = work.get_future().wait()
        equal(value, work.result())
    else:
        assert work.wait()
    assert work.is_completed() and work.is_success() and work.exception() is None


def check_operations(r, n):
    def at_once(function, *args, **options):
        work = function(*args, **options)
        if function is dist.irecv:
            finished(work, "wait")
        else:
            assert work is None

    def later(form, function, *args, **options):
        options.update({} if function is dist.irecv else {"async_op": True})
        finished(function(*args, **options), form)

    calls = [at_once, *(functools.partial(later, form) for form in ("wait", "poll", "future"))]
    for operation in OPERATIONS:
        for call in calls:
            for count in (0, 1, n + 1, 1031):
                equal(*operation(r, n, count, call))


def test_operations():
    spawn(3, check_operations)


# --- results --------------------


def results(r, n, c):
    """{name: (work, the tensors that it gives)}"""
    group, options = dist.group.WORLD, Options
    x, flat, parts = data(r, c), data(r, n * c), [data(r, c) for _ in range(n)]
    out, outs, whole = torch.zeros(c), [torch.zeros(c) for _ in range(n)], torch.zeros(n * c)
    root = n - 1
    roots = {cls: cls() for cls in (options.GatherOptions, options.ScatterOptions, options.BroadcastOptions)}
    for each in roots.values():
        each.rootRank = root
    made = {
        "allreduce": (group.allreduce([x]), [x]),
        "broadcast": (group.broadcast([out], roots[options.BroadcastOptions]), [out]),
        "allgather": (group.allgather([outs], [x]), outs),
        "allgather_base": (group._allgather_base(whole, x), [whole]),
        "gather": (group.gather([outs] if r == root else [], [x], roots[options.GatherOptions]), outs),
        "scatter": (
            group.scatter([out], [parts] if r == root else [], roots[options.ScatterOptions]),
            [out],
        ),
        "reduce_scatter": (group.reduce_scatter([out], [parts]), [out]),
        "reduce_scatter_base": (group._reduce_scatter_base(out, flat), [out]),
        "alltoall_base": (group.alltoall_base(whole, flat, [], []), [whole]),
        "alltoall": (group.alltoall(outs, parts), outs),
        "barrier": (group.barrier(), []),
        "send": (group.send([x], (r + 1) % n, 4), []),
        "recv": (group.recv([out], (r - 1) % n, 4), [out]),
    }
    if r != root:
        made["gather"] = (made["gather"][0], [])
    return made


def check_results(r, n):
    for c in (5, 40_000):
        for name, (work, expected) in results(r, n, c).items():
            assert work.wait(), name
            got = work.get_future().value() if name == "recv" else work.get_future().wait()
            assert len(got) == len(expected), (name, r, got)
            assert all(a is e for a, e in zip(got, expected, strict=True)), name
            assert len(work.result()) == len(expected), name
            assert all(a is e for a, e in zip(work.result(), expected, strict=True)), name


def test_results():
    spawn(3, check_results)


# --- works that fail, and how long they take --------------------


def check_failures(r, n):
    odd = int(r == 0)
    for call in ("wait", "future", "result"):
        tensors = [torch.ones(4), torch.ones(5 + odd), torch.ones(3), torch.ones(8 + odd)]
        work = backend_of().allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions())
        wanted = "5 here|6 here"  # the first that failed
        if call == "result":
            result = work.get_future_result().wait()
            assert result == int(Options.WorkResult.COMM_ERROR), result
        else:
            with pytest.raises(pycomm.MismatchError, match=wanted):
                (work if call == "wait" else work.get_future()).wait()
        while not work.is_completed():
            time.sleep(0)
        assert not work.is_success()
        assert any(text in str(work.exception()) for text in wanted.split("|")), work.exception()
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    assert work.get_future_result().wait() == int(Options.WorkResult.SUCCESS)
    equal(x, torch.full((3,), float(n)))


def test_failures():
    spawn(3, check_failures)


def check_duration(r, n):
    """In milliseconds: as long as the last rank was away, and no longer than the call."""
    dist.group.WORLD._enable_collectives_timing()
    dist.barrier()
    if r == n - 1:
        time.sleep(0.05)
    start = time.monotonic()
    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    dist.barrier()
    ms = (time.monotonic() - start) * 1e3
    assert work._get_duration() <= ms
    lasted = [None] * n
    dist.all_gather_object(lasted, work._get_duration())
    assert max(lasted) > 25, lasted


def test_duration():
    spawn(2, check_duration)


def check_who_failed(r, n):
    """REMOTE_ERROR where another rank is the reason, whichever it is."""
    for culprit in (0, n - 1):
        group = dist.new_group(list(range(n)))
        dist.barrier(group)
        backend = backend_of(group)
        if r == culprit:
            backend.abort()
        with pytest.raises(pycomm.AbortedError, match=f"rank {culprit}"):
            dist.all_reduce(torch.ones(1), group=group)
        own, other = Options.ErrorType.COMM_ERROR, Options.ErrorType.REMOTE_ERROR
        assert backend.get_error() == (own if r == culprit else other), (culprit, backend.get_error())


def test_who_failed():
    spawn(3, check_who_failed)


# --- options --------------------


def limited(g, r, n):
    """{name: (kind of its options, call(options))}."""
    x, out, whole = torch.ones(5), torch.zeros(5), torch.zeros(5 * n)
    parts, outs = list(torch.ones(n, 5)), list(torch.zeros(n, 5))
    rooted = outs if r == 0 else []
    table = {
        "allreduce": (Options.AllreduceOptions, lambda o: g.allreduce([x], o)),
        "allreduce_coalesced": (
            Options.AllreduceCoalescedOptions,
            lambda o: g.allreduce_coalesced([x, out], o),
        ),
        "broadcast": (Options.BroadcastOptions, lambda o: g.broadcast([x], o)),
        "reduce": (Options.ReduceOptions, lambda o: g.reduce([x], o)),
        "allgather": (Options.AllgatherOptions, lambda o: g.allgather([outs], [x], o)),
        "allgather_base": (Options.AllgatherOptions, lambda o: g._allgather_base(whole, x, o)),
        "gather": (Options.GatherOptions, lambda o: g.gather([rooted] if rooted else [], [x], o)),
        "scatter": (Options.ScatterOptions, lambda o: g.scatter([out], [parts] if r == 0 else [], o)),
        "reduce_scatter": (Options.ReduceScatterOptions, lambda o: g.reduce_scatter([out], [parts], o)),
        "reduce_scatter_base": (
            Options.ReduceScatterOptions,
            lambda o: g._reduce_scatter_base(out, whole, o),
        ),
        "alltoall": (Options.AllToAllOptions, lambda o: g.alltoall(outs, parts, o)),
        "alltoall_base": (
            Options.AllToAllOptions,
            lambda o: g.alltoall_base(whole, whole.clone(), [], [], o),
        ),
        "barrier": (Options.BarrierOptions, lambda o: g.barrier(o)),
    }
    return table


NAMES = list(limited(None, 0, 2))


def check_limits(r, n):
    """Each call has the limit of its options, which is not its group's."""
    groups = {name: dist.new_group(list(range(n))) for name in NAMES}
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if r == n - 1:
        store.wait(["over"])
        return
    works = {}
    for name, group in groups.items():
        kind, call = limited(group, r, n)[name]
        options = kind()
        options.timeout = datetime.timedelta(seconds=0.25)
        works[name] = call(options)
    failed = {}
    for name, work in works.items():
        try:
            work.wait()
        except pycomm.CommTimeoutError as error:
            assert error.peer == n - 1 and "0.25 s" in str(error), (name, error)
            failed[name] = work.get_future_result().wait()
    assert {"broadcast", "scatter", *failed} >= set(NAMES), set(NAMES) - set(failed)  # a root may not wait
    assert set(failed.values()) == {int(Options.WorkResult.TIMEOUT)}
    if r == 0:
        store.set("over", "")


def test_limits():
    spawn(3, check_limits)


# --- splits --------------------


def check_splits(r, n):
    """Sizes on one side alone: the other side is even."""
    for c in (2, 1000):
        mine, theirs = n * (c + r), [c + p for p in range(n)]
        x, out = data(r, mine, 2), torch.zeros(sum(theirs), 2)
        dist.all_to_all_single(out, x, theirs)
        equal(out, torch.cat([data(p, n * (c + p), 2).view(n, c + p, 2)[r] for p in range(n)]))
        x, out = data(r, sum(theirs), 2), torch.zeros(n * (c + r), 2)
        dist.all_to_all_single(out, x, None, theirs)
        equal(out, torch.cat([data(p, sum(theirs), 2).split(theirs)[r] for p in range(n)]))


def test_splits():
    spawn(3, check_splits)


# --- groups within groups, records --------------------


def check_parts(r, n):
    """Errors of a subgroup name global ranks, at any depth of nesting."""
    part = dist.group.WORLD.split_group([1, 2, 3], group_name="part")
    if r == 0:
        return
    again = part.split_group([0, 2], group_name="again")
    assert (again is None) == (r == 2)
    if again is not None:
        x = torch.tensor([float(r)])
        again.allreduce([x]).wait()
        assert x.item() == 4 and again.rank() == r // 2
        record = _C.flight_records()[-1]
        assert (record["group_name"], record["global_ranks"]) == ("again", [1, 3]), record
        assert record["rank"] == again.rank()


def test_parts():
    spawn(4, check_parts)


def check_limits_of_parts(r, n):
    """A split group has its own time limit, or by default its parent's."""
    whole = dist.group.WORLD
    for limit in (None, 7, 0.3):
        given = {} if limit is None else {"timeout": datetime.timedelta(seconds=limit)}
        part = whole.split_group([0, 1], group_name=f"limit {limit}", **given)
        options = [p._get_backend(torch.device("cpu")).options for p in (part, whole)]
        expected = [WHOLE if limit is None else limit, WHOLE]
        assert [each._timeout.total_seconds() for each in options] == expected
    if r == 0:
        with pytest.raises(pycomm.CommTimeoutError, match=r"rank 1 .*within the timeout of 0\.3 s"):
            part.allreduce([torch.ones(1)]).wait()
    dist.barrier()


WHOLE = 20.0  # seconds, of spawn()


def test_limits_of_parts():
    spawn(2, check_limits_of_parts)


def check_records(r, n):
    """More calls than there are records, and a failed one among the first."""
    x, wrong = torch.ones(3), torch.ones(2 + r)
    for _ in range(2):
        with pytest.raises(pycomm.MismatchError):
            dist.all_reduce(wrong)
        records = _C.flight_records()
        assert records[-1]["failed"] and records[-1]["input_sizes"] == [[2 + r]]
        assert records[-1]["completed_ns"] is None
        length = 2000
        for _ in range(length):
            dist.all_reduce(x)
        records = _C.flight_records()
        ids = [record["id"] for record in records]
        assert ids == list(range(ids[-1] - length + 1, ids[-1] + 1))
        sequences = [record["sequence"] for record in records]
        assert sequences == list(range(sequences[-1] - length + 1, sequences[-1] + 1))
        for record in records:
            assert not record["failed"] and record["created_ns"] <= record["completed_ns"], record
            assert record["input_sizes"] == record["output_sizes"] == [[3]], record


def test_records():
    spawn(2, check_records)
