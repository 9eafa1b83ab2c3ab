"""The table that was measured on this machine: which file counts, that all ranks of a group take rank 0's,
that results keep their bits, and what `tune` writes.
"""

import errno
import json
import logging
import os

import pytest
import torch

import pycomm
from pycomm import _C, cached, env, tuned
from pycomm.benchmarks import __main__ as cli
from pycomm.benchmarks.tune import choose, command, measure
from pycomm.testing import run_ranks

KiB, MiB = 1 << 10, 1 << 20
LIMIT = 20.0  # seconds
CORES = 2  # of the groups in the tables below; what the machine has is asked where groups are made


def row(op="all_reduce", choices=((64 * MiB, "one_shot"),), ranks=2, cores=CORES, access="kernel"):
    return {"ranks": ranks, "cores": cores, "access": access, "op": op, "choices": [list(c) for c in choices]}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A function that writes rows where groups look by default, and returns the path."""
    monkeypatch.setenv("PYCOMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PYCOMM_TUNED")

    def put(*rows):
        tuned.write(tuned.default_path(), list(rows), "2026-11-22")
        return tuned.default_path()

    return put


def explain(op="all_reduce", size=MiB, world_size=2, **options):
    return pycomm.explain(op, size, world_size, **{"cores": CORES, **options})


# --- which table decides --------------------


def test_without_a_file_the_built_in_table_decides(table):
    assert tuned.load() == tuned.Tuned(tuned.default_path(), None, None)
    assert " Table: built-in." in explain()


def test_rows_decide_where_they_were_measured(table):
    path = table(
        row(choices=[(32 * KiB, "one_shot"), (2 * MiB, "two_shot")]),
        row(choices=[(2 * MiB, "one_shot")], access="staging"),
        row("all_gather", [(2 * MiB, "ring")], access="mapped"),
    )
    assert ": one_shot" in (small := explain(size=32 * KiB)) and f" Table: {path}." in small
    assert ": two_shot" in explain(size=32 * KiB + 1)
    assert ": one_shot" in explain(kernel_reads=False)
    assert ": ring" in explain("all_gather", MiB, mapped=True)  # parts of 1 MiB: 2 MiB in all
    for text, reason in (
        (explain(size=2 * MiB + 1), "no figures for this operation and size"),
        (explain("all_gather", MiB + 1, mapped=True), "no figures for this operation and size"),
        (explain(world_size=3), "no figures for 3 ranks on 2 cores"),
        (explain(cores=4), "no figures for 2 ranks on 4 cores"),
    ):
        assert f"Table: built-in; {path} has {reason}." in text


@pytest.mark.parametrize(("ranks", "cores"), [(2, 4), (4, 2), (3, 1), (1, 3)])
def test_what_a_table_lacks_is_told_of_its_own_ranks_and_cores(ranks, cores, table):
    """The size, where both are those that were measured, else these; each differs from the other."""
    path = table(row(ranks=ranks, cores=cores, choices=[(MiB, "direct")]))
    size = "this operation and size"
    for world_size, here, lacks in (
        (ranks, cores, size),
        (cores, ranks, f"{cores} ranks on {ranks} cores"),
        (ranks, ranks, f"{ranks} ranks on {ranks} cores"),
        (cores, cores, f"{cores} ranks on {cores} cores"),
    ):
        said = explain("broadcast", 4 * MiB, world_size, cores=here)
        assert f"Table: built-in; {path} has no figures for {lacks}." in said


def test_what_the_caller_asks_for_comes_first(table, monkeypatch):
    table(row())
    assert ": two_shot" in (text := explain(algorithm="two_shot")) and "Table" not in text
    monkeypatch.setenv("PYCOMM_ALGORITHM", "all_reduce=direct")
    assert ": direct" in explain()


def test_switched_off(table, monkeypatch):
    table(row())
    monkeypatch.setenv("PYCOMM_TUNED", "0")
    assert tuned.load() == tuned.Tuned(None, None, None)
    assert " Table: built-in." in explain()


# --- files that do not count --------------------

ROWS = '"rows": [{"ranks": 2, "cores": 2, "access": "kernel", "op": "all_reduce", "choices": %s}]'


def content(choices='[[9, "one_shot"]]', **changes):
    head = {"format": tuned.FORMAT, "pycomm": pycomm.__version__, "machine": tuned.machine(), **changes}
    return json.dumps(head)[:-1] + ", " + ROWS % choices + "}"


DAMAGED = {
    "": "damaged, not JSON",
    "\xff\xfe": "damaged, not JSON",
    content()[:-9]: "damaged, not JSON",
    "[" * 200_000: "damaged, not JSON",
    content()[:-1] + ', "more": ' + "[" * 100_000 + "]" * 100_000 + "}": "damaged, not JSON",
    content()[:-1] + ', "more": ' + "1" * 9_999 + "}": "damaged, not JSON",
    "[]": "damaged, there are no rows",
    '{"rows": {}}': "damaged, there are no rows",
    content('[["many", "one_shot"]]'): "damaged, a row is not as it should be",
    content('[[-1, "one_shot"]]'): "damaged, a row is not as it should be",
    content("[[9]]"): "damaged, a row is not as it should be",
    content("5"): "damaged, a row is not as it should be",
    content('[[1e400, "one_shot"]]'): "damaged, a row is not as it should be",
    content(f'[[{10**30}, "one_shot"]]'): "damaged, a row is not as it should be",
    content('[[9, "fast"]]'): "damaged, unknown word fast",
    content('[[9, "ring"]]'): "damaged, all_reduce on 2 ranks, kernel: the algorithm ring cannot be taken",
    content('[[9, "staged"]]'): "the algorithm staged cannot be taken",
    content('[[9, "automatic"]]'): "the algorithm automatic cannot be taken",
    content('[[9, "one_shot"], [9, "direct"]]'): "9 bytes follow 9, they must grow",
    content(json.dumps([[n, "direct"] for n in range(1, 10)])): "more than 8 ranges",
    content(format=0): "it is of pycomm 0.1.0, format 0, and this is pycomm 0.1.0, format 1",
    content(pycomm="0.0.9"): "it is of pycomm 0.0.9, format 1",
    content(machine={"cpu": "Z80", "cores": 1}): "it is of another machine (Z80, 1 cores), and this is",
    content(machine=7): "it is of another machine (not named)",
    content(machine={"cpu": "\ud800" * 10_000}): "it is of another machine (\\ud800",
    content(pycomm="1" * 100_000): f"it is of pycomm {'1' * 64}, and this is",
}


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: DAMAGED[text][:60])
def test_a_file_that_does_not_count(text, table, monkeypatch, caplog):
    """Found by itself: a warning, once, and the built-in table. Named: an error."""
    path = tuned.default_path()
    path.parent.mkdir()
    path.write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING, "pycomm"):
        assert [tuned.load().rows, tuned.load().rows] == [None, None]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and told[0].startswith(f"{path} is not used, the built-in table is: ")
    assert DAMAGED[text] in told[0] and "`python -m pycomm.benchmarks tune` measures again" in told[0]
    assert f"Table: built-in; {path} is not used: it is " in explain()
    monkeypatch.setenv("PYCOMM_TUNED", str(path))
    for use in (tuned.load, explain, lambda: run_ranks(1, lambda comm: None)):
        with pytest.raises(Exception, match="PYCOMM_TUNED=.* in the environment: it is "):
            use()


def a_folder(path, monkeypatch):
    path.mkdir()


def a_pipe(path, monkeypatch):
    os.mkfifo(path)


def a_device(path, monkeypatch):
    path.symlink_to("/dev/zero")


def a_loop(path, monkeypatch):
    path.symlink_to(path)


def without_rights(path, monkeypatch):
    """Also for root, whom the mode of the file does not stop."""
    path.write_text(content())
    opened = os.open

    def refuse(wanted, *arguments, **options):
        if wanted == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(wanted, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)


STRANGE = {
    a_folder: "not a regular file",
    a_pipe: "not a regular file",
    a_device: "not a regular file",
    a_loop: "it cannot be read: Too many levels of symbolic links",
    without_rights: "it cannot be read: Permission denied",
}


@pytest.mark.parametrize("make", STRANGE, ids=lambda make: make.__name__)
def test_what_is_not_a_file(make, table, monkeypatch, caplog):
    """As a damaged file; and groups are made."""
    path = tuned.default_path()
    path.parent.mkdir()
    make(path, monkeypatch)
    with caplog.at_level(logging.WARNING, "pycomm"):
        assert [tuned.load().rows, tuned.load().rows] == [None, None]
        assert run_ranks(2, lambda comm: comm.all_reduce(torch.ones(3000))[0].item(), timeout=LIMIT) == [2, 2]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and STRANGE[make] in told[0], told
    monkeypatch.setenv("PYCOMM_TUNED", str(path))
    with pytest.raises(ValueError, match=f"PYCOMM_TUNED=.* in the environment: .*{STRANGE[make]}"):
        tuned.load()


def test_a_damaged_file_is_replaced(table):
    """`tune` writes over it."""
    path = tuned.default_path()
    path.parent.mkdir()
    for rows in ([5], [{"ranks": []}], [row(ranks=[4])]):
        path.write_text(json.dumps({**json.loads(content()), "rows": rows}))
        table(row())
        assert len(json.loads(path.read_text())["rows"]) == 1


@pytest.mark.parametrize("pieces", [1, 7, 1 << 20])
def test_a_file_of_just_the_most_bytes_is_read(pieces, tmp_path, monkeypatch):
    """However few bytes a read returns; one byte more is refused."""
    path, read = tmp_path / "a.json", os.read
    path.write_text(json.dumps("\u00e4" * 9, ensure_ascii=False))
    monkeypatch.setattr(os, "read", lambda fd, count: read(fd, min(count, pieces)))
    assert cached.read_json(path, 20) == cached.read_json(path) == "\u00e4" * 9
    with pytest.raises(ValueError, match="more than 19 bytes"):
        cached.read_json(path, 19)


def test_a_large_file_is_not_read(table):
    path = tuned.default_path()
    path.parent.mkdir()
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # sparse
    assert "more than 1048576 bytes" in tuned.load().problem


def test_a_named_file_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("PYCOMM_TUNED", str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match="none.json' in the environment: it cannot be read: No such file"):
        tuned.load()


def test_a_file_that_changes_is_read_again(table):
    table(row())
    assert tuned.load() is tuned.load()  # once per state of the file, however many groups are made
    assert ": one_shot" in explain()
    table(row(choices=[(64 * MiB, "two_shot")]))
    assert ": two_shot" in explain()


def test_what_else_was_measured_is_kept(table):
    table(row(), row(ranks=4))
    path = table(row(choices=[(9, "direct")], ranks=4))
    found = json.loads(path.read_text())["rows"]
    assert [(r["ranks"], r["choices"]) for r in found] == [
        (2, [[64 * MiB, "one_shot"]]),
        (4, [[9, "direct"]]),
    ]
    table(row(cores=4, choices=[(7, "direct")]), row(cores=1))
    found = json.loads(path.read_text())["rows"]
    assert [(r["ranks"], r["cores"]) for r in found] == [(2, 1), (2, 2), (2, 4), (4, 2)]
    path.write_text("{")
    table(row())
    assert len(json.loads(path.read_text())["rows"]) == 1
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing left beside it


# --- groups --------------------

SIZES = [3000, 9000, 70_001]  # elements of float32: on the header, and in two ranges of the table below


def results(comm):
    """(what the group says of its table, bits of results)."""
    found = []
    for count in SIZES:
        x = torch.randn(count, generator=torch.Generator().manual_seed(count + comm.rank)) * 1e3
        parts = torch.zeros(comm.world_size * count)
        found += [comm.all_reduce(x.clone()), comm.all_gather(x, parts)]
        found.append(comm.reduce_scatter(parts.clone() * (comm.rank + 1)))
        found.append(comm.all_to_all(parts.clone() + comm.rank))
    return comm.describe()["table"], [t.view(torch.int32).tolist() for t in found]


def rows_for(cores, access, n):
    one, two = [(100 * KiB, "one_shot"), (MiB, "two_shot")], [(100 * KiB, "ring"), (MiB, "staged")]
    small = {"ranks": n, "cores": cores, "access": access}
    rows = [row("all_reduce", one, **small), row("all_gather", two, **small)]
    return [*rows, row("reduce_scatter", [(MiB, "staged")], **small)]


@pytest.mark.parametrize(
    ("mode", "cma", "access"),
    [("threads", "1", "mapped"), ("processes", "1", "kernel"), ("processes", "0", "staging")],
)
def test_results_keep_their_bits(mode, cma, access, table, monkeypatch):
    monkeypatch.setenv("PYCOMM_CMA", cma)
    before = run_ranks(3, results, mode=mode)
    cores = run_ranks(1, lambda comm: comm.describe()["cores"])[0]
    table(*rows_for(cores, access, 3))
    after = run_ranks(3, results, mode=mode)
    assert {told for told, _ in before} == {"built-in"}
    assert {told for told, _ in after} == {"measured on this machine"}
    assert [bits for _, bits in before] == [bits for _, bits in after]


@pytest.mark.parametrize("first", [True, False])
def test_rank_0_decides_for_all(first, tmp_path):
    """The ranks' files differ in every line, and one has none. Whichever is rank 0 of a group, all take its
    table: were they to choose apart, the group would hang or return other values.
    """
    cores = run_ranks(1, lambda comm: comm.describe()["cores"])[0]
    for rank, algorithm in enumerate(("one_shot", "two_shot", "direct")):
        rows = [row(choices=[(64 * MiB, algorithm)], ranks=4, cores=cores)]
        tuned.write(tmp_path / f"{rank}.json", rows, "2026-11-22")

    def body(comm):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYCOMM_TUNED", "0" if comm.rank == 3 else str(tmp_path / f"{comm.rank}.json"))
            group = comm.split(0, comm.rank if first else -comm.rank)
        with group:
            return results(group)

    plain = run_ranks(4, results, mode="processes")
    found = run_ranks(4, body, mode="processes", timeout=60, operation_timeout=20)
    told = "measured on this machine" if first else "built-in"
    assert {text for text, _ in found} == {told}
    assert sorted(bits[0] for _, bits in found) == sorted(bits[0] for _, bits in plain)


def test_torch_groups_too(table):
    cores = run_ranks(1, lambda comm: comm.describe()["cores"])[0]
    table(*(row(ranks=n, cores=cores) for n in (1, 2)))

    def body(rank):
        import torch.distributed as dist

        def told(group):
            return group._get_backend(torch.device("cpu")).communicator.describe()["table"]

        x = torch.full((50_000,), rank + 1.0)
        dist.all_reduce(x)
        assert bool((x == 3).all())
        alone = dist.new_group([rank], use_local_synchronization=True)
        split = dist.group.WORLD.split_group([0, 1], group_name="split")  # made without asking Python
        return [told(group) for group in (dist.group.WORLD, alone, split)]

    assert run_ranks(2, body, mode="processes", backend="pycomm") == [["measured on this machine"] * 3] * 2


# --- what `tune` writes --------------------


def by_round(**times):
    return {name: seconds if isinstance(seconds, list) else [seconds] * 3 for name, seconds in times.items()}


@pytest.mark.parametrize(
    ("times", "built_in", "expected"),
    [
        ([(1, 2), (1, 2), (2, 1)], "a", [[22, "a"], [64, "b"]]),
        ([(1, 2), (1, 2), (2, 1)], "b", [[22, "a"], [64, "b"]]),
        ([(1.04, 1), (1, 1.04), (1.04, 1)], "a", [[64, "a"]]),  # as fast: what the built-in table says
        ([(1.04, 1), (1, 1.04), (1.04, 1)], "b", [[64, "b"]]),
        ([(1, 2), (1.04, 1), (1, 2)], "b", [[64, "a"]]),  # as fast: what the size below has
        ([(2, 1)], "a", [[16, "b"]]),
        ([([2, 2, 1, 2], [1, 1, 1.5, 1])], "a", [[16, "b"]]),  # faster in three rounds of four
        ([([2, 1, 1, 2], [1, 1.5, 1.5, 1])], "a", [[16, "a"]]),
        ([([2, 1.4, 3], [1, 1.5, 1])], "a", [[16, "a"]]),  # of three in every one
    ],
)
def test_choices(times, built_in, expected):
    times = {8 << step: by_round(a=a, b=b) for step, (a, b) in enumerate(times)}
    assert [list(choice) for choice in choose.choices(times, dict.fromkeys(times, built_in))] == expected


def test_choices_fit_the_table():
    """What is given up first is what costs least; an algorithm that was not tried at a size is not chosen."""
    times = {1 << step: by_round(a=1 + step % 2, b=2 - step % 2) for step in range(9)}
    times[1 << 4] = by_round(a=1, b=1.06)  # its neighbours are b
    times[1 << 8] = by_round(a=1)
    found = choose.choices(times, dict.fromkeys(times, "a"))
    assert [name for _, name in found] == list("abababa") and found[-1][0] == 1 << 9
    assert [choose.chosen(found, 1 << step) for step in (3, 4, 5, 8, 10)] == ["b", "b", "b", "a", None]
    many = {1 << step: by_round(a=1 + step % 2, b=2 - step % 2) for step in range(40)}
    assert len(choose.choices(many, dict.fromkeys(many, "a"))) <= choose.MOST_RANGES
    _C.TunedRows([(2, 2, "kernel", "broadcast", n, "direct") for n in range(choose.MOST_RANGES)])
    with pytest.raises(ValueError, match="more than 8 ranges"):
        _C.TunedRows([(2, 2, "kernel", "broadcast", n, "direct") for n in range(choose.MOST_RANGES + 1)])


@pytest.mark.parametrize(
    ("cores", "expected"), [(1, [2, 4]), (2, [2, 4, 8]), (6, [2, 4, 6, 8, 16]), (64, [2, 4, 8, 16, 32, 64])]
)
def test_usual_ranks(cores, expected):
    assert command.usual_ranks(cores) == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "1"], "--ranks '1'"),
        (["--ranks", "2,x"], "--ranks '2,x'"),
        (["--ops", "all_reduces"], "--ops 'all_reduces'"),
        (["--seconds", "0"], "--seconds"),
    ],
)
def test_wrong_arguments(arguments, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["tune", *arguments])
    assert stopped.value.code == 2 and text in capsys.readouterr().err


def test_wrong_results_fail_the_command(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(measure.oracle, "expected", lambda *case: [measure.oracle.Piece(0, 100, 0, 1)])
    monkeypatch.setattr(command, "SIZES", [24 * KiB])
    output = tmp_path / "tuned.json"
    assert cli.main(["tune", "--ranks", "2", "--ops", "all_gather", "--output", str(output)]) == 1
    assert "all_gather by staged, 24576 bytes: " in capsys.readouterr().err and not output.exists()


@pytest.mark.parametrize("cma", ["1", "0"])
def test_tune(cma, tmp_path, monkeypatch, capsys):
    """The command, at few sizes: what it writes counts and speaks of every operation and access."""
    monkeypatch.setattr(command, "SIZES", [12 * KiB, 96 * KiB, MiB])
    monkeypatch.setenv("PYCOMM_CMA", cma)
    monkeypatch.setenv("PYCOMM_TUNED", str(tmp_path / "tuned.json"))  # not there yet
    assert cli.main(["tune", "--ranks", "2", "--seconds", "1"]) == 0
    shown = capsys.readouterr().out
    assert f"Written to {tmp_path}/tuned.json; groups that are made from now on use it" in shown
    assert "Beside the built-in table" in shown
    assert env.tuned_file() == "0"
    monkeypatch.setenv("PYCOMM_TUNED", str(tmp_path / "tuned.json"))
    known, rows = tuned.load(), json.loads((tmp_path / "tuned.json").read_text())["rows"]
    accesses = ["staging", "kernel", "mapped"] if cma == "1" else ["staging", "mapped"]
    assert [(r["op"], r["access"]) for r in rows] == [(op, a) for op in measure.CANDIDATES for a in accesses]
    assert all(r["choices"][-1][0] == 2 * MiB and r["ranks"] == 2 for r in rows)
    assert known.problem is None and known.rows.has(2, rows[0]["cores"])
    assert (
        run_ranks(2, lambda comm: comm.describe()["table"], mode="processes")[1] == "measured on this machine"
    )
