"""Every collective x algorithm x world size x ugly count x placement of buffers, against one-line oracles on all ranks' inputs.

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

# --- inputs, and where they lie ----------------------------------------------------------------------------------------------------------


# Inputs are windows into memory that is filled once and shared by threads and forked processes; another seed is another window.
POOL_BYTES = 21 << 20
_generator = torch.Generator().manual_seed(0)
RANDOM_BYTES = torch.randint(-(2**63), 2**63 - 1, (POOL_BYTES // 8,), generator=_generator).view(torch.uint8)
RANDOM_BOOLS = RANDOM_BYTES[: 1 << 20] % 2
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
    """A view that starts in the middle of an element (not of complex ones: torch's own copy of them crashes)."""
    if values.dtype.is_complex:
        return odd(values)
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


# --- one generator per collective: yields (what, got, expected) --------------------------------------------------------------------------
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
    v, junk = (bits(n, count, dtype=dtype, seed=seed + i) for i in range(2))
    for root in {0, n - 1}:
        got = [comm.gather(put(v[r]), root=root, **kw), comm.gather(put(v[r]), junk.clone(), root=root, **kw)]
        memory = junk.clone()
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


# --- the table ---------------------------------------------------------------------------------------------------------------------------

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
        return [20011, 93001]
    if n > 2:
        return [20011]
    return [edge + d for edge in (65536 // n, 65536, 131072) for d in (-1, 1)] + [200003] + [400009] * (options.get("threads", 1) > 1)


def table(name, n, options):
    """Small counts in all placements; large ones in one placement each, which differs from case to case."""
    seed = 0
    for algorithm in ALGORITHMS[name]:
        for count in [0, 1, 11, 1009] if "staging_bytes" in options else small_counts(n):
            seed += 1
            for placement in sorted({"dense", list(PLACEMENTS)[seed % 4]}):
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


@pytest.mark.parametrize(("mode", "n"), [("threads", 3), ("processes", 2)])
def test_every_dtype_is_moved_bit_by_bit(mode, n):
    cases, sizes = [], [0, 1, 7, 1031, 9001]
    for name in MOVING:
        for i, algorithm in enumerate(ALGORITHMS[name]):
            for j, dtype in enumerate(DTYPES.values()):
                options = {"algorithm": algorithm, "dtype": dtype}
                cases.append((name, sizes[(i + j) % 5], list(PLACEMENTS)[(i + j) % 4], i * 20 + j, options))
    check(n, cases, mode=mode)


def program(seed, n, length):
    """Operations of alternating kinds, algorithms, sizes and placements: what one leaves in flags and staging must not disturb the next."""
    rng = random.Random(seed)
    for step in range(length):
        name = rng.choice(list(CHECKS))
        count = rng.choice([0, 1, n, 9, 11, 500, 2047, 2049, 5003, 12007, rng.randrange(40000)])
        yield name, count, rng.choice(list(PLACEMENTS)), seed * length + step, {"algorithm": rng.choice(ALGORITHMS[name])}


PROGRAMS = ["threads-2", "threads-small-staging-4", "processes-4-lanes-2", "processes-small-staging-3"]  # configuration and world size


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("where", PROGRAMS)
def test_random_programs(where, seed):
    config, _, n = where.rpartition("-")
    check(int(n), list(program(seed, int(n), 60)), **CONFIGS[config][2])


def test_sixteen_processes():
    cases = [
        (name, count, "dense", 7, {"algorithm": algorithm}) for name in CHECKS for algorithm in ALGORITHMS[name] for count in (3, 5003)
    ]
    check(16, cases, mode="processes", staging_bytes=1 << 20)


# --- reductions: which op on which dtype, and every bit of the result --------------------------------------------------------------------

REAL = ["sum", "avg", "product", "min", "max", "premul_sum"]
REDUCTIONS = {name: REAL for name in ("f64", "f32", "f16", "bf16")}
REDUCTIONS |= {
    name: ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"] for name in ("i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64")
}
REDUCTIONS |= {"bool": ["sum", "product", "min", "max", "band", "bor", "bxor"]}
REDUCTIONS |= {name: ["sum", "avg", "product", "premul_sum"] for name in ("c64", "c128")}
FACTOR = 0.3


def values(dtype, n, count, seed):
    if dtype.is_floating_point or dtype.is_complex:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(n, count, generator=generator, dtype=dtype if dtype.itemsize > 2 else f32).to(dtype)
    return bits(n, count, dtype=dtype, seed=seed)


def oracle(op, v):
    """The reduction of the rows of v from left to right: 16-bit floats in f32, rounded once; integers wrap, and avg truncates."""
    if v.dtype.is_floating_point or v.dtype.is_complex:
        rows = list(v.to(f32) if v.dtype in (torch.float16, torch.bfloat16) else v)
        rows = [row * FACTOR for row in rows] if op == "premul_sum" else rows
        fold = {"product": product, "min": torch.minimum, "max": torch.maximum}.get(op, torch.add)
        result = functools.reduce(fold, rows)
        if op == "avg":
            result = torch.view_as_complex(torch.view_as_real(result) / len(rows)) if v.is_complex() else result / len(rows)
        return result.to(v.dtype)
    rows = list(v.numpy())
    folds = {
        "product": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }
    with np.errstate(over="ignore"):
        result = functools.reduce(folds.get(op, np.add), rows)
    if op == "avg" and result.dtype.kind == "i":
        return torch.from_numpy(result).div(len(rows), rounding_mode="trunc")
    result = result // len(rows) if op == "avg" else result
    return torch.from_numpy(np.asarray(result, dtype=v.numpy().dtype))


def product(a, b):
    if not a.is_complex():
        return a * b
    return torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)


def reduction(op):
    return pycomm.premul_sum(FACTOR) if op == "premul_sum" else op


def run_reductions(comm, counts):
    found, n, r = [], comm.world_size, comm.rank
    for seed, (name, op, count) in enumerate((name, op, count) for name, ops in REDUCTIONS.items() for op in ops for count in counts):
        v = values(DTYPES[name], n, n * count, seed)
        expected = oracle(op, v)
        got = {}
        for algorithm in ALGORITHMS["all_reduce"]:
            got["all_reduce", algorithm] = comm.all_reduce(v[r].clone(), reduction(op), algorithm=algorithm), expected
        for algorithm in ALGORITHMS["reduce"]:
            got["reduce", algorithm] = (
                comm.reduce(v[r].clone(), n - 1, reduction(op), algorithm=algorithm),
                expected if r == n - 1 else None,
            )
        for algorithm in ALGORITHMS["reduce_scatter"]:
            out = comm.reduce_scatter(v[r].clone(), op=reduction(op), algorithm=algorithm)
            got["reduce_scatter", algorithm] = out, expected[r * count : (r + 1) * count]
        for (kind, algorithm), (result, right) in got.items():
            what = f"rank {r}: {kind}({name}, {op}, count={n * count}, algorithm={algorithm})"
            if right is None:
                found += [f"{what}: the result {result} is not at the root"] if result is not None else []
            elif algorithm == "ring" and not same(result, right):  # sums in cyclic order
                tolerance = dict(rtol=1e-5, atol=1e-5) if DTYPES[name].itemsize < 16 else {}
                if not torch.allclose(result, right, **tolerance):
                    found.append(difference(what, result, right))
            elif not same(result, right):
                found.append(difference(what, result, right))
        again = comm.all_reduce(v[r].clone(), reduction(op), algorithm="ring")
        everyone = comm.all_gather(raw(again))
        if not same(again, got["all_reduce", "ring"][0]) or (everyone != everyone[0]).any():
            found.append(f"rank {r}: ring all_reduce({name}, {op}): bits differ between runs or ranks")
    return found


@pytest.mark.parametrize(
    ("mode", "n", "counts"), [("threads", 1, [3]), ("threads", 3, [1, 37, 1501]), ("processes", 2, [5, 2503]), ("threads", 7, [11])]
)
def test_reductions_are_the_same_bits_everywhere(mode, n, counts):
    found = sum(run_ranks(n, run_reductions, counts, mode=mode, timeout=45), [])
    assert not found, f"{len(found)} wrong results:\n" + "\n".join(found[:8])


def special(comm):
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([nan if comm.rank == 1 else 1.0, inf, inf if comm.rank else -inf, 1e38, -0.0])
    return [comm.all_reduce(x.clone(), op) for op in ("sum", "min", "max")]


def test_special_values():
    nan, inf = float("nan"), float("inf")
    for total, least, greatest in run_ranks(4, special):
        torch.testing.assert_close(total, torch.tensor([nan, inf, nan, inf, -0.0]), equal_nan=True, rtol=0, atol=0)
        torch.testing.assert_close(least, torch.tensor([nan, inf, -inf, 1e38, -0.0]), equal_nan=True, rtol=0, atol=0)
        torch.testing.assert_close(greatest, torch.tensor([nan, inf, inf, 1e38, -0.0]), equal_nan=True, rtol=0, atol=0)


def try_unsupported(comm):
    wrong = []
    for name, op in ((name, op) for name in _C.dtypes for op in _C.reduce_ops if op not in REDUCTIONS.get(name, [])):
        x = torch.zeros(2 * comm.world_size, dtype=DTYPES[name])
        for kind, call in (("all_reduce", comm.all_reduce), ("reduce", comm.reduce), ("reduce_scatter", comm.reduce_scatter)):
            try:
                call(x, op=reduction(op))
                wrong.append(f"{kind}({name}, {op}) did not raise")
            except ValueError as error:
                if not all(word in str(error) for word in (f"[rank {comm.rank}/", kind, name, op)):
                    wrong.append(str(error))
    return wrong, comm.all_reduce(torch.ones(1)).item()


def test_unsupported_reductions_raise_and_leave_the_group_usable():
    assert set(DTYPES) == set(_C.dtypes)
    assert run_ranks(2, try_unsupported) == [([], 2.0)] * 2


# --- what went wrong once ----------------------------------------------------------------------------------------------------------------


def lopsided(comm, size):
    n, r = comm.world_size, comm.rank
    sizes = torch.zeros(n, n, dtype=torch.int64)
    sizes[0, 1] = sizes[1, 0] = size
    sizes[0, 2] = 10
    parts = [[torch.full((sizes[q, p],), 10.0 * q + p) for p in range(n)] for q in range(n)]
    got = comm.all_to_all(torch.cat(parts[r]), in_splits=sizes[r].tolist(), out_splits=sizes[:, r].tolist(), timeout=5)
    return same(got, torch.cat([parts[q][r] for q in range(n)]))


@pytest.mark.parametrize("size", [1000, 30000, 100000, 700000])
@pytest.mark.parametrize("cma", ["0", "1"])
def test_all_to_all_whose_ranks_see_very_different_sizes(monkeypatch, cma, size):
    """All ranks must choose the same algorithm, although each knows only its own sizes."""
    monkeypatch.setenv("PYCOMM_CMA", cma)
    assert run_ranks(3, lopsided, size, mode="processes", timeout=8, staging_bytes=256 * KIB) == [True] * 3


def stale(comm):
    """Peers must not take what a mismatched operation has left in the staging. Pages of rank 0's data are absent: it is slow."""
    count, wrong = 700000, 0
    for _ in range(25):
        with pytest.raises(pycomm.MismatchError):
            comm.broadcast(torch.full((count + comm.rank,), -1.0), algorithm="staged")
        x = torch.frombuffer(mmap.mmap(-1, 4 * count), dtype=f32) if comm.rank == 0 else torch.full((count,), -5.0)
        comm.barrier()
        wrong += int(comm.broadcast(x, algorithm="staged").any())
    return wrong


def test_a_mismatch_leaves_nothing_behind():
    assert run_ranks(3, stale, mode="processes") == [0, 0, 0]
