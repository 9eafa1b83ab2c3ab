"""Times on devices as readers of a trace see them: conversion to the host's clock against clocks that drift,
the table, the timelines. Recording them: tests/cpp/cuda/group_times_test.cc, tests/cuda_trace_cases.py.
"""

import json

import numpy as np
import pytest
from trace_files import FileWriter

from pycomm.trace import chrome, devices, overlap, stragglers, waits
from pycomm.trace.__main__ import main
from pycomm.trace.joined import load
from pycomm.trace.steps import blocked

MS, US = 1_000_000, 1_000


def drifting(folder, ppm, behind, seconds=4):
    """A device whose clock is 3 ms behind the host's at first. The host looks every 5 ms, but at 64
    operations of each second within 200 us; the device comes to an operation `behind` ns after its issue.
    Returns true begins and ends by the host's clock, less that of the trace.
    """
    random = np.random.default_rng(7)
    file = FileWriter(folder, capacity=1 << 13)
    file.group(0)
    count = 300 * seconds
    begins = np.sort(random.integers(1000 * MS, (1000 + 1000 * seconds) * MS, count))
    lengths = np.minimum(random.integers(20 * US, 900 * US, count), np.diff(begins, append=begins[-1] + MS))
    issued = begins - behind - random.integers(5 * US, 400 * US, count)
    late = np.where(np.arange(count) % 300 < 64, random.integers(5 * US, 200 * US, count), 5 * MS)

    def by_device(host):
        return np.rint((host - 1000 * MS) * (1 + ppm * 1e-6)).astype(int) + 1000 * MS - 3 * MS

    ends = begins + lengths
    rows = zip(issued, ends + late, by_device(begins), by_device(ends), strict=True)
    for sequence, row in enumerate(rows, 1):
        file.on_device(sequence, *map(int, row), nbytes=1 << 20)
    file.write()
    return begins - issued.min() + 1, ends - issued.min() + 1


@pytest.mark.parametrize("ppm", [0, 30, -30, 100, -100])
@pytest.mark.parametrize("behind", [0, 40 * MS], ids=["close", "far behind"])
def test_conversion_to_the_clock_of_the_host(tmp_path, ppm, behind):
    begins, ends = drifting(tmp_path, ppm, behind)
    trace = load(tmp_path)
    (row,) = trace.rows
    found = np.sort(row.operations, order="sequence")
    late = found["device_begin"] - begins
    # the best of 64 looks of a second is some microseconds late, and a line of a second is straight
    assert np.abs(late).max() < 30 * US + abs(ppm) * US // 2, late
    assert np.median(np.abs(late)) <= trace.device_error_ns
    assert behind or trace.device_error_ns < 100 * US
    assert (found["device_end"] - found["device_begin"] >= 0).all()
    assert np.abs(found["device_end"] - found["device_begin"] - (ends - begins)).max() < US
    assert (found["device_begin"] >= found["issued"]).all()
    assert (found["device_begin"][1:] >= found["device_end"][:-1] - 1).all()  # their order stays
    assert [note for note in trace.notes if note.startswith("Times on devices: known to ")]


def test_a_second_that_nobody_looked_at_is_put_right_by_its_neighbours(tmp_path):
    file = FileWriter(tmp_path)
    file.group(0)
    for sequence, (second, late) in enumerate([(1, 3 * US), (2, 5 * MS), (3, 4 * US)], 1):
        begin = second * 1000 * MS
        file.on_device(sequence, begin - 9 * MS, begin + MS + late, begin - 500, begin + MS - 500)
    file.write()
    (row,) = load(tmp_path).rows
    found = np.sort(row.operations, order="sequence")
    late = found["device_begin"] - found["issued"] - 9 * MS
    assert 0 <= late.min() and late.max() <= 4 * US + 2e-4 * 1000 * MS


def test_clocks_of_a_file_are_told_apart(tmp_path):
    """A long pause: a clock that is 7 ms behind, then one that is 1 ms behind."""
    file = FileWriter(tmp_path)
    file.group(0)
    for sequence, (begin, behind, clock) in enumerate([(1000 * MS, 7 * MS, 3), (1100 * MS, MS, 4)], 1):
        file.on_device(
            sequence, begin - 9 * MS, begin + MS + 2, begin - behind, begin + MS - behind, clock=clock
        )
    file.write()
    (row,) = load(tmp_path).rows
    assert (row.operations["device_begin"] - row.operations["issued"]).tolist() == [9 * MS + 2] * 2


def group_of_two(folder):
    """Two ranks: an all_reduce for which rank 1 comes 3 ms late, a broadcast, a product, a message, and an
    operation in a graph."""
    for rank in range(2):
        file = FileWriter(folder, pid=rank + 1)
        file.group(0, "0", rank, 2)
        file.line(axis="tp", of="0")

        def add(sequence, begin, end, file=file, **fields):
            file.on_device(sequence, 10 * MS, end + 2, begin, end, **{"nbytes": 4 * MS, **fields})

        add(1, (20 + 3 * rank) * MS, 25 * MS)
        add(2, 25 * MS, (26 + rank) * MS, kind="broadcast")
        add(7, 30 * MS, (34 + 2 * rank) * MS, kind="none", nbytes=0)
        add(1, 30 * MS, 31 * MS, kind=("send", "recv")[rank])
        file.on_device(3, 11 * MS, 0, 0, 0, nbytes=4 * MS)
        file.write()


def test_table(tmp_path):
    group_of_two(tmp_path)
    trace = load(tmp_path)
    found = {line.operation: line[:6] for line in devices.table(trace)}
    assert found == {
        "all_reduce": ("tp", "all_reduce", "4 MiB", 1, 4 * MS, pytest.approx(3.5)),
        "broadcast": ("tp", "broadcast", "4 MiB", 1, 4 * MS, pytest.approx(1.5)),
        "fused product": ("tp", "fused product", "", 1, 0, pytest.approx(5.0)),
        "send": ("tp", "send", "4 MiB", 1, 4 * MS, pytest.approx(1.0)),
        "recv": ("tp", "recv", "4 MiB", 1, 4 * MS, pytest.approx(1.0)),
    }
    assert [note for note in trace.notes if "when 1 of 5 operations ran on the device is not known" in note]


def test_what_waits_for_the_last_rank_is_told_where_the_clocks_are_exact_enough(tmp_path):
    group_of_two(tmp_path)
    trace = load(tmp_path)

    def before_last(error):
        lines = devices.table(trace._replace(device_error_ns=error))
        return {line.operation: line.before_last_ms for line in lines if not np.isnan(line.before_last_ms)}

    assert before_last(10 * US) == {"all_reduce": pytest.approx(1.5)}
    assert before_last(2 * MS) == {}


def test_other_tables_are_those_of_the_host(tmp_path):
    group_of_two(tmp_path)
    trace = load(tmp_path)
    assert waits.table(trace) == stragglers.find(trace) == trace.collectives == []
    for row in trace.rows:
        assert overlap.of_row(row).percent is None and len(blocked(row)) == 0


def test_timeline_has_both_sides(tmp_path):
    group_of_two(tmp_path)
    events = list(chrome.events(load(tmp_path)))
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    sides = {}
    for event in (event for event in events if event["ph"] == "X"):
        sides.setdefault(names[event["pid"], event["tid"]], []).append(event)
    # the message runs beside the product
    device, beside = sides["group tp, on the device"], sides["group tp, on the device 2"]
    assert len(sides["group tp, host side"]) == 2 * 5 and len(device) + len(beside) == 2 * 4
    (reduce,) = [event for event in device if event["pid"] == 1 and event["name"] == "all_reduce"]
    assert reduce["dur"] == pytest.approx(2000) and reduce["args"]["issued_us_before"] == pytest.approx(13000)
    assert {event["name"] for event in device + beside} == {
        "all_reduce", "broadcast", "fused product", "send", "recv",
    }  # fmt: skip


def test_report_and_page(tmp_path, capsys):
    pytest.importorskip("plotly")
    group_of_two(tmp_path)
    assert main([str(tmp_path), "--html"]) == 0
    printed = capsys.readouterr().out
    assert "On the devices: running" in printed and "fused product" in printed
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    page = (tmp_path / "trace.html").read_text()
    assert "<h2>On the devices</h2>" in page and "rank 1 on the device" in page
    assert "0.000 ms until all was in the stream" in page  # the host's side


@pytest.mark.parametrize(
    "wrong",
    [
        dict(begin=9 * MS, end=8 * MS),
        dict(begin=9 * MS, end=10 * MS, seen=3 * MS),
        dict(begin=9 * MS, end=1 << 62),
        dict(begin=0, end=10 * MS),
    ],
    ids=["ends before it begins", "seen before its issue", "far away", "no begin"],
)
def test_what_cannot_be_is_left_out(tmp_path, wrong):
    file = FileWriter(tmp_path)
    file.group(0)
    file.on_device(1, 5 * MS, wrong.pop("seen", 20 * MS), **wrong)
    file.on_device(2, 5 * MS, 20 * MS, 6 * MS, 7 * MS)
    file.write()
    trace = load(tmp_path)
    assert trace.rows[0].operations["sequence"].tolist() == [2]
    assert [note for note in trace.notes if "1 records were being written, or are damaged" in note]
