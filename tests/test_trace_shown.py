"""What readers of a trace are shown: names with commands to a terminal or a browser in them, units, places,
what is left out, and traces of nothing.
"""

import json
import sys

import pytest
from test_trace_reader import training
from trace_files import FileWriter

from pycomm import trace
from pycomm.trace import chrome, joined, overlap, page, picture
from pycomm.trace.__main__ import main, report
from pycomm.trace.files import read_files
from pycomm.trace.joined import load
from pycomm.trace.steps import Part, length_within, own_times, place_at, say, steps_of, union

MS = 1_000_000
ESCAPE = "\x1b[2J\u202e"
MARKUP = "<script>alert('x')</script>&"


def named(folder, name):
    """Two ranks, of which the second is late: groups, axes, spans and hosts with this in their names, one
    process not ended; and an operation on a device.
    """
    for rank in range(2):
        file = FileWriter(folder, host=f"h{name}#1".replace("/", ""), pid=rank + 1)
        file.group(0, f"g{name}", rank, 3)
        file.line(axis=f"x{name}", of=f"g{name}")
        file.group(1, f"pair{name}", rank, 2)
        file.name(0, f"s{name}")
        file.span(0, MS, 60 * MS)
        file.operation(1, 2 * MS, (3 + 40 * rank) * MS, 43 * MS, 50 * MS, waited=2 * MS, group=1)
        file.operation(7, 55 * MS, 0, 0, 0)
        file.on_device(2, 51 * MS, 54 * MS, 52 * MS, 53 * MS, group=1, nbytes=9)
        file.write(closed=0)


def test_names_are_no_commands_to_a_terminal(tmp_path, capsys):
    named(tmp_path, ESCAPE)
    report(load(tmp_path))
    text = capsys.readouterr().out
    assert all(line.isprintable() for line in text.splitlines())
    for shown in ("process 1 on h?[2J? has not ended", "pair?[2J?  all_reduce", "most in s?[2J?."):
        assert shown in text
    assert [line for line in text.splitlines() if line.startswith("  rank ")] == [
        "  rank 0: 0% of 47.000 ms",
        "  rank 1: 0% of 7.000 ms",
    ]


def test_names_are_no_markup_of_the_page(tmp_path):
    pytest.importorskip("plotly")
    named(tmp_path, MARKUP)
    page.write(load(tmp_path), tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    assert "<script>alert" not in text and text.count("&lt;script&gt;alert(&#x27;x&#x27;)&lt;") >= 5
    assert "<li>process 1 on h&lt;script&gt;" in text and "most in s&lt;script&gt;" in text
    assert "<td>pair&lt;script&gt;" in text


# --- Perfetto --------------------


def events(folder):
    """{(process, track): [(name, begin, length in us, arguments)]}"""
    found, tracks = list(chrome.events(load(folder))), {}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    for e in found:
        if e["ph"] == "X":
            track = tracks.setdefault((e["pid"], names[e["pid"], e["tid"]]), [])
            track.append((e["name"], e["ts"], e["dur"], e["args"]))
    return tracks


def test_units_and_arguments_of_the_timeline(tmp_path):
    """Microseconds since the first record, 1 ns before it; whichever rank comes last."""
    for rank in range(3):
        file = FileWriter(tmp_path, pid=rank + 1)
        file.group(0, "0", rank, 3)
        file.line(axis="dp", of="0")
        begun = [14, 12, 13][rank] * MS
        file.operation(70000, 10 * MS, begun, 14 * MS, 20 * MS, nbytes=1 << 40, algorithm=2, last=0)
        file.operation(70001, 30 * MS, [31, 32, 35][rank] * MS, 35 * MS, 40 * MS, last=2, outcome=2)
        file.operation(70002, 50 * MS, 50 * MS, 0, 0, last=0xFFFF)
        file.write()
    found = events(tmp_path)
    assert set(found) == {(rank, "group dp") for rank in range(3)}
    first, *phases = found[1, "group dp"][:3]
    assert first == ("all_reduce", 2000.001, 8000.0, {
        "sequence": 70000, "bytes": 1 << 40, "algorithm": "two_shot", "outcome": "done",
        "issued_us_before": 2000.0, "last_rank": 0, "arrivals_us": {0: 2000.0, 1: 0.0, 2: 1000.0},
    })  # fmt: skip
    assert [each[:3] for each in phases] == [("waiting", 2000.001, 2000.0), ("moving", 4000.001, 6000.0)]
    second = found[2, "group dp"][3]
    assert (second[3]["outcome"], second[3]["last_rank"]) == ("failed", 2)
    assert second[3]["arrivals_us"] == {0: 0.0, 1: 1000.0, 2: 4000.0}
    last = found[0, "group dp"][-1]  # not ended: to the end of the trace, without phases
    assert last[:3] == ("all_reduce", 40000.001, 0.0) and last[3]["outcome"] == "under way"
    assert last[3]["last_rank"] is None and len(found[0, "group dp"]) == 7


def test_messages_that_overlap_lie_in_lanes(tmp_path):
    file = FileWriter(tmp_path)
    file.group(0, "0", 0, 400)
    for number, (begin, end) in enumerate([(10, 30), (10, 20), (20, 40), (25, 26), (40, 50)]):
        file.operation(number, begin * MS, 0, 0, end * MS, type=2, kind="recv", last=300, nbytes=5)
    file.operation(9, 60 * MS, 0, 0, 0, type=2, kind="send", last=0xFFFF)
    file.write()
    found = events(tmp_path)
    lanes = {
        track[-1]: [(round(begin / 1e3) + 10, round(length / 1e3)) for _, begin, length, _ in messages]
        for (_, track), messages in found.items()
    }
    assert lanes["1"][0][0] == lanes["2"][0][0] == 10 and set(lanes) == {"1", "2", "3"}
    for messages in lanes.values():
        assert all(a + length <= b for (a, length), (b, _) in zip(messages, messages[1:], strict=False))
    arguments = [message[3] for messages in found.values() for message in messages]
    assert {(each["peer"], each["outcome"]) for each in arguments} == {(300, "done"), (None, "under way")}


def test_spans_of_each_thread_have_a_track(tmp_path):
    file = FileWriter(tmp_path)
    file.name(0, "forward")
    file.name(1, "bucket")
    for thread in (7, 1 << 40):
        file.span(1, 3 * MS, 4 * MS, thread=thread, bucket=300)
        file.span(0, 2 * MS, 5 * MS, thread=thread, stage=0, microbatch=256)
    file.write()
    wanted = [("forward (stage 0, microbatch 256)", 0.001, 3000.0, {}), ("bucket 300", 1000.001, 1000.0, {})]
    assert events(tmp_path) == {(0, f"thread {thread}"): wanted for thread in (7, 1 << 40)}


# --- steps and spans --------------------


def test_a_span_s_own_time_is_without_what_lies_inside(tmp_path):
    """Two threads; the rank waits from 5 to 7 and from 19 to 20, in all threads."""
    file = FileWriter(tmp_path)
    file.group(0)
    for number, name in enumerate("abc"):
        file.name(number, name)
    for thread, (begin, *inside) in enumerate([(0, (2, 4), (6, 9)), (1, (1, 3), (3, 5))]):
        file.span(0, (1 + begin) * MS, 11 * MS, thread=thread)
        for first, last in inside:
            file.span(1, (1 + first) * MS, (1 + last) * MS, thread=thread, stage=thread)
    file.span(2, 3 * MS + MS // 2, 4 * MS, thread=0)
    file.span(0, 19 * MS, 22 * MS, thread=0)
    file.operation(1, 5 * MS, 6 * MS, 7 * MS, 8 * MS, waited=6 * MS)
    file.operation(2, 18 * MS, 18 * MS, 18 * MS, 21 * MS, waited=20 * MS)
    file.write()
    found = load(tmp_path)
    own = {part: time / MS for part, time in own_times(found, found.rows[0]).items()}
    a, b = Part("a", -1, -1, -1), Part("b", 0, -1, -1)
    assert own == {
        a: (10 - 2 - 3 - 1) + (9 - 2 - 2 - 2) + (3 - 1),
        b: (2 - 0.5) + (3 - 1),
        b._replace(stage=1): 2 + 2,
        Part("c", -1, -1, -1): 0.5,
    }


@pytest.mark.parametrize(
    ("moment", "name"),
    [(0.5, None), (1, "a"), (2.5, "b"), (3, "c"), (4, "c"), (4.5, "a"), (6, "a"), (6.5, None)],
)
def test_the_innermost_span_at_a_moment(moment, name, tmp_path):
    file = FileWriter(tmp_path)
    for number, (each, begin, end) in enumerate([("a", 1, 6), ("b", 2, 4), ("c", 3, 4)]):
        file.name(number, each)
        file.span(number, (10 + begin) * MS, (10 + end) * MS)
    file.write()
    found = load(tmp_path)
    place = place_at(found, found.rows[0], (moment - 1) * MS + 1)
    assert (place and place.name) == name


@pytest.mark.parametrize(
    ("intervals", "wanted"),
    [
        ([], []),
        ([(3, 3)], []),
        ([(1, 2), (2, 3)], [(1, 3)]),
        ([(5, 6), (1, 9), (2, 3)], [(1, 9)]),
        ([(4, 5), (1, 2), (1, 3), (9, 8)], [(1, 3), (4, 5)]),
    ],
)
def test_intervals(intervals, wanted):
    found = union(intervals)
    assert found.tolist() == [list(each) for each in wanted]
    assert length_within(found, 2, 4.5) == sum(max(0, min(b, 4.5) - max(a, 2)) for a, b in wanted)
    assert length_within(found, 7, 7) == length_within(found, 20, 30) == 0


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (Part("forward", 0, 3, -1), "forward (stage 0, microbatch 3)"),
        (Part("bucket", -1, -1, 0), "bucket 0"),
        (Part("bucket", 300, -1, 256), "bucket 256 (stage 300)"),
        (Part("stage", 2, 0, 1), "stage 2 (microbatch 0, bucket 1)"),
        (Part("load batch", -1, -1, -1), "load batch"),
    ],
)
def test_what_is_said_of_a_place(part, text):
    assert say(part) == text


def test_the_step_in_the_middle_is_that_of_all_ranks(tmp_path):
    """From the first rank's begin to the last one's end; a rank may have recorded fewer steps."""
    for rank, count in enumerate([5, 3]):
        file = FileWriter(tmp_path, pid=rank + 1)
        file.group(0, "0", rank, 2)
        file.name(0, "step")
        for step in range(count):
            file.span(0, (10 * step + 1 + rank) * MS, (10 * step + 8 + 2 * rank) * MS)
        file.write()
    found = load(tmp_path)
    assert picture.middle_step(found) == (10 * MS + 1, 19 * MS + 1, 1)
    assert [len(steps_of(found, row)) for row in found.rows] == [5, 3]
    none = found._replace(names=["other"])
    assert picture.middle_step(none) == (0.0, found.duration, None)


def test_bars_of_the_picture_end_at_its_edges(tmp_path):
    file = FileWriter(tmp_path)
    file.group(0)
    for number, name in enumerate(("step", "forward", "other")):
        file.name(number, name)
        file.span(number, (1 + number) * MS, (21 - number) * MS)
    file.operation(1, 2 * MS, 4 * MS, 8 * MS, 14 * MS)
    file.operation(2, 15 * MS, 16 * MS, 0, 0)
    file.operation(3, 15 * MS, 0, 0, 18 * MS, type=2, kind="send")
    file.on_device(4, 5 * MS, 13 * MS, 6 * MS, 12 * MS)
    file.write()
    found = load(tmp_path)
    bars = {}
    for spans, _, label, _ in picture._bars(found, found.rows[0], 5 * MS + 1, 17 * MS + 1):
        bars[label] = [(round(begin, 6), round(length, 6)) for begin, length in spans]
    assert bars.pop("on the device")[0][1] == pytest.approx(6, abs=0.01)
    assert bars == {
        "forward": [(0, 12)],
        "other": [(0, 12)],
        "moving": [(2, 6), (10, 2)],
        "waiting": [(0, 2), (10, 0)],
        "message": [(9, 3)],
    }


def test_overlap_counts_what_runs_at_once_once(tmp_path):
    """Of 10 to 40 ms, 25 to 30 and 38 to 40 are waited for; an operation on a device does not count."""
    file = FileWriter(tmp_path)
    file.group(0)
    file.operation(1, 5 * MS, 10 * MS, 10 * MS, 30 * MS, waited=25 * MS)
    file.operation(2, 5 * MS, 20 * MS, 20 * MS, 40 * MS, waited=38 * MS)
    file.operation(3, 5 * MS, 50 * MS, 0, 0, waited=51 * MS)  # not ended
    file.on_device(4, 60 * MS, 90 * MS, 61 * MS, 62 * MS)
    file.write()
    (row,) = load(tmp_path).rows
    found = overlap.of_row(row)
    assert (found.communication_ms, found.blocked_ms) == (30, 7) and found.percent == pytest.approx(2300 / 30)


def test_the_page_shows_the_steps_in_the_middle_of_a_long_trace(tmp_path, monkeypatch):
    training(tmp_path, ranks=2, steps=40, late=1)
    found = load(tmp_path)
    assert page._window(found) == (0.0, found.duration)
    monkeypatch.setattr(page, "MOST_BARS", 100)
    begin, end = page._window(found)
    bars = sum(2 * len(row.operations) + len(row.spans) for row in found.rows)
    assert end - begin == pytest.approx(found.duration * 100 / bars)
    assert begin == pytest.approx(steps_of(found, found.rows[0])[20][0])
    end_of_last = page._window(found._replace(names=["none"]))
    assert sum(end_of_last) / 2 == pytest.approx(found.duration / 2)


@pytest.mark.parametrize(("begin", "end"), [(0, 30), (11, 12), (26, 27)])
def test_the_timeline_has_what_is_in_its_window_and_no_more(begin, end, tmp_path):
    """Of bars of 10 to 20 and 20 to 26 ms, and of all else that lies in part of it."""
    pytest.importorskip("plotly")
    file = FileWriter(tmp_path)
    file.group(0)
    file.name(0, "a")
    for first, last in ((10, 20), (20, 26), (28, 29)):
        file.span(0, (1 + first) * MS, (1 + last) * MS)
    file.operation(1, 1 * MS, 6 * MS, 12 * MS, 30 * MS)
    file.write()
    found = load(tmp_path)
    figure = page._timeline(found, begin * MS + 1, end * MS + 1)
    bars = {
        bar.name: [(round(base), round(base + length)) for base, length in zip(bar.base, bar.x, strict=True)]
        for bar in figure.data
    }
    wanted = {"a": [(10, 20), (20, 26), (28, 29)], "waiting": [(5, 11)], "moving": [(11, 29)]}
    inside = {name: [(a, b) for a, b in each if b > begin and a < end] for name, each in wanted.items()}
    assert bars == {name: each for name, each in inside.items() if each}


# --- what is lost --------------------


def test_more_than_can_be_joined_is_refused(tmp_path, monkeypatch, capsys):
    """Operations of a group times its ranks; of one group, whatever the others have."""
    file = FileWriter(tmp_path)
    file.group(0, "few", 0, 2)
    file.group(300, "many", 0, 7)
    for number in range(30):
        file.operation(number, (1 + number) * MS, 0, 0, (2 + number) * MS, group=300 * (number % 3 == 0))
    file.write()
    monkeypatch.setattr(joined, "MOST_CELLS", 70)
    assert len(load(tmp_path).collectives) == 2
    monkeypatch.setattr(joined, "MOST_CELLS", 69)
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path} has 10 operations of 7 ranks of group 'many' in {file.path}: too many" in said


@pytest.mark.parametrize("missing", [1, 15, 16, 17, 399])
@pytest.mark.parametrize("last", [False, True])
def test_missing_ranks_are_named_up_to_sixteen(missing, last, tmp_path):
    """The first rank alone is there, or the last."""
    file = FileWriter(tmp_path)
    file.group(0, "world", missing if last else 0, missing + 1)
    file.write()
    absent = ", ".join(map(str, range(missing + 1)[not last :][: min(missing, 16)]))
    more = ", ..." if missing > 16 else ""
    text = f"No trace of {missing} of {missing + 1} ranks: {absent}{more}. They had no room, or no right."
    assert load(tmp_path).notes == [text]


def test_what_a_file_has_lost_is_said_with_its_process(tmp_path):
    file = FileWriter(tmp_path, host="node-a#77", pid=70000)
    file.group(0, "world", 0, 1)
    file.text += '{"group": 1, "name": "x", "rank": 3, "world_size": 3, "host": ""}\nnonsense\n'
    for number in range(5):
        file.operation(number, (1 + number) * MS, 0, 0, 0, group=9 * (number == 0), kind="barrier")
    file.operation(8, 3 * MS, 0, 0, 0, type=2, kind="send")  # a message does not count
    file.span(5, 4 * MS, 2005 * MS)
    file.write(closed=0)
    was = "process 70000 on node-a was in barrier"
    assert load(tmp_path).notes == [
        "process 70000 on node-a: 2 lines with names of groups or spans are damaged.",
        "process 70000 on node-a has not ended its trace: it still runs, or it was killed.",
        f"{was} #0 of group '?', issued 2.004 s before its last record.",
        f"{was} #1 of group 'world', issued 2.003 s before its last record.",
        f"{was} #2 of group 'world', issued 2.002 s before its last record.",
    ]


@pytest.mark.parametrize("with_group", [False, True])
def test_a_trace_of_nothing(with_group, tmp_path, capsys):
    pytest.importorskip("plotly")
    file = FileWriter(tmp_path, host="node-b#1", pid=9)
    if with_group:
        file.group(0, "world", 0, 1)
    file.write()
    assert main([str(tmp_path), "--html", "--out", str(tmp_path / "new" / "out")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("1 ranks, 0.000 s\n") and "rank 0: no communication of 0.000 ms" in text
    assert "no rank cost the others 1% of the time or more." in text
    names = ["trace.json", "step.png", "trace.html"]
    assert text.endswith(f"Written: {', '.join(str(tmp_path / 'new' / 'out' / name) for name in names)}\n")
    assert sorted(path.name for path in (tmp_path / "new" / "out").iterdir()) == sorted(names)
    shown = json.loads((tmp_path / "new" / "out" / "trace.json").read_text())
    assert shown["traceEvents"][0]["args"] == {"name": "rank 0 (node-b, process 9)"}
    assert shown["otherData"]["notes"] == []


@pytest.mark.parametrize(
    ("missing", "status", "text"), [("matplotlib", 0, "No picture"), ("plotly", 1, "No page")]
)
def test_without_what_draws(missing, status, text, tmp_path, monkeypatch, capsys):
    training(tmp_path, ranks=2, late=1)
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main([str(tmp_path), "--html"]) == status
    said = capsys.readouterr()
    assert f"{text}: {missing} is not installed (pip install {missing})." in said.out + said.err
    assert (tmp_path / "trace.json").exists() and ("Written" in said.out) == (status == 0)


# --- traces of this process, one after the other --------------------


def record(folder, *axes):
    trace.begin(folder)
    try:
        for each in axes:
            trace.name_axis(*each)
        with trace.span("work"), trace.span("inner", bucket=300):
            pass
    finally:
        trace.end()
    (file,) = read_files(folder)
    spans = [(file.names[span["name"]], *span.tolist()[4:]) for span in file.spans]
    assert sorted(spans) == [("inner", -1, -1, 300), ("work", -1, -1, -1)]
    return file.axes


def test_every_trace_has_all_names_and_axes(tmp_path, monkeypatch):
    """Also for groups that were named earlier, and each once."""
    monkeypatch.setattr("pycomm.trace.spans._axes", {})
    trace.name_axis("g1", "dp")
    assert record(tmp_path / "a") == {"g1": "dp"}
    assert record(tmp_path / "b", ("g2", "tp"), ("g2", "tp")) == {"g1": "dp", "g2": "tp"}
    assert record(tmp_path / "c", ("g1", "ep")) == {"g1": "ep", "g2": "tp"}
    text = next((tmp_path / "b").glob("*.pytrace")).read_bytes()
    assert text.count(b'"tp"') == 1
