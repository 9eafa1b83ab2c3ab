"""python -m pycomm.trace on files that somebody has damaged, and on what is no file: it ends with a table or
with a sentence, whatever is in them. Damaged are the header, lines of names, and records, these also with a
right checksum around wrong values.
"""

import json
import os
import random
import resource
import struct

import pytest
from test_trace_reader import training
from trace_files import HEADER_BYTES, STAMP_BITS, TEXT_BYTES, FileWriter, checksum

from pycomm.trace import chrome
from pycomm.trace.__main__ import main, report
from pycomm.trace.files import read_files
from pycomm.trace.joined import NO_NAME, load

MS = 1_000_000
RING = HEADER_BYTES + TEXT_BYTES
HOLES = 1 << 40  # bytes of a file that takes no room
WILD = (0, 1, 255, 65535, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
VALUES = (-1, 0, 3, 70000, 1 << 40, 1 << 70, 1.5, None, "x", [], {}, True, "\x1b[2J", "a\u2028b\x85c")


def wild(draws, old):
    return draws.choice([draws.choice(WILD), draws.getrandbits(64), old ^ 1 << draws.randrange(64)])


def in_header(draws, data):
    place = 8 * draws.randrange(1, 18)
    (old,) = struct.unpack_from("<Q", data, place)
    struct.pack_into("<Q", data, place, wild(draws, old))


def in_a_record(draws, data):
    ticket = draws.randrange(10)
    words = list(struct.unpack_from("<8Q", data, RING + 64 * ticket))
    for _ in range(draws.randint(1, 3)):
        word = draws.randrange(1, 8)
        words[word] = wild(draws, words[word])
    words[0] = (ticket + 1) << STAMP_BITS | checksum(words)
    struct.pack_into("<8Q", data, RING + 64 * ticket, *words)


def in_the_names(draws, data):
    lines = bytes(data[HEADER_BYTES:RING]).rstrip(b"\0").decode().splitlines()
    number = draws.randrange(len(lines))
    entry = json.loads(lines[number])
    entry[draws.choice(list(entry))] = draws.choice(VALUES)
    lines[number] = draws.choice([json.dumps(entry), lines[number][: draws.randrange(9)], "[" * 5000, "7"])
    text = ("\n".join(lines) + "\n").encode()
    data[HEADER_BYTES:RING] = text.ljust(TEXT_BYTES, b"\0")
    struct.pack_into("<Q", data, 104, len(text))


def anywhere(draws, data):
    for _ in range(draws.randint(1, 40)):
        place = draws.choice([draws.randrange(8, 200), draws.randrange(HEADER_BYTES, RING + 9000)])
        data[place] ^= draws.randrange(1, 256)


def cut(draws, data):
    del data[draws.randrange(len(data)) :]


DAMAGES = [in_the_names, in_header, in_a_record, anywhere, cut]


def damage(draws, folder):
    for path in sorted(folder.glob("*.pytrace"))[: draws.randint(1, 3)]:
        data = bytearray(path.read_bytes())
        for kind in DAMAGES:
            if draws.random() < (0.05 if kind is cut else 0.4):
                kind(draws, data)
        path.write_bytes(data)


@pytest.fixture
def little_memory():
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as sizes:
        now = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (3 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("seed", range(60))
def test_random_damage(seed, tmp_path, little_memory, capsys):
    training(tmp_path, ranks=3, late=1)
    damage(random.Random(seed), tmp_path)
    try:
        trace = load(tmp_path)
    except (ValueError, MemoryError) as error:
        assert tmp_path.name in str(error), error
        return
    report(trace)
    assert json.dumps(list(chrome.events(trace)))
    assert capsys.readouterr().out


@pytest.mark.parametrize("seed", range(1000, 1002))
def test_all_that_is_written(seed, tmp_path, little_memory, capsys):
    training(tmp_path, ranks=3, late=1)
    data = bytearray((path := min(tmp_path.glob("*.pytrace"))).read_bytes())
    in_a_record(random.Random(seed), data)
    path.write_bytes(data)
    assert main([str(tmp_path)]) == 0


def no_file(folder):
    os.mkfifo(folder / "a.pytrace")


def a_folder(folder):
    (folder / "a.pytrace").mkdir()


def without_end(folder):
    (folder / "a.pytrace").symlink_to("/dev/zero")


def with_holes(folder):
    path = next(folder.glob("*.pytrace"))
    with open(path, "r+b") as file:
        file.seek(8)
        file.write(struct.pack("<Q", (HOLES - RING) // 64))
        file.truncate(HOLES)


def nobody_s(folder):
    (folder / "a.pytrace").symlink_to("nowhere")


@pytest.mark.parametrize("spoil", [no_file, a_folder, without_end, with_holes, nobody_s])
def test_what_is_no_file_of_ours(spoil, tmp_path, capsys, little_memory):
    training(tmp_path, ranks=1, late=0)
    spoil(tmp_path)
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("pycomm.trace: ") and ".pytrace" in said and said.count("\n") == 1


def test_names_for_which_there_was_no_room(tmp_path):
    """A span without a name is none of another name."""
    file = FileWriter(tmp_path)
    file.group(0)
    file.name(0, "forward")
    file.span(0, MS, 2 * MS)
    file.span(7, 3 * MS, 4 * MS)
    file.span((1 << 32) - 1, 5 * MS, 6 * MS)
    file.write()
    trace = load(tmp_path)
    assert [trace.names[span["name"]] for span in trace.rows[0].spans] == ["forward", NO_NAME, NO_NAME]


def test_a_name_with_what_ends_a_line_elsewhere(tmp_path):
    file = FileWriter(tmp_path)
    file.text += (
        '{"group": 0, "name": "a\u2028b\x85c", "rank": 0, "world_size": 1, "host": "", "members": 5}\n'
    )
    file.operation(1, MS, MS, MS, 2 * MS)
    file.write()
    assert [group.name for group in load(tmp_path).groups] == ["a\u2028b\x85c"]


def test_where_nothing_can_be_written(tmp_path, capsys):
    training(tmp_path, ranks=1, late=0)
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path), "--out", str(tmp_path / "file" / "x")]) == 1
    assert "Not a directory" in capsys.readouterr().err


def made_anew(folder, common=True):
    """Four ranks, of which rank 1 dies; three go on in a group of the same name; a process joins them."""
    pids = {10: [(0, 4, 1), (0, 3, 2), (0, 4, 3)], 11: [(1, 4, 1)], 12: [(2, 4, 1), (1, 3, 2), (1, 4, 3)]}
    pids |= {13: [(3, 4, 1), (2, 3, 2), (2, 4, 3)], 14: [(3, 4, 3)] if common else [(3, 4, 9)]}
    for pid, groups in pids.items():
        file = FileWriter(folder, pid=pid)
        for number, (rank, size, members) in enumerate(groups):
            file.group(number, "0", rank, size, members=members)
            moment = 10 * members * MS
            file.operation(1, moment, moment + rank * MS, 0, moment + 9 * MS, group=number)
        file.write()


def test_groups_of_one_name_after_a_death(tmp_path):
    made_anew(tmp_path)
    trace = load(tmp_path)
    sizes = [(len(found.rows), [row.label[-11:-1] for row in found.rows]) for found in trace.collectives]
    assert sizes == [
        (4, ["process 10", "process 11", "process 12", "process 13"]),
        (3, ["process 10", "process 12", "process 13"]),
        (4, ["process 10", "process 12", "process 13", "process 14"]),
    ]
    assert [found.last.tolist() for found in trace.collectives] == [[3], [2], [3]]
    assert [row.rank for row in trace.rows] == [0, 1, 2, 3, 3]


def test_runs_that_have_no_process_in_common(tmp_path):
    made_anew(tmp_path, common=False)
    with pytest.raises(ValueError, match="traces of two runs: rank 3 of group '0' is process"):
        load(tmp_path)
    assert len(read_files(tmp_path)) == 5
