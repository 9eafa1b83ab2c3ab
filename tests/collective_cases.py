"""Calls of every collective with what must come out, for test_collectives.py and test_reductions.py.

All ranks make the inputs of all ranks from the same seed, so each checks its own result. A generator per
collective (CHECKS) yields what it got and what it expected; one run_ranks call goes through a whole table and
returns the differences as text.
"""

import functools

import torch

from pycomm.testing import run_ranks

f32 = torch.float32
DTYPES = {
    "f64": torch.float64, "f32": f32, "f16": torch.float16, "bf16": torch.bfloat16,
    "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
    "u8": torch.uint8, "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64,
    "bool": torch.bool, "c64": torch.complex64, "c128": torch.complex128,
    "f8_e4m3fn": torch.float8_e4m3fn, "f8_e4m3fnuz": torch.float8_e4m3fnuz,
    "f8_e5m2": torch.float8_e5m2, "f8_e5m2fnuz": torch.float8_e5m2fnuz, "f8_e8m0fnu": torch.float8_e8m0fnu,
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

# --- inputs, and where they lie --------------------


# Inputs are windows into memory that is filled once and shared by threads and forked processes; another seed
# is another window.
POOL_BYTES = 21 << 20
_generator = torch.Generator().manual_seed(0)
RANDOM_BYTES = torch.randint(-(2**63), 2**63 - 1, (POOL_BYTES // 8,), generator=_generator).view(torch.uint8)
RANDOM_BOOLS = RANDOM_BYTES[: 2 << 20] % 2
SMALL_NUMBERS = (RANDOM_BYTES[: POOL_BYTES // 4] % 17).to(f32) - 8


def window(pool, size, seed):
    assert size <= pool.numel(), "the pool is too small for this test"
    return pool.narrow(0, seed * 1009 * 16 % (pool.numel() - size + 1) // 16 * 16, size)


def bits(*shape, dtype=f32, seed=0):
    """Random bytes as a read-only tensor of any dtype: what moves must arrive bit by bit, NaN included."""
    pool = RANDOM_BOOLS if dtype == torch.bool else RANDOM_BYTES
    return window(pool, torch.Size(shape).numel() * dtype.itemsize, seed).view(dtype).view(shape)


def whole(*shape, seed=0):
    """Small whole numbers, to be read only: their sums are exact in any order."""
    return window(SMALL_NUMBERS, torch.Size(shape).numel(), seed).view(shape)


def dense(values):
    return values.clone()


def odd(values):
    """A view that starts at an odd element."""
    return torch.empty(values.numel() + 3, dtype=values.dtype)[3:].view(values.shape).copy_(values)


def unaligned(values):
    """A view that starts in the middle of an element (not of complex ones: torch's own copy of them
    crashes).
    """
    if values.dtype.is_complex:
        return odd(values)
    memory = bytearray(values.nbytes + 3)
    return (
        torch.frombuffer(memory, dtype=values.dtype, offset=3).view(values.shape).copy_(values)
        if values.numel()
        else values.clone()
    )


def strided(values):
    return torch.empty(*values.shape, 2, dtype=values.dtype)[..., 1].copy_(values)


PLACEMENTS = {"dense": dense, "odd": odd, "unaligned": unaligned, "strided": strided}


def raw(tensor):
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same(got, expected):
    return (
        got.shape == expected.shape and got.dtype == expected.dtype and torch.equal(raw(got), raw(expected))
    )


def difference(what, got, expected):
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return (
            f"{what}: got {got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
        )
    flat, right = got.reshape(-1), expected.reshape(-1)
    wrong = [i for i in range(flat.numel()) if not same(flat[i : i + 1], right[i : i + 1])]
    at = wrong[0]
    first = f"first at {at}: got {flat[at]}, expected {right[at]}"
    return f"{what}: {len(wrong)} of {flat.numel()} elements, {first}"


# --- one generator per collective: yields (what, got, expected) --------------------
# `put` places a tensor; `kw` is the algorithm; `seed` is equal on all ranks. n = world_size, r = rank.


def all_reduce(comm, count, put, seed, **kw):
    v = whole(comm.world_size, count, seed=seed)
    x, out = put(v[comm.rank]), put(v[0])
    yield "out of place", comm.all_reduce(x, out=out, **kw), v.sum(0)
    yield "input kept", x, v[comm.rank]
    v = whole(comm.world_size, count, seed=seed + 1)
    yield "in place", comm.all_reduce(put(v[comm.rank]), "max", **kw), v.amax(0)
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
    junk = bits(n, count, dtype=dtype, seed=seed + 1)
    yield "tensor", comm.all_gather(put(v[r]), put(junk), **kw), v
    out = junk.clone()
    out[r] = v[r]
    yield "in place", comm.all_gather(out[r], out, **kw), v
    out = junk.clone()
    out[r - 1] = v[r]
    yield "in another's place", comm.all_gather(out[r - 1], out, **kw), v
    yield (
        "overlap",
        comm.all_gather(torch.cat([v[r].view(torch.uint8)] * n).view(dtype)[:count], out, **kw),
        v,
    )
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
    size = torch.tensor(
        [[ragged(count, p + q, seed) // (1 + p) for p in range(n)] for q in range(n)]
    )  # size[q, p]: from q to p
    parts = [[bits(size[q, p], dtype=dtype, seed=seed + q * n + p) for p in range(n)] for q in range(n)]
    lists = comm.all_to_all(
        [put(part) for part in parts[r]], [put(torch.zeros_like(parts[q][r])) for q in range(n)], **kw
    )
    yield from ((f"uneven list[{q}]", lists[q], parts[q][r]) for q in range(n))
    join = functools.partial(join_parts, dtype=dtype)
    got = comm.all_to_all(
        put(join(parts[r])), in_splits=size[r].tolist(), out_splits=size[:, r].tolist(), **kw
    )
    yield "splits", got, join([parts[q][r] for q in range(n)])


def join_parts(parts, dtype):
    return torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)


def gather(comm, count, put, seed, dtype=f32, **kw):
    n, r = comm.world_size, comm.rank
    v, junk = (bits(n, count, dtype=dtype, seed=seed + i) for i in range(2))
    for root in {0, n - 1}:
        got = [comm.gather(put(v[r]), root=root, **kw), comm.gather(put(v[r]), junk.clone(), root=root, **kw)]
        memory = junk.clone()
        memory[r] = v[r]
        got.append(comm.gather(memory[r], memory, root, **kw))
        memory = junk.clone()
        memory[r - 1] = v[r]
        got.append(comm.gather(memory[r - 1], memory, root, **kw))
        lists = comm.gather(put(v[r]), [put(v[0]) for _ in range(n)], root, **kw)
        if r != root:
            assert got == [None] * 4 and lists is None
            continue
        yield from ((f"root {root} form {i}", one, v) for i, one in enumerate(got))
        yield from ((f"root {root} list[{p}]", lists[p], v[p]) for p in range(n))


def scatter(comm, count, put, seed, dtype=f32, **kw):
    n, r = comm.world_size, comm.rank
    v = bits(n, n, count, dtype=dtype, seed=seed)
    for root in {0, n - 1}:
        mine = v[root].clone() if r == root else None
        yield f"root {root} tensor", comm.scatter(mine, put(v[0, 0]), root, **kw), v[root, r]
        yield (
            f"root {root} list",
            comm.scatter([put(part) for part in v[r]], put(v[0, 0]), root, **kw),
            v[root, r],
        )
        out = mine[r] if r == root else put(v[0, 0])
        yield f"root {root} in place", comm.scatter(mine, out, root, **kw), v[root, r]
        mine = v[root].clone() if r == root else None
        out = mine[r - 1] if r == root else put(v[0, 0])
        yield f"root {root} in another's place", comm.scatter(mine, out, root, **kw), v[root, r]


CHECKS = {
    check.__name__: check
    for check in (all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, gather, scatter)
}
MOVING = ["broadcast", "all_gather", "all_to_all", "gather", "scatter"]


def run_cases(comm, cases):
    """The differences found on this rank, as text; cases: (collective, count, placement, seed, options)."""
    found = []
    for case in cases:
        name, count, placement, seed, options = case
        for what, got, expected in CHECKS[name](comm, count, PLACEMENTS[placement], seed, **options):
            if not same(got, expected):
                found.append(difference(f"rank {comm.rank}: {case} {what}", got, expected))
    comm.barrier()
    return found


def check(world_size, cases, **options):
    options.setdefault("timeout", 45)
    found = sum(run_ranks(world_size, run_cases, cases, **options), [])
    assert not found, f"{len(found)} wrong results:\n" + "\n".join(found[:8])
