"""The benchmark: its arithmetic against one-line oracles, its check of results, and the command with Gloo. No
figure is tested.
"""

import csv
import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import oracle as reference
import pytest
import torch
from gpu import summary
from tiers import tier

from pycomm import env
from pycomm.benchmarks import __main__ as cli
from pycomm.benchmarks import plot
from pycomm.benchmarks.collectives import backends, bounds, cases, columns, mpi, runner, worker
from pycomm.benchmarks.common import data, device, oracle, report

RESULTS = Path(report.__file__).parents[1] / "results"
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
    "send_recv": lambda n: 1,
    "pingpong": lambda n: 1,
    "barrier": lambda n: 0,
}


@pytest.mark.parametrize("op", cases.OPS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8])
def test_busbw_factor(op, n):
    assert cases.OPS[op].busbw_factor(n) == pytest.approx(FACTORS[op](n))


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
    assert cases.parse_sizes(text, factor) == sizes


@pytest.mark.parametrize("text", ["", "0", "8:", ":8", "-8", "8T", "8:4", "1.5K", "8:16:32", "8,"])
def test_parse_sizes_refuses(text):
    with pytest.raises(ValueError, match="size"):
        cases.parse_sizes(text)


def test_parse_ops():
    """The name that send_recv had before is accepted."""
    assert cases.parse_ops("sendrecv,all_reduce,send_recv") == ["send_recv", "all_reduce"]
    assert cases.parse_ops("all") == list(cases.MAIN_OPS)


def test_parse_sizes_refuses_factor():
    with pytest.raises(ValueError, match="factor=1"):
        cases.parse_sizes("8:16", 1)


@pytest.mark.parametrize(
    "nbytes, text", [(0, "0"), (12, "12"), (1024, "1K"), (1536, "1536"), (1 << 20, "1M"), (3 << 30, "3G")]
)
def test_format_nbytes(nbytes, text):
    assert cases.format_nbytes(nbytes) == text


@pytest.mark.parametrize(
    "op, nbytes, n, count, size",
    [
        ("all_reduce", 8, 4, 2, 8),
        ("all_reduce", 1, 4, 1, 4),  # one element at least
        ("all_gather", 8, 4, 1, 16),
        ("all_gather", 1024, 4, 64, 1024),
        ("reduce_scatter", 1000, 3, 83, 996),  # rounded down to whole elements for each rank
        ("all_to_all", 1024, 2, 128, 1024),
        ("send_recv", 64, 2, 16, 64),
        ("barrier", 64, 2, 0, 0),
    ],
)
def test_case(op, nbytes, n, count, size):
    case = cases.make_case(op, nbytes, "f32", "sum", 0, n)
    assert (case.count, case.nbytes(n)) == (count, size)


def test_summary():
    case = cases.make_case("all_reduce", 1 << 20, "f32", "sum", 0, 4)
    timing = cases.summarize(case, 4, [[1e-3, 1e-3, 1e-3], [2e-3, 3e-3]], wrong=0)
    assert (
        timing.time_us == pytest.approx(1000)
        and timing.p99_us == pytest.approx(3000)
        and timing.spread == pytest.approx(2.5)
    )
    assert timing.algbw == pytest.approx(2**20 / 1e-3 / 1e9) and timing.busbw == pytest.approx(
        1.5 * timing.algbw
    )


# Reads and writes of all ranks by simulation of the steps, for n ranks, in chunks of k=n bytes (so that a
# part is 1 byte).
def _two_shot_bytes(n):
    return sum(
        n + n for _ in range(n)
    )  # every rank: one part of n inputs read, its result written to n outputs


def _ring_bytes(n):
    total = 0
    for _ in range(n):
        total += 2  # own part into the next rank's slot
        total += (n - 2) * 3  # slot and own part read, sum into the next slot
        total += 4  # the last partial sum: slot and own read, result into out and into the next slot
        total += (n - 2) * 3 + 2  # results: slot read, out written, passed on except by the last
    return total


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8])
def test_bytes_of_one_gpu(n):
    traffic = bounds.device_traffic("all_reduce", n, n)
    assert traffic == {
        "two_shot": _two_shot_bytes(n),
        "ring": _ring_bytes(n),
        "one_shot": n * n * (2 + 4 * (n - 1)),
    }
    for op in cases.OPS:
        for in_place in (False, True):
            floor = bounds.device_floor(op, n, 64, in_place)
            assert floor <= min(bounds.device_traffic(op, n, 64, in_place).values())


def test_fractions():
    case = cases.make_case("all_reduce", 64 << 20, "f32", "sum", 0, 8)
    least_us = 16 * (64 << 20) / 4e12 * 1e6  # 2nk at 4000 GB/s
    timing = cases.Timing(2 * least_us, 0, 0, 0, 0, 1)
    assert bounds.fractions(case, 8, timing, 4000.0, False) == pytest.approx((0.5, 0.5))
    assert bounds.fractions(case, 1, timing, 4000.0, False) is None
    row = runner.as_record(runner.Row("pycomm", case, 8, case.nbytes(8), timing, None, 4000.0))
    assert row["in_place_of_bound"] is None and row["out_of_place_of_bound"] == pytest.approx(0.5)
    assert columns.of_op([row], "").lines[0][-5:] == ["4000", "0.50", "0.50", "n/a", "n/a"]


@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("count", [1, data.PERIOD, 3 * data.PERIOD + 17])
def test_device_memory_as_host_memory(dtype, count):
    """The buffers of a GPU, here on torch's CPU device, hold the same bytes and count the same errors as the
    host's.
    """
    case = cases.Case("all_gather", count, dtype, "none", 0)
    segments, host, gpu = oracle.expected(case, 0, 2), data.HostMemory(), data.DeviceMemory("cpu")
    buffers = [some.empty(2 * count, dtype) for some in (host, gpu)]
    for some, buffer in zip((host, gpu), buffers, strict=True):
        some.poison(buffer)
        assert some.count_wrong(buffer, segments, case, 2, 1) == 2 * count
        for source in range(2):
            some.fill(buffer[source * count : (source + 1) * count], data.pattern(case, 2, source, 1))
        assert some.count_wrong(buffer, segments, case, 2, 1) == 0
        some.zero(buffer[:1])
    assert host.count_wrong(buffers[0], segments, case, 2, 1) == gpu.count_wrong(
        buffers[1], segments, case, 2, 1
    )
    assert buffers[0].tobytes() == bytes(buffers[1].view(torch.uint8).tolist())


@pytest.mark.parametrize(
    "ranks, devices, given, result",
    [(8, 1, None, 8), (8, 4, None, 2), (3, 2, None, 2), (8, 8, None, 1), (4, 2, 3, 3)],
)
def test_ranks_per_gpu(ranks, devices, given, result):
    assert device.ranks_per_gpu(ranks, devices, given) == result


def test_too_few_gpus():
    with pytest.raises(ValueError, match="needs 4 GPUs, here are 2"):
        device.ranks_per_gpu(8, 2, 2)


@pytest.mark.parametrize(
    "name, on, sharing, reason",
    [
        ("pycomm", "cuda", 8, None),
        ("pycomm-torch", "cuda", 8, None),
        ("gloo", "cuda", 1, "host memory"),
        ("mpi:impi", "cuda", 1, "host memory"),
        ("nccl", "cuda", 2, "Duplicate GPU"),
        ("nccl4py", "cuda", 4, "Duplicate GPU"),
        ("nccl", "cpu", 1, "CUDA tensors only"),
        ("gloo", "cpu", 1, None),
    ],
)
def test_who_takes_part(name, on, sharing, reason):
    told = backends.why_not(name, on, sharing)
    assert told is None if reason is None else reason in told


def test_options_by_machine():
    options = runner.Options(
        ops=["all_reduce"], sizes=[8], device="cuda", ranks=8, backends=("pycomm", "pycomm-torch", "nccl")
    )
    shared = runner.resolve(options, None, 1)
    assert (shared.ranks_per_gpu, shared.ranks_as, shared.one_gpu) == (8, "threads", True)
    able, notes = runner.leave_out(shared)
    assert able.backends == ("pycomm", "pycomm-torch")
    assert "nccl is left out" in notes[0] and "pycomm-torch: its ranks are processes" in notes[1]
    alone = runner.resolve(options, None, 8)
    assert (alone.ranks_per_gpu, alone.ranks_as, alone.one_gpu) == (1, "processes", False)
    launched = runner.resolve(options, env.Launch(0, 4, 0, "host", 1), 1)
    assert (launched.ranks, launched.ranks_as, launched.ranks_per_gpu) == (4, "processes", 4)
    assert runner.resolve(options._replace(device="cpu"), None, None).ranks_as == "processes"


def test_cuda_without_gpu(monkeypatch, capsys):
    monkeypatch.setattr(device, "why_no_cuda", lambda: "there is no GPU")
    assert cli.main(["all_reduce", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "error: --device cuda: there is no GPU.\n"


class FakeEvent:
    """A CUDA event on a clock that each call advances by 1 ms."""

    now = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.at = FakeEvent.now

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at - self.at


class FakeGraph:
    """Keeps the calls that tick() makes while it captures, and makes them again."""

    capturing = None

    def capture_begin(self, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.ticks, FakeGraph.capturing = 0, self

    def capture_end(self):
        FakeGraph.capturing = None

    def replay(self):
        FakeEvent.now += self.ticks


def tick():
    if FakeGraph.capturing:
        FakeGraph.capturing.ticks += 1
    else:
        FakeEvent.now += 1


@pytest.mark.parametrize("graph", [False, True])
def test_time_by_events(graph, monkeypatch):
    """Milliseconds of a batch become seconds of a call, with and without a graph; a graph is captured once
    for each number of calls.
    """
    stream = types.SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    adapter = Loopback(0)
    adapter.device, adapter.make_memory = "cuda", lambda: data.DeviceMemory("cpu")
    adapter.calls = lambda case, send, recv: {case.op: backends.both(lambda: (tick(), recv.copy_(send)))}
    rank = worker.Rank(adapter, graph)
    assert rank.prepare(cases.make_case("all_reduce", 8192, "bf16", "sum", 0, 1), 1) == {
        "out_of_place": 0,
        "in_place": 0,
    }
    for _ in range(2):
        assert rank.measure("out_of_place", iters=7, batches=3, warmup=2) == pytest.approx([1e-3] * 3)
    assert list(rank.graphs) == ([("out_of_place", 7)] if graph else [])


class Loopback(backends.Adapter):
    """A world of one rank: every operation is a copy. It spoils `planted` elements of each result."""

    rank, world_size = 0, 1

    def __init__(self, planted):
        self.planted = planted

    def calls(self, case, send, recv):
        def call():
            recv[:] = send
            recv.view(np.uint8)[:: max(1, recv.itemsize)][: self.planted] ^= 1

        return {case.op: backends.both(call)}

    def start(self, spec):
        pass

    def version(self):
        return "loopback"

    def barrier(self):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("planted", [0, 3])
def test_planted_wrong_elements_are_counted(dtype, planted):
    rank = worker.Rank(Loopback(planted))
    for op in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "scatter"):
        case = cases.make_case(op, 8192, dtype, "sum", 0, 1)
        for wrong in (rank.prepare(case, 1), rank.verify(2)):
            assert wrong and set(wrong.values()) == {planted}
    assert len(rank.measure("out_of_place", iters=3, batches=4, warmup=1)) == 4


@pytest.mark.parametrize("redop", cases.REDOPS)
@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("n", [2, 7])
def test_expected_results(redop, dtype, n):
    """Every operation, computed by tests/oracle.py from the ranks' inputs in f64, is what the check
    expects."""
    count, memory = 2 * data.PERIOD + 5, data.HostMemory()
    inputs = [np.resize(data.numbers(redop, n, rank, 3), n * count).astype(np.float64) for rank in range(n)]
    wide = torch.from_numpy(np.stack(inputs))
    for op in (
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "all_to_all",
        "broadcast",
        "scatter",
        "send_recv",
    ):
        case = cases.Case(op, count, dtype, redop, 1)
        x = wide if cases.OPS[op].send == "all" else wide[:, :count]
        for rank in range(n):
            result = reference.collective(op, rank, x, reference.reduced(redop, x), root=1)
            got = data.encode(result.numpy(), dtype)
            pieces = oracle.expected(case, rank, n)
            assert len(got) == sum(piece.length for piece in pieces)
            assert memory.count_wrong(got, pieces, case, n, 3) == 0
            assert memory.count_wrong(got, pieces, case, n, 4) > count // 10  # another salt: other numbers
    shifted = data.encode(np.concatenate([inputs[0][1:], inputs[0][:1]])[: n * count], dtype)
    everything = [oracle.Piece(0, n * count, 0, 0)]
    assert memory.count_wrong(shifted, everything, case, n, 3) > count // 10


def _row(backend, time_us, op="all_reduce"):
    timing = cases.Timing(time_us, 2 * time_us, 1.0, 1.0, 0, 1.0)
    return runner.Row(backend, cases.make_case(op, 1024, "f32", "sum", 0, 2), 2, 1024, None, timing)


def test_comparison():
    (line,) = _compare(_row("pycomm", 2.0), _row("gloo", 100.0), _row("mpi", 4.0))
    assert (line["best_peer"], line["of_best_peer"], line["faster_than_gloo"]) == ("mpi", 0.5, 50.0)
    assert _compare(_row("pycomm", 2.0)) == _compare(_row("gloo", 2.0)) == []


def _compare(*rows):
    return columns.compare([runner.as_record(row) for row in rows])


@tier(slow=1)
def test_command_with_gloo(tmp_path):
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "markdown")}
    command = [sys.executable, "-m", "pycomm.benchmarks", "all_reduce,all_gather"]
    command += "--backends gloo --ranks 2 --rounds 2 --sizes 8:1K --factor 128".split()
    command += "--seconds 0.002 --timeout 60".split()
    command += [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=env.for_child(RANK=None, WORLD_SIZE=None)
    )
    assert done.returncode == 0, done.stderr
    assert "busbw" in done.stdout and "#wrong" in done.stdout
    written = json.loads(files["json"].read_text())
    assert {"machine", "versions", "command", "date", "settings", "rows", "comparison"} <= written.keys()
    assert [(row["op"], row["size"]) for row in written["rows"]] == [
        (op, size) for op in ("all_reduce", "all_gather") for size in (8, 1024)
    ]
    for row in written["rows"]:
        assert row["backend"] == "gloo" and row["ranks"] == 2 and row["type"] == "f32"
        assert (
            row["in_place_wrong"] == 0
            and row["in_place_p99_us"] >= row["in_place_time_us"] > 0
            and row["in_place_busbw"] > 0
        )
        assert row["out_of_place_wrong"] == (None if row["op"] == "all_reduce" else 0)
    with open(files["csv"], newline="") as file:
        assert [row["size"] for row in csv.DictReader(file)] == ["8", "1024"] * 2
    assert "| gloo |" in files["markdown"].read_text()


@tier(slow=1)
def test_ranks_as_threads(tmp_path):
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "pycomm.benchmarks", "all_reduce"]
    command += "--backends pycomm,gloo --ranks 3 --rounds 1 --ranks-as threads --sizes 4K".split()
    command += ["--seconds", "0.002", "--timeout", "60", "--json", str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=env.for_child(RANK=None, WORLD_SIZE=None)
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert [(row["backend"], row["in_place_wrong"]) for row in written["rows"]] == [
        ("pycomm", 0),
        ("gloo", 0),
    ]
    assert (
        written["settings"]["ranks_as"] == "threads"
        and "gloo: its ranks are processes" in written["notes"][0]
    )


def test_plot(tmp_path):
    """Also by the sub-command, from the JSON of a run."""
    rows = [runner.as_record(row) for row in (_row("pycomm", 2.0), _row("gloo", 100.0))]
    content = {**report.context("collectives"), "notes": [], "rows": rows, "comparison": []}
    report.draw(content, columns.draw, tmp_path / "out.png")
    report.write_json(tmp_path / "out.json", content)
    assert json.loads((tmp_path / "out.json").read_text()) == content
    assert cli.main(["plot", str(tmp_path / "out.json"), str(tmp_path / "again.png")]) == 0
    for name in ("out.png", "again.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["all_reduces"], "all_reduces"),
        (["all_reduce", "--backends", "gloo,nkkl"], "nkkl"),
        (["all_reduce", "--graph"], "need --device cuda"),
        (["all_reduce", "--ranks-per-gpu", "2"], "need --device cuda"),
        (["all_reduce", "--sizes", "8:x"], "'x'"),
        (["all_reduce", "--ranks", "0"], "--ranks"),
        (["all_reduce", "--limit", "0"], "--limit must be above 0"),
    ],
)
def test_wrong_arguments(arguments, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2 and text in capsys.readouterr().err


def test_missing_mpi_is_named(tmp_path):
    with pytest.raises(ValueError, match="mpi:other: there is no .*other/bin/mpiexec"):
        mpi.find_mpi("mpi:other", tmp_path)


def test_wrong_result_fails_the_command(monkeypatch, capsys):
    row = _row("gloo", 1.0)
    row = row._replace(in_place=row.in_place._replace(wrong=5))
    monkeypatch.setattr(runner, "run", lambda options: runner.Results([row], {"gloo": "1"}, []))
    assert cli.main(["all_reduce", "--backends", "gloo"]) == 1
    assert "5 elements are wrong" in capsys.readouterr().err


@pytest.mark.parametrize(
    "op, n, text",
    [("send_recv", 1, "2 ranks or more"), ("pingpong", 3, "even number"), ("broadcast", 2, "root=2")],
)
def test_impossible_cases(op, n, text):
    with pytest.raises(ValueError, match=text):
        cases.make_case(op, 8, "f32", "sum", 2 if op == "broadcast" else 0, n)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results(path):
    """Each has a page that its JSON gives again, one row per line, and no picture is committed."""
    content, text = json.loads(path.read_text()), path.with_suffix(".md").read_text()
    assert path.read_text() == report.as_json(content)
    if content["kind"] == summary.KIND:
        assert summary.markdown(content) == text
        return
    page = plot.columns_of(content).page(content)
    assert all("\n".join(report.markdown_table(*table[1:])) in text for table in page.tables)
    assert "machine" not in content or "\n".join(report.markdown(content, page)) + "\n" == text
    assert not list(RESULTS.glob("*.png"))
