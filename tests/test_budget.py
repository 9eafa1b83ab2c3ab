"""The table of budgets in tests/README.md and the script that fills it (budget.py)."""

import re
from pathlib import Path

import budget
import pytest
from source_tree import ROOT, show

ROWS = budget.read_table(budget.README.read_text())
FILES = [path.relative_to(budget.HERE).as_posix() for path in sorted(budget.HERE.rglob("test_*.py"))]
CORES = 2

TABLE = f"""Some text.

{budget.HEADER}
|---|---|---|---|---|---|
| one | `one/*` | ? | ? | 7 | 8 |
| two | `test_*` | ? | 10 | ? | ? |
| all | | ? | 100 | ? | 1000 |

More text.
"""
QUICK = """tests/one/test_a.py::test_x[1]\t2.50\t9.00
tests/one/test_a.py::test_y\t17.50\t9.00
tests/test_b.py::test_x[a\\tb]\t30.00\t9.00
tests/one/test_a.py::test_x[1]\t12.50\t9.00
"""


def minutes() -> dict[str, int]:
    """{tier: minutes on two cores} of the first table."""
    rows = re.findall(r"^\| (\w+) \| `make \S+` \|.*\| (\d+) \|$", budget.README.read_text(), re.M)
    return {tier: int(number) for tier, number in rows}


@pytest.mark.parametrize("pattern", [pattern for row in ROWS for pattern in row.patterns])
def test_patterns_name_files(pattern: str):
    """Each is the first one that fits some file."""
    fits = [path for path in FILES if budget.fnmatch.fnmatchcase(path, pattern)]
    assert fits, f"no test file fits {pattern}"
    owners = [row.subject for row in ROWS if pattern in row.patterns]
    assert any([budget.subject_of(path, ROWS)] == owners for path in fits)


def test_each_file_has_a_subject():
    assert {budget.subject_of(path, ROWS) for path in FILES} == {row.subject for row in ROWS[:-1]}
    with pytest.raises(ValueError, match="belongs to no subject"):
        budget.subject_of("elsewhere/x.py", ROWS)


def test_budgets_fit_into_the_minutes():
    for place, tier in enumerate(budget.TIERS):
        *parts, total = [row.figures[place][1] for row in ROWS]
        assert total == minutes()[tier] * 60 * CORES, tier
        assert sum(part or 0 for part in parts) <= total, f"budgets of the {tier} tier"


def test_minutes_are_written_once():
    """Other pages refer to tests/README.md."""
    pages = [
        ROOT / name for name in ("CONTRIBUTING.md", "Makefile", "README.md", "docs/decisions/0012-tests.md")
    ]
    said = r"make test(?:-slow|-deep)?\b[^.|\n]*?(?:\bminutes?\b|\bhours?\b)"
    wrong = [f"{show(path)}: {text}" for path in pages for text in re.findall(said, path.read_text())]
    assert not wrong, wrong


def test_filled():
    rows = budget.read_table(TABLE)
    assert [row.patterns for row in rows] == [("one/*",), ("test_*",), ()]
    quick = budget.measured(QUICK.splitlines(), rows)
    assert quick == {"one": 30.0, "two": 30.0, "all": 60.0}  # of the test that ran twice the last run
    rows = budget.filled(rows, [quick, None])
    assert [row.figures for row in rows] == [
        ((30, 50), (7, 8)),
        ((30, 10), (None, None)),
        ((60, 100), (None, 1000)),
    ]
    assert budget.exceeded(rows) == ["two, quick: 30 s of 10"]
    text = budget.write_table(TABLE, rows)
    assert budget.read_table(text) == rows and "| one | `one/*` | 30 | 50 | 7 | 8 |\n" in text
    assert text.startswith("Some text.\n") and text.endswith("|\n\nMore text.\n")


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    readme, cost = tmp_path / "README.md", tmp_path / "quick.tsv"
    readme.write_text(TABLE)
    cost.write_text(QUICK)
    monkeypatch.setattr(budget, "README", readme)
    assert budget.main(["--quick", str(cost)]) == 1
    printed = capsys.readouterr()
    assert "| two | `test_*` | 30 | 10 | ? | ? |" in printed.out and readme.read_text() == TABLE
    assert printed.err == "exceeds its budget: two, quick: 30 s of 10\n"
    assert budget.main(["--quick", str(cost), "--write"]) == 1
    readme.write_text(readme.read_text().replace("| 30 | 10 |", "| 30 | 40 |"))
    assert budget.main([]) == 0 and capsys.readouterr().err.count("exceeds") == 1
