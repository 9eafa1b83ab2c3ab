"""What became of each fault, kept by commit in results.tsv, and the table of it by folder.

A line: fault, commit of the tests, verdict, detail, seconds. The verdicts:

    caught    detail: the test that failed with the fault and passes without it
    missed    detail: how many tests that reach it passed, of how many
    nothing   changes nothing that a user sees; detail: why
"""

import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from planted.fault import Fault

FILE = Path(__file__).resolve().parent / "results.tsv"
AIM = 0.8  # of a folder that has ten faults or more
FEW = 10


class Result(NamedTuple):
    fault: str
    commit: str
    verdict: str
    detail: str
    seconds: float

    def __str__(self) -> str:
        return "\t".join([*map(str, self[:4]), f"{self.seconds:.0f}"])


def read(path: Path = FILE) -> list[Result]:
    if not path.exists():
        return []
    lines = (line.split("\t") for line in path.read_text().splitlines())
    return [
        Result(name, commit, verdict, detail, float(took)) for name, commit, verdict, detail, took in lines
    ]


def add(results: Iterable[Result], path: Path = FILE) -> None:
    """Of one fault and one commit, the last result stays; sorted by fault, in the order of the commits."""
    kept = {(result.fault, result.commit): result for result in [*read(path), *results]}
    order = in_order(dict.fromkeys(result.commit for result in kept.values()))
    ordered = sorted(kept.values(), key=lambda result: (result.fault, order.index(result.commit)))
    path.write_text("".join(f"{result}\n" for result in ordered))


def in_order(commits: Iterable[str]) -> list[str]:
    """The oldest first; those that git does not know come behind, as they are given."""
    command = ["git", "-C", str(FILE.parent), "rev-list", "--reverse", "--topo-order", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    history = done.stdout.split() if done.returncode == 0 else []

    def place(commit: str) -> int:
        name = commit.removesuffix("+")
        return next((at for at, whole in enumerate(history) if whole.startswith(name)), len(history))

    return sorted(commits, key=place)


def latest(results: Iterable[Result], faults: Mapping[str, Fault]) -> dict[str, Result]:
    """The last result of each fault that there is."""
    return {result.fault: result for result in results if result.fault in faults}


def oldest(results: Iterable[Result]) -> dict[str, Result]:
    """Those of the oldest tests."""
    results = list(results)
    commits = in_order(dict.fromkeys(result.commit for result in results))
    return {result.fault: result for result in results if result.commit in commits[:1]}


def share(caught: int, missed: int) -> str:
    return f"{100 * caught / (caught + missed):.0f}%" if caught + missed else "-"


def table(faults: Mapping[str, Fault], results: list[Result]) -> str:
    """By folder: faults, those that change nothing, caught and missed by the oldest tests that were tried,
    and when each was tried last.
    """
    before, after = oldest(results), latest(results, faults)
    rows: dict[str, list[int]] = {}
    for fault in faults.values():
        row = rows.setdefault(fault.folder, [0] * 6)
        verdicts = [kept[fault.name].verdict if fault.name in kept else "" for kept in (before, after)]
        row[0] += 1
        row[1] += bool(fault.changes_nothing)
        if not fault.changes_nothing:
            for place, verdict in zip((2, 4), verdicts, strict=True):
                row[place] += verdict == "caught"
                row[place + 1] += verdict == "missed"
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    lines = [
        "| folder | faults | change nothing | caught, missed before | | caught, missed after | |",
        "|---|---|---|---|---|---|---|",
    ]
    for folder, (number, nothing, *numbers) in sorted(
        rows.items(), key=lambda row: (row[0] == "all", row[0])
    ):
        old, new = numbers[:2], numbers[2:]
        lines.append(
            f"| {folder} | {number} | {nothing} | {old[0]}, {old[1]} | {share(*old)} "
            f"| {new[0]}, {new[1]} | {share(*new)} |"
        )
    return "\n".join(lines)
