"""allocate_tensor of torch's backend interface: memory that the ranks of a group have registered, as ordinary
tensors.

That an operation used the memory in place shows in what it costs: the pages of a part are in the address
space of every rank that has read or written it (Rss of the mapping in /proc/self/smaps), and of no other rank
where the operation went through staging memory.
"""

import gc
import os
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from test_resources import Usage
from torch_ranks import data, equal, spawn

import pycomm
from pycomm import _C
from pycomm.benchmarks import registered as registered_benchmark

CPU = torch.device("cpu")
MIB = 1 << 20


def allocate(count, dtype=torch.float32, group=None):
    backend = (group or dist.group.WORLD)._get_backend(CPU)
    assert backend.supports_tensor_alloc(CPU)
    return backend.allocate_tensor(count, dtype=dtype, device=CPU)


def registered(count, r, seed=0, **options):
    return allocate(count, **options).copy_(data(r + 100 * seed, count))


def total(n, count, seed=0):
    return sum(data(p + 100 * seed, count) for p in range(n))


# --- values --------------------


def check_values(r, n):
    for count in (1, 7, 1000, 2049, 40009, 300007):
        x = allocate(count)
        assert (
            x.shape == (count,)
            and x.dtype == torch.float32
            and x.device == CPU
            and not x.requires_grad
            and not x.any()
        )
        dist.all_reduce(x.copy_(data(r, count)))
        equal(x, total(n, count))
        for async_op in (False, True):
            check_slices(r, n, count, async_op)
        y = registered(count, r)
        y = y.clone() if r == 0 else y  # registered on some ranks only
        dist.all_reduce(y)
        equal(y, total(n, count))
        z = registered(count, r)
        dist.broadcast(z, n - 1)
        equal(z, data(n - 1, count))
        work = dist.isend(registered(count, r), (r + 1) % n) if n > 1 else None
        if work:
            out = allocate(count)
            dist.recv(out, (r - 1) % n)
            work.wait()
            equal(out, data((r - 1) % n, count))


def check_slices(r, n, count, async_op):
    """Views of one tensor, whose neighbours stay as they were."""

    def run(function, *args):
        work = function(*args, async_op=async_op)
        if work:
            work.wait()

    big = allocate(n * count + 8)
    view = big[5 : 5 + n * count]
    big.fill_(77)
    view.copy_(data(r, n * count))
    mine = view[r * count :][:count]
    run(dist.reduce_scatter_tensor, mine, view)
    equal(mine, total(n, n * count)[r * count :][:count])
    view.fill_(-1)
    mine.copy_(data(r, count))
    run(dist.all_gather_into_tensor, view, mine)
    equal(view, torch.cat([data(p, count) for p in range(n)]))
    run(dist.all_reduce, view.view(n, count)[-1])
    equal(view[-count:], n * data(n - 1, count))
    equal(big[:5], torch.full((5,), 77.0))
    equal(big[-3:], torch.full((3,), 77.0))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives_on_whole_tensors_and_on_slices(world_size):
    spawn(world_size, check_values)


@pytest.mark.parametrize("world_size", [2, 3])
def test_without_reading_peers_memory(world_size, monkeypatch):
    """Where the kernel lets no process read another's memory, registered memory alone is reached in place."""
    monkeypatch.setenv("PYCOMM_CMA", "0")
    spawn(world_size, check_values)


def check_bits(r, n):
    x = torch.randn(30011, generator=torch.Generator().manual_seed(r))
    y = allocate(x.numel()).copy_(x)
    dist.all_reduce(x)
    dist.all_reduce(y)
    equal(y, x)
    return y


def test_same_bits_on_all_ranks_and_as_with_ordinary_tensors():
    results = spawn(3, check_bits)
    equal(results[1:], [results[0]] * 2)


SHORT = {"i": "int", "u": "uint", "f": "float", "bf": "bfloat", "c": "complex"}


def torch_dtype(name):
    """bf16 -> torch.bfloat16, f8_e5m2 -> torch.float8_e5m2, bool -> torch.bool."""
    return getattr(torch, re.sub(r"^([a-z]+)(?=\d)", lambda letters: SHORT[letters[0]], name))


def check_dtypes(r, n):
    for dtype in map(torch_dtype, _C.dtypes):
        x = allocate(37, dtype)
        assert x.dtype == dtype and x.numel() == 37 and not x.view(torch.uint8).any()
        want = torch.arange(37 * dtype.itemsize).remainder(2 if dtype == torch.bool else 251).to(torch.uint8)
        x.view(torch.uint8).copy_(want if r == n - 1 else want * 0)
        dist.broadcast(x, n - 1)
        equal(x.view(torch.uint8), want)
    return len(_C.dtypes)


def test_every_dtype():
    assert spawn(2, check_dtypes) == [20, 20]


def check_groups(r, n):
    """Memory of one group is ordinary memory for another; each group's is its own."""
    pair, other = dist.new_group([0, 1]), dist.new_group([1, 2])
    groups = [dist.group.WORLD] + [pair] * (r < 2) + [other] * (r > 0)
    buffers = [allocate(5000, group=group) for group in groups]
    for x, group in zip(buffers, groups, strict=True):
        dist.all_reduce(x.fill_(1.0), group=group)
        assert (x == group.size()).all()
    foreign = buffers[1].fill_(r)
    dist.all_reduce(foreign)
    assert (foreign == 3).all() and (buffers[0] == 3).all()


def test_several_groups():
    spawn(3, check_groups)


def check_empty(r, n):
    empty = [allocate(0), allocate(0, torch.float64)]
    for x in empty:
        assert x.shape == (0,)
        dist.all_reduce(x)
    x = allocate(3)
    dist.all_reduce(x.fill_(1.0))
    assert x.tolist() == [float(n)] * 3


def test_zero_size():
    spawn(2, check_empty)


# --- errors --------------------


def check_errors(r, n):
    with pytest.raises(
        pycomm.MismatchError,
        match=r"alloc.*nbytes=\d+ here, \d+ on rank \d. All ranks must allocate equal sizes",
    ):
        allocate(3 + (r == n - 1))
    with pytest.raises(ValueError, match="size -1 is negative"):
        allocate(-1)
    with pytest.raises(ValueError, match="not supported"):
        allocate(3, torch.qint8)
    with pytest.raises(ValueError, match="device meta; expected cpu or cuda"):
        dist.group.WORLD._get_backend(CPU).allocate_tensor(
            3, dtype=torch.float32, device=torch.device("meta")
        )
    x = allocate(4)  # nothing of it has broken the group
    dist.all_reduce(x.fill_(1.0))
    assert x.tolist() == [float(n)] * 4


@pytest.mark.parametrize("world_size", [2, 3])
def test_wrong_sizes_raise_on_every_rank_and_break_nothing(world_size):
    spawn(world_size, check_errors)


def check_support(r, n):
    backend = dist.group.WORLD._get_backend(CPU)
    return [backend.supports_tensor_alloc(torch.device(name)) for name in ("cpu", "cpu:0")]


def test_who_supports_it():
    assert spawn(2, check_support) == [[True, True]] * 2
    assert spawn(2, check_support, backend="gloo") == [[False, False]] * 2


def check_absent_rank(r, n):
    store = dist.distributed_c10d._get_default_store()
    if r == 1:
        store.wait(["raised"], timedelta(seconds=60))
        return
    with pytest.raises(pycomm.CommTimeoutError, match="rank 1"):
        allocate(10)
    store.set("raised", "")


def test_a_rank_that_does_not_come_is_named():
    spawn(2, check_absent_rank, timeout=0.5)


# --- lifetime --------------------


def check_order(r, n):
    """Each rank frees in another order, beside operations of its peers on theirs."""
    count = 50021
    for rounds in range(6):
        xs = [registered(count, r, seed) for seed in range(4)]
        works = [dist.all_reduce(x, async_op=True) for x in xs]
        for work in works:
            work.wait()
        equal(xs, [total(n, count, seed) for seed in range(4)])
        kept = xs.pop((r + rounds) % 4)
        del xs, works, work
        for _ in range(2):
            plain = (
                kept.fill_(1.0) if r else torch.ones(count)
            )  # the kept ones are in different regions on all ranks
            work = dist.all_reduce(plain, async_op=True)
            if r == 0:
                kept = None  # unregistered while a peer's part of it may be in use
            work.wait()
            assert (plain == n).all()


@pytest.mark.parametrize(("world_size", "cma"), [(2, "1"), (3, "1"), (3, "0")])
def test_freed_in_different_orders(world_size, cma, monkeypatch):
    monkeypatch.setenv("PYCOMM_CMA", cma)
    spawn(world_size, check_order)


def check_freed_beside_an_operation(r, n):
    """Rank 0 drops its part of a region while its worker thread is at rank 1's part of the same."""
    count = 8 * MIB
    mine = allocate(count)
    for wait_ms in range(6):
        x = allocate(count)
        y = (mine if r == 0 else x).fill_(r + 1.0)
        dist.barrier()
        work = dist.all_reduce(y, async_op=True)
        if r == 0:
            time.sleep(wait_ms / 1000)
            del x
        work.wait()
        assert (y == 3).all()


def test_freed_while_peers_parts_are_read():
    spawn(2, check_freed_beside_an_operation)


def check_outlives(r, n):
    x, y = registered(5000, r), allocate(3)
    view = x[10:20]
    del x
    dist.all_reduce(view)
    backend = dist.group.WORLD._get_backend(CPU)
    dist.destroy_process_group()
    equal(view, total(n, 5000)[10:20])
    view.add_(1)
    equal(view, total(n, 5000)[10:20] + 1)
    with pytest.raises(pycomm.CommError, match="closed|shut"):
        backend.allocate_tensor(3, dtype=torch.float32, device=CPU)
    with pytest.raises(ValueError, match="initialized"):
        dist.all_reduce(y)
    del backend
    gc.collect()
    view.mul_(2)  # the group is gone altogether
    return view, y


@pytest.mark.parametrize("world_size", [2, 3])
def test_plain_memory_after_the_group(world_size):
    for view, y in spawn(world_size, check_outlives):
        equal(view, 2 * (total(world_size, 5000)[10:20] + 1))
        assert y.tolist() == [0, 0, 0]


def resident(holding=None):
    """Bytes of registered memory, of all ranks, that this process has touched and that still exist.

    holding: a tensor: only of the mapping that it lies in. What was given back before may go meanwhile.
    """
    with open("/proc/self/smaps") as maps:
        text = maps.read()
    found = re.findall(r"^(\w+)-(\w+) .*/memfd:pycomm.*\n(?:[A-Z].*\n)*?Rss: +(\d+) kB", text, re.M)
    place = None if holding is None else holding.data_ptr()
    return sum(
        int(size) << 10
        for first, end, size in found
        if place is None or int(first, 16) <= place < int(end, 16)
    )


def check_leaks(r, n):
    keep, before = registered(1000, r), None
    for i in range(400):
        x = allocate(64 << 10 if i % 7 else MIB).fill_(1.0)
        if i % 3 == r:
            kept = x  # freed a round later than by the peers  # noqa: F841
        dist.all_reduce(x)
        if i == 60:
            dist.barrier()
            before = Usage()
    kept = x = None  # noqa: F841
    dist.barrier()
    allocate(1)
    grown = Usage().growth_since(before, 6 * MIB)
    dist.all_reduce(keep)
    equal(keep, total(n, 1000))
    return [
        text for text in grown if not text.startswith("fds") and not text.startswith("segments")
    ], count_segments()


def count_segments():
    gc.collect()
    with open("/proc/self/maps") as maps:
        return len({line.split()[4] for line in maps if "/memfd:pycomm" in line})


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_many_allocations_leave_nothing(world_size):
    for grown, descriptors in spawn(world_size, check_leaks):
        assert grown == []
        assert descriptors <= 5  # of the group, of `keep`, of the last ones


def check_given_back(r, n):
    """A rank's pages go when its tensor goes, though its peers still have theirs."""
    before = resident()
    x = allocate(8 * MIB)
    x.fill_(1.0)
    filled = resident() - before
    dist.barrier()
    if r == 0:
        del x
    dist.barrier()
    left = resident() - before
    if r:
        assert (x == 1.0).all()
    return filled, left


def test_memory_goes_with_the_tensor_of_each_rank():
    (filled, left), *others = spawn(3, check_given_back)
    assert filled >= 31 * MIB and left <= MIB
    assert all(filled >= 31 * MIB and left >= 31 * MIB for filled, left in others)


def check_forked_child(r, n):
    x = registered(100000, r)
    pid = os.fork()
    if pid == 0:
        del x
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    equal(x, data(r, 100000))
    dist.all_reduce(x)
    equal(x, total(n, 100000))


def test_a_forked_child_frees_nothing_of_its_parent():
    spawn(2, check_forked_child)


# --- in place --------------------


def check_in_place(r, n):
    """How many bytes of registered memory this rank has touched in an operation; its own part was touched
    before.
    """
    count, touched = 2 * MIB, {}

    def measure(name, x, operation, holding=None):
        dist.barrier()
        before = resident(holding)
        operation(x)
        touched[name] = resident(holding) - before

    def reduce_scatter(x):
        dist.reduce_scatter_tensor(x.chunk(n)[r], x)

    def all_gather(x):
        dist.all_gather_into_tensor(x, x.chunk(n)[r])

    def all_reduce_slice(x):
        dist.all_reduce(x[8 : count // 2])

    for operation in (dist.all_reduce, all_reduce_slice, reduce_scatter, all_gather):
        x = allocate(count).fill_(1.0)
        measure(operation.__name__, x, operation, holding=x)
        measure(f"ordinary {operation.__name__}", torch.ones(count), operation)
    return touched


def test_peers_are_read_in_place(monkeypatch):
    """8 MiB on 2 ranks: each works on its half, in the other's part too; with ordinary memory in the staging,
    which is less.
    """
    monkeypatch.setenv("PYCOMM_CMA", "0")
    monkeypatch.setenv("PYCOMM_STAGING_BYTES", str(MIB))
    least = {
        "all_reduce": 4 * MIB,
        "all_reduce_slice": 2 * MIB,
        "reduce_scatter": 4 * MIB,
        "all_gather": 4 * MIB,
    }
    for touched in spawn(2, check_in_place):
        for name, nbytes in least.items():
            assert touched[name] >= nbytes - 65536, touched
            assert touched[f"ordinary {name}"] <= 1.25 * MIB, touched


def test_benchmark(monkeypatch, capfd):
    monkeypatch.setattr(registered_benchmark, "TURNS", 2)
    monkeypatch.setattr(registered_benchmark, "SIZES", {"1 KiB": 1 << 10, "100 KiB": 100 << 10})
    monkeypatch.setattr("sys.argv", ["registered", "3"])
    registered_benchmark.main()
    rows = capfd.readouterr().out.splitlines()
    assert len(rows) == 2 + 6 and rows[-1].startswith("| all_gather_into_tensor | 100 KiB |")
    assert all(float(cell) > 0 for row in rows[2:] for cell in row.split("|")[3:6])
