"""python -m pycomm.benchmarks tune: the command line. See --help."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from pycomm import env
from pycomm.benchmarks.common import memory, ranks, report
from pycomm.benchmarks.common.options import chosen, new_parser

if TYPE_CHECKING:
    import argparse

    from pycomm.benchmarks.tune.measure import Found, OpName
    from pycomm.tuned import Choices

SIZES = [(12 << 10) << step for step in range(13)]  # from just above the payload of a header to 48 MiB
BUFFERS = 4  # of a rank, two of them registered
LIMIT_FACTOR, LIMIT_S = 10, 300.0  # a group may take so much longer before it counts as hanging
DESCRIPTION = """\
Measures which algorithm is fastest on this machine, by operation, size, number of ranks and the way in which
ranks get at each other's buffers, and writes it to a file that every later group of pycomm reads.

  python -m pycomm.benchmarks tune
  python -m pycomm.benchmarks tune --ranks 2,3,6 --seconds 60

The figures are of float32 on processes. Every algorithm's result is checked. Where two are equally fast, the
choice of the built-in table stays. A group with another number of ranks, or on another number of cores, takes
the built-in table; measuring again adds to the file. `pycomm.explain` says which table decides, and
PYCOMM_TUNED=0 does without the file. Stop other work on the machine meanwhile.
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit status: 0, 1 when a rank failed or a result was wrong."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    from pycomm import tuned  # torch, which --help does without
    from pycomm.benchmarks.tune.measure import CANDIDATES

    named = env.tuned_file()
    path = given.output or (named if named not in (None, "0") else tuned.default_path())
    cores = len(os.sched_getaffinity(0))
    try:
        ops = chosen(given.ops, CANDIDATES, "--ops") if given.ops else tuple(CANDIDATES)
        worlds = parse_ranks(given.ranks) if given.ranks else usual_ranks(cores)
        if not given.seconds > 0:
            raise ValueError("--seconds must be above 0")
    except ValueError as error:
        parser.error(str(error))
    env.use_built_in_table()
    if os.getloadavg()[0] > cores / 2:
        print(f"Other work is running (load {os.getloadavg()[0]:.1f}); the figures are of this state.")
    rows, lines = list[tuned.Choices](), list[list[str]]()
    try:
        for n in worlds:
            found = measure_group(n, ops, given.seconds * n / sum(worlds))
            new = rows_of(found, n)
            rows += new
            lines += lines_of(found, n, new)
    except (ranks.RankError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report.show([report.Table("Beside the built-in table", COLUMNS, lines)])
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    tuned.write(path, rows, today)
    used = str(path) in (named, str(tuned.default_path()))
    use = "groups that are made from now on use it" if used else f"PYCOMM_TUNED={path} makes groups use it"
    print(f"Written to {path}; {use}.")
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser("python -m pycomm.benchmarks tune", DESCRIPTION)
    add, default = parser.add_argument, "(default %(default)s)"
    add(
        "--ranks",
        help="numbers of ranks, with commas (default: powers of two to four times the cores, or 16)",
    )
    add("--ops", metavar="OP,OP", help="operations (default: all)")
    add("--seconds", type=float, default=110, help=f"of measuring, about, for all together {default}")
    add("--output", metavar="FILE", help="where to write (default: where groups look, see PYCOMM_TUNED)")
    return parser


def parse_ranks(text: str) -> list[int]:
    """ "2,4" -> [2, 4]. Raises ValueError."""
    found = text.split(",")
    if not all(part.strip().isdecimal() and 2 <= int(part) <= 256 for part in found):
        raise ValueError(f"--ranks {text!r}: must be numbers from 2 to 256 with commas between them")
    return sorted({int(part) for part in found})


def usual_ranks(cores: int) -> list[int]:
    """Powers of two as far as ranks have a core each, and beyond that as people try things on small
    machines.
    """
    most = max(cores, min(16, 4 * cores))
    powers = [1 << k for k in range(1, 9) if 1 << k <= most]
    return sorted({*powers, *([cores] if 2 <= cores <= 256 else [])})


def measure_group(n: int, ops: Sequence[OpName], seconds: float) -> Found:
    """What the ranks of a group of n found. Raises RankError, ValueError."""
    from pycomm.benchmarks.tune.measure import measure

    room = memory.available_bytes()
    sizes = [size for size in SIZES if room is None or BUFFERS * n * size <= room / 2]
    if not sizes:
        raise ValueError(f"{n} ranks: {room} bytes of free memory are not enough for their buffers")
    start = time.monotonic()
    limit = LIMIT_FACTOR * seconds + LIMIT_S
    found = ranks.run(n, measure, ops, sizes, seconds, mode="processes", timeout=limit)[0]
    took = time.monotonic() - start
    told = f"{n} ranks on {found.cores} cores: {found.rounds} rounds, {took:.0f} s"
    print(told, file=sys.stderr, flush=True)
    return found


def rows_of(found: Found, n: int) -> list[Choices]:
    from pycomm.benchmarks.tune.choose import choices
    from pycomm.benchmarks.tune.measure import built_in

    return [
        {
            "ranks": n,
            "cores": found.cores,
            "access": access,
            "op": op,
            "choices": [
                *choices(times, {size: built_in(op, size, n, found.cores, access) for size in times})
            ],
        }
        for (op, access), times in found.times.items()
    ]


# --- what is shown --------------------

COLUMNS = ["op", "ranks", "access", "choices: up to bytes", "times as fast", "most, at"]


def lines_of(found: Found, n: int, rows: Sequence[Choices]) -> list[list[str]]:
    """What changes beside the built-in table: for each row how many times as fast, as a mean and at most.
    rows: of rows_of.
    """
    from pycomm.benchmarks.tune.choose import chosen as chosen_at
    from pycomm.benchmarks.tune.measure import built_in, geometric_mean

    lines = []
    for ((op, access), by_size), row in zip(found.times.items(), rows, strict=True):
        gains: dict[int, float] = {}
        for size, times in by_size.items():
            before = times[built_in(op, size, n, found.cores, access)]
            best = chosen_at(row["choices"], size)
            assert best is not None  # the last choice reaches beyond the largest size
            gains[size] = median(before) / median(times[best])
        most = max(gains, key=lambda size: gains[size])
        told = ", ".join(f"{name} {until >> 10}K" for until, name in row["choices"])
        cells = [op, str(n), access, told]
        lines.append([*cells, f"{geometric_mean(gains.values()):.2f}", f"{gains[most]:.2f} at {most >> 10}K"])
    return lines
