"""@tier: how many cases of a test it draws, which, what it refuses, and that tests say it so."""

import ast
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import tiers
import workers
from source_tree import ROOT, python_files, show

# A test of ten cases, of which case 3 is marked slow: (in the line above it, how many are quick, slow, deep).
COUNTS = [
    ("", 9, 1, 0),
    ("@tier(quick=1 / 3)", 3, 7, 0),
    ("@tier(quick=1 / 3, slow=1 / 2)", 3, 4, 3),
    ("@tier(quick=1 / 3, slow=0)", 3, 0, 7),
    ("@tier(quick=1 / 30)", 1, 9, 0),
    ("@tier(quick=1, slow=0)", 9, 0, 1),
    ("@tier(slow=1)", 0, 10, 0),
    ("@tier(slow=1 / 4)", 0, 3, 7),
    ("@tier(deep=1)", 0, 0, 10),
]
HEAD = "import pytest\nfrom tiers import tier\n"
TEST = """
{line}
@pytest.mark.parametrize("case", [0, 1, 2, pytest.param(3, marks=pytest.mark.slow), *range(4, 10)])
def test_{number}(case): pass
"""
# pytestmark is that of the tests without a line of their own.
MARKED = """
pytestmark = tier(slow=1)
def test_of_the_file(): pass
@tier(quick=1)
def test_own(): pass
@pytest.mark.parametrize("case", [0, pytest.param(1, marks=pytest.mark.deep)])
def test_case(case): pass
"""


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """{tier: the cases that pytest selects}, of the two files above."""
    folder = tmp_path_factory.mktemp("tiers")
    path = f"import sys\nsys.path.insert(0, {str(tiers.HERE)!r})\n"
    (folder / "conftest.py").write_text(f"{path}from tiers import *\n")
    tests = (TEST.format(line=line, number=number) for number, (line, *_) in enumerate(COUNTS))
    (folder / "test_counts.py").write_text(HEAD + "".join(tests))
    (folder / "test_marked.py").write_text(HEAD + MARKED)
    selections = {"quick": ["-m", "not slow"], "slow": ["-m", "slow"], "deep": ["-m", "slow", "--deep"]}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-c", str(ROOT / "pyproject.toml")]
    found = {}
    for name, options in selections.items():
        run = subprocess.run([*command, *options, folder], capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stdout + run.stderr
        found[name] = set(re.findall(r"::(test_\S+)", run.stdout))
    found["deep"] -= found["slow"]  # `make test-deep` also runs what is slow
    return found


@pytest.mark.parametrize("number", range(len(COUNTS)), ids=[line or "none" for line, *_ in COUNTS])
def test_counts(collected: dict[str, set[str]], number: int):
    cases = [[name for name in collected[kind] if name.startswith(f"test_{number}[")] for kind in collected]
    assert tuple(map(len, cases)) == COUNTS[number][1:]
    assert sorted(sum(cases, [])) == sorted(f"test_{number}[{case}]" for case in range(10))
    assert f"test_{number}[3]" not in collected["quick"]


def test_drawn_by_name():
    """The first places of a shuffle that the name seeds: a change here would move every test's cases."""
    cases = list("abcdefg")
    places = random.Random("file.py::test").sample(range(7), 7)[:3]
    drawn, others = tiers.draw(cases, Fraction(1, 3), "file.py::test")
    assert drawn == [cases[place] for place in sorted(places)] and sorted(drawn + others) == cases


def test_mark_of_a_file(collected: dict[str, set[str]]):
    mine = {kind: {name for name in names if not name[5].isdigit()} for kind, names in collected.items()}
    assert mine == {
        "quick": {"test_own"},
        "slow": {"test_of_the_file", "test_case[0]"},
        "deep": {"test_case[1]"},
    }


@pytest.mark.parametrize("count", [1, 2, 3, 10, 49, 1000])
@pytest.mark.parametrize("part", [1, 2, 3, 5, 7, 30, 49])
def test_one_in_so_many(part: int, count: int):
    """The share is rounded up to whole cases, not what floating point makes of it."""
    drawn, _ = tiers.draw(range(count), tiers.exact(1 / part), "test")
    assert len(drawn) == -(-count // part)


@pytest.mark.parametrize(
    "shares",
    [{}, {"quick": 2}, {"slow": -1}, {"deep": 1 / 2}, {"quick": 1, "deep": 1}, {"slow": 1, "deep": 1}],
)
def test_refused(shares: dict[str, float]):
    with pytest.raises(ValueError, match="^tier: "):
        tiers.tier(**shares)


def marks_of(path: Path) -> Iterator[str]:
    """The decorators of a file's tests, and its pytestmark, each mark alone."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            yield from map(ast.unparse, node.decorator_list)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            yield from map(ast.unparse, getattr(node.value, "elts", [node.value]))


@pytest.mark.parametrize("name", workers.LONG)
def test_files_that_begin_first_exist(name: str):
    assert [path for path in tiers.HERE.rglob("test_*.py") if show(path).endswith(f"/{name}")]


def test_one_way_to_say_it():
    marks = [(show(path), mark) for path in python_files("tests") for mark in marks_of(path)]
    assert any(mark.startswith("tier(") for _, mark in marks)
    wrong = [f"{file}: {mark}" for file, mark in marks if re.match(r"pytest\.mark\.(slow|deep)\b", mark)]
    assert not wrong, f"write @tier(slow=1) or @tier(deep=1): {wrong}"
