"""The benchmark: its arithmetic against one-line oracles, its check of results, and the command with Gloo. No figure is tested."""

import csv
import json
import subprocess
import sys

import numpy as np
import pytest

from pycomm import env
from pycomm.benchmarks import __main__ as cli
from pycomm.benchmarks import backends, data, launch, metrics, report, runner, worker

# What nccl-tests computes as `factor` in its getBw functions, from the world size n.
FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
    "sendrecv": lambda n: 1,
    "pingpong": lambda n: 1,
    "barrier": lambda n: 0,
}


@pytest.mark.parametrize("op", metrics.OPS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8])
def test_busbw_factor(op, n):
    assert metrics.busbw_factor(op, n) == pytest.approx(FACTORS[op](n))


@pytest.mark.parametrize(
    "text, factor, sizes",
    [
        ("8", 2, [8]),
        ("8:64", 2, [8, 16, 32, 64]),
        ("8:100", 2, [8, 16, 32, 64]),
        ("1K:4K", 2, [1024, 2048, 4096]),
        ("8:256M", 32, [8, 256, 8192, 1 << 18, 1 << 23, 1 << 28]),
        ("64K,8,1M", 2, [8, 65536, 1 << 20]),
        ("8:32,16,1GB", 2, [8, 16, 32, 1 << 30]),
    ],
)
def test_parse_sizes(text, factor, sizes):
    assert metrics.parse_sizes(text, factor) == sizes


@pytest.mark.parametrize("text", ["", "0", "8:", ":8", "-8", "8T", "8:4", "1.5K", "8:16:32", "8,"])
def test_parse_sizes_refuses(text):
    with pytest.raises(ValueError, match="size"):
        metrics.parse_sizes(text)


def test_parse_sizes_refuses_factor():
    with pytest.raises(ValueError, match="factor=1"):
        metrics.parse_sizes("8:16", 1)


@pytest.mark.parametrize("nbytes, text", [(0, "0"), (12, "12"), (1024, "1K"), (1536, "1536"), (1 << 20, "1M"), (3 << 30, "3G")])
def test_format_nbytes(nbytes, text):
    assert metrics.format_nbytes(nbytes) == text


@pytest.mark.parametrize(
    "op, nbytes, n, count, size",
    [
        ("all_reduce", 8, 4, 2, 8),
        ("all_reduce", 1, 4, 1, 4),  # one element at least
        ("all_gather", 8, 4, 1, 16),
        ("all_gather", 1024, 4, 64, 1024),
        ("reduce_scatter", 1000, 3, 83, 996),  # rounded down to whole elements for each rank
        ("all_to_all", 1024, 2, 128, 1024),
        ("sendrecv", 64, 2, 16, 64),
        ("barrier", 64, 2, 0, 0),
    ],
)
def test_case(op, nbytes, n, count, size):
    case = metrics.make_case(op, nbytes, "f32", "sum", 0, n)
    assert (case.count, case.nbytes(n)) == (count, size)


def test_summary():
    case = metrics.make_case("all_reduce", 1 << 20, "f32", "sum", 0, 4)
    timing = metrics.summarize(case, 4, [[1e-3, 1e-3, 1e-3], [2e-3, 3e-3]], wrong=0)
    assert timing.time_us == pytest.approx(1000) and timing.p99_us == pytest.approx(3000) and timing.spread == pytest.approx(2.5)
    assert timing.algbw == pytest.approx(2**20 / 1e-3 / 1e9) and timing.busbw == pytest.approx(1.5 * timing.algbw)


class Loopback(backends.Adapter):
    """A world of one rank: every operation is a copy. It spoils `planted` elements of each result."""

    rank, world_size = 0, 1

    def __init__(self, planted):
        self.planted = planted

    def make_call(self, case, form, send, recv):
        def call():
            recv[:] = send
            recv.view(np.uint8)[:: max(1, recv.itemsize)][: self.planted] ^= 1

        return call

    def start(self, spec):
        pass

    def version(self):
        return "loopback"

    def barrier(self):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("dtype", metrics.ITEMSIZE)
@pytest.mark.parametrize("planted", [0, 3])
def test_planted_wrong_elements_are_counted(dtype, planted):
    rank = worker.Rank(Loopback(planted))
    for op in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "scatter"):
        case = metrics.make_case(op, 8192, dtype, "sum", 0, 1)
        for wrong in (rank.prepare(case, 1), rank.verify(2)):
            assert wrong and set(wrong.values()) == {planted}
    assert len(rank.measure("out_of_place", iters=3, batches=4, warmup=1)) == 4


@pytest.mark.parametrize("redop", metrics.REDOPS)
@pytest.mark.parametrize("dtype", metrics.ITEMSIZE)
@pytest.mark.parametrize("n", [2, 7])
def test_expected_results(redop, dtype, n):
    """Every operation, computed here from the ranks' inputs in f64, is what the check expects."""
    reduce = {"sum": np.sum, "avg": np.mean, "product": np.prod, "min": np.min, "max": np.max}[redop]
    count = 2 * data.PERIOD + 5
    case = metrics.Case("all_reduce", count, dtype, redop, 1)
    inputs = [np.resize(data._numbers(redop, n, rank, 3), n * count).astype(np.float64) for rank in range(n)]
    chunk = [slice(rank * count, (rank + 1) * count) for rank in range(n)]
    for rank in range(n):
        for op, result in {
            "all_reduce": reduce([x[:count] for x in inputs], axis=0),
            "reduce_scatter": reduce([x[chunk[rank]] for x in inputs], axis=0),
            "all_gather": np.concatenate([x[:count] for x in inputs]),
            "all_to_all": np.concatenate([x[chunk[rank]] for x in inputs]),
            "broadcast": inputs[1][:count],
            "scatter": inputs[1][chunk[rank]],
            "sendrecv": inputs[rank - 1][:count],
        }.items():
            case = case._replace(op=op)
            got = data.encode(result, dtype)
            segments = data.expected(case, rank, n)
            assert len(got) == sum(segment.length for segment in segments)
            assert data.count_wrong(got, segments, case, n, 3) == 0
            assert data.count_wrong(got, segments, case, n, 4) > count // 10  # another salt: other numbers
    shifted = data.encode(np.concatenate([inputs[0][1:], inputs[0][:1]])[: n * count], dtype)
    everything = [data.Segment(0, n * count, 0, 0)]
    assert data.count_wrong(shifted, everything, case, n, 3) > count // 10


def _row(backend, time_us, op="all_reduce"):
    timing = metrics.Timing(time_us, 2 * time_us, 1.0, 1.0, 0, 1.0)
    return runner.Row(backend, metrics.make_case(op, 1024, "f32", "sum", 0, 2), 2, 1024, None, timing)


def test_comparison():
    (line,) = report.compare([_row("pycomm", 2.0), _row("gloo", 100.0), _row("mpi", 4.0)])
    assert (line["best_peer"], line["of_best_peer"], line["faster_than_gloo"]) == ("mpi", 0.5, 50.0)
    assert report.compare([_row("pycomm", 2.0)]) == report.compare([_row("gloo", 2.0)]) == []


def test_command_with_gloo(tmp_path):
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "markdown")}
    command = [sys.executable, "-m", "pycomm.benchmarks", "all_reduce,all_gather", "--backends", "gloo", "--ranks", "2", "--rounds", "2"]
    command += ["--sizes", "8:1K", "--factor", "128", "--seconds", "0.002", "--timeout", "60"]
    command += [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env.for_child(RANK=None, WORLD_SIZE=None))
    assert done.returncode == 0, done.stderr
    assert "busbw" in done.stdout and "#wrong" in done.stdout
    written = json.loads(files["json"].read_text())
    assert {"machine", "versions", "command", "date", "settings", "rows", "comparison"} <= written.keys()
    assert [(row["op"], row["size"]) for row in written["rows"]] == [
        (op, size) for op in ("all_reduce", "all_gather") for size in (8, 1024)
    ]
    for row in written["rows"]:
        assert row["backend"] == "gloo" and row["ranks"] == 2 and row["type"] == "f32"
        assert row["in_place_wrong"] == 0 and row["in_place_p99_us"] >= row["in_place_time_us"] > 0 and row["in_place_busbw"] > 0
        assert row["out_of_place_wrong"] == (None if row["op"] == "all_reduce" else 0)
    with open(files["csv"], newline="") as file:
        assert [row["size"] for row in csv.DictReader(file)] == ["8", "1024"] * 2
    assert "| gloo |" in files["markdown"].read_text()


def test_plot(tmp_path):
    rows = [_row("pycomm", 2.0), _row("gloo", 100.0)]
    report.write_plot(tmp_path / "out.png", runner.Results(rows, {"pycomm": "1", "gloo": "2"}, []))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["all_reduces"], "all_reduces"),
        (["all_reduce", "--backends", "gloo,nccl"], "nccl"),
        (["all_reduce", "--sizes", "8:x"], "'x'"),
        (["all_reduce", "--ranks", "0"], "--ranks"),
    ],
)
def test_wrong_arguments(arguments, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2 and text in capsys.readouterr().err


def test_missing_mpi_is_named(tmp_path):
    with pytest.raises(ValueError, match="mpi:other: there is no .*other/bin/mpiexec"):
        launch.find_mpi("mpi:other", tmp_path)


def test_wrong_result_fails_the_command(monkeypatch, capsys):
    row = _row("gloo", 1.0)
    row = row._replace(in_place=row.in_place._replace(wrong=5))
    monkeypatch.setattr(runner, "run", lambda options: runner.Results([row], {"gloo": "1"}, []))
    assert cli.main(["all_reduce", "--backends", "gloo"]) == 1
    assert "5 elements are wrong" in capsys.readouterr().err


@pytest.mark.parametrize("op, n, text", [("sendrecv", 1, "2 ranks or more"), ("pingpong", 3, "even number"), ("broadcast", 2, "root=2")])
def test_impossible_cases(op, n, text):
    with pytest.raises(ValueError, match=text):
        metrics.make_case(op, 8, "f32", "sum", 2 if op == "broadcast" else 0, n)
