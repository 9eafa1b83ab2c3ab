"""Which reduction is there for which dtype, and every bit of its result: the same on all ranks, in every run
and with every algorithm that keeps the order of the ranks.
"""

import oracle
import pytest
import torch
from collective_cases import ALGORITHMS, DTYPES, bits, difference, f32, raw, same

import pycomm
from pycomm import _C
from pycomm.testing import run_ranks

REAL = ["sum", "avg", "product", "min", "max", "premul_sum"]
REDUCTIONS = {name: REAL for name in ("f64", "f32", "f16", "bf16")}
REDUCTIONS |= {
    name: ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
    for name in ("i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64")
}
REDUCTIONS |= {"bool": ["sum", "product", "min", "max", "band", "bor", "bxor"]}
REDUCTIONS |= {name: ["sum", "avg", "product", "premul_sum"] for name in ("c64", "c128")}
FACTOR = 0.3


def values(dtype, n, count, seed):
    if dtype.is_floating_point or dtype.is_complex:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(n, count, generator=generator, dtype=dtype if dtype.itemsize > 2 else f32).to(
            dtype
        )
    return bits(n, count, dtype=dtype, seed=seed)


def reduction(op):
    return pycomm.premul_sum(FACTOR) if op == "premul_sum" else op


def run_reductions(comm, counts):
    found, n, r = [], comm.world_size, comm.rank
    for seed, (name, op, count) in enumerate(
        (name, op, count) for name, ops in REDUCTIONS.items() for op in ops for count in counts
    ):
        v = values(DTYPES[name], n, n * count, seed)
        expected = oracle.reduced(op, v, FACTOR)
        got = {}
        for algorithm in ALGORITHMS["all_reduce"]:
            got["all_reduce", algorithm] = (
                comm.all_reduce(v[r].clone(), reduction(op), algorithm=algorithm),
                expected,
            )
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
    ("mode", "n", "counts"),
    [("threads", 1, [3]), ("threads", 3, [1, 37, 1501]), ("processes", 2, [5, 2503]), ("threads", 7, [11])],
)
def test_reductions_are_the_same_bits_everywhere(mode, n, counts):
    found = sum(run_ranks(n, run_reductions, counts, mode=mode, timeout=45), [])
    assert not found, f"{len(found)} wrong results:\n" + "\n".join(found[:8])


# --- values at the edges --------------------


def edges(dtype):
    """Zeros, denormals, the largest and infinities of both signs, and NaN of several payloads."""
    info, integer = torch.finfo(dtype), {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    nan = torch.tensor([float("nan")], dtype=dtype).view(integer)
    nans = torch.stack([nan, nan | 5, -(nan | 3)]).view(dtype).flatten()
    above = torch.tensor([0.0, 1.0, 0.1, info.smallest_normal, 0.0, info.max, float("inf")], dtype=dtype)
    above.view(integer)[4] = 1  # the smallest denormal
    return torch.cat([above, -above, nans])


def combinations(dtype, n):
    """Each combination of such values on n ranks; of complex numbers a fixed choice of them."""
    if dtype.is_complex:
        parts = edges({8: f32, 16: torch.float64}[dtype.itemsize])
        chosen = torch.randint(len(parts), (n, 997, 2), generator=torch.Generator().manual_seed(n))
        return torch.view_as_complex(parts[chosen])
    values = edges(dtype)
    return torch.stack([grid.flatten() for grid in torch.meshgrid([values] * n, indexing="ij")])


def plain(x):
    """Its bits, of each part of complex numbers."""
    return raw(torch.view_as_real(x) if x.is_complex() else x)


def with_one_nan(op, x):
    """There is one NaN in results; which zero is the least of zeros of both signs is not told."""
    parts = torch.view_as_real(x) if x.is_complex() else x
    parts = torch.where(parts.isnan(), float("nan"), parts)
    return torch.where(parts == 0, 0.0, parts) if op in ("min", "max") else parts


def expected_edges(op, v, reduced=oracle.reduced):
    """Part by part: torch's sums of complex numbers multiply, and make NaN of infinities by it."""
    if not v.is_complex() or op == "product":
        return reduced(op, v, factor=FACTOR)
    parts = torch.view_as_real(v)
    return torch.view_as_complex(reduced(op, parts.flatten(1), factor=FACTOR).view(parts.shape[1:]))


EDGES = [(name, op) for name in ("f64", "f32", "f16", "bf16", "c64", "c128") for op in REDUCTIONS[name]]
CALLS = [(kind, a) for kind in ("all_reduce", "reduce", "reduce_scatter") for a in ALGORITHMS[kind]]


def reduce_edges(comm):
    found, n, r = [], comm.world_size, comm.rank
    for name, op in EDGES:
        v = combinations(DTYPES[name], n)
        count = v.shape[1] // n
        expected = expected_edges(op, v)
        for kind, algorithm in CALLS:
            x, right = v[r].clone(), expected
            if kind == "all_reduce":
                got = comm.all_reduce(x, reduction(op), algorithm=algorithm)
            elif kind == "reduce":
                got = comm.reduce(x, n - 1, reduction(op), algorithm=algorithm)
            else:
                got = comm.reduce_scatter(x[: n * count], op=reduction(op), algorithm=algorithm)
                right = expected[r * count : (r + 1) * count]
            if got is None:
                continue
            one, what = with_one_nan(op, got), f"rank {r}: {kind}({name}, {op}, {algorithm})"
            if op not in ("min", "max") and not torch.equal(plain(got), raw(one)):
                found.append(f"{what}: a NaN is not the one NaN")
            cyclic = algorithm == "ring" and n > 2  # the order of its sums
            if not cyclic and not torch.equal(raw(one), raw(with_one_nan(op, right))):
                found.append(f"{what}: wrong")
        everyone = comm.all_gather(raw(comm.all_reduce(v[r].clone(), reduction(op), algorithm="ring")))
        if (everyone != everyone[0]).any():
            found.append(f"rank {r}: ring all_reduce({name}, {op}): bits differ between ranks")
    return found


@pytest.mark.parametrize(("mode", "n"), [("threads", 2), ("processes", 2), ("threads", 3)])
def test_values_at_the_edges(mode, n):
    """All combinations on all ranks, so that each rank, the first and the last, has each of them alone."""
    found = sum(run_ranks(n, reduce_edges, mode=mode, timeout=45), [])
    assert not found, f"{len(found)} wrong results:\n" + "\n".join(found[:8])


def try_unsupported(comm):
    wrong = []
    for name, op in (
        (name, op) for name in _C.dtypes for op in _C.reduce_ops if op not in REDUCTIONS.get(name, [])
    ):
        x = torch.zeros(2 * comm.world_size, dtype=DTYPES[name])
        for kind, call in (
            ("all_reduce", comm.all_reduce),
            ("reduce", comm.reduce),
            ("reduce_scatter", comm.reduce_scatter),
        ):
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
