"""What the planner says: tables, reasons, traces, pictures, the one change that helps; what it asks of a
model and an optimizer; and that what a search leaves out early is slower or larger.
"""

import dataclasses
import random

import pytest
import torch

from pycomm.parallel import Plan
from pycomm.parallel.planning import load_machine, named, planner, plot, report, space
from pycomm.parallel.planning import search as searching
from pycomm.parallel.planning.job import PYCOMM, Job
from pycomm.parallel.planning.memory import rank_memory
from pycomm.parallel.planning.model import gpt, llama
from pycomm.parallel.planning.search import NoPlan, Request, predict, search
from pycomm.parallel.planning.space import Shape, ideal_time, jobs_of, microbatches_of, shapes_of
from pycomm.parallel.planning.time import StepTime, step_time
from pycomm.parallel.planning.trace import events_of

GIB = 2**30


def job(text, model="gpt3-1.3b", rows=64, microbatches=4, machine="h100", recompute="none"):
    described = named(model) if isinstance(model, str) else model
    return Job(described, load_machine(machine), Plan.parse(text), rows, microbatches, recompute, PYCOMM)


def took(text, *parts, recompute="none", **more):
    """A Prediction with these seconds: passes, bubble, inside, gradients, optimizer, values."""
    return predict(job(text, recompute=recompute, **more))._replace(time=StepTime(*parts, None))


BEST = took("dp=8", 10.0, 0.0, 0.0, 1.0, 1.0, 0.0)
LOSES = [
    (took("dp=8", 10.04, 0.0, 0.0, 1.0, 1.0, 0.0), "as fast as the best"),
    (
        took("dp=8", 10.0, 0.0, 0.0, 3.4, 1.0, 0.0),
        "20% slower: sums of gradients 3.400 s, 1.000 s in the best",
    ),
    (took("dp=8", 10.0, 0.0, 0.0, 3.4, 1.0, 0.0), "in the best (over NVLink 4)"),
    (
        took("dp=8", 10.0, 0.0, 0.0, 1.0, 1.0, 6.0),
        "50% slower: gathering values 6.000 s, 0.000 ms in the best",
    ),
    (took("dp=8", 10.0, 0.0, 0.0, 1.0, 4.0, 0.0), "25% slower: optimizer 4.000 s, 1.000 s in the best"),
    (took("pp=2,dp=4", 16.0, 6.0, 0.0, 1.0, 1.0, 0.0), "50% slower: bubble 6.000 s, 0.000 ms in the best"),
    (
        took("tp=16", 16.0, 0.0, 6.0, 1.0, 1.0, 0.0),
        "collectives in blocks 6.000 s, 0.000 ms in the best (tp over",
    ),
    (took("tp=16", 16.0, 0.0, 6.0, 1.0, 1.0, 0.0), "(tp over InfiniBand"),
    (took("tp=8,dp=2", 16.0, 0.0, 6.0, 1.0, 1.0, 0.0), "(tp over NVLink"),
    (took("dp=16,zero=3", 16.0, 0.0, 6.0, 1.0, 1.0, 0.0), "(data over InfiniBand"),
    (
        took("dp=8", 16.0, 0.0, 0.0, 1.0, 1.0, 0.0),
        "50% slower: compute 16.000 s, 10.000 s in the best (smaller",
    ),
    (took("dp=8", 16.0, 0.0, 0.0, 1.0, 1.0, 0.0, recompute="full"), "10.000 s in the best (recomputation)"),
]


@pytest.mark.parametrize(("found", "words"), LOSES, ids=lambda value: value if isinstance(value, str) else "")
def test_why_a_plan_loses(found, words):
    """The part in which it takes most more than the best, and the link that this goes over."""
    assert words in report.loses(found, BEST, 1000 * GIB)


def test_what_does_not_fit_says_how_much_of_what():
    found = BEST
    peak = found.memory.peak / GIB
    most = max(found.memory.parts(), key=found.memory.parts().get)
    size = found.memory.parts()[most] / GIB
    text = report.loses(found, BEST, 3 * GIB)
    assert text == (f"out of memory: {peak:.1f} GiB of 3.0 GiB, of which {most} {size:.1f} GiB")
    sizes = [report.size(number) for number in (GIB, GIB / 10, GIB / 16, 2**20 / 4)]
    assert sizes == ["1.0 GiB", "0.1 GiB", "64.00 MiB", "0.25 MiB"]
    assert [report.seconds(time) for time in (2.0, 0.1, 0.0999, 1e-6)] == [
        "2.000 s",
        "0.100 s",
        "99.900 ms",
        "0.001 ms",
    ]


def test_a_table_of_plans_in_columns():
    found = [predict(job("tp=4,dp=2,megatron_sp", rows=20, microbatches=3)), BEST]
    head, first, second = report.table(found, 80 * GIB)
    for name in ("plan", "microbatches", "step", "tokens/s/rank", "MFU", "peak of a rank"):
        assert name in head
    cells = [first.split(), second.split()]
    assert [row[0] for row in cells] == ["1", "2"] and cells[0][1] == "dp=2,tp=4,megatron_sp"
    assert cells[0][2:5] == ["3", "x", "4"] and cells[1][2:7] == ["4", "x", "2", "12.000", "s"]
    rate, share = 64 * 2048 / 12 / 8, 100 * named("gpt3-1.3b").flops(64 * 2048) / (8 * 989e12 * 12)
    assert cells[1][7:9] == [f"{rate:.0f}", f"{share:.1f}%"]
    assert second.endswith(f"{BEST.memory.peak / GIB:.1f} GiB of 80.0 GiB in {BEST.memory.where}")
    assert report.short(Plan(dp=2, precision="bf16")) == "dp=2" and "=True" not in first


def test_a_reason_names_what_counts():
    found = took("pp=2,dp=4", 7.0, 2.0, 1.0, 2.0, 0.97, 0.03)
    text = report.reason(found)
    assert text.startswith("time: compute 40%, collectives in blocks 10%, bubble 20%, sums of gradients 20%")
    assert "optimizer 10%" in text and "gathering" not in text
    for name, value in found.memory.parts().items():
        assert (f"{name} {value / GIB:.1f}" in text) == (value > 0.05 * GIB)


# --- a change that helps --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "microbatches"),
    [("dp=8", 4), ("tp=2,pp=2,dp=2,megatron_sp", 4), ("pp=4,schedule=interleaved,chunks=2", 8), ("tp=8", 3)],
)
def test_a_change_is_of_one_thing(text, microbatches):
    """One option, the microbatches, or a factor 2 between two axes, on as many ranks; none twice."""
    asked = job(text, microbatches=microbatches)
    found = list(report.changes(asked))
    assert len({(other.plan, other.microbatches) for _, other in found}) == len(found)
    for sentence, other in found:
        new, plan = other.plan, asked.plan
        assert new.megatron_sp == (plan.megatron_sp and new.tp > 1) or "megatron_sp" in sentence
        assert new.world_size == plan.world_size and other.rows == asked.rows and other != asked
        fields = [f.name for f in dataclasses.fields(Plan) if getattr(new, f.name) != getattr(plan, f.name)]
        moved = [name for name in ("tp", "pp", "dp") if name in fields]
        options = [name for name in fields if name not in moved and f"{name}=" in sentence]
        options = options[:1] if "schedule=" in sentence else options
        assert len(moved) in (0, 2) and bool(moved) + len(options) + (not fields) == 1, sentence
        if moved:  # in the fewest microbatches that are no larger
            fewer = other._replace(microbatches=other.microbatches - 1)
            possible = min(other.rows // (new.dp * new.ep), 10**9)
            assert other.microbatches == 1 or fewer.microbatch_rows > asked.microbatch_rows, sentence
            assert other.microbatch_rows <= asked.microbatch_rows or other.microbatches == possible, sentence
        for name in moved:
            assert f"{name}={getattr(new, name)}" in sentence
            assert {getattr(new, name), getattr(plan, name)} == {
                min(getattr(new, name), getattr(plan, name)) * i for i in (1, 2)
            }
        assert not fields or f"{fields[0]}=" in sentence or moved
        assert fields or f"{other.microbatches} microbatches" == sentence
        assert other.recompute == ("full" if new.checkpoint else "none")
        assert new.dp * new.ep * other.microbatches <= other.rows and new.virtual_stages <= 24
    assert {"checkpoint=True", f"{2 * microbatches} microbatches"} <= {sentence for sentence, _ in found}


@pytest.mark.parametrize("limit", [None, 60 * GIB, 20 * GIB, 5 * GIB])
def test_the_change_that_helps_most_is_the_best_of_all(limit):
    asked = job("tp=2,pp=2,dp=2,megatron_sp", model="gpt3-6.7b", microbatches=4)
    found = report.explain_job(asked, limit)
    limit = limit or asked.machine.usable
    now, all_of_them = predict(asked), [predict(other) for _, other in report.changes(asked)]
    fitting = [each for each in all_of_them if each.memory.peak <= limit]
    if fitting:
        best = min(fitting, key=lambda each: each.seconds)
    else:
        best = min(all_of_them, key=lambda each: each.memory.peak)
    assert found.prediction == now and found.better[0] == best
    assert report.reason(now) in str(found).splitlines()
    over = f"does not fit: {report.size(now.memory.peak - limit)} too much"
    assert (over in str(found)) == (now.memory.peak > limit)
    assert f"{report.seconds(now.seconds)} -> {report.seconds(best.seconds)}" in found.better[1]
    assert f"{report.size(now.memory.peak)} -> {report.size(best.memory.peak)}" in found.better[1]


def test_nothing_helps_the_best():
    found = report.explain_job(search(small(8, 16), 1)[0].job)
    assert found.better is None or found.better[0].seconds > 0.9 * found.prediction.seconds
    (one,) = report.even_experts(named("mixtral-8x7b"))
    assert "2 rows of work for a token over 8 experts" in one and not report.even_experts(named("gpt3-13b"))


# --- a trace and pictures -------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["dp=4,zero=1", "pp=3", "pp=2,dp=2,schedule=zbv", "pp=2,schedule=gpipe"])
def test_a_trace_has_the_whole_step(text):
    """In microseconds, without overlap on a rank, each pass once, and what comes after the passes."""
    found = predict(job(text, microbatches=6))
    plan, boxes = found.plan, events_of(found)
    kinds = (
        {"F", "B", "W"}
        if plan.pp == 1
        else {action.kind for row in found.time.pipeline.schedule.actions for action in row}
    )
    stages = range(plan.virtual_stages)
    passes = [box for box in boxes if box["args"]]
    assert sorted((box["name"], box["args"]["stage"]) for box in passes) == sorted(
        (f"{kind}{m}", stage) for kind in kinds for m in range(6) for stage in stages
    )
    for rank in range(plan.pp):
        row = sorted((box["ts"], box["ts"] + box["dur"]) for box in boxes if box["tid"] == rank)
        assert all(a[1] <= b[0] + 1e-6 for a, b in zip(row, row[1:], strict=False))
    last = max(box["ts"] + box["dur"] for box in boxes)
    assert last == pytest.approx(1e6 * found.seconds, rel=1e-6) and min(box["ts"] for box in boxes) == 0
    for name in ("sums of gradients", "optimizer", "gathering values"):
        lasted, seconds = [box["dur"] for box in boxes if box["name"] == name], found.time.parts()[name]
        assert lasted == pytest.approx([1e6 * seconds] * plan.pp if seconds else [])


def test_pictures_show_what_a_search_finds(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    figures, make = [], plot._figure
    monkeypatch.setattr(plot, "_figure", lambda *sizes: figures.append(make(*sizes)) or figures[-1])
    asked = small(4, 8, fixed={"zero": 1, "checkpoint": False})
    plot.heat_map(asked, tmp_path / "a.png")
    asked = asked._replace(world=8)
    plot.over_ranks(asked, tmp_path / "b.png")
    asked = asked._replace(world=4)
    (_, cells), (figure, lines) = figures
    values = {text.get_position(): float(text.get_text()) for text in cells.texts if text.get_text() != "-"}
    middle = (min(values.values()) + max(values.values())) / 2
    for text in cells.texts:
        is_dark = values.get(text.get_position(), 0.0) > middle
        assert (text.get_color() == "white") == is_dark, text
    columns, rows = (
        [label.get_text() for label in axis.get_ticklabels()] for axis in (cells.xaxis, cells.yaxis)
    )
    assert columns == rows == ["1", "2", "4"] and len(cells.texts) == 9
    for text in cells.texts:
        x, y = text.get_position()
        fixed = {**asked.fixed, "tp": int(rows[y]), "pp": int(columns[x])}
        if int(rows[y]) * int(columns[x]) > 4:
            assert text.get_text() == "-"
        else:
            assert text.get_text() == f"{search(asked._replace(fixed=fixed), 1)[0].seconds:.3g}"
    step, ideal = lines.get_lines()
    worlds = [1, 2, 4, 8, 16, 32, 64][: len(step.get_xdata())]
    best = [search(asked._replace(world=world), 1)[0] for world in worlds]
    assert list(step.get_xdata()) == worlds and len(worlds) > 3
    assert list(step.get_ydata()) == [each.seconds for each in best]
    assert list(ideal.get_ydata()) == pytest.approx([best[0].seconds / world for world in worlds])
    peaks, limit = figure.axes[1].get_lines()
    assert list(peaks.get_ydata()) == [each.memory.peak / GIB for each in best]
    assert set(limit.get_ydata()) == {asked.limit / GIB}


# --- the search -----------------------------------------------------------------------------------

TINY = gpt("tiny", 4, 256, 4, vocab=512, sequence=128)
MIXED = llama("mixed", 4, 256, 4, 4, 512, vocab=512, sequence=128, experts=(4, 2))
LONG = gpt("long", 2, 64, 4, vocab=64, sequence=16384)


def small(world, rows, model=TINY, **more):
    return Request(model, load_machine("h100"), world, rows, **more)


def perfect():
    """A machine with which nothing takes time but products, at the best rate: bounds are tight on it."""
    machine = load_machine("h100")
    reached = machine.reached._replace(product_half=0.0, launch=0.0, memory=1.0, attention=1.0)
    links = tuple(link._replace(bandwidth=1e30, latency=0.0) for link in machine.links)
    return machine._replace(reached=reached, links=links, bandwidth=1e30, host=1e30)


@pytest.mark.parametrize(("model", "world", "rows"), [(TINY, 4, 8), (MIXED, 4, 7)], ids=["dense", "mixed"])
def test_what_is_left_out_early_is_no_loss(model, world, rows):
    """No plan is faster than the time, or smaller than the states, by which its axes are left out."""
    asked = small(world, rows, model)._replace(machine=perfect())
    ideal, tightest, near = ideal_time(asked), {}, [0.0]

    def fastest(shape, *bounds):
        found = {}
        for each in jobs_of(asked, shape, *bounds):
            ranks = range(each.plan.pp)
            most = max(rank_memory(each, rank).states for rank in ranks)
            assert least <= most * (1 + 1e-9), each.plan
            near.append(least / most)
            seconds, name = step_time(each, exact=False).total, each.plan.schedule
            found[name] = min(found.get(name, 9e9), seconds)
        return found

    for shape in shapes_of(asked):
        least = space._least_states(asked, shape.tp * shape.pp)
        for name, seconds in fastest(shape).items():
            kept = fastest(shape, ideal, lambda most=seconds: most * (1 + 1e-9))
            assert kept.get(name) == seconds, (shape, name)
            tightest[name] = min(tightest.get(name, 9e9), seconds / ideal)
    assert max(tightest["1f1b"], tightest["interleaved"]) < 1.5, tightest
    assert max(near) > 0.9, "states are bounded by less than there could be"


def test_the_best_forty_are_those_of_all(monkeypatch):
    """Nothing else is left out early, on a machine on which much can be."""
    asked = small(8, 8)._replace(machine=perfect())
    found = search(asked, searching.WIDE)
    monkeypatch.setattr(searching, "WIDE", 10**9)
    everything = search(asked, 10**9)
    closed = sorted(step_time(each.job, exact=False).total for each in everything)
    assert len(found) == 40 < len(everything)
    assert sorted(step_time(each.job, exact=False).total for each in found) == closed[:40]
    calls = []
    assert len(search(asked, 7, lambda done, of_all: calls.append((done, of_all)))) == 7
    shapes = len(list(shapes_of(asked)))
    assert calls == [(done, shapes) for done in range(1, shapes + 1)]


def test_fewer_than_forty_are_all_found():
    asked = small(8, 8, fixed={"zero": 0, "checkpoint": False, "tp": 1})._replace(machine=perfect())
    everything = [each for shape in shapes_of(asked) for each in jobs_of(asked, shape)]
    assert 3 < len(everything) < searching.WIDE
    assert {each.job for each in search(asked, 10**6)} == set(everything)


@pytest.mark.parametrize(
    ("model", "world", "rows", "fixed"),
    [
        (TINY, 8, 16, {}),
        (TINY, 12, 3, {}),
        (TINY, 8, 16, {"dp": 4}),
        (TINY, 8, 16, {"tp": 2, "pp": 2}),
        (MIXED, 8, 16, {}),
        (LONG, 8, 8, {}),
    ],
)
def test_every_way_to_deal_ranks(model, world, rows, fixed):
    """All that multiply to the ranks, by trying them all; tp in a node and a divisor of the heads."""
    numbers = range(1, world + 1)
    is_long = model.sequence >= 16384
    found = {
        Shape(tp, pp, dp, ep, ulysses, ring)
        for tp in numbers
        if 8 % tp == 0 and model.heads % tp == 0
        for pp in range(1, model.layers + 1)
        for ep in ((1, 2, 4) if model.experts else (1,))
        for ulysses in (range(1, model.heads // tp + 1) if is_long else (1,))
        if model.heads // tp % ulysses == 0
        for ring in ((1, 2, 4, 8) if is_long else (1,))
        for dp in numbers
        if tp * pp * dp * ep * ulysses * ring == world and dp * ep <= rows
    }
    found = {shape for shape in found if all(getattr(shape, key) == value for key, value in fixed.items())}
    wide = {shape.ring for shape in shapes_of(small(1024, 1024, LONG, fixed={"dp": 1, "pp": 1, "tp": 1}))}
    assert wide == {256}  # and no wider one, of which a piece would be too short
    shapes = list(shapes_of(small(world, rows, model, fixed=fixed)))
    assert len(shapes) == len(set(shapes)) and set(shapes) == found


@pytest.mark.parametrize("rows", [4, 5, 16, 24, 37])
@pytest.mark.parametrize("data", [1, 3, 4])
@pytest.mark.parametrize("most", [1, 3, 8])
def test_numbers_of_microbatches(rows, data, most):
    """Each has a row for every data rank, none more than was allowed; the fewest are there and the most."""
    found = microbatches_of(small(8, rows, microbatch=most), data)
    assert found == sorted(set(found), reverse=True)
    possible = [m for m in range(1, rows + 1) if m * data <= rows and -(-rows // (m * data)) <= most]
    assert set(found) <= set(possible) and bool(found) == bool(possible)
    assert not possible or found[0] == possible[-1]
    assert not possible or -(-rows // data) < most or found[-1] == possible[0]


@pytest.mark.parametrize(
    ("fixed", "pp", "microbatches", "expected"),
    [
        ({}, 1, 8, [("1f1b", 1)]),
        ({"schedule": "gpipe"}, 1, 8, [("gpipe", 1)]),
        ({}, 2, 8, [("1f1b", 1), ("zb-h1", 1), ("zbv", 2), ("interleaved", 2)]),
        ({}, 2, 1, [("1f1b", 1), ("zb-h1", 1), ("zbv", 2)]),  # interleaved ones need as many as stages
        ({}, 4, 8, [("1f1b", 1), ("zb-h1", 1)]),  # of four blocks there are no eight stages
        ({"chunks": 2}, 2, 8, [("interleaved", 2), ("zbv", 2)]),
        ({"chunks": 2, "schedule": "interleaved"}, 2, 8, [("interleaved", 2)]),
        ({"chunks": 3}, 1, 8, [("1f1b", 3)]),
        ({"schedule": "interleaved"}, 2, 8, [("interleaved", 2)]),
        ({"schedule": "interleaved"}, 2, 1, [("interleaved", 2)]),
        ({"schedule": "pipedream"}, 2, 8, [("pipedream", 1)]),
        ({"schedule": "zbv", "chunks": 3}, 2, 8, []),
    ],
)
def test_schedules_that_are_tried(fixed, pp, microbatches, expected):
    assert space._schedules(small(8, 16, fixed=fixed), pp, microbatches) == expected


def test_limits_of_a_request():
    asked = small(8, 16, memory=3.0)
    assert asked.limit == 3.0 and asked._replace(memory=None).limit == asked.machine.usable
    with pytest.raises(NoPlan, match="no plan fits into"):
        search(asked)
    with pytest.raises(ValueError, match="count=0"):
        search(small(8, 16), 0)


# --- models, optimizers, devices ------------------------------------------------------------------


class Plain(torch.optim.Optimizer):
    pass


def sgd(momentum):
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "momentum": each} for each in momentum]
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize(
    ("opt", "moments"),
    [
        (None, 2),
        (torch.optim.Adam, 2),
        (torch.optim.AdamW, 2),
        (torch.optim.NAdam, 2),
        (torch.optim.RMSprop, 1),
        (torch.optim.Adagrad, 1),
        (torch.optim.SGD, 0),
        (sgd([0.0]), 0),
        (sgd([0.0, 0.9]), 1),
        (Plain, 1),
    ],
    ids=str,
)
def test_what_an_optimizer_holds_and_moves(opt, moments):
    """Moments of fp32 beside masters for a model in 16 bits, else as the values are. An update reads and
    writes values and moments and reads gradients.
    """
    half, whole = planner._software(opt, 2, True), planner._software(opt, 4, False)
    assert (half.state, whole.state) == (4 + 4 * moments, 4 * moments)
    assert (half.gradient, half.summed, whole.gradient, whole.summed) == (2, 2, 4, 4)
    assert whole.update == 4 * (2 + 2 * moments + 1) + 4
    assert half.update == 4 * (2 + 2 * moments + 1) + 2 + 20
    if moments == 2:
        assert (half.state, half.update, half.copies) == (PYCOMM.state, PYCOMM.update - 0, PYCOMM.copies)


def test_a_device_without_a_file_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, machine in (("NVIDIA H100 80GB HBM3", "h100"), ("A100-SXM", "a100"), ("NVIDIA B200", "b200")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert planner._machine(None) == load_machine(machine)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Voodoo 2")
    with pytest.raises(ValueError, match="does not know 'Voodoo 2': give machine=, .*calibrate"):
        planner._machine(None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert planner._machine(None) == load_machine("cpu-2core")
    assert planner._machine(load_machine("h200")) == load_machine("h200")


class Shared(torch.nn.Module):
    """Four blocks; the last two share a layer, so no stage may begin between them."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(6, 6)) for _ in range(4))
        self.blocks[3][0] = self.blocks[2][0]
        self.norm = torch.nn.BatchNorm1d(6)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def test_what_is_remembered_of_refusals_is_that_of_each_plan():
    """In any order: a model is looked at once for plans that differ in sizes, and refused as by itself."""
    texts = [
        "dp=2",
        "dp=4",
        "pp=2,stages=2:2",
        "pp=2,stages=3:1",
        "pp=2,stages=1:3",
        "pp=2",
        "pp=4",
        "pp=3,stages=1:1:2",
    ]
    texts += [
        "pp=2,schedule=pipedream",
        "dp=2,zero=3",
        "tp=2",
        "ep=2",
        "ring=2",
        "dp=2,checkpoint",
        "pp=2,checkpoint",
    ]
    model = Shared()

    def refusal(refuse, text):
        try:
            refuse(Plan.parse(text))
        except ValueError as error:
            return str(error)

    alone = {text: refusal(planner._refusals(model, None), text) for text in texts}
    assert len(set(alone.values())) > 3 and alone["dp=2"] is None
    for seed in range(4):
        order, refuse = random.Random(seed).sample(texts, len(texts)), planner._refusals(model, None)
        assert {text: refusal(refuse, text) for text in order + order} == alone
