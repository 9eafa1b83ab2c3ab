"""Tries many faults: some processes, each with its own copy of the project, take one after the other.

[Note: tests of another commit] So that two states of the tests can be compared, the copy may have the tests
of another commit. The product is as it is now, and those tests are run that both commits have.
"""

import multiprocessing
import os
import random
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from planted import choose, fault, native, results, trial
from planted.fault import ROOT, Fault
from planted.results import Result
from planted.trial import Copy, Outcome

FOLDER = ROOT / "build" / "planted"


def commit() -> str:
    """Of the tests, with + where files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=8", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def a_copy() -> Iterator[Copy]:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        yield Copy(Path(folder))


def attempt(one: Fault, tests: Sequence[str], limit: float = 600) -> Outcome:
    """These tests alone, with the fault."""
    trial.load_libraries()
    with a_copy() as copy:
        return _Judge(copy, How(limit)).outcome(one, tests)


class How(NamedTuple):
    """limit: seconds of tests for a fault. tests_of: a commit, see [Note: tests of another commit]. first:
    tests that run before the others that reach the fault.
    """

    limit: float
    tests_of: str = ""
    first: Sequence[str] = ()


def run(faults: Sequence[Fault], how: How, workers: int) -> int:
    """Adds to results.tsv as results come. Returns 1 if a fault was missed or could not be tried, 2 if there
    is nothing to try.
    """
    lost = fault.without_place(faults)
    for name, why in lost.items():
        print(f"left out: {name}: {why}")
    left = [one for one in faults if one.name not in lost]
    random.Random(1).shuffle(left)
    if not left:
        return 2
    here, tasks, answers = how.tests_of or commit(), multiprocessing.Queue(), multiprocessing.Queue()
    for one in left:
        tasks.put(one)
    for _ in range(workers):
        tasks.put(None)
    processes = [multiprocessing.Process(target=_work, args=(tasks, answers, how)) for _ in range(workers)]
    for process in processes:
        process.start()
    missed = 0
    for done in range(1, len(left) + 1):
        name, verdict, detail, seconds = answers.get()
        if verdict != "error":
            results.add([Result(name, here, verdict, detail, seconds)])
        missed += verdict != "caught"
        print(f"{done}/{len(left)} {verdict}  {name}  {detail}  {seconds:.0f} s", flush=True)
    for process in processes:
        process.join()
    return missed > 0


def _work(tasks: multiprocessing.Queue, answers: multiprocessing.Queue, how: How) -> None:
    trial.load_libraries()
    with a_copy() as copy:
        judge = _Judge(copy, how)
        while (one := tasks.get()) is not None:
            try:
                answers.put((one.name, *judge(one)))
            except Exception as error:
                answers.put((one.name, "error", repr(error)[:200].replace("\t", " "), 0.0))


class _Judge:
    """copy: its own."""

    def __init__(self, copy: Copy, how: How) -> None:
        self.copy, self.how, self.reach, faults = copy, how, choose.load(), fault.load()
        self.numbers = native.numbers(FOLDER / "native", faults)
        self.native = Copy.existing(FOLDER / "native", scratch=copy.scratch)
        self.known: set[str] | None = None
        self.last: dict[str, Result] = {}
        if how.tests_of:
            copy.take_tests_of(how.tests_of, FOLDER / "native")
            self.native, self.known = copy, copy.collected()
            self.last = results.latest(results.read(), faults)

    def __call__(self, one: Fault) -> tuple[str, str, float]:
        """(verdict, detail, seconds)"""
        tests = self._tests(one)
        outcome = self.outcome(one, tests)
        if outcome.caught:
            return "caught", outcome.caught, outcome.seconds
        return "missed", f"{outcome.tried} of {len(tests)} tests that reach it passed", outcome.seconds

    def outcome(self, one: Fault, tests: Sequence[str]) -> Outcome:
        """Of these tests."""
        number = self.numbers.get(one.name)
        if one.is_python:
            return self.copy.run(one, tests, self.how.limit)
        if number is not None:
            return self.native.run(one, tests, self.how.limit, **{native.NUMBER: str(number)})
        self.copy.without_faults = self.native
        return _alone(one, self.copy, tests, self.how.limit)

    def _tests(self, one: Fault) -> list[str]:
        """Of another commit: first the one that caught it last."""
        tests = list(dict.fromkeys([*self.how.first, *choose.tests_for(one, self.reach)]))
        if self.known is None:
            return tests
        last = self.last[one.name].detail if one.name in self.last else ""
        return sorted((test for test in tests if test in self.known), key=lambda test: test != last)


def _alone(one: Fault, copy: Copy, tests: Sequence[str], limit: float) -> Outcome:
    """Compiled in the copy, where each following one compiles only what differs."""
    path = copy.folder / one.file
    before = path.read_text()
    one.put_into(copy.folder)
    try:
        native.compile_in(copy.folder)
        return copy.run(one, tests, limit)
    finally:
        path.write_text(before)
        os.utime(path)
