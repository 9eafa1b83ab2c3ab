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


def special(comm):
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([nan if comm.rank == 1 else 1.0, inf, inf if comm.rank else -inf, 1e38, -0.0])
    return [comm.all_reduce(x.clone(), op) for op in ("sum", "min", "max")]


def test_special_values():
    nan, inf = float("nan"), float("inf")
    for total, least, greatest in run_ranks(4, special):
        torch.testing.assert_close(
            total, torch.tensor([nan, inf, nan, inf, -0.0]), equal_nan=True, rtol=0, atol=0
        )
        torch.testing.assert_close(
            least, torch.tensor([nan, inf, -inf, 1e38, -0.0]), equal_nan=True, rtol=0, atol=0
        )
        torch.testing.assert_close(
            greatest, torch.tensor([nan, inf, inf, 1e38, -0.0]), equal_nan=True, rtol=0, atol=0
        )


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
