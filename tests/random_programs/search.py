"""Seeds in turn, and the shrinking of one that fails."""

import dataclasses
import time

from random_programs.program import draw
from random_programs.run import LIMIT, run

FAULTS = ("none", "kill", "stop", "leave")
KINDS = ("none", "none", "kill", "none", "stop", "leave")  # of the programs of one seed after another


class Totals:
    def __init__(self):
        self.programs = self.operations = self.errors = self.struck = 0
        self.failed = []  # (command, failures)

    def __str__(self):
        return (
            f"{self.programs} programs, {self.operations} results compared, {self.struck} faults, "
            f"{self.errors} errors of them, {len(self.failed)} failed"
        )


def command(seed, fault, keep=None, hosts=1):
    kept = f" --keep {','.join(map(str, keep))}" if keep is not None else ""
    return f"python tests/random_programs {seed} --fault {fault}{f' --hosts {hosts}' * (hosts > 1)}{kept}"


def search(first, number, *, fault=None, seconds=None, say=print, stop_at=1, hosts=1):
    """Runs the programs of `number` seeds, fewer where `seconds` have gone by or `stop_at` have failed."""
    totals, start = Totals(), time.monotonic()
    for seed in range(first, first + number):
        if seconds is not None and time.monotonic() - start > seconds:
            break
        kind = fault or KINDS[seed % len(KINDS)]
        outcome = run(draw(seed, kind, hosts))
        totals.programs += 1
        totals.operations += outcome.operations
        totals.errors += outcome.errors
        totals.struck += outcome.struck
        if outcome.failures:
            totals.failed.append((command(seed, kind, hosts=hosts), outcome.failures))
            say(f"{totals.failed[-1][0]}\n" + "\n".join(outcome.failures))
            if len(totals.failed) >= stop_at:
                break
    return totals


def keep_only(program, numbers):
    """The program with these operations, and those that they need: the splits that made their groups."""
    numbers, groups = set(numbers), program.groups
    while (
        needed := {groups[op.group].made_by for op in program.operations if op.number in numbers}
        - numbers
        - {None}
    ):
        numbers |= needed
    kept = tuple(op for op in program.operations if op.number in numbers)
    return dataclasses.replace(program, operations=kept)


def shrink(program, tries=3, limit=20.0, say=print):
    """The numbers of few operations with which the program still fails in one of `tries` runs. limit: seconds
    after which a run hangs.
    """

    def fails(numbers):
        smaller = keep_only(program, numbers)
        return any(run(smaller, min(limit, LIMIT), grace=0.1, gdb=False).failures for _ in range(tries))

    numbers = [op.number for op in program.operations]
    size = len(numbers) // 2
    while size >= 1:
        at = 0
        while at < len(numbers):
            fewer = numbers[:at] + numbers[at + size :]
            if fewer and fails(fewer):
                numbers = fewer
                say(f"{len(numbers)} operations left")
            else:
                at += size
        size //= 2
    return numbers
