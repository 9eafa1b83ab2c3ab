"""The benchmark of pycomm.fused: the command on tiny shapes, its exact results against one process, wrong
results, ranks that fail.
"""

import json
import time

import pytest
import torch
from oracle import ACTIVATIONS

from pycomm.benchmarks import __main__ as cli
from pycomm.benchmarks.common import turns
from pycomm.benchmarks.common.ranks import RankError
from pycomm.benchmarks.fused import columns, command, peers, variants
from pycomm.benchmarks.fused.cases import EPILOGUES, OPS, Case, make_tensors, parse_shapes

QUICK = "--rounds 2 --seconds 0.002 --timeout 20".split()
THREADS = peers.Place("threads", "cpu", timeout=30)


def test_command(tmp_path, capsys):
    files = {"json": tmp_path / "a.json", "markdown": tmp_path / "a.md", "plot": tmp_path / "a.png"}
    options = [f"--{kind}={path}" for kind, path in files.items()]
    assert (
        cli.main(
            [
                "fused",
                *QUICK,
                "--shapes",
                "8x12x16",
                "--dtype",
                "f32,bf16",
                "--activation",
                "swiglu",
                *options,
            ]
        )
        == 0
    )
    found = json.loads(files["json"].read_text())
    rows = {(row["op"], row["dtype"], row["variant"]): row for row in found["rows"]}
    for op in OPS:
        names = (
            ["plain", "pycomm.fused"]
            if op == "matmul"
            else ["plain", "torch, gloo", "chunked", "fused", "pycomm.fused"]
        )
        for dtype in ("f32", "bf16"):
            assert [name for o, d, name in rows if (o, d) == (op, dtype)] == names
    for (op, dtype, name), row in rows.items():
        assert row["ranks"] == (1 if op == "matmul" else 2)
        if name == "fused":
            assert "need a GPU" in row["missing"]
            continue
        assert row["error"] < (1e-6 if dtype == "f32" else 0.02) and not row["wrong"]
        assert row["p10_us"] <= row["time_us"] <= row["p90_us"] and len(row["rounds_us"]) == 2
        assert row["gflops"] == pytest.approx(2 * 8 * 24 * 16 / row["time_us"] / 1e3)
        assert row["times_faster"][name] == 1.0 and row["times_faster"]["plain"] > 0
        assert row["choice"].startswith("plain")
    text = files["markdown"].read_text()
    assert (
        "| 8x12x16 | bf16 | swiglu | torch, gloo |" in text
        and "n/a: all_gather_matmul, fused: the kernels need a GPU" in text
    )
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
    assert "## matmul_reduce_scatter, 2 ranks, forward" in capsys.readouterr().out


def test_backward_and_threads(tmp_path):
    path = tmp_path / "a.json"
    more = [
        "--backward",
        "--ranks-as",
        "threads",
        "--ranks",
        "3",
        "--json",
        str(path),
        "--activation",
        "gelu,none",
    ]
    assert cli.main(["fused", *QUICK, "--shapes", "9x12x16", *more]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["missing"] for row in rows if row["variant"] in ("chunked", "fused")} == {"forward only"}
    assert all(row["error"] < 1e-5 for row in rows if row["missing"] is None) and "torch, gloo" not in {
        row["variant"] for row in rows
    }


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--op", "matmul_gather"], "--op 'matmul_gather': must be of matmul, "),
        (["--shapes", "64x64"], "must be MxNxK"),
        (["--shapes", "64x0x64"], "must be MxNxK"),
        (["--shapes", "63x64x64"], "must be a multiple of --ranks 2"),
        (["--dtype", "f64"], "must be of f32"),
        (["--activation", "tanh"], "must be of bare"),
        (["--ranks", "1"], "need 2 or more"),
        (["--graph"], "need --device cuda"),
        (["--seconds", "0"], "above 0"),
        (["--backward", "--activation", "relu"], "jumps at 0"),
    ],
)
def test_wrong_options(arguments, reason, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["fused", *arguments])
    assert stopped.value.code == 2 and reason in capsys.readouterr().err


def test_without_gpu(monkeypatch, capsys):
    monkeypatch.setattr(command.gpu, "why_no_cuda", lambda: "torch is built without CUDA")
    monkeypatch.setattr(command.env, "allow_thread_ranks", lambda: None)
    assert cli.main(["fused", "--device", "cuda"]) == 2
    assert "--device cuda: torch is built without CUDA." in capsys.readouterr().err


def test_parse_shapes():
    assert parse_shapes("1x2x3, 64x128x256") == [(1, 2, 3), (64, 128, 256)]


# --- the exact result --------------------


def in_one_process(case, n, rank):
    """[result, gradients] of a rank by autograd of the whole computation in float64."""
    everyone = [make_tensors(case, n, r, torch.device("cpu")).to(torch.float64) for r in range(n)]
    a, b = [[x[i].clone().requires_grad_() for x in everyone] for i in (0, 1)]
    biases = [None if x.bias is None else x.bias.clone().requires_grad_() for x in everyone]
    bias = biases[rank] if case.op == "all_gather_matmul" else biases[0]
    own = biases if case.op == "all_gather_matmul" else [bias] * n
    if case.op == "all_gather_matmul":
        outs = [torch.cat(a) @ b[r] for r in range(n)]
    else:
        outs = (
            list(sum(x @ y for x, y in zip(a, b, strict=True)).tensor_split(n))
            if case.op == "matmul_reduce_scatter"
            else None
        )
        outs = outs or [sum(x @ y for x, y in zip(a, b, strict=True))] * n
    outs = [ACTIVATIONS[case.activation](z if own[r] is None else z + own[r]) for r, z in enumerate(outs)]
    counted = [rank] if case.op in ("matmul", "matmul_all_reduce") else range(n)
    loss = sum((outs[r] * everyone[r].weights).sum() for r in counted)
    return [
        outs[rank].detach(),
        *torch.autograd.grad(loss, [x for x in (a[rank], b[rank], bias) if x is not None]),
    ]


def compare_exact(peers, cases):
    for case in cases:
        tensors = make_tensors(case, peers.size, peers.rank, peers.device)
        got = variants.exact(case, tensors, peers, backward=True)
        want = in_one_process(case, peers.size, peers.rank)
        assert len(got) == len(want) == 3 + case.bias
        for mine, theirs in zip(got, want, strict=True):
            assert mine.dtype == torch.float64 and torch.allclose(mine, theirs, rtol=1e-9, atol=1e-11), str(
                case
            )
        assert torch.equal(variants.exact(case, tensors, peers)[0], got[0])


@pytest.mark.parametrize("n", [1, 3])
def test_exact_results(n):
    ops = ["matmul"] if n == 1 else OPS[1:]
    peers.run(
        n,
        THREADS,
        compare_exact,
        [Case(op, 12, 5, 7, "f32", epilogue) for op in ops for epilogue in EPILOGUES],
    )


def apart(peers):
    """Kernels are loaded without a word to the others: they do not come."""
    if peers.rank == 0:
        for op in OPS[1:]:
            case = Case(op, 8, 4, 4, "bf16", "swiglu")
            variants.load_kernels(case, make_tensors(case, 2, 0, peers.device), peers, backward=True)


def test_loading_kernels_waits_for_nobody():
    peers.run(2, THREADS._replace(operation_timeout=2.0), apart)


def test_wrong_results_fail_the_command(monkeypatch, capsys):
    right = variants.public

    def planted(case, tensors, peers, backward):
        call = right(case, tensors, peers, backward)

        def wrong():
            (out,) = call()
            out[:2, :2] = out[2:4, :2]
            return (out,)

        return wrong if peers.rank == 1 else call

    monkeypatch.setattr(variants, "public", planted)
    arguments = ["fused", *QUICK, "--ranks-as", "threads", "--op", "matmul_all_reduce", "--shapes", "8x8x8"]
    assert cli.main(arguments) == 1
    shown = capsys.readouterr()
    assert " WRONG |" in shown.out and "matmul_all_reduce 8x8x8 f32 gelu_tanh, pycomm.fused" in shown.err
    assert "plain:" not in shown.err


# --- ranks, records --------------------


def test_what_was_measured_before_an_error_is_kept(monkeypatch, capsys):
    right = variants.exact

    def planted(case, *args):
        if case.m == 16:
            raise RuntimeError("bad luck")
        return right(case, *args)

    monkeypatch.setattr(variants, "exact", planted)
    assert cli.main(["fused", *QUICK, "--op", "matmul_all_reduce", "--shapes", "8x8x8,16x8x8"]) == 1
    shown = capsys.readouterr()
    assert "| 8x8x8 | f32 |" in shown.out and "| 16x8x8 |" not in shown.out
    assert "rank 0/2: matmul_all_reduce 16x8x8 f32 gelu_tanh: RuntimeError: bad luck" in shown.err


def test_limit(capsys):
    assert (
        cli.main(
            [
                "fused",
                *QUICK,
                "--ranks-as",
                "threads",
                "--op",
                "matmul",
                "--shapes",
                "8x8x8",
                "--limit",
                "1e-9",
            ]
        )
        == 1
    )
    assert "not reached within 1e-09 s" in capsys.readouterr().err


def fail(peers, hang):
    if peers.rank == 1:
        raise ValueError("bad luck")
    time.sleep(30 if hang else 0)


def test_ranks_that_fail_are_named():
    began = time.monotonic()
    for place in (peers.Place("processes", "cpu", timeout=20), THREADS):
        with pytest.raises(RankError, match=r"(?s)rank 1: .*ValueError: bad luck"):
            peers.run(2, place, fail, place.mode == "processes")
    with pytest.raises(RankError, match="rank 0 did not end in time"):
        peers.run(1, peers.Place("processes", "cpu", timeout=1.5), lambda peers: time.sleep(30))
    assert time.monotonic() - began < 25


def test_merge():
    """The slowest rank of every sample counts; ratios are by round."""
    case = Case("matmul_all_reduce", 8, 8, 8, "f32", "none")

    def rank(scale):
        found = {
            "plain": [[2.0 * scale, 4.0], [20.0, 20.0]],
            "pycomm.fused": [[1.0, 3.0 * scale], [5.0, 5.0]],
        }
        return [
            {
                "choice": "c",
                "variants": {name: {"rounds": rounds, "error": scale / 10} for name, rounds in found.items()},
            }
        ], ""

    rows, stopped = columns.merge([case, case], 2, [rank(1), rank(2)])
    assert turns.slowest(
        [found[0]["variants"]["pycomm.fused"]["rounds"] for found, _ in (rank(1), rank(2))]
    ) == [
        [1.0, 6.0],
        [5.0, 5.0],
    ]
    assert [row["rounds_us"] for row in rows] == [[4.0e6, 20.0e6], [3.5e6, 5.0e6]] and stopped == ""
    assert rows[1]["error"] == 0.2 and rows[1]["wrong"] and rows[1]["time_us"] == 5.0e6
    speed = rows[1]["times_faster_of_rounds"]["plain"]
    assert (
        speed == pytest.approx(((4 / 3.5 + 4) / 2, 4 / 3.5, 4))
        and rows[1]["times_faster"]["plain"] == speed[0]
    )
    assert (rows[0]["p10_us"], rows[0]["p90_us"]) == (4.0e6, 20.0e6)
    assert columns.merge([case], 2, [rank(1), ([], "lost")]) == ([], "rank 1/2: lost")
