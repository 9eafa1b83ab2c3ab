"""tests/planted: the faults as data, how they are planted and tried, and twenty of them that tests notice."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from planted import choose, fault, native, operators, results
from planted.fault import KINDS, Fault
from planted.results import Result
from tiers import tier

ROOT = Path(__file__).parent.parent
REPLAYED = 20
PLACED = 0.9  # of the faults have their place: when fewer do, the others are to be written anew


def test_data():
    faults = fault.load()
    assert len(faults) >= 400
    assert {one.kind for one in faults.values()} == KINDS
    lost = fault.without_place(faults.values())
    assert len(lost) <= (1 - PLACED) * len(faults), f"draw or write these anew: {lost}"
    for one in faults.values():
        if one.is_python and one.file and (ROOT / one.file).read_text().count(one.old) == 1:
            compile((ROOT / one.file).read_text().replace(one.old, one.new), one.file, "exec")


def test_results_are_of_faults():
    faults = fault.load()
    assert not {result.fault for result in results.read()} - set(faults)
    assert {result.verdict for result in results.read()} <= {"caught", "missed"}


def test_faults_without_a_place(tmp_path):
    """By name: names have colons."""
    (tmp_path / "file.py").write_text("a\nb\nb\n")
    faults = [
        Fault("zero: right", "file.py", "a condition", "a\n", "c\n"),
        Fault("zero: gone", "file.py", "a condition", "x\n", "c\n"),
        Fault("zero: twice", "file.py", "a condition", "b\n", "c\n"),
        Fault("zero: no kind", "file.py", "a kind", "a\n", "c\n"),
        Fault("zero: no change", "file.py", "a condition", "a\n", "a\n"),
        Fault("zero: no file", "other.py", "a condition", "a\n", "c\n"),
    ]
    assert list(fault.without_place(faults, tmp_path)) == [one.name for one in faults[1:]]


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ("b\n", "B\n", range(2, 3)),
        ("b\nc\n", "b\n", range(3, 4)),
        ("a\nb\nc\n", "a\nx\nc\n", range(2, 3)),
        ("b\n", "b\nmore\n", range(2, 4)),
        ("c\nd", "c\nd + 1", range(4, 5)),
    ],
)
def test_lines_that_differ(tmp_path, old, new, lines):
    (tmp_path / "file.py").write_text("a\nb\nc\nd\n")
    one = Fault("name", "file.py", "a condition", old, new)
    assert one.lines(tmp_path) == lines
    one.put_into(tmp_path)
    assert (tmp_path / "file.py").read_text() == "a\nb\nc\nd\n".replace(old, new)


SOURCE = """
def first(self, mesh, values, world_size):
    total = sum(values) / world_size
    for rank in range(world_size):
        if rank == 0 and values:
            self.last = values[rank + 1 :]
    mesh.group("dp").wait()
    if total < 0:
        raise ValueError(f"{total / world_size} is below 0")
    return sorted(values), min(values)
"""
DRAWN = {
    "total = sum(values)\n": "a size of the group",
    "range(1, world_size)": "a rank left out",
    "range((world_size) - 1)": "a rank left out",
    "if rank != 0 and values:": "a condition",
    "if ((values)):": "not compared",
    "values[rank :]": "off by one",
    'mesh.group("tp").wait()': "another group",
    "        pass\n": "a limit ignored",
    "    return list(values), min(values)": "an order exchanged",
    "    return sorted(values), max(values)": "a wrong value",
}


def test_operators(tmp_path):
    """Each change is found once, nothing inside of texts is changed, and each text occurs once."""
    (tmp_path / "source.py").write_text(SOURCE)
    made = [make() for _, _, make in operators.possible("source.py", tmp_path)]
    for text, kind in DRAWN.items():
        found = [one for one in made if text in SOURCE.replace(one.old, one.new) and text not in SOURCE]
        assert [one.kind for one in found if one.kind == kind] == [kind], (text, found)
    assert not fault.without_place(made, tmp_path)
    assert all("{total / world_size} is below 0" in SOURCE.replace(one.old, one.new) for one in made
               if one.kind != "a limit ignored")  # fmt: skip


def test_draw_takes_functions_in_turn(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in "abc":
        (tmp_path / "folder" / f"{name}.py").write_text(SOURCE)
    drawn = operators.draw("folder", 6, 1, tmp_path)
    assert drawn == operators.draw("folder", 6, 1, tmp_path) != operators.draw("folder", 6, 2, tmp_path)
    assert sorted(one.file for one in drawn) == [f"folder/{name}.py" for name in "aabbcc"]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "machine_folder.toml").write_text(operators.as_toml(drawn))
    assert list(fault.load(tmp_path / "data").values()) == drawn


def test_order_of_tests():
    """First those that reach little else; the third case of a function as if it reached twice as much. Lines
    as they were numbered then.
    """
    one = Fault("name", "tests/tiers.py", "a condition", "import math\n", "import cmath\n")
    here = one.lines()[0]
    text = (ROOT / one.file).read_text().splitlines()
    reach = choose.Reach(sources={one.file: ["new first line", *text]})
    for test, others in {
        "wide": 50,
        "middle": 5,
        "narrow[1]": 3,
        "narrow[2]": 2,
        "narrow[3]": 1,
        "misses": 0,
    }.items():
        lines = {one.file: {here if test == "misses" else here + 1}, "other": set(range(others))}
        reach.lines[f"tests/test_x.py::{test}"], reach.seconds[f"tests/test_x.py::{test}"] = lines, others
    order = [test.partition("::")[2] for test in choose.tests_for(one, reach)]
    assert order == ["narrow[3]", "narrow[2]", "middle", "narrow[1]", "wide"]


def test_a_line_that_runs_at_import_concerns_all_tests_of_its_file():
    """Also those that only a new process of a test imports again."""
    one = Fault("name", "tests/tiers.py", "a condition", "import math\n", "import cmath\n")
    here = one.lines()[0]
    reached = {"import": {here}, "launcher": {here}, "inside": {here + 9}}
    reach = choose.Reach(
        sources={one.file: (ROOT / one.file).read_text().splitlines()},
        lines={test: {one.file: lines} for test, lines in reached.items()} | {"elsewhere": {"other": {1}}},
        seconds=dict.fromkeys((*reached, "elsewhere"), 0.0),
    )
    assert sorted(choose.tests_for(one, reach)) == ["inside", "launcher"]


def test_the_others_of_a_file_follow_where_few_reach_a_line():
    """One process of the file may have reached it for all of them."""
    one = Fault("name", "tests/tiers.py", "a condition", "import math\n", "import cmath\n")
    reach = choose.Reach(sources={one.file: (ROOT / one.file).read_text().splitlines()})
    for test, lines in {"a::began": {*one.lines()}, "a::served": set(), "b::other": set()}.items():
        reach.lines[test], reach.seconds[test] = {one.file: lines, "more": {*range(9)} & lines}, 0.0
    assert choose.tests_for(one, reach) == ["a::began", "a::served"]


def test_table():
    faults = {
        name: Fault(name, "parallel/zero/units.py", "a condition", "old", "new", changes_nothing=why)
        for name, why in {"a": "", "b": "", "c": "no user sees it"}.items()
    }
    kept = [
        Result("a", "old", "missed", "", 1),
        Result("a", "new", "caught", "t", 1),
        Result("b", "new", "caught", "t", 1),
    ]
    assert "| parallel/zero | 3 | 1 | 0, 1 | 0% | 2, 0 | 100% |" in results.table(faults, kept)


def test_results_are_kept_by_commit(tmp_path, monkeypatch):
    """In the order of the history, whichever was tried first; what git does not know comes last."""
    known = SimpleNamespace(stdout="aa11\nbb22\ncc33\n", returncode=0)
    monkeypatch.setattr(results.subprocess, "run", lambda *given, **options: known)
    file = tmp_path / "results.tsv"
    results.add([Result("b", "bb2", "missed", "2 of 2", 1.0), Result("a", "bb2", "caught", "t", 2.0)], file)
    results.add([Result("b", "cc3", "caught", "t", 3.0), Result("a", "bb2", "missed", "x", 2.0)], file)
    results.add([Result("b", "elsewhere", "caught", "u", 3.0), Result("b", "aa1", "caught", "u", 1.0)], file)
    assert file.read_text().splitlines() == [
        "a\tbb2\tmissed\tx\t2", "b\taa1\tcaught\tu\t1", "b\tbb2\tmissed\t2 of 2\t1",
        "b\tcc3\tcaught\tt\t3", "b\telsewhere\tcaught\tu\t3",
    ]  # fmt: skip


def test_faults_in_one_extension_have_numbers_of_their_own():
    shared = native.numbered(fault.load().values())
    assert len(shared) < native.PLACES and not any(one.is_python or one.alone for one in shared)


@tier(slow=1)
def test_known_faults_are_caught():
    """Twenty that were caught when the results were made; half a minute each at most."""
    command = [sys.executable, "tests/planted", "replay", str(REPLAYED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0 and done.stdout.count("caught  ") == REPLAYED, (
        done.stdout + done.stderr[-3000:]
    )


def test_a_fault_that_is_compiled_alone_takes_the_tests_of_its_neighbours():
    """Of its file; else of its folder; its own where there are any."""
    known = fault.load().values()
    file = next(one for one in known if not one.is_python)
    folder = next(one for one in known if one.folder == file.folder and one.file != file.file)
    reach = choose.Reach(marks={"of file": {file.name}, "of folder": {folder.name}, "elsewhere": {"another"}})
    reach.lines, reach.seconds = dict.fromkeys(reach.marks, {}), dict.fromkeys(reach.marks, 0.0)
    alone = fault.Fault("alone", file.file, "a condition", "a", "b")
    assert choose.tests_of_place(alone, reach) == {"of file"}
    assert choose.tests_of_place(folder, reach) == {"of folder"}
    del reach.marks["of file"]
    assert choose.tests_of_place(alone, reach) == {"of folder"}
    del reach.marks["of folder"]
    assert choose.tests_of_place(alone, reach) == set()
