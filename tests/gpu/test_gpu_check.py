"""gpu-check without a GPU: its checks on host tensors, and the orchestration: limits, hangs, failures, the
report and its targets.
"""

import datetime
import json
import re
import subprocess
import sys
import time

import pytest
import torch
from tiers import tier

from gpu import cases, checks, program, ranks, steps, summary, values
from pycomm.benchmarks.common import device

ON_HOST = [name for name in checks.CHECKS if name not in ("values_threads", "values_processes")]


def run_check(name, folder, seconds=90):
    (step,) = steps.choose(only=[name])
    return steps.run_step(step, folder, seconds, on="cpu")


@tier(quick=1 / 24)
@pytest.mark.parametrize("name", ON_HOST)
def test_check_on_host_tensors(name, tmp_path):
    outcome = run_check(name, tmp_path)
    assert outcome.status == "pass", "\n".join([outcome.note, *steps.problems(outcome)])
    assert outcome.records


@tier(quick=1 / 3)
@pytest.mark.parametrize("n, mode", [(1, "threads"), (3, "threads"), (2, "processes")])
def test_values_on_host_tensors(n, mode, tmp_path):
    check = ranks.Check("values", tmp_path / "records", on="cpu", seconds=100)
    check.now = mode
    values.matrix(check, (n,), mode, (), algorithms=False)
    records = [json.loads(line) for line in open(check.path)]
    assert len(records) == (8 if n == 1 else 9)
    assert [record for record in records if not record["ok"]] == []


def test_values_find_planted_errors(tmp_path, monkeypatch):
    """A wrong element, a write beside the buffer and a refusal are each found."""
    right = values.call

    def wrong(comm, case, x, out):
        right(comm, case, x, out)
        if comm.rank == 0 and case.count == 31 and case.layout == "plain":
            out[7] += 1
        if comm.rank == 1 and case.count == 31 and case.layout == "strided":
            out.as_strided((1,), (1,), out.storage_offset() + 1).fill_(0)
        if case.count == 65537:
            raise ValueError("no such size")

    monkeypatch.setattr(values, "call", wrong)
    monkeypatch.setattr(
        cases,
        "blocks",
        lambda *_: [("all_gather", [c for c in cases.block("all_gather", None, 2, True) if c.count < 70000])],
    )
    check = ranks.Check("values", tmp_path / "records", on="cpu", seconds=60)
    check.now = "threads"
    values.matrix(check, (2,), "threads", ())
    found = [json.loads(line)["detail"] for line in open(check.path)]
    assert any("element 7 of 62 is" in text for text in found)
    assert any("beside the buffer" in text for text in found)
    assert any("refused: ValueError: no such size" in text for text in found)
    assert check.failed


def test_a_broken_group_costs_one_block(tmp_path, monkeypatch):
    right = values.call

    def broken(comm, case, x, out):
        if case.op == "broadcast":
            raise RuntimeError("planted")
        right(comm, case, x, out)

    monkeypatch.setattr(values, "call", broken)
    monkeypatch.setattr(cases, "OPS", ("broadcast", "all_gather", "send_recv"))
    check = ranks.Check("values", tmp_path / "records", on="cpu", seconds=60)
    check.now = "threads"
    values.matrix(check, (2,), "threads", (), algorithms=False)
    records = [json.loads(line) for line in open(check.path)]
    assert any(record["ok"] is False and "planted" in record["detail"] for record in records)
    assert [record["case"] for record in records if record["ok"]] == [
        "all_gather automatic, 2 ranks",
        "send_recv automatic, 2 ranks",
    ]


def test_time_runs_out(tmp_path):
    check = ranks.Check("values", tmp_path / "records", on="cpu", seconds=4)
    check.now = "threads"
    values.matrix(check, (2,), "threads", (), algorithms=False, spare=10)
    (record,) = [json.loads(line) for line in open(check.path)]
    assert record["ok"] is None and record["reached"] is False and "not reached" in record["detail"]
    assert not check.failed
    check.deadline = time.monotonic() + 0.5
    check.each("late", 2, lambda comm, check: "wrong")  # less than a second is left
    assert json.loads(open(check.path).read().splitlines()[-1])["reached"] is False


def test_a_step_that_is_cut_short(tmp_path):
    """What was not reached has not failed, and has not passed."""
    lines = [{"check": "c", "case": "a", "ok": True, "detail": ""}]
    lines.append({"check": "c", "case": "b", "ok": None, "detail": "not reached", "reached": False})
    text = "\\n".join(map(json.dumps, lines)).replace("{", "{{").replace("}", "}}")
    step = python(f"open('{{records}}', 'w').write('{text}')", name="long")
    (outcome,) = steps.run_all([step], tmp_path, tell=lambda text: None)
    assert (outcome.status, outcome.note) == ("cut short", "1 of 2 records were not reached")
    report = summary.contents([outcome], {}, "command")
    assert summary.exit_code(report) == 1 and "| b | not reached |" in summary.markdown(report)


def test_a_process_that_a_kill_does_not_end(tmp_path, monkeypatch):
    """As one that waits in a driver: it is left behind, and the next step runs."""
    real, stuck = subprocess.Popen.wait, []

    def wait(process, timeout=None):
        if "hangs" not in process.args[-1]:
            return real(process, timeout)
        assert timeout is not None and timeout <= steps.END_SECONDS
        stuck.append(process)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    both = [python("'hangs'", 1.0, "hangs"), python("print('fine')", name="runs")]
    first, second = steps.run_all(both, tmp_path, tell=lambda text: None)
    assert first.status == "fail" and "is still there 10 s after SIGKILL" in first.note
    assert second.status == "pass" and len(stuck) == 2
    real(stuck[0], 10)


def test_matrix_covers():
    """Every algorithm, dtype, reduction, size, layout and root position occurs."""
    everything = [case for _, block in cases.blocks(8, True) for case in block]
    assert {(case.op, case.algorithm) for case in everything} == {
        (op, a) for op, names in cases.ALGORITHMS.items() for a in names
    }
    for op in cases.REDUCING:
        reductions = {(case.dtype, case.redop) for case in everything if case.op == op}
        assert reductions >= {
            (dtype, redop) for dtype, redops in cases.REDUCTIONS.items() for redop in redops
        }
        assert {case.layout for case in everything if case.op == op} == set(cases.LAYOUTS)
    assert {0, 1, 7, 8, 9, 31, 1027, 65537} <= {case.count for case in everything}
    assert {case.in_place for case in everything} == {True, False}
    assert all(0 <= case.root < 8 for case in everything)
    assert max(case.count for case in everything) >= 3 << 20


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("dtype", cases.MOVED)
@pytest.mark.parametrize("count", [0, 1, 31])
def test_buffer(layout, dtype, count):
    wanted = torch.arange(count).to(torch.float32).to(getattr(torch, dtype))
    buffer = values.Buffer(wanted, layout, "cpu")
    got, guarded = buffer.read()
    assert guarded and torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    assert layout != "strided" or count < 2 or not buffer.view.is_contiguous()
    assert (
        layout != "offset"
        or count == 0
        or buffer.view.data_ptr() % 16 == (buffer.base.data_ptr() + wanted.element_size()) % 16
    )
    buffer.base[-1] = 0
    assert not buffer.read()[1]


def python(code, seconds=20.0, name="step"):
    return steps.Step(name, seconds, ("{python}", "-c", code), "a step of a test")


def test_a_hang_costs_one_step(tmp_path):
    """The step that hangs is ended with its children; the next one runs."""
    hang = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '1000']).pid, flush=True)"
    hang += "; time.sleep(1000)"
    began = time.monotonic()
    first, second = steps.run_all(
        [python(hang, 1.5, "hangs"), python("print('fine')", name="runs")], tmp_path, tell=lambda text: None
    )
    assert time.monotonic() - began < 15
    assert (first.status, second.status, second.log) == (
        "fail",
        "pass",
        "fine\n",
    ) and "did not end within" in first.note
    child = int(first.log)
    deadline = time.monotonic() + 5
    while (state := _state(child)) not in ("Z", "gone") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert state in ("Z", "gone")


def _state(pid):
    try:
        return re.search(r"\) (\S)", open(f"/proc/{pid}/stat").read())[1]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def test_failures_are_kept(tmp_path):
    """A step that crashes, one with a failed record, one that cannot be started any more: all are in the
    report.
    """
    crash = python("print('the reason'); raise SystemExit(3)", name="crashes")
    record = '{"check": "c", "case": "odd sizes", "ok": false, "detail": "3 elements wrong"}'
    fails = steps.Step(
        "fails",
        20.0,
        (
            "{python}",
            "-c",
            f"open('{{records}}', 'w').write({json.dumps(record).replace('{', '{{').replace('}', '}}')} + "
            f"'\\n{{{{cut')",
        ),
        "",
    )
    told = []
    outcomes = steps.run_all([crash, fails], tmp_path, tell=told.append)
    assert [outcome.status for outcome in outcomes] == ["fail", "fail"]
    assert outcomes[0].note == "ended with 3" and steps.problems(outcomes[0]) == ["the reason"]
    assert steps.problems(outcomes[1]) == ["odd sizes: 3 elements wrong"]
    assert any("3 elements wrong" in text for text in told)
    late = steps.run_all([crash], tmp_path, total=1.0, tell=told.append)
    assert late[0].status == "not run" and "run out" in late[0].note
    after = steps.run_all([crash._replace(name="build"), fails], tmp_path, tell=told.append)
    assert [outcome.status for outcome in after] == ["fail", "not run"] and after[
        1
    ].note == "the build failed"
    report = summary.contents(outcomes + late, {}, "command")
    assert summary.exit_code(report) == 1
    assert "3 elements wrong" in summary.markdown(report) and "not run" in summary.markdown(report)


def _bench(step, rows):
    outcome = steps.Outcome(steps.choose(only=[step])[0], "pass", 1.0)
    return outcome._replace(bench={"rows": rows, "notes": []})


def _row(op, size, time_us, of_bound):
    timing = {"time_us": time_us, "algbw": 1.0, "busbw": 1.0, "wrong": 0}
    row = {"op": op, "backend": "pycomm", "size": size, "copy_gbps": 4000.0}
    row |= {f"out_of_place_{name}": value for name, value in timing.items()} | dict.fromkeys(
        f"in_place_{name}" for name in timing
    )
    return row | {
        "out_of_place_of_bound": of_bound,
        "in_place_of_bound": None,
        "out_of_place_of_floor": of_bound,
    }


def test_targets(tmp_path):
    large, small = 256 << 20, 8192
    good = [
        _bench(
            "bench_8",
            [_row("all_reduce", 64 << 20, 1, 0.87), _row("all_reduce", small, 1, 0.01)],
        ),
        _bench(
            "bench_8_graph",
            [
                _row("all_reduce", 64 << 20, 1, 0.86),
                _row("all_reduce", large, 1, 0.9),
                _row("all_reduce", small, 5.5, 0.01),
                _row("all_reduce", 1 << 20, 50, None),
            ],
        ),
    ]
    about = {"machine": {"gpu": "NVIDIA H200"}, "versions": {"torch": "2.11.0"}}
    report = summary.contents(
        good, about, "command", datetime.datetime(2026, 11, 21, tzinfo=datetime.timezone.utc)
    )
    assert [target["met"] for target in report["targets"]] == [True, True, *[None] * 4, True, *[None] * 5]
    assert [target["measured"] for target in report["targets"][:2]] == [0.87, 0.86] and summary.exit_code(
        report
    ) == 0
    paths = summary.write(report, [tmp_path / "results", tmp_path / "out"])
    assert [path.name for path in paths] == ["2026-11-21_nvidia_h200.json", "2026-11-21_nvidia_h200.md"] * 2
    assert json.loads(paths[0].read_text())["targets"][6]["measured"] == 5.5
    text = paths[1].read_text()
    assert (
        "| all_reduce | pycomm | 64M | 1.00 | n/a | 1 | 1 | 4e+03 | 0.86 | 0.86 | 0 |" in text
        and "- torch: 2.11.0" in text
    )
    slow = summary.contents([_bench("bench_8", [_row("all_gather", large, 1, 0.5)])], about, "command")
    assert (
        slow["targets"][2] == {"target": summary.TARGETS[2].text, "measured": 0.5, "met": False}
        and summary.exit_code(slow) == 2
    )


@tier(slow=1)
def test_program_on_host_tensors(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    code = program.main(
        ["--device", "cpu", "--only", "versions,smoke", "--results", str(tmp_path / "results")]
    )
    printed = capsys.readouterr().out
    assert code == 0 and "2 pass, 0 fail, 0 cut short, 0 not run" in printed
    (path,) = (tmp_path / "out").glob("*_steps.json")
    report = json.loads(path.read_text())
    assert report["versions"]["torch"].startswith("2.") and [step["status"] for step in report["steps"]] == [
        "pass",
        "pass",
    ]
    assert len(list((tmp_path / "results").glob("*.md"))) == 1


def test_parts():
    """Every step is in a part, each part begins alike and takes eight minutes at most."""
    for part in steps.PARTS:
        assert [step.name for step in steps.choose(part)][:3] == ["versions", "build", "smoke"]
    assert {step.name for step in steps.choose()} == set(steps.all_steps())
    assert steps.TOTAL_SECONDS <= 480
    with pytest.raises(ValueError, match="no such part: speed"):
        steps.choose("speed")


def test_report_after_every_step(tmp_path):
    """A program that is ended in the middle has reported what it had done."""
    seen = []
    steps.run_all(
        [python("print(1)", name="first"), python("print(2)", name="second")],
        tmp_path,
        tell=lambda text: None,
        done=lambda outcomes: seen.append([outcome.step.name for outcome in outcomes]),
    )
    assert seen == [["first"], ["first", "second"]]
    report = summary.contents([], {"machine": {"gpu": "NVIDIA H200"}}, "command", part="bench")
    assert summary.file_name(report).endswith("_nvidia_h200_bench")


def test_list_and_wrong_steps(capsys):
    assert program.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed[:3] == ["versions", "build", "smoke"] and set(checks.CHECKS) < set(listed)
    with pytest.raises(SystemExit) as stopped:
        program.main(["--device", "cpu", "--only", "smoke,nothing"])
    assert stopped.value.code == 2 and "no such step: nothing" in capsys.readouterr().err


def test_without_gpu(monkeypatch, capsys):
    monkeypatch.setattr(device, "why_no_cuda", lambda: "torch 2.13.0 is built without CUDA")
    assert program.main([]) == 1
    assert "gpu-check: torch 2.13.0 is built without CUDA. It runs with" in capsys.readouterr().err


def test_table_of_checks_needs_no_extension():
    """gpu-check reads it before it builds."""
    code = "import sys; sys.modules['pycomm._C'] = None; import runpy; sys.argv[1:] = ['--list']; "
    code += "runpy.run_path('tests/gpu', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=steps.ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text, found", [("", {}), ("x", {}), ('warning\n{"a": 1}\n', {"a": 1}), ("[1]", {})])
def test_last_object(text, found):
    assert program.last_object(text) == found
