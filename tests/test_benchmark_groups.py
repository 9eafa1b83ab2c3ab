"""The benchmark's wider settings: several groups at once, several dtypes, sizes beyond the memory,
DeepSpeed's kernel as a peer. No figure is tested.
"""

import json
import math
import subprocess
import sys
import types

import numpy as np
import pytest
from tiers import tier

from pycomm import env
from pycomm.benchmarks import __main__ as cli
from pycomm.benchmarks.collectives import backends, cases, columns, deepspeed_shm, runner, worker
from pycomm.benchmarks.common import memory, report

LIMIT = 150  # seconds, of a command that takes about ten


def run_command(text, folder):
    file = folder / "out.json"
    command = [sys.executable, "-m", "pycomm.benchmarks", *text.split(), "--json", str(file)]
    child = env.for_child(RANK=None, WORLD_SIZE=None)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=child)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text()), done.stdout


@tier(slow=1)
def test_groups_at_once(tmp_path):
    """Ranks, sizes and roots are those of a group, and no group sees the data of another."""
    text = "all_reduce,broadcast,gather,send_recv,pingpong --backends pycomm,pycomm-torch,gloo"
    text += (
        " --ranks 4 --groups 2 --dtype f32,bf16 --sizes 12K --root 1 --rounds 1 --seconds 0.002 --timeout 60"
    )
    content, shown = run_command(text, tmp_path)
    assert "all_reduce, 2 groups of 2 ranks at once" in shown and content["settings"]["groups"] == 2
    ops = ("all_reduce", "broadcast", "gather", "send_recv", "pingpong")
    assert [(row["op"], row["type"], row["backend"]) for row in content["rows"]] == [
        (op, dtype, backend)
        for op in ops
        for dtype in ("f32", "bf16")
        for backend in ("pycomm", "pycomm-torch", "gloo")
    ]
    for row in content["rows"]:
        assert (row["ranks"], row["groups"], row["size"]) == (2, 2, 12 << 10)
        assert row["in_place_wrong"] in (0, None) and row["out_of_place_wrong"] in (0, None)
    report.draw(content, columns.draw, tmp_path / "out.png")  # a picture for each operation and dtype


def test_where_a_rank_is():
    adapter = worker_adapter(5, 6, 3)
    assert (adapter.group, adapter.rank, adapter.world_size, adapter.neighbours()) == (2, 1, 2, (0, 0, 0))
    assert worker_adapter(5, 6, 1).rank == 5


def worker_adapter(global_rank, ranks, groups):
    adapter = Copies()
    adapter.enter_group(global_rank, {"ranks": ranks, "groups": groups})
    return adapter


class Copies(backends.Adapter):
    """Every operation is a copy of this rank's input: right where the group has one rank."""

    def calls(self, case, send, recv):
        return {case.op: backends.both(lambda: np.copyto(recv, self.sent(send)))}

    def sent(self, send):
        return send

    def start(self, spec): ...

    def version(self): ...

    def barrier(self): ...

    def close(self): ...


def test_groups_have_data_of_their_own():
    """What a rank of the other group has put in counts as wrong."""
    case, kept = cases.make_case("all_reduce", 8192, "f32", "sum", 0, 1), []
    for group in (0, 1):
        adapter = worker_adapter(group, 2, 2)
        adapter.sent = lambda send: (kept.append(send.copy()), kept[0])[1]
        wrong = worker.Rank(adapter).prepare(case, 1)["out_of_place"]
        assert wrong == 0 if group == 0 else wrong > 1000


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--groups 0", "--groups"),
        ("--groups 3 --ranks 4", "4 ranks cannot be cut into equal groups"),
        ("--groups 4 --ranks 4 --backends gloo", "send_recv needs 2 ranks or more, here 1"),
        ("--dtype f32,f80", "--dtype 'f80'"),
    ],
)
def test_wrong_arguments(arguments, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["send_recv", "--sizes", "8", *arguments.split()])
    assert stopped.value.code == 2 and text in capsys.readouterr().err


@pytest.mark.parametrize(("free", "fits"), [(None, True), (100 << 30, True), (3 << 30, False)])
def test_what_does_not_fit_is_left_out(free, fits, monkeypatch):
    """256 MiB for 2 ranks of 3 backends, in and out: 3 GiB."""
    monkeypatch.setattr(memory, "available_bytes", lambda: free)
    options = runner.Options(ops=["all_reduce"], sizes=[256 << 20])
    case = cases.make_case("all_reduce", 256 << 20, "f32", "sum", 0, 2)
    note = runner.too_large(case, options, 3)
    assert note is None if fits else "all_reduce 256M f32 is left out: the buffers of 2 ranks of 3" in note
    if not fits:
        assert runner.measure_all(options, [types.SimpleNamespace(name="a", version="1")] * 3, None) == (
            runner.Results([], {"a": "1"}, [note])
        )


def measure_slowly(seconds: dict[int, float], limit: float, monkeypatch) -> runner.Results:
    """Four sizes in three rounds on a clock that shows what a round takes, seconds[nbytes]."""
    now = [100.0]

    def measure_round(part: runner.Part) -> None:
        now[0] += seconds[part.nbytes]

    def finish(part: runner.Part, copy_gbps: float | None) -> runner.Row:
        return runner.Row("a", part.case, 2, part.nbytes, None, cases.Timing(1.0, 1.0, 1.0, 1.0, 0, 1.0))

    monkeypatch.setattr(runner, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    for name, does in (("prepare", lambda part: None), ("measure_round", measure_round), ("finish", finish)):
        monkeypatch.setattr(runner.Part, name, does)
    options = runner.Options(ops=["all_reduce"], sizes=[*seconds], rounds=3, ranks_per_gpu=1, limit=limit)
    team = types.SimpleNamespace(name="a", version="1")
    return runner.measure_all(options, [team], lambda text: None)


@pytest.mark.parametrize(
    "rounds_s, limit, measured, note",
    [
        ([1, 1, 1, 1], math.inf, 4, None),
        ([1, 1, 1, 1], 13, 4, None),
        # 3 s of 40 / 4, then of 37 / 3 not three rounds but two, and from 21 / 2 and 18 s all again
        ([1, 8, 1, 1], 40, 4, "limit of 40 s was reached, so these were measured less: "
                              "all_reduce 16 f32 in 2 of 3 rounds."),
        ([5, 5, 5, 1], 20, 4, "all_reduce 8 f32, all_reduce 16 f32, all_reduce 32 f32 in 1 of 3 rounds."),
        ([1, 30, 1, 1], 20, 2, "all_reduce 16 f32 in 1 of 3 rounds; "
                               "not at all: all_reduce 32 f32, all_reduce 64 f32."),
        ([9, 1, 1, 1], 1e-6, 1, "all_reduce 8 f32 in 1 of 3 rounds; not at all: all_reduce 16 f32, "),
    ],
)  # fmt: skip
def test_time_limit(rounds_s, limit, measured, note, monkeypatch):
    """[Note: time limit] in runner.py."""
    found = measure_slowly(dict(zip([8, 16, 32, 64], rounds_s, strict=True)), limit, monkeypatch)
    assert [row.nbytes for row in found.rows] == [8, 16, 32, 64][:measured]
    assert not found.notes if note is None else note in found.notes[0] and len(found.notes) == 1


def test_free_memory():
    assert 1 << 20 < memory.available_bytes() < 1 << 50


# --- DeepSpeed --------------------


def test_deepspeed_is_left_out_where_it_cannot_take_part(monkeypatch):
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    assert "DeepSpeed is not installed (pip install -r" in backends.why_not("deepspeed", "cpu", 1)
    assert "one group" in backends.why_not("deepspeed", "cpu", 1, groups=2)
    assert "host memory" in backends.why_not("deepspeed", "cuda", 1)
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: "there")
    assert backends.why_not("deepspeed", "cpu", 1) is None


@pytest.mark.parametrize(
    ("op", "dtype", "redop", "level", "text"),
    [
        ("all_gather", "f32", "sum", 2, "its kernel has all_reduce alone, of sums of f32, f16, bf16"),
        ("all_reduce", "f64", "sum", 2, "all_reduce alone"),
        ("all_reduce", "f32", "max", 2, "all_reduce alone"),
        (
            "all_reduce",
            "bf16",
            "sum",
            1,
            "its kernel for bf16 does not run on this processor or was not built",
        ),
        ("all_reduce", "f32", "sum", 0, "its kernel for f32"),  # DeepSpeed would call Gloo
    ],
)
def test_deepspeed_refuses(op, dtype, redop, level, text):
    adapter = backends.make_adapter("deepspeed")
    adapter.level = level
    with pytest.raises(backends.Unsupported, match=text):
        adapter.calls(cases.make_case(op, 64, dtype, redop, 0, 2), None, None)


def test_deepspeed_kernel_that_cannot_be_built(monkeypatch):
    monkeypatch.setattr(deepspeed_shm, "PROGRAM", "raise SystemExit('no compiler')")
    with pytest.raises(ValueError, match="(?s)cannot be compiled here.*no compiler"):
        deepspeed_shm.build()


@tier(slow=1)
@pytest.mark.frameworks
@pytest.mark.timeout(900)
def test_deepspeed(tmp_path):
    pytest.importorskip("deepspeed", reason="requirements-frameworks.txt is not installed")
    deepspeed_shm.build()
    text = "all_reduce --backends pycomm,deepspeed --ranks 2 --sizes 64,4K,1M --dtype f32,bf16"
    content, _ = run_command(f"{text} --rounds 1 --seconds 0.002", tmp_path)
    found = [row for row in content["rows"] if row["backend"] == "deepspeed"]
    assert [(row["type"], row["in_place_wrong"]) for row in found] == [("f32", 0)] * 3 + [("bf16", 0)] * 3
