"""Runs tests on a copy of the project that has a fault.

A `Copy` is a folder with the tracked files and the built extension. The process that makes trials has torch
and pytest loaded but nothing of the project: each trial is a fork of it, which saves the seconds that a new
interpreter needs. It leads its own process group, which is killed at its end.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planted.fault import ROOT, Fault

QUICK = "not slow and not torch_suite"
CHUNKS = (30, 150, 600, 10**6)  # tests of a run of pytest: collecting them costs time too
SLOWEST = 60.0  # seconds of a test: then it hangs
LIMIT = 60.0  # seconds for the tests of a fault
COPIED = ("pycomm/_C*.so", "pycomm/_build_info.py", "build/objects.json")


@dataclass
class Outcome:
    """caught: the test that failed; tried: tests that were run; all: none is left to run."""

    caught: str | None
    tried: int
    all: bool
    seconds: float
    text: str = ""


def files_of(root: Path) -> list[str]:
    """Tracked and new files; without git, all files but build products."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if (root / ".git").exists():
        names = subprocess.run(listed, cwd=root, capture_output=True, check=True).stdout.decode()
        return list(filter(None, names.split("\0")))
    built = {".venv", "build", "dist", "demo", "__pycache__"}
    paths = (path for path in root.rglob("*") if path.is_file() or path.is_symlink())
    inside = [path.relative_to(root) for path in paths]
    return [str(name) for name in inside if not built & set(name.parts)]


class Copy:
    """The project in its own folder. without_faults: another one, where its own extension has a fault."""

    without_faults: "Copy | None" = None

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.folder, self.root, self.scratch = folder, root, folder / "build" / "trial"
        self.refresh()

    @classmethod
    def existing(cls, folder: Path, scratch: Path) -> "Copy":
        """A copy that is there, which several processes use at a time: what each writes goes to `scratch`."""
        self = cls.__new__(cls)
        self.folder, self.root, self.scratch = folder, ROOT, scratch
        return self

    def refresh(self) -> None:
        """Takes the files as they are now."""
        names = files_of(self.root)
        built = [str(path.relative_to(self.root)) for name in COPIED for path in self.root.glob(name)]
        for name in [*names, *built]:
            source, target = self.root / name, self.folder / name
            if not source.exists() or name.startswith("build/planted/"):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink():
                target.unlink(missing_ok=True)
                target.symlink_to(os.readlink(source))
            else:
                shutil.copy2(source, target)

    def take_tests_of(self, commit: str, native: Path) -> None:
        """The tests of another commit, and the extension of the folder `native`."""
        shutil.rmtree(self.folder / "tests")
        archive = ["git", "archive", commit, "tests"]
        packed = subprocess.run(archive, cwd=self.root, capture_output=True, check=True).stdout
        subprocess.run(["tar", "x"], cwd=self.folder, input=packed, check=True)
        for name in COPIED:
            for path in native.glob(name):
                shutil.copy2(path, self.folder / path.relative_to(native))

    def collected(self) -> set[str]:
        """The quick tests of this copy."""
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", QUICK]
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the tests in {self.folder} cannot be collected:\n{done.stdout[-3000:]}")
        return {line for line in done.stdout.splitlines() if "::" in line}

    def forget(self, file: str) -> None:
        """The compiled form of a source: Python compares whole seconds and sizes only."""
        path = self.folder / file
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()

    def run(
        self, fault: Fault | None, tests: Sequence[str], limit: float = LIMIT, **environment: str
    ) -> Outcome:
        """Until one fails, or for `limit` seconds. A failure counts if the test passes without the fault and
        fails with it again: under load a test may fail by itself.
        """
        begin, tried, left = time.monotonic(), 0, list(tests)
        while left and (spent := time.monotonic() - begin) < limit:
            size = next(size for size in CHUNKS if tried < size)
            chunk, left = left[:size], left[size:]
            failed, ran, text = self._with(fault, chunk, limit - spent, environment)
            tried += ran
            if failed and self._by(fault, failed, environment):
                return Outcome(failed, tried, False, time.monotonic() - begin, text)
            if failed:  # not by the fault: go on behind it
                left = chunk[chunk.index(failed) + 1 :] + left if failed in chunk else left
        return Outcome(None, tried, not left and tried >= len(tests), time.monotonic() - begin)

    def _by(self, fault: Fault | None, test: str, environment: dict[str, str]) -> bool:
        """Whether the fault makes the test fail."""
        without = {**environment, "PLANTED_FAULT": "0"}
        passes = (self.without_faults or self)._with(None, [test], 2 * SLOWEST, without)[0] is None
        return passes and self._with(fault, [test], 2 * SLOWEST, environment)[0] is not None

    def _with(
        self, fault: Fault | None, tests: Sequence[str], limit: float, environment: dict[str, str]
    ) -> tuple[str | None, int, str]:
        path = self.folder / fault.file if fault and fault.is_python else None
        before = path.read_text() if path else ""
        try:
            if fault and path:
                fault.put_into(self.folder)
                self.forget(fault.file)
            return self._pytest(sorted_by_file(tests), limit, environment)
        finally:
            if fault and path:
                path.write_text(before)
                self.forget(fault.file)

    def _pytest(
        self, tests: Sequence[str], limit: float, environment: dict[str, str]
    ) -> tuple[str | None, int, str]:
        """(the test that failed or None, number of tests that were run, what pytest printed)"""
        self.scratch.mkdir(parents=True, exist_ok=True)
        record, output = self.scratch / "record", self.scratch / "output"
        record.write_text("")
        child = os.fork()
        if not child:
            try:
                _be_pytest(self.folder, self.scratch, tests, limit, environment)
            finally:
                os._exit(9)
        status = _ended(child, limit + SLOWEST + 30)
        events = [line.split("\t", 1) for line in record.read_text().splitlines()]
        begun = [test for what, test in events if what == "begun"]
        failed = [test for what, test in events if what == "failed"]
        text = output.read_text(errors="replace")[-4000:]
        if failed:
            return failed[0], len(begun), text
        if status != 0 and not any(what == "end" for what, _ in events):  # a crash, or a limit of time
            return (begun or ["collecting"])[-1], len(begun), text
        return None, len(begun), text


def sorted_by_file(tests: Sequence[str]) -> list[str]:
    """What a file makes for all its tests is made once; files in the order in which they come first."""
    order = {
        file: place for place, file in reversed(list(enumerate(test.partition("::")[0] for test in tests)))
    }
    return sorted(tests, key=lambda test: order[test.partition("::")[0]])


def _ended(child: int, limit: float) -> int:
    """The status of the child, which is killed after `limit` seconds; none of its group is left."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.02)
    else:
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1] or 1
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return status


def parents(test: str) -> set[str]:
    """What may be written for it: its file, its function."""
    return {test.partition("::")[0], test.partition("[")[0]}


class _Watch:
    """A plugin of pytest: runs these tests only, says what begins and fails, and stops in time."""

    def __init__(self, record: Path, tests: Sequence[str], deadline: float) -> None:
        self.file, self.deadline = record.open("a", buffering=1), deadline
        self.tests = {test: place for place, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted(
            (
                item
                for item in items
                if not self.tests.keys().isdisjoint({item.nodeid, *parents(item.nodeid)})
            ),
            key=lambda item: self.tests.get(item.nodeid, 0),
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.file.write(f"begun\t{nodeid}\n")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.file.write(f"failed\t{report.nodeid}\n")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.file.write(f"failed\t{report.nodeid or 'collecting'}\n")

    def pytest_runtest_protocol(self, item: Any) -> None:
        if time.monotonic() > self.deadline:
            item.session.shouldstop = "the time of this fault is up"

    def pytest_sessionfinish(self) -> None:
        self.file.write("end\t\n")


def _be_pytest(
    folder: Path, scratch: Path, tests: Sequence[str], limit: float, environment: dict[str, str]
) -> None:
    os.setsid()
    target = os.open(scratch / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.chdir(folder)
    for name in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTHONDONTWRITEBYTECODE"):
        os.environ.pop(name, None)
    sys.dont_write_bytecode = False  # the next trial reads what this one has compiled; see `forget`
    os.environ.update({"PYTHONPATH": str(folder), **environment})
    here = str(ROOT / "tests")
    sys.path[:] = [str(folder), *(path for path in sys.path if path not in (str(ROOT), here))]
    import pytest
    import torch

    torch._import_device_backends()
    arguments = [
        "-x",
        "-q",
        "--no-header",
        f"--timeout={SLOWEST}",
        "--tb=short",
        *dict.fromkeys(file for test in tests if (folder / (file := test.partition("::")[0])).exists()),
    ]
    status = pytest.main(arguments, plugins=[_Watch(scratch / "record", tests, time.monotonic() + limit)])
    sys.stdout.flush()
    os._exit(int(status))


def load_libraries() -> None:
    """Once, before the first trial: all that tests import and that knows nothing of the project."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch._dynamo
    import torch.distributed  # noqa: F401
    import transformers  # noqa: F401
