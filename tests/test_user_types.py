"""What a type checker says of programs as users write them (tests/types/): a line that ends in "# wrong: ..."
is underlined with these words, and no other line is.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import ROOT

PROGRAMS = sorted((ROOT / "tests" / "types").glob("*.py"))
LIMIT = 1200  # seconds; 60 without a cache on a machine that has nothing else to do


def checked(
    programs: list[Path], folder: Path = ROOT, python: str | Path = sys.executable
) -> dict[str, dict[int, str]]:
    """What mypy says: {name of the program: {line: text}}. python: whose mypy and packages count."""
    command = [str(python), "-m", "mypy", *map(str, programs)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    found: dict[str, dict[int, str]] = {path.name: {} for path in programs}
    for name, line, text in re.findall(r"([^/\n]+\.py):(\d+): error: (.*)", result.stdout):
        if name in found:
            found[name][int(line)] = text
    return found


def judge(said: dict[int, str], program: Path) -> list[str]:
    """What is said that is not expected, and the reverse."""
    lines = program.read_text().splitlines()
    expected = {
        number: match[1]
        for number, line in enumerate(lines, 1)
        if (match := re.search("# wrong: (.*)", line))
    }
    wrong = [f"{program.name}:{line}: {text}" for line, text in said.items() if line not in expected]
    for line, text in expected.items():
        if not said.get(line, "").startswith(text):
            wrong.append(f"{program.name}:{line}: said {said.get(line)!r}, expected {text!r}")
    return wrong


@pytest.mark.timeout(LIMIT)
def test_programs_of_users():
    said = checked(PROGRAMS)
    assert [text for program in PROGRAMS for text in judge(said[program.name], program)] == []
    names = [program.name for program in PROGRAMS]
    assert sum(name.startswith("right") for name in names) == 8
    assert sum(name.startswith("wrong") for name in names) == 2


def test_judge(tmp_path):
    program = tmp_path / "wrong_one.py"
    program.write_text("a = 1\nb = 2  # wrong: Name\nc = 3  # wrong: Name\n")
    assert judge({2: "Name is not defined", 3: "Name is not defined"}, program) == []
    assert [text.partition(": ")[0] for text in judge({1: "x", 2: "Type"}, program)] == [
        "wrong_one.py:1",
        "wrong_one.py:2",
        "wrong_one.py:3",
    ]
