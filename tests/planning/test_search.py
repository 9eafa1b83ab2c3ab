"""The search: against all plans on small worlds, its constraints, its refusals, and the command."""

import json

import pytest
from published import SC21
from tiers import tier

from pycomm.parallel import Plan, predict
from pycomm.parallel.planning import NoPlan, load_machine, named, space
from pycomm.parallel.planning import search as searching
from pycomm.parallel.planning.__main__ import main
from pycomm.parallel.planning.job import MEGATRON_2021
from pycomm.parallel.planning.machine import FOLDER, from_toml, known, tomllib
from pycomm.parallel.planning.report import explain_job, famous
from pycomm.parallel.planning.search import Request, search

GIB = 2**30


def request(model="gpt3-13b", world=32, rows=64, machine="h100", **more):
    return Request(named(model), load_machine(machine), world, rows, **more)


def test_the_best_of_all(monkeypatch):
    """Pruning and ranking by closed forms lose nothing: every plan, timed by events, is no faster."""
    asked = request("gpt3-6.7b", 8, 16)
    found = search(asked)
    monkeypatch.setattr(searching, "WIDE", 10**9)
    everything = search(asked, 10**9)
    assert len(everything) > 2 * 40
    assert found[0].seconds == min(each.seconds for each in everything)
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    assert all(each.memory.peak <= asked.limit for each in everything)
    assert all(each.plan.world_size == 8 for each in everything)


@pytest.mark.parametrize(
    "fixed", [{"tp": 4}, {"pp": 2, "zero": 1}, {"schedule": "1f1b", "pp": 4}, {"checkpoint": True}, {"dp": 8}]
)
def test_constraints_are_kept(fixed):
    for each in search(request(fixed=fixed)):
        assert all(getattr(each.plan, key) == value for key, value in fixed.items()), each.plan
        assert each.job.recompute == ("full" if each.plan.checkpoint else "none")


def test_largest_microbatch_and_memory_are_kept():
    for each in search(request(microbatch=1, memory=40 * GIB)):
        assert each.job.microbatch_rows == 1 and each.memory.peak <= 40 * GIB


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"fixed": {"tp": 7}}, "tp=7 does not divide 32 ranks; tp=8 does"),
        ({"fixed": {"pp": 64}, "world": 128}, "pp=64 stages for 40 blocks; pp can be 40 at most"),
        ({"fixed": {"tp": 8, "pp": 8}}, "the fixed axes take 64 ranks"),
        ({"fixed": {"tp": 1, "pp": 1}, "rows": 8}, "batches of 32 rows"),
        ({"memory": 2 * GIB}, r"What would do: .* GiB per rank; or \d+ ranks"),
        (
            {"fixed": {"zero": 0, "pp": 1, "tp": 1}, "memory": 60 * GIB},
            r"needs .* GiB .*optimizer.*or leave (zero=0|pp=1|tp=1) open",
        ),
    ],
)
def test_what_cannot_be_says_why(change, text):
    with pytest.raises(NoPlan, match=text):
        search(request(**change))


@tier(slow=1)
def test_what_would_do_does():
    """The ranks that the refusal names are enough."""
    with pytest.raises(NoPlan) as refused:
        search(request("gpt3-175b", 16, 64))
    ranks = int(str(refused.value).split("; or ")[1].split()[0])
    assert search(request("gpt3-175b", ranks, 64 * ranks // 16))
    with pytest.raises(NoPlan):
        search(request("gpt3-175b", ranks // 2, 64 * ranks // 32))


@tier(slow=1)
def test_few_plans_are_timed_by_events(monkeypatch):
    """What a search costs, counted: 1,024 and 100,000 ranks. That is 3 s on one core of a small machine."""
    asked, plain = [], searching.step_time

    def counting(job, exact=True):
        asked.append(exact)
        return plain(job, exact)

    monkeypatch.setattr(searching, "step_time", counting)
    for world, rows in ((1024, 1536), (100_000, 50_000)):
        asked.clear()
        found = search(request("gpt3-175b", world, rows))
        assert len(found) == 10 and sum(asked) <= searching.WIDE and len(asked) < 3000, len(asked)


@tier(deep=1)  # 15 s a row
@pytest.mark.parametrize("row", SC21, ids=lambda row: row.model)
def test_published_plans_are_among_the_best(row, monkeypatch):
    """SC21's rows under the constraints of that program (1F1B or interleaved, full recomputation, no zero):
    among the best five, or within 5% of the best. Which are not is in docs/planning.md.
    """
    every = space._schedules

    def theirs(*given):
        return [pair for pair in every(*given) if pair[0] in ("1f1b", "interleaved")]

    monkeypatch.setattr(space, "_schedules", theirs)
    monkeypatch.setattr(searching, "WIDE", 12)
    job = row.job()
    fixed = {"zero": 0, "checkpoint": True, "megatron_sp": False}
    asked = Request(
        job.model, job.machine, job.plan.world_size, row.rows, None, fixed, 16, MEGATRON_2021, None
    )
    found = search(asked, 5)
    seconds = predict(job).seconds
    near = seconds <= 1.05 * found[0].seconds or seconds <= found[-1].seconds
    assert near == (row.model not in OUTSIDE), (seconds, found[0].seconds, str(found[0].plan))


# (share by which the best is faster: of smaller tp with an interleaved pipeline, which sends less inside of
# blocks)
OUTSIDE = {"gpt-18b": 0.16, "gpt-39b": 0.17}


@tier(slow=1)
def test_famous_plans_have_a_reason():
    asked = request("gpt3-175b", 1024, 1536)
    best = search(asked, 1)[0]
    rows = famous(asked, best)
    assert len(rows) == 9 and all(why for _, _, why in rows)
    reasons = {name: why for name, _, why in rows}
    assert "out of memory" in reasons["data parallel alone (DDP)"]
    assert "tp over InfiniBand" in reasons["tensor parallel over two nodes"]
    assert "recomputation" in reasons["ZeRO-3 with recomputation"]


def test_explain_finds_the_change_that_helps():
    asked = request("gpt3-13b", 32, 64)
    job = search(asked, 1)[0].job
    worse = job._replace(plan=Plan(tp=8, pp=4, precision="bf16"), microbatches=4, recompute="none")
    found = explain_job(worse)
    assert found.better and found.better[0].seconds < found.prediction.seconds
    assert "the one change that helps most" in str(found)
    too_large = explain_job(worse, limit=20 * GIB)
    assert "does not fit" in str(too_large)


@pytest.mark.parametrize("name", known())
def test_machines_are_whole(name):
    machine = load_machine(name)
    assert machine.peak > 0 and machine.usable > 0 and machine.links[-1].ranks == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("memory = 0.85", r"\[reached\] must have .*missing or unknown: memory"),
        ("peak_tflops = 989", "peak_tflops"),
        ("ranks = 0", "missing or unknown: ranks"),
    ],
)
def test_a_wrong_machine_is_refused(change, text):
    table = (FOLDER / "h100-dgx.toml").read_text()
    lines = [line for line in table.splitlines() if not line.startswith(change)]
    with pytest.raises(ValueError, match=text):
        from_toml(tomllib.loads("\n".join(lines)))
    with pytest.raises(ValueError, match="no machine 'z80': known are a100-selene"):
        load_machine("z80")


ARGUMENTS = ["--model", "gpt3-13b", "--gpus", "32", "--machine", "h100", "--batch", "64"]


def test_the_command(capsys, tmp_path):
    trace = tmp_path / "step.json"
    assert main([*ARGUMENTS, "--trace", str(trace), "--fix", "pp=4"]) == 0
    text = capsys.readouterr().out
    assert "why others lose" in text and "the first: time: compute" in text
    rows = [line for line in text.splitlines() if line[:2].strip().isdigit()]
    assert len(rows) == 10 and all("pp=4" in row for row in rows)
    boxes = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {box["tid"] for box in boxes} == {0, 1, 2, 3} and all(box["dur"] > 0 for box in boxes)
    assert main([*ARGUMENTS, "--json", "--top", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 3 and Plan.parse(found[0]["plan"]).world_size == 32
    assert main([*ARGUMENTS, "--explain", "tp=8,pp=4", "--microbatches", "8"]) == 0
    assert main([*ARGUMENTS, "--memory", "1"]) == 2
    assert "no plan fits into 1.0 GiB" in capsys.readouterr().err
    assert main(["--model", "gpt", "--gpus", "1", "--batch", "1"]) == 2


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    asked = ["--model", "gpt3-1.3b", "--gpus", "8", "--batch", "16", "--fix", "pp=2,tp=2"]
    assert main([*asked, "--plot", str(tmp_path / "new"), "--top", "1"]) == 0
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "new").iterdir()}
    assert set(sizes) == {"tp_pp.png", "ranks.png", "pipeline.png"} and min(sizes.values()) > 5000
