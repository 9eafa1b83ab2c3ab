"""Which form runs: the tables, what PYCOMM_FUSED forces, and that explain says the same."""

import re

import pytest
import torch

import pycomm
from pycomm.fused import choice, ranks
from pycomm.fused.problem import Problem, cut, join_rows, split_rows
from pycomm.groups import even_sizes


def problem(
    op="matmul_reduce_scatter",
    m=8192,
    n=8192,
    k=8192,
    dtype=torch.bfloat16,
    world_size=4,
    *,
    activation=None,
    **options,
):
    sizes = tuple(even_sizes(m, world_size)) if op in ("all_gather_matmul", "matmul_reduce_scatter") else ()
    return Problem(
        op, m, n, k, dtype, world_size, 0, activation, activation is not None, sizes=sizes, **options
    )


CUDA = [
    (problem(), {}, "fused", "GFLOP on this rank and 8192 rows"),
    (problem(k=512), {}, "plain", "68.7 GFLOP on this rank, below 100"),
    (problem(m=2047, n=32768), {}, "plain", "2047 rows, below 512 per rank"),
    (problem(m=2048, n=32768), {}, "fused", ""),
    (problem(dtype=torch.float32), {}, "plain", "float32"),
    (problem(dtype=torch.float64), {"forced": "fused"}, "plain", "no kernel for torch.float64"),
    (problem(), {"peer_memory": False}, "plain", "backend is not pycomm"),
    (problem(), {"peer_memory": False, "forced": "fused"}, "plain", "backend is not pycomm"),
    (problem(), {"obstacle": "no way"}, "plain", "no way"),
    (problem(), {"triton": False}, "plain", "triton is not installed"),
    (problem(m=1), {"forced": "fused"}, "fused", "PYCOMM_FUSED=fused"),
    (problem(), {"forced": "plain"}, "plain", "PYCOMM_FUSED=plain"),
    (problem(), {"forced": "chunked"}, "chunked", "PYCOMM_FUSED=chunked"),
    (problem("matmul"), {"peer_memory": False}, "plain", "no bias with an activation"),
    (problem("matmul", activation="gelu"), {"peer_memory": False}, "fused", "an epilogue"),
    (problem("matmul", activation="gelu"), {"obstacle": "no way"}, "plain", "no way"),
    (problem(world_size=1), {"obstacle": "no way", "forced": "fused"}, "plain", "no way"),
    (problem("matmul", m=64, activation="gelu"), {}, "plain", "8.59 GFLOP, below 10"),
    (problem("matmul", activation="gelu", dtype=torch.float32), {}, "plain", "float32"),
    (problem(world_size=1), {}, "plain", "cuBLAS"),
]
CPU = [
    (problem(m=1024, n=1024, dtype=torch.float32), {}, "plain", "4194304 bytes of partial sums fit"),
    (problem(m=4096, n=2048, dtype=torch.float32, world_size=2), {}, "chunked", "33554432 bytes"),
    (problem(m=512, n=65536, world_size=2), {}, "plain", "8 chunks would have 32 rows per rank, below 256"),
    (problem("all_gather_matmul"), {}, "plain", "overlaps nothing"),
    (problem("matmul_all_reduce"), {}, "plain", "overlaps nothing"),
    (problem("matmul"), {}, "plain", "one process"),
    (problem(world_size=1), {}, "plain", "one process"),
    (problem("matmul"), {"forced": "chunked"}, "plain", "nothing is communicated"),
    (
        problem(m=4096, n=2048, world_size=2, dtype=torch.float32),
        {"forced": "plain"},
        "plain",
        "PYCOMM_FUSED=plain",
    ),
    (problem(m=0), {"forced": "chunked"}, "chunked", ""),
    (problem(), {"forced": "fused"}, "plain", "TRITON_INTERPRET=1"),
    (problem(), {"forced": "fused", "interpreted": True}, "fused", "PYCOMM_FUSED=fused"),
    (problem(), {"interpreted": True}, "plain", "16 chunks would have 128 rows"),
]


@pytest.mark.parametrize(
    ("case", "device"), [(case, "cuda") for case in CUDA] + [(case, "cpu") for case in CPU]
)
def test_choose(case, device):
    what, options, name, reason = case
    chosen = choice.choose(what, device, **options)
    assert chosen.name == name and re.search(re.escape(reason), chosen.reason), chosen
    assert chosen.chunks >= 2 if name == "chunked" else chosen.chunks == 1


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_cpu_choice_is_the_same_on_all_ranks(op):
    """Whatever differs between ranks that hold uneven parts of a weight: their k where sums travel, their n
    where rows are gathered.
    """
    for m, n, k in [(4096, 2048, 64), (4096, 2047, 2048), (512, 65536, 8), (8192, 8192, 1)]:
        here = problem(op, m, n, k, torch.float32, 2)
        there = here._replace(rank=1, **({"n": 3 * n + 1} if op == "all_gather_matmul" else {"k": 3 * k + 1}))
        assert choice.choose(here)[:3] == choice.choose(there)[:3]


@pytest.mark.parametrize(
    ("op", "options", "expected"),
    [
        ("all_gather_matmul", {"dtype": "bfloat16"},
         r"^all_gather_matmul of \(8192, 4096, 2048\) in bfloat16 on 4 ranks: plain, because"),
        ("matmul_reduce_scatter", {}, "in float32 on 4 ranks: plain, because: 16 chunks would have 128 rows"),
        ("matmul_reduce_scatter", {"device": "cuda", "dtype": "float16"},
         "fused, because: 137 GFLOP on this rank and 8192 rows"),
        ("matmul_all_reduce", {"device": "cuda"}, "plain, because: float32"),
        ("matmul", {"device": "cuda", "dtype": "float16", "activation": "swiglu"},
         "fused, because: an epilogue on 275 GFLOP"),
    ],
)  # fmt: skip
def test_explain(op, options, expected):
    text = pycomm.explain(op, (8192, 4096, 2048), 4, **options)
    assert re.search(expected, text) and "\n" not in text, text


def test_explain_says_what_is_forced(monkeypatch):
    monkeypatch.setenv("PYCOMM_FUSED", "chunked")
    assert "chunked in 3 chunks, because: PYCOMM_FUSED=chunked." in pycomm.explain(
        "matmul_all_reduce", (1, 1, 1), 2
    )


def test_explain_of_collectives():
    assert "payload" in pycomm.explain("all_reduce", 64, 2)
    assert "GPUs" in pycomm.explain("all_reduce", 64, 2, device="cuda")


@pytest.mark.parametrize(
    ("args", "options", "text"),
    [
        (("all_gather_matmul", 64, 2), {}, r"size=64: all_gather_matmul takes \(M, N, K\)"),
        (("all_gather_matmul", (64, 64), 2), {}, r"takes \(M, N, K\)"),
        (("matmul", (1, 1, 1), 2), {"dtype": "int8"}, "dtype='int8': must be one of float32"),
        (("matmul", (1, 1, 1), 2), {"activation": "tanh"}, "activation='tanh': must be None or one of relu"),
        (("matmul", (1, 1, 1), 2), {"device": "tpu"}, "device='tpu'"),
        (
            ("matmol", (1, 1, 1), 2),
            {},
            "unknown op 'matmol'; expected one of .*all_reduce.* matmul, all_gather_matmul",
        ),
        (("send", 64, 2), {}, "unknown op 'send'"),
    ],
)
def test_explain_refuses(args, options, text):
    with pytest.raises(ValueError, match=text):
        pycomm.explain(*args, **options)


def test_problem():
    swiglu = problem(
        "all_gather_matmul", 10, 6, 4, activation="swiglu", world_size=4, outer=2, inner=3
    )._replace(sizes=(3, 0, 1, 2))
    assert (swiglu.panels, swiglu.columns, swiglu.flops) == (2, 12, 2 * 10 * 6 * 4 * 2)
    assert swiglu.piece_rows == [18, 0, 6, 12]
    whole = torch.arange(36 * 5).view(36, 5)
    sorted_rows = split_rows(swiglu, whole)
    cube = whole.view(2, 6, 3, 5)
    assert torch.equal(
        sorted_rows,
        torch.cat([cube[:, :3].reshape(-1, 5), cube[:, 3:4].reshape(-1, 5), cube[:, 4:].reshape(-1, 5)]),
    )
    assert torch.equal(join_rows(swiglu, sorted_rows), whole)


@pytest.mark.parametrize(("length", "parts"), [(0, 1), (0, 3), (1, 3), (7, 3), (8, 4), (9, 4)])
def test_cuts(length, parts):
    bounds = cut(length, parts)
    assert [bounds[0][0], *(stop for _, stop in bounds)][-1] == length and all(
        a[1] == b[0] for a, b in zip(bounds, bounds[1:], strict=False)
    )
    assert list(even_sizes(length, parts)) == [len(x) for x in torch.arange(length).tensor_split(parts)]


def test_without_a_group():
    assert ranks.of(None) is ranks.ALONE
