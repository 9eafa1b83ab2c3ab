"""The processor time of the tests by subject, beside its budget: the table in tests/README.md.

    python -m pytest ... --cost quick.tsv      as `make test` runs pytest; slow.tsv as `make test-slow` does
    python tests/budget.py --quick quick.tsv --slow slow.tsv            prints the table
    python tests/budget.py --quick quick.tsv --slow slow.tsv --write    also writes it into tests/README.md

Exits with 1 where a subject or a tier exceeds its budget. A budget that reads `?` becomes the subject's share
of the tier's, in proportion to what was measured, if that is above 0. A
figure stays until a person changes it.
"""

import argparse
import fnmatch
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
README = HERE / "README.md"
TIERS = ("quick", "slow")
ALL = "all"  # the last row, which has the budgets of the tiers
HEADER = "| subject | files | " + " | ".join(f"{tier} s | {tier} budget" for tier in TIERS) + " |"
ROUND = 5  # seconds, of budgets


class Row(NamedTuple):
    """figures: of each tier (measured, budget) in seconds of processor; None: unknown, `?` in the table."""

    subject: str
    patterns: tuple[str, ...]  # of files below tests/; of several rows that fit, the first one counts
    figures: tuple[tuple[float | None, float | None], ...]

    def __str__(self) -> str:
        files = " ".join(f"`{pattern}`" for pattern in self.patterns)
        numbers = ["?" if number is None else f"{number:.0f}" for pair in self.figures for number in pair]
        return f"| {' | '.join([self.subject, files, *numbers])} |".replace("|  |", "| |")


def read_table(text: str) -> list[Row]:
    """The rows of the table below HEADER; the last one is for all tests."""
    lines = text[text.index(HEADER) :].splitlines()[2:]
    rows = []
    for line in lines[: next((place for place, line in enumerate(lines) if not line.startswith("|")), None)]:
        subject, files, *numbers = (cell.strip() for cell in line.strip("|").split("|"))
        values = [None if number == "?" else float(number) for number in numbers]
        pairs = tuple(zip(values[::2], values[1::2], strict=True))
        rows.append(Row(subject, tuple(re.findall(r"`(.+?)`", files)), pairs))
    return rows


def write_table(text: str, rows: Iterable[Row]) -> str:
    old = re.search(rf"^{re.escape(HEADER)}\n\|[-|: ]+\|\n(?:\|.*\n)+", text, re.M)
    rule = re.sub(r"[^|]+", lambda cell: "-" * len(cell[0]), HEADER)
    return text.replace(old[0], "\n".join([HEADER, rule, *map(str, rows)]) + "\n")


def subject_of(path: str, rows: Iterable[Row]) -> str:
    """Of a test file, from tests/ on."""
    for row in rows:
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in row.patterns):
            return row.subject
    raise ValueError(f"{path} belongs to no subject of the table in tests/README.md; add it to a row there")


def measured(lines: Iterable[str], rows: list[Row]) -> dict[str, float]:
    """{subject: seconds of processor} of a file that --cost wrote; of a test that ran twice, the last run."""
    cost = {}
    for line in lines:
        test, used, _ = line.rstrip("\n").split("\t")
        cost[test] = float(used)
    seconds = {row.subject: 0.0 for row in rows}
    for test, used in cost.items():
        seconds[subject_of(test.partition("::")[0].removeprefix("tests/"), rows[:-1])] += used
    return seconds | {rows[-1].subject: sum(cost.values())}


def filled(rows: list[Row], seconds: list[dict[str, float] | None]) -> list[Row]:
    """The rows with the measured seconds of each tier (None: it stays as it was) and no budget left open."""
    result = []
    for row in rows:
        figures = []
        for (old, budget), found, (_, total) in zip(row.figures, seconds, rows[-1].figures, strict=True):
            used = found[row.subject] if found else old
            if budget is None and found and used and total:
                budget = used / found[rows[-1].subject] * total // ROUND * ROUND
            figures.append((used, budget))
        result.append(row._replace(figures=tuple(figures)))
    return result


def exceeded(rows: Iterable[Row]) -> list[str]:
    return [
        f"{row.subject}, {tier}: {used:.0f} s of {budget:.0f}"
        for row in rows
        for tier, (used, budget) in zip(TIERS, row.figures, strict=True)
        if None not in (used, budget) and used > budget
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for tier in TIERS:
        parser.add_argument(f"--{tier}", type=Path, help=f"what --cost wrote in a run of the {tier} tests")
    parser.add_argument("--write", action="store_true", help="write the table into tests/README.md")
    options = parser.parse_args(arguments)
    text = README.read_text()
    rows = read_table(text)
    paths = [getattr(options, tier) for tier in TIERS]
    rows = filled(rows, [path and measured(path.read_text().splitlines(), rows) for path in paths])
    print("\n".join([HEADER, *map(str, rows)]))
    if options.write:
        README.write_text(write_table(text, rows))
    too_much = exceeded(rows)
    for line in too_much:
        print(f"exceeds its budget: {line}", file=sys.stderr)
    return 1 if too_much else 0


if __name__ == "__main__":
    sys.exit(main())
