"""What reads traces where there are two of things: groups in a process, hosts, pieces of a file; and numbers
that do not fit into a byte.
"""

import numpy as np
import pytest
from trace_files import FileWriter

from pycomm.trace import devices, files, stragglers, waits
from pycomm.trace.clocks import align
from pycomm.trace.files import read_files
from pycomm.trace.joined import load

MS = 1_000_000


def writer(folder, rank, **options):
    return FileWriter(folder, pid=rank + 1, **options)


def pairs_and_all(folder, late, steps=3, first=0):
    """Four ranks: in each step an all_reduce in a pair (0 and 1, 2 and 3: tp), for which `late` comes 6 ms
    late, then a barrier of all. The pair is made before the group of all.
    """
    for rank in range(4):
        file = writer(folder, rank)
        file.group(first, f"pair{rank // 2}", rank % 2, 2)
        file.group(first + 1, "all", rank, 4)
        file.line(axis="tp", of=f"pair{rank // 2}")
        for number, name in enumerate(("step", "forward", "update")):
            file.name(first + number, name)
        for step in range(steps):
            begin = (10 + 20 * step) * MS
            arrival = begin + (7 if rank == late else 1) * MS
            last = begin + (7 if rank // 2 == late // 2 else 1) * MS
            file.span(first + 1, begin, arrival, stage=rank // 2)
            file.operation(
                step + 1, arrival, arrival, last, last + MS, waited=arrival, nbytes=64, group=first
            )
            file.span(first + 2, last + MS, begin + 9 * MS)
            file.operation(
                step + 1, begin + 9 * MS, begin + 10 * MS, begin + 10 * MS, begin + 11 * MS, kind="barrier",
                waited=begin + 9 * MS, group=first + 1,
            )  # fmt: skip
            file.span(first, begin, begin + 11 * MS)
        file.write()


@pytest.mark.parametrize("late", range(4))
@pytest.mark.parametrize("first", [0, 255, 65533], ids=["few", "256", "65534"])
def test_a_straggler_of_a_part_has_its_number_in_the_job(late, first, tmp_path):
    """Groups and names have numbers of 16 and 32 bits; a process has the rank of its largest group."""
    pairs_and_all(tmp_path, late, first=first)
    found = load(tmp_path)
    assert [(row.rank, row.world_size) for row in found.rows] == [(rank, 4) for rank in range(4)]
    labels = [f"rank {rank} (here, process {rank + 1})" for rank in range(4)]
    assert [row.label for row in found.rows] == labels
    (one,) = stragglers.find(found)
    assert (one.rank, one.axis, one.operation, one.came_last, one.of) == (late, "tp", "all_reduce", 3, 3)
    assert (one.waited_ns, one.steps) == (18 * MS, 3)
    where = f"forward (stage {late // 2})"
    assert (one.mostly, one.slow_in, one.excess_ns) == (where, where, 18 * MS)
    assert stragglers.sentence(one).startswith(f"Rank {late} came last in 100% of 3 all_reduces of tp; ")
    lines = {(line.axis, line.operation): line for line in waits.table(found)}
    assert set(lines) == {("tp", "all_reduce"), ("all", "barrier")}
    barrier = lines["all", "barrier"]
    assert (barrier.waiting_ms, barrier.moving_ms, barrier.queued_ms) == (0, 3, 3)


def test_each_pair_has_its_own_line(tmp_path):
    pairs_and_all(tmp_path, 3)
    found = [line for line in waits.table(load(tmp_path)) if line.axis == "tp"]
    assert [(line.calls, line.waiting_ms, line.moving_ms, line.nbytes) for line in found] == [
        (3, 9, 3, 192),
        (3, 0, 3, 192),
    ]


@pytest.mark.parametrize("late", range(3))
def test_of_three_ranks_the_others_wait_in_the_mean(late, tmp_path):
    """An operation that two ranks were late for costs what the mean of the others waits for the last."""
    for rank in range(3):
        file = writer(tmp_path, rank)
        file.group(0, "g", rank, 3)
        for sequence in (1, 2):
            issued = 20 * sequence * MS
            begun = issued + (9 if rank == late else 3 * ((rank - late) % 3) - 3) * MS  # 0 and 3 ms
            file.operation(sequence, issued, begun, issued + 9 * MS, issued + 10 * MS)
        file.write()
    found = load(tmp_path)
    (one,) = stragglers.find(found)
    assert (one.rank, one.waited_ns, one.steps, one.mostly) == (late, 2 * (9 + 6) / 2 * MS, 0, None)
    assert stragglers.sentence(one) == (
        f"Rank {late} came last in 100% of 2 all_reduces of g; the others waited 15.00 ms for it "
        f"({100 * one.share:.0f}% of the time)."
    )


def test_a_rank_that_is_late_for_some_operations(tmp_path):
    """The one that cost most is named, with how often the rank came last in that kind."""
    for rank in range(2):
        file = writer(tmp_path, rank)
        file.group(0, "g", rank, 2)
        for sequence, (kind, wait) in enumerate([("barrier", 5), ("all_reduce", 2), ("barrier", -1)], 1):
            issued = 20 * sequence * MS
            begun = issued + max(0, wait if rank else -wait) * MS
            last = issued + abs(wait) * MS
            file.operation(sequence, issued, begun, last, last + MS, kind=kind)
        file.write()
    found = {one.rank: one for one in stragglers.find(load(tmp_path))}
    assert [found[1][2:6], found[0][2:6]] == [("barrier", 1, 2, 7 * MS), ("barrier", 1, 2, MS)]


SIZES = {0: "64 B", 64: "64 B", 65: "1 KiB", 1 << 10: "1 KiB", (1 << 10) + 1: "16 KiB", 64 << 20: "64 MiB"}
SIZES |= {(64 << 20) + 1: "more", (1 << 48) - 1: "more"}


@pytest.mark.parametrize("nbytes", SIZES)
def test_sizes_are_classed_at_their_limits_by_what_reads(nbytes, tmp_path):
    """As csrc/trace/counters.h classes them (test_trace.py): collectives, messages, and both on devices."""
    for rank in range(2):
        file = writer(tmp_path, rank)
        file.group(0, "g", rank, 2)
        file.operation(1, MS, MS, MS, 2 * MS, nbytes=nbytes)
        file.operation(
            9, MS, MS, MS, 2 * MS, nbytes=nbytes, type=2, kind=("send", "recv")[rank], last=1 - rank
        )
        file.on_device(2, 3 * MS, 5 * MS, 3 * MS, 4 * MS, nbytes=nbytes)
        file.on_device(3, 5 * MS, 7 * MS, 5 * MS, 6 * MS, nbytes=nbytes, kind=("send", "recv")[rank])
        file.write()
    found = load(tmp_path)
    for lines in (waits.table(found), devices.table(found)):
        assert {(line.operation, line.size, line.nbytes) for line in lines} == {
            (kind, SIZES[nbytes], nbytes) for kind in ("all_reduce", "send", "recv")
        }


def test_messages_are_sums_of_both_ranks(tmp_path):
    for rank in range(2):
        file = writer(tmp_path, rank)
        file.group(0, "g", rank, 2)
        for number in range(300):
            issued = (10 + 10 * number) * MS
            file.operation(
                number, issued, 0, issued + (1 + rank) * MS, issued + 5 * MS, nbytes=1000, type=2,
                kind="send", last=1 - rank,
            )  # fmt: skip
        file.operation(300, 9000 * MS, 0, 0, 0, type=2, kind="send", last=1 - rank)  # not ended
        file.write()
    (line,) = waits.table(load(tmp_path))
    assert line == ("g", "send", "1 KiB", 600, 600_000, pytest.approx(900), pytest.approx(2100), 0.0)
    assert waits.show([line]).splitlines()[-1].split()[-6:] == "600 0.600 900.000 2100.000 30 0.00".split()


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_a_message_whose_arrival_is_not_known_has_not_waited(kind, tmp_path):
    """It moves from its issue on, whether the others of its kind and size have an arrival or not."""
    for rank in range(2):
        file = writer(tmp_path, rank)
        file.group(0, "g", rank, 2)
        for number, (nbytes, arrival) in enumerate([(1000, 0), (1000, 2), (1000, 0), (9, 0)]):
            issued = (1000 + 10 * number) * MS
            file.operation(
                number, issued, issued, arrival and issued + arrival * MS, issued + 5 * MS, nbytes=nbytes,
                type=2, kind=kind, last=1 - rank,
            )  # fmt: skip
        file.write()
    assert waits.table(load(tmp_path)) == [
        ("g", kind, "1 KiB", 6, 6000, pytest.approx(4), pytest.approx(26), 0.0),
        ("g", kind, "64 B", 2, 18, pytest.approx(0), pytest.approx(10), 0.0),
    ]


def test_waiting_on_devices_must_be_more_than_all_the_clocks_may_be_off(tmp_path):
    """Three operations for each of which rank 1 comes 2 ms late: the mean of the ranks waits 3 ms in all."""
    for rank in range(2):
        file = writer(tmp_path, rank)
        file.group(0, "g", rank, 2)
        for number in range(3):
            begin = (20 * number + 10) * MS
            file.on_device(
                number, begin - MS, begin + 6 * MS, begin + 2 * rank * MS, begin + 5 * MS, nbytes=9
            )
        file.write()
    found = load(tmp_path)
    for error, told in ((MS - 1000, pytest.approx(3)), (MS + 1000, None), (2 * MS, None)):
        (line,) = devices.table(found._replace(device_error_ns=error))
        assert (None if np.isnan(line.before_last_ms) else line.before_last_ms) == told and line.calls == 3


def test_what_is_not_known_is_a_dash():
    """A barrier has no bytes, and what took no time has no rate."""
    rows = [
        waits.Line("g", "barrier", "64 B", 2, 0, 1.0, 3.0, 0.0),
        waits.Line("g", "send", "64 B", 1, 64, 2.0, 0.0, 0.0),
        waits.Line("g", "recv", "64 B", 1, 64, 0.0, 0.0, 0.0),
        waits.Line("g", "all_reduce", "more", 1, 1 << 30, float("nan"), float("nan"), 0.0),
    ]
    assert [line.split()[-5:] for line in waits.show(rows).splitlines()[2:]] == [
        ["0.000", "1.000", "3.000", "25", "-"],
        ["0.000", "2.000", "0.000", "100", "-"],
        ["0.000", "-", "-", "-", "-"],
        ["1073.742", "-", "-", "-", "-"],
    ]


# --- pieces of a file, hosts --------------------


@pytest.mark.parametrize("at_once", [1, 7, 16, 64])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
def test_a_long_ring_is_read_in_pieces(at_once, count, tmp_path, monkeypatch):
    """What is newest is there, in its order, however far the ring was written and however it is read."""
    monkeypatch.setattr(files, "_AT_ONCE", at_once)
    file = FileWriter(tmp_path, capacity=16)
    file.group(0)
    for number in range(count):
        file.operation(70000 + number, (1 + number) * MS, 0, 0, (2 + number) * MS, nbytes=number)
    file.write()
    (found,) = read_files(tmp_path)
    assert found.operations["sequence"].tolist() == list(range(70000 + max(0, count - 16), 70000 + count))
    assert (found.torn, found.overwritten) == (0, max(0, count - 16))


def two_hosts(folder, ahead, *operations):
    """operations: kind, begun and ended on the one host, and on the other, whose clock is so far ahead."""
    for rank in range(2):
        file = writer(folder, rank, host=("a#1", "b#2")[rank])
        file.group(0, "g", rank, 2)
        for sequence, (kind, *times) in enumerate(operations, 1):
            begun, ended = (1000 * MS + ahead * rank + time for time in times[2 * rank : 2 * rank + 2])
            file.operation(sequence, begun, begun, ended, ended, kind=kind)
        file.write()


@pytest.mark.parametrize("ahead", [-500 * MS, 0, 7000 * MS])
def test_only_what_waits_for_all_says_what_the_clocks_differ_by(ahead, tmp_path):
    """The root of a broadcast, a reduce, a scatter may end before another rank begins."""
    early = [(kind, 0, MS, 900 * MS, 901 * MS) for kind in ("broadcast", "scatter", "reduce", "gather")]
    two_hosts(tmp_path, ahead, *early, ("barrier", 950 * MS, 954 * MS, 952 * MS, 954 * MS))
    offset = align(read_files(tmp_path))["b#2"]
    assert (offset.by, offset.ns + ahead, offset.error_ns) == ("operations", -MS, 3 * MS)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"])
def test_every_operation_narrows_what_the_clocks_differ_by(kind, tmp_path):
    two_hosts(
        tmp_path, 0, (kind, 0, 40 * MS, 10 * MS, 30 * MS), (kind, 50 * MS, 54 * MS, 53 * MS, 58 * MS),
        (kind, 60 * MS, 90 * MS, 61 * MS, 62 * MS),
    )  # fmt: skip
    offset = align(read_files(tmp_path))["b#2"]
    low, high = -2 * MS, 1 * MS  # 60 - 62, 54 - 53
    assert (offset.ns, offset.error_ns) == ((low + high) // 2, (high - low) // 2)
    assert any(note == "Clock of b: set by operations, within 1500.0 us." for note in load(tmp_path).notes)


def test_clocks_of_three_hosts(tmp_path):
    """Each by what it has in common with the first; the last has nothing, and the first operation of all is
    the beginning.
    """
    hosts = [("a#1", 0, 0), ("b#2", 50 * MS, 0), ("c#3", -9 * MS, 20 * MS)]
    for rank, (host, ahead, day) in enumerate(hosts):
        file = writer(tmp_path, rank, host=host, clock=5 * MS, day=1000 * MS + day)
        file.group(0, "pair" if rank < 2 else "alone", rank % 2, 2 if rank < 2 else 1)
        file.operation(1, 100 * MS + ahead, 100 * MS + ahead, 101 * MS + ahead, 101 * MS + ahead)
        file.write()
    offsets = align(read_files(tmp_path))
    assert offsets == {
        "a#1": (0, 0, "reference"),
        "b#2": (-50 * MS, MS, "operations"),
        "c#3": (20 * MS, None, "time of day"),
    }
    found = load(tmp_path)
    first = [(row.label[8:9], int(row.operations["begun"].min())) for row in found.rows]
    assert first == [("a", 1), ("c", 11 * MS + 1), ("b", 1)]  # ranks 0, 0, 1
    assert [note for note in found.notes if note.startswith("Clock of c")] == [
        "Clock of c: set by time of day, as exact as their time of day."
    ]
