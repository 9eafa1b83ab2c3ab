"""Every collective x algorithm x world size x ugly count x placement of the buffers, against one-line oracles on the stacked inputs of all ranks.

All ranks make the inputs of all ranks from the same seed, so each checks its own result. A generator per collective (CHECKS) yields what it
got and what it expected; one run_ranks call goes through a whole table and returns the differences as text.
"""

import functools
import mmap
import random

import numpy as np
import pytest
import torch

import pycomm
from pycomm import _C
from pycomm.testing import run_ranks

f32 = torch.float32
DTYPES = {
    "f64": torch.float64, "f32": f32, "f16": torch.float16, "bf16": torch.bfloat16, "i8": torch.int8, "u8": torch.uint8, "i16": torch.int16,
    "u16": torch.uint16, "i32": torch.int32, "u32": torch.uint32, "i64": torch.int64, "u64": torch.uint64, "bool": torch.bool,
    "c64": torch.complex64, "c128": torch.complex128, "f8_e4m3fn": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2,
    "f8_e4m3fnuz": torch.float8_e4m3fnuz, "f8_e5m2fnuz": torch.float8_e5m2fnuz, "f8_e8m0fnu": torch.float8_e8m0fnu,
}  # fmt: skip
ALGORITHMS = {  # has_algorithm of csrc/collectives/select.cc; test_unknown_algorithm holds the rest
    "all_reduce": [None, "one_shot", "two_shot", "ring", "direct"],
    "reduce": [None, "two_shot", "direct"],
    "broadcast": [None, "staged", "direct"],
    "all_gather": [None, "staged", "ring", "direct"],
    "reduce_scatter": [None, "staged", "ring", "direct"],
    "all_to_all": [None, "staged", "direct"],
    "gather": [None, "staged", "direct"],
    "scatter": [None, "staged", "direct"],
}

# --- inputs, and where they lie -----------------------------------------------------------------------------------------------------------


def bits(*shape, dtype=f32, seed=0):
    """Random bytes as a tensor of any dtype: what moves must arrive bit by bit, NaN included."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


def whole(*shape, seed=0):
    """Small whole numbers: their sums are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(f32)


def dense(values):
    return values.clone()


def odd(values):
    """A view that starts at an odd element."""
    return torch.empty(values.numel() + 3, dtype=values.dtype)[3:].view(values.shape).copy_(values)


def unaligned(values):
    """A view that starts in the middle of an element."""
    memory = bytearray(values.nbytes + 3)
    return torch.frombuffer(memory, dtype=values.dtype, offset=3).view(values.shape).copy_(values) if values.numel() else values.clone()


def strided(values):
    return torch.empty(*values.shape, 2, dtype=values.dtype)[..., 1].copy_(values)


PLACEMENTS = {"dense": dense, "odd": odd, "unaligned": unaligned, "strided": strided}


def raw(tensor):
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same(got, expected):
    return got.shape == expected.shape and got.dtype == expected.dtype and torch.equal(raw(got), raw(expected))


def difference(what, got, expected):
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{what}: got {got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    flat, right = got.reshape(-1), expected.reshape(-1)
    wrong = [i for i in range(flat.numel()) if not same(flat[i : i + 1], right[i : i + 1])]
    return f"{what}: {len(wrong)} of {flat.numel()} elements, first at {wrong[0]}: got {flat[wrong[0]]}, expected {right[wrong[0]]}"


# --- one generator per collective: yields (what, got, expected) ----------------------------------------------------------------------------
# `put` places a tensor; `kw` is the algorithm; `seed` is equal on all ranks. n = world_size, r = rank.


def all_reduce(comm, count, put, seed, **kw):
    v = whole(comm.world_size, count, seed=seed)
    x, out = put(v[comm.rank]), put(v[0])
    yield "out of place", comm.all_reduce(x, out=out, **kw), v.sum(0)
    yield "input kept", x, v[comm.rank]
    yield "in place", comm.all_reduce(x, "max", **kw), v.amax(0)
    memory = torch.empty(count + 1)
    memory[:-1] = v[comm.rank]
    yield "overlap", comm.all_reduce(memory[:-1], out=memory[1:], **kw), v.sum(0)


def reduce(comm, count, put, seed, **kw):
    n, r = comm.world_size, comm.rank
    v = whole(n, count, seed=seed)
    for root in {0, n - 1}:
        x, out = put(v[r]), put(v[0])
        got = comm.reduce(x, root, out=out if r == root else None, **kw)
        yield f"root {root}", out, v.sum(0) if r == root else v[0]
        yield f"root {root} input kept", x, v[r]
        assert (got is out) if r == root else got is None
        comm.reduce(x, root, "min", **kw)
        yield f"root {root} in place", x, v.amin(0) if r == root else v[r]


def broadcast(comm, count, put, seed, dtype=f32, **kw):
    v = bits(comm.world_size, count, dtype=dtype, seed=seed)
    for root in {0, comm.world_size - 1}:
        yield f"root {root}", comm.broadcast(put(v[comm.rank]), root, **kw), v[root]


def ragged(count, p, seed):
    """The size of rank p's part where sizes differ: some are zero."""
    return 0 if (p + seed) % 3 == 0 else count + p


def all_gather(comm, count, put, seed, dtype=f32, **kw):
    n, r = comm.world_size, comm.rank
    v = bits(n, count, dtype=dtype, seed=seed)
    yield "new", comm.all_gather(put(v[r]), **kw), v
    yield "tensor", comm.all_gather(put(v[r]), put(v.flip(0)), **kw), v
    out = v.flip(0).clone()
    out[r] = v[r]
    yield "in place", comm.all_gather(out[r], out, **kw), v
    yield "overlap", comm.all_gather(torch.cat([v[r].view(torch.uint8)] * n).view(dtype)[:count], out, **kw), v
    lists = comm.all_gather(put(v[r]), [put(v[0]) for _ in range(n)], **kw)
    yield from ((f"list[{p}]", lists[p], v[p]) for p in range(n))
    parts = [bits(ragged(count, p, seed), dtype=dtype, seed=seed + p) for p in range(n)]
    lists = comm.all_gather(put(parts[r]), [put(torch.zeros_like(part)) for part in parts], **kw)
    yield from ((f"uneven[{p}]", lists[p], parts[p]) for p in range(n))


def reduce_scatter(comm, count, put, seed, **kw):
    n, r = comm.world_size, comm.rank
    v = whole(n, n, count, seed=seed)
    x = put(v[r])
    yield "tensor", comm.reduce_scatter(x, put(v[0, 0]), **kw), v[:, r].sum(0)
    yield "input kept", x, v[r]
    yield "new", comm.reduce_scatter(x, **kw), v[:, r].sum(0, keepdim=True)
    yield "list", comm.reduce_scatter([put(part) for part in v[r]], op="max", **kw), v[:, r].amax(0)
    memory = v[r].clone()
    yield "in place", comm.reduce_scatter(memory, memory[r], **kw), v[:, r].sum(0)
    memory = v[r].clone()
    yield "overlap", comm.reduce_scatter(memory, memory[(r + 1) % n], **kw), v[:, r].sum(0)
    sizes = [ragged(count, p, seed) for p in range(n)]
    parts = [[whole(size, seed=seed + q * n + p) for p, size in enumerate(sizes)] for q in range(n)]
    got = comm.reduce_scatter([put(part) for part in parts[r]], **kw)
    yield "uneven", got, torch.stack([parts[q][r] for q in range(n)]).sum(0)


def all_to_all(comm, count, put, seed, dtype=f32, **kw):
    n, r = comm.world_size, comm.rank
    v = bits(n, n, count, dtype=dtype, seed=seed)
    yield "new", comm.all_to_all(put(v[r]), **kw), v[:, r]
    yield "tensor", comm.all_to_all(put(v[r]), put(v[0]), **kw), v[:, r]
    x = v[r].clone()
    yield "in place", comm.all_to_all(x, x, **kw), v[:, r]
    size = torch.tensor([[ragged(count, p + q, seed) // (1 + p) for p in range(n)] for q in range(n)])  # size[q, p]: from q to p
    parts = [[bits(size[q, p], dtype=dtype, seed=seed + q * n + p) for p in range(n)] for q in range(n)]
    lists = comm.all_to_all([put(part) for part in parts[r]], [put(torch.zeros_like(parts[q][r])) for q in range(n)], **kw)
    yield from ((f"uneven list[{q}]", lists[q], parts[q][r]) for q in range(n))
    join = functools.partial(join_parts, dtype=dtype)
    got = comm.all_to_all(put(join(parts[r])), in_splits=size[r].tolist(), out_splits=size[:, r].tolist(), **kw)
    yield "splits", got, join([parts[q][r] for q in range(n)])


def join_parts(parts, dtype):
    return torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)


def gather(comm, count, put, seed, dtype=f32, **kw):
    n, r = comm.world_size, comm.rank
    v = bits(n, count, dtype=dtype, seed=seed)
    for root in {0, n - 1}:
        got = [comm.gather(put(v[r]), root=root, **kw), comm.gather(put(v[r]), v.flip(0).clone(), root=root, **kw)]
        memory = v.flip(0).clone()
        memory[r] = v[r]
        got.append(comm.gather(memory[r], memory, root, **kw))
        lists = comm.gather(put(v[r]), [put(v[0]) for _ in range(n)], root, **kw)
        if r != root:
            assert got == [None] * 3 and lists is None
            continue
        yield from ((f"root {root} form {i}", one, v) for i, one in enumerate(got))
        yield from ((f"root {root} list[{p}]", lists[p], v[p]) for p in range(n))


def scatter(comm, count, put, seed, dtype=f32, **kw):
    n, r = comm.world_size, comm.rank
    v = bits(n, n, count, dtype=dtype, seed=seed)
    for root in {0, n - 1}:
        mine = v[root].clone() if r == root else None
        yield f"root {root} tensor", comm.scatter(mine, put(v[0, 0]), root, **kw), v[root, r]
        yield f"root {root} list", comm.scatter([put(part) for part in v[r]], put(v[0, 0]), root, **kw), v[root, r]
        out = mine[r] if r == root else put(v[0, 0])
        yield f"root {root} in place", comm.scatter(mine, out, root, **kw), v[root, r]


CHECKS = {check.__name__: check for check in (all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, gather, scatter)}
MOVING = ["broadcast", "all_gather", "all_to_all", "gather", "scatter"]


def run_cases(comm, cases):
    """The differences found on this rank, as text; cases: (collective, count, placement, seed, options)."""
    found = []
    for name, count, placement, seed, options in cases:
        for what, got, expected in CHECKS[name](comm, count, PLACEMENTS[placement], seed, **options):
            if not same(got, expected):
                found.append(difference(f"rank {comm.rank}: {name}(count={count}, {placement}, seed={seed}, {options}) {what}", got, expected))
    comm.barrier()
    return found


def check(world_size, cases, **options):
    options.setdefault("timeout", 45)
    found = sum(run_ranks(world_size, run_cases, cases, **options), [])
    assert not found, f"{len(found)} wrong results:\n" + "\n".join(found[:8])


# --- the table ----------------------------------------------------------------------------------------------------------------------------

KIB = 1024
CONFIGS = {  # name -> (world sizes, environment, options of run_ranks)
    "threads": ([1, 2, 3, 4, 7], {}, {}),
    "threads-small-staging": ([2, 3, 7], {}, {"staging_bytes": 256 * KIB}),
    "threads-2-lanes": ([2, 4], {}, {"staging_bytes": 256 * KIB, "threads": 2}),
    "threads-4-lanes": ([3], {}, {"threads": 4}),
    "processes": ([1, 2, 3, 4], {}, {"mode": "processes"}),
    "processes-small-staging": ([2, 7], {}, {"mode": "processes", "staging_bytes": 256 * KIB}),
    "processes-4-lanes": ([2], {}, {"mode": "processes", "threads": 4}),
    "processes-no-cma": ([2, 3], {"PYCOMM_CMA": "0"}, {"mode": "processes", "staging_bytes": 256 * KIB}),
}


def small_counts(n):
    """Around nothing, the world size, the 40 bytes of the header's line and its payload of 8192 bytes, whole and per rank."""
    edges = {0, 1, n - 1, n, n + 1, 9, 10, 11, 17} | {edge + d for edge in (8192 // 4, 8192 // 4 // n) for d in (-1, 0, 1)}
    return sorted(edges | {40 // 4 // n, 40 // 4 // n + 1, 4099})


def large_counts(n, options):
    """Beyond two steps of every pipeline; with 256 KiB blocks (all staging, cores enough) around one and two blocks, whole and per rank."""
    if "staging_bytes" in options:
        return [20011, 100003]
    if n > 2:
        return [250007]
    return [edge + d for edge in (65536 // n, 65536, 131072) for d in (-1, 1)] + [200003] + [400009] * (options.get("threads", 1) > 1)


def table(name, n, options):
    """Small counts in all placements; large ones in one placement each, which differs from case to case."""
    seed = 0
    for algorithm in ALGORITHMS[name]:
        for count in small_counts(n):
            seed += 1
            for placement in ("dense", list(PLACEMENTS)[seed % 4]):
                yield name, count, placement, seed, {"algorithm": algorithm}
        for count in large_counts(n, options):
            seed += 1
            yield name, count, list(PLACEMENTS)[seed % 4], seed, {"algorithm": algorithm}


@pytest.mark.parametrize(("config", "n"), [(config, n) for config, (sizes, _, _) in CONFIGS.items() for n in sizes])
def test_table(monkeypatch, config, n):
    _, environment, options = CONFIGS[config]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    check(n, [case for name in CHECKS for case in table(name, n, options)], **options)
