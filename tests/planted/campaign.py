"""Tries many faults: some processes, each with its own copy of the project, take one after the other."""

import multiprocessing
import os
import random
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from planted import choose, fault, native, results, trial
from planted.choose import Reach
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
        if one.is_python:
            return copy.run(one, tests, limit)
        one.put_into(copy.folder)
        native.compile_in(copy.folder)
        return copy.run(one, tests, limit)


def run(faults: Sequence[Fault], limit: float, workers: int) -> int:
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
    here, tasks, answers = commit(), multiprocessing.Queue(), multiprocessing.Queue()
    shared = {one.name: number for number, one in enumerate(native.numbered(fault.load().values()), 1)}
    for one in left:
        tasks.put(one)
    for _ in range(workers):
        tasks.put(None)
    processes = [
        multiprocessing.Process(target=_work, args=(tasks, answers, shared, limit)) for _ in range(workers)
    ]
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


def _work(
    tasks: multiprocessing.Queue, answers: multiprocessing.Queue, shared: dict[str, int], limit: float
) -> None:
    trial.load_libraries()
    reach = choose.load()
    with a_copy() as copy:
        while (one := tasks.get()) is not None:
            try:
                answers.put((one.name, *_judge(one, copy, reach, shared.get(one.name), limit)))
            except Exception as error:
                answers.put((one.name, "error", repr(error)[:200].replace("\t", " "), 0.0))


def _judge(one: Fault, copy: Copy, reach: Reach, number: int | None, limit: float) -> tuple[str, str, float]:
    tests = choose.tests_for(one, reach, number)
    if one.is_python:
        outcome = copy.run(one, tests, limit)
    elif number is not None:
        with_all = Copy.existing(FOLDER / "native", scratch=copy.scratch)
        outcome = with_all.run(one, tests, limit, **{native.NUMBER: str(number)})
    else:
        outcome = _alone(one, copy, tests, limit)
    if outcome.caught:
        return "caught", outcome.caught, outcome.seconds
    return "missed", f"{outcome.tried} of {len(tests)} tests that reach it passed", outcome.seconds


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
