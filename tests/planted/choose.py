"""Which tests may notice a fault, the most specific tests first.

[Note: order] A test that reaches few lines of the product in all was written for these lines. So the tests
that reach the fault are sorted by how much else they reach. Of the extension, where a thousand tests may
reach a place, it is the number of planted places, times the seconds of the test. Later cases of a test
function count as if they reached more: CASES twice as much, CASES three times.

[Note: files] A process that a fixture of a file starts serves all tests of the file, and what it reaches
counts for the test that began it. So where FEW tests or less reach a fault, the others of their files come
behind them.
"""

import base64
import binascii
import contextlib
import difflib
import pickle
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planted.fault import ROOT, Fault
from planted.fault import load as known_faults

DATABASE = ROOT / "build" / "planted" / "reach"
CASES = 2  # of a test function
QUICKEST = 0.05  # seconds of a test
FEW = 2


@dataclass
class Reach:
    """What each test reaches."""

    lines: dict[str, dict[str, set[int]]] = field(default_factory=dict)  # {test: {file: numbers}}
    marks: dict[str, set[str]] = field(default_factory=dict)  # {test: faults of the extension}
    seconds: dict[str, float] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)  # the files as they were

    def save(self, path: Path = DATABASE) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(zlib.compress(pickle.dumps(self), 1))

    def add(self, folder: Path, shared: Sequence[str] = ()) -> None:
        """The rows that reach.py wrote into the folder replace what was known of these tests. shared: the
        faults of the extension, by their numbers from 1 on.
        """
        for test in {test for test, _ in rows(folder)}:
            self.lines[test], self.seconds[test] = {}, 0.0
            self.marks.pop(test, None)
        for test, row in rows(folder):
            if "seconds" in row:
                self.seconds[test] += row["seconds"]
            elif "" in row:
                self.marks.setdefault(test, set()).update(shared[number - 1] for number in row[""])
            else:
                for file, numbers in row.items():
                    self.lines[test].setdefault(file, set()).update(numbers)

    def keep_sources(self, root: Path = ROOT) -> None:
        for file in {file for reached in self.lines.values() for file in reached}:
            self.sources[file] = (root / file).read_text().splitlines()

    def as_recorded(self, file: str, numbers: Iterable[int], root: Path = ROOT) -> set[int]:
        """These lines of the file, by the numbers that they had when the tests were recorded."""
        now, then = (root / file).read_text().splitlines(), self.sources.get(file, [])
        if now == then:
            return set(numbers)
        blocks = difflib.SequenceMatcher(None, now, then, autojunk=False).get_matching_blocks()
        return {n - a + b for n in numbers for a, b, size in blocks if a < n <= a + size}


def load(path: Path = DATABASE) -> Reach:
    if not path.exists():
        return Reach()
    return pickle.loads(zlib.decompress(path.read_bytes()))


def rows(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of all processes; not the lines of those that were killed while they wrote them."""
    for path in folder.glob("rows-*"):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(binascii.Error, pickle.UnpicklingError, EOFError):
                if line:
                    yield pickle.loads(base64.b64decode(line, validate=True))


def function_of(test: str) -> str:
    return test.partition("[")[0]


def file_of(test: str) -> str:
    return test.partition("::")[0]


def is_named_after(test: str, file: str) -> bool:
    """tests/hosts/test_status.py is, of pycomm/status/pages.py."""
    words = {part.strip("_") for part in Path(file).with_suffix("").parts}
    return bool(words & {Path(file_of(test)).stem.removeprefix("test_")})


def tests_of_place(fault: Fault, reach: Reach) -> set[str]:
    """Of C++. A fault that is compiled alone has no mark: it is reached where others of its file are, or else
    where others of its folder are.
    """
    others = [one for one in known_faults().values() if not one.is_python]
    same_file = {one.name for one in others if one.file == fault.file}
    same_folder = {one.name for one in others if one.folder == fault.folder}
    for names in ({fault.name}, same_file, same_folder):
        if found := {test for test, marks in reach.marks.items() if marks & names}:
            return found
    return set()


def tests_for(fault: Fault, reach: Reach) -> list[str]:
    """In the order of [Note: order]. Of a line that runs at import, or in a process that was not measured:
    the tests that reach the file, or else those that are named after it.
    """
    if fault.is_python:
        lines = reach.as_recorded(fault.file, fault.lines())
        found = {test for test, files in reach.lines.items() if files.get(fault.file, set()) & lines}
    else:
        found = tests_of_place(fault, reach)
    if not found or "import" in found:
        found |= {test for test, files in reach.lines.items() if fault.file in files}
    found -= {"import"}
    found |= {test for test in reach.seconds if not found and is_named_after(test, fault.file)}
    others: set[str] = set()
    if len(found) <= FEW:
        files = {file_of(test) for test in found}
        others = {test for test in reach.lines if file_of(test) in files} - found
        found |= others
    size = {test: sum(map(len, reach.lines[test].values())) for test in found}
    cases: dict[str, list[str]] = defaultdict(list)
    for test in sorted(found, key=lambda test: (reach.seconds[test], test)):
        cases[function_of(test)].append(test)
    turn = {test: 1 + place // CASES for tests in cases.values() for place, test in enumerate(tests)}

    def order(test: str) -> tuple[bool, bool, float]:
        reached: float = size[test]
        if not fault.is_python:
            reached = len(reach.marks.get(test, ())) * max(reach.seconds[test], QUICKEST)
        return test in others, not is_named_after(test, fault.file), reached * turn[test]

    return sorted(found, key=order)
