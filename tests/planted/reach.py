"""Which tests reach which lines: recorded once by coverage.py, per test, in all its threads and processes.

    python tests/planted record                  runs the quick tests
    python tests/planted record tests/test_x.py  runs these, and replaces what was known of them

[Note: processes] A rank is often a process that a test forks. So each forked process begins a measurement of
its own, under the name of the test. It writes what it has before it sends anything through a pipe, as it may
be killed as soon as its result has come, and before os._exit. A process
that is started anew (a launcher, an example) finds site/sitecustomize.py on PYTHONPATH and does the same. A
process that is killed leaves nothing; the other ranks reach the same lines.

[Note: C++] A planted place of the extension (native.py) sets its byte in a file that all processes of the
test map. No process writes anything at its end, so those that are killed count too.
"""

import atexit
import base64
import contextlib
import fcntl
import functools
import os
import pickle
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER, TEST, MARKS = "PLANTED_REACH_FOLDER", "PLANTED_REACH_TEST", "PLANTED_REACHED"  # environment
MEASURED = ("pycomm", "parallel")
PLACES = 4096  # bytes of the file of marks
IMPORT = "import"  # the name of what runs before the first test
WORKER = os.environ.get("PYTEST_XDIST_WORKER")  # of pytest-xdist; runs the tests

# Each of them has marks of its own. The extension maps them when it is loaded, which a conftest.py may do
# before pytest_configure.
if WORKER and "{worker}" in os.environ.get(MARKS, ""):
    os.environ[MARKS] = os.environ[MARKS].format(worker=WORKER)
    Path(os.environ[MARKS]).write_bytes(bytes(PLACES))


class Recorder:
    """Measures this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.begin()

    def begin(self) -> None:
        import coverage
        from coverage import collector

        collector.short_stack = lambda: ""  # where it was made: 0.2 s each, with torch loaded
        self.lock = threading.Lock()
        self.coverage = coverage.Coverage(
            data_file=None,
            config_file=False,
            include=[str(ROOT / name / "*") for name in MEASURED],  # `source` looks for files at each flush
            messages=False,
        )
        self.coverage._no_warn_slugs = {"no-data-collected"}
        self.coverage.start()
        self.context = os.environ.get(TEST, IMPORT)
        self.coverage.switch_context(self.context)

    def flush(self, following: str | None = None) -> None:
        """Writes a row (test, {file: lines}) of what was reached; what comes then belongs to `following`."""
        with self.lock:
            data = self.coverage.get_data()
            data.set_query_context(self.context)
            found = {name_of(file): data.lines(file) for file in data.measured_files()}
            if reached := {file: sorted(lines) for file, lines in found.items() if lines}:
                write(self.folder, self.context, reached)
            self.context = following or self.context
            self.coverage.switch_context(self.context)


@functools.cache
def name_of(file: str) -> str:
    return os.path.relpath(os.path.realpath(file), ROOT)


def write(folder: Path, test: str, reached: dict[str, Any]) -> None:
    """A line, which begins anew where a process was killed while it wrote the one before."""
    row = b"\n" + base64.b64encode(pickle.dumps((test, reached))) + b"\n"
    name = f"rows-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
    with contextlib.suppress(OSError), open(folder / name, "ab") as file:  # a test may take all descriptors
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(row)


_recorder: Recorder | None = None


def start() -> None:
    """Measure from here on, and in each process that this one forks."""
    global _recorder
    _recorder = Recorder(Path(os.environ[FOLDER]))
    flush = _recorder.flush
    os._exit = before(os._exit, flush)  # type: ignore[assignment]
    Connection._send_bytes = before(Connection._send_bytes, flush)  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=_recorder.begin)
    atexit.register(flush)


def before(function: Callable, first: Callable[[], None]) -> Callable:
    """Calls `first` before the function, but not in the process that runs the tests."""
    tests = os.getpid()

    @functools.wraps(function)
    def both(*args: Any) -> Any:
        if os.getpid() != tests:
            first()
        return function(*args)

    return both


# --- hooks of pytest, of a run with `-p planted.reach` ---------------------------------------------


def pytest_configure(config: Any) -> None:
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        return  # the process that only deals the tests
    sys.path.insert(0, str(ROOT / "tests"))
    start()


def pytest_runtest_logstart(nodeid: str) -> None:
    if _recorder:
        _recorder.flush(nodeid)
        os.environ[TEST] = nodeid
        clear_marks()


def pytest_runtest_logfinish(nodeid: str) -> None:
    if _recorder:
        _recorder.flush()
        if marks := reached_marks():
            write(_recorder.folder, nodeid, {"": marks})


def pytest_runtest_logreport(report: Any) -> None:
    if _recorder:
        write(_recorder.folder, report.nodeid, {"seconds": report.duration})


def clear_marks() -> None:
    if path := os.environ.get(MARKS):
        with open(path, "r+b") as file:
            file.write(bytes(os.path.getsize(path)))


def reached_marks() -> list[int]:
    path = os.environ.get(MARKS)
    return [place for place, mark in enumerate(Path(path).read_bytes()) if mark] if path else []
