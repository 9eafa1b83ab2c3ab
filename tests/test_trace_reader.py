"""What reads traces (pycomm/trace/), on files written here: sentences and figures against what was put in."""

import json

import numpy as np
import pytest
from trace_files import FileWriter

from pycomm.trace import chrome, overlap, stragglers, waits
from pycomm.trace.__main__ import main
from pycomm.trace.clocks import align
from pycomm.trace.files import read_files
from pycomm.trace.joined import load

MS = 1_000_000
NAMES = ["step", "forward", "bucket"]


def training(
    folder, *, ranks=4, steps=5, late=2, delay=5 * MS, shift=lambda rank: 0, host=lambda rank: "here#1"
):
    """Steps of a forward and an all_reduce, in whose forward one rank is slower; clocks shifted per rank."""
    for rank in range(ranks):
        file = FileWriter(folder, host=host(rank), pid=rank + 1)
        file.group(0, "0", rank, ranks)
        file.line(axis="dp", of="0")
        for number, name in enumerate(NAMES):
            file.name(number, name)
        begin = 10 * MS + shift(rank)
        for step in range(steps):
            forward = begin + 3 * MS + (delay if rank == late else 0)
            last = begin + 3 * MS + delay
            file.span(1, begin, forward, stage=0, microbatch=0)
            file.operation(
                step + 1, forward, forward, last, last + MS, waited=forward, nbytes=1 << 20, last=late
            )
            file.span(2, forward, last + MS, bucket=5)
            file.span(0, begin, last + MS)
            begin = last + 2 * MS
        file.write()


def test_straggler_is_named_with_its_place(tmp_path):
    training(tmp_path)
    trace = load(tmp_path)
    (found,) = stragglers.find(trace)
    assert (found.rank, found.axis, found.came_last, found.of, found.steps) == (2, "dp", 5, 5, 5)
    assert found.waited_ns == 5 * 5 * MS
    assert stragglers.sentence(found) == (
        "Rank 2 came last in 100% of 5 all_reduces of dp; the others waited 5.00 ms per step for it (51% of "
        "the time), most in bucket 5. It is slower than the others in forward (stage 0, microbatch 0): by "
        "5.00 ms per step."
    )
    assert not trace.notes


def test_equal_ranks_have_no_straggler(tmp_path):
    training(tmp_path, delay=0)
    assert stragglers.find(load(tmp_path)) == []


def test_table_splits_waiting_from_moving(tmp_path):
    training(tmp_path)
    (line,) = waits.table(load(tmp_path))
    assert (line.axis, line.operation, line.size, line.calls, line.nbytes) == (
        "dp",
        "all_reduce",
        "4 MiB",
        5,
        5 << 20,
    )
    assert line.waiting_ms == pytest.approx(5 * 5 * 3 / 4)  # three of four ranks wait
    assert line.moving_ms == pytest.approx(5)
    assert "all_reduce" in waits.show([line])


@pytest.mark.parametrize(
    ("waited", "percent"), [(0, 100), (20, 0), (25, 50)], ids=["never blocked", "blocked from begin", "half"]
)
def test_overlap(tmp_path, waited, percent):
    file = FileWriter(tmp_path)
    file.group(0)
    file.operation(1, 15 * MS, 20 * MS, 20 * MS, 30 * MS, waited=waited * MS)
    file.write()
    (row,) = load(tmp_path).rows
    found = overlap.of_row(row)
    assert (found.percent, found.communication_ms) == (pytest.approx(percent), pytest.approx(10))


def test_clocks_of_hosts_are_aligned_by_the_operations(tmp_path):
    """The second host's clock is 7 s ahead; an all_reduce without waiting takes 1 ms."""
    training(
        tmp_path,
        delay=0,
        shift=lambda rank: 7000 * MS * (rank >= 2),
        host=lambda rank: "here#1" if rank < 2 else "there#2",
    )
    offset = align(read_files(tmp_path))["there#2"]
    assert abs(offset.ns + 7000 * MS) <= offset.error_ns == MS
    trace = load(tmp_path)
    assert trace.notes == ["Clock of there: set by operations, within 1000.0 us."]
    assert trace.duration < 1000 * MS


def test_hosts_without_common_operations_are_aligned_by_the_day(tmp_path):
    for pid, (host, clock, group) in enumerate([("a#1", 5 * MS, "x"), ("b#2", 9 * MS, "y")]):
        file = FileWriter(tmp_path, host=host, pid=pid, clock=clock, day=100 * MS)
        file.group(0, group)
        file.operation(1, clock, clock, clock, clock + MS)
        file.write()
    assert align(read_files(tmp_path))["b#2"].ns == -4 * MS
    assert load(tmp_path).duration == MS + 1  # times begin at 1


def test_what_is_lost_is_said(tmp_path):
    file = FileWriter(tmp_path, pid=42, capacity=1024)
    file.group(0, "world", 0, 3)
    for n in range(1, 1100):
        file.operation(n, n * MS, n * MS, n * MS, n * MS + 100)
    file.operation(1100, 1100 * MS, 0, 0, 0)
    file.write(closed=0, tear={1050})
    trace = load(tmp_path)
    assert trace.notes == [
        "process 42 on here: 76 older records were replaced by newer ones, its ring is full. "
        "PYCOMM_TRACE_BYTES makes it longer.",
        "process 42 on here: 1 records were being written, or are damaged, and are left out.",
        "process 42 on here has not ended its trace: it still runs, or it was killed.",
        "process 42 on here was in all_reduce #1100 of group 'world', issued 0.000 s before its last record.",
        "No trace of 2 of 3 ranks: 1, 2. They had no room, or no right.",
    ]
    sequences = trace.rows[0].operations["sequence"]
    assert len(sequences) == 1023 and 1051 not in sequences
    assert sequences.tolist() == sorted(sequences.tolist())


def test_a_rank_without_file_is_the_last_by_what_peers_saw(tmp_path):
    file = FileWriter(tmp_path)
    file.group(0, "world", 0, 2)
    file.operation(1, MS, MS, 9 * MS, 10 * MS, last=1)
    file.write()
    trace = load(tmp_path)
    (collective,) = trace.collectives
    assert collective.last.tolist() == [1]
    assert "nan" not in waits.show(waits.table(trace))
    assert np.isnan(collective.begun[0, 1])


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda path: path.unlink(), "has no trace"),
        (lambda path: path.write_bytes(b"x" * 400000), "no trace of this version"),
        (lambda path: path.write_bytes(path.read_bytes()[:-64]), "has been cut"),
        (lambda path: path.with_name("b.pytrace").write_bytes(_other_pid(path)), "traces of two runs"),
    ],
    ids=["none", "foreign", "cut", "two runs"],
)
def test_bad_folders_are_refused(tmp_path, capsys, spoil, text):
    training(tmp_path, ranks=1, late=0)
    spoil(next(tmp_path.glob("*.pytrace")))
    assert main([str(tmp_path)]) == 1
    assert text in capsys.readouterr().err


def _other_pid(path):
    data = path.read_bytes()
    return data[:16] + (77).to_bytes(8, "little") + data[24:]


def test_chrome_json_has_what_perfetto_asks_for(tmp_path):
    """The rules of the Trace Event Format for complete events and metadata."""
    training(tmp_path)
    trace = load(tmp_path)
    chrome.write(trace, tmp_path / "trace.json")
    check_chrome(json.loads((tmp_path / "trace.json").read_text()), ranks=4, operations=20)


def check_chrome(data, ranks, operations):
    events = data["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert len(processes) == ranks
    last = {}
    for event in (event for event in events if event["ph"] == "X"):
        assert {"name", "ts", "dur", "pid", "tid"} <= event.keys()
        assert event["ts"] >= 0 and event["dur"] >= 0
        track = event["pid"], event["tid"]
        assert track in tracks
        # events of a track nest: each lies in the one that is open, or begins after its end
        open_ones = last.setdefault(track, [])
        while open_ones and open_ones[-1] <= event["ts"] + 0.0011:
            open_ones.pop()
        end = event["ts"] + event["dur"]
        assert not open_ones or end <= open_ones[-1] + 0.0011, event
        open_ones.append(end)
    found = [e for e in events if e["ph"] == "X" and "sequence" in e["args"]]
    assert len(found) == operations
    assert all(len(event["args"]["arrivals_us"]) == ranks for event in found)
