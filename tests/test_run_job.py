"""What pycomm.run decides when ranks end, and what it does with their lines: without starting a rank."""

import ast
import contextlib
import io
import os
import signal
import subprocess
import sys
import types

import pytest

from pycomm.run import job, rank
from pycomm.run.__main__ import parse
from pycomm.run.job import Job, Settings
from pycomm.run.output import BLOCK, Output


class Ends(Job):
    """A job whose processes are numbers: what it starts, says and kills is noted."""

    def __init__(self, nproc, replacements, monkeypatch, begun=True):
        super().__init__(Settings(nproc, replacements, ["script.py"]))
        self.joined, self.said, self.killed = set(), [], []
        monkeypatch.setattr(job, "has_joined", lambda store, number: number in self.joined)
        monkeypatch.setattr(job, "_end_session", lambda *kill: self.killed.append(kill))
        for place in range(nproc * begun):
            self._start(place, 0)

    def _start(self, place, number):
        popen = types.SimpleNamespace(poll=lambda: popen.returncode, returncode=None, wait=lambda: None)
        self.running.append(job._Process(place, number, popen))

    def _say(self, text):
        self.said.append(text)

    def end(self, place, status):
        """The process that has this place now ends."""
        (process,) = [process for process in self.running if process.place == place]
        process.popen.returncode = status
        self._look()

    def places(self):
        return sorted((process.place, process.number) for process in self.running)


# replacements, ends (place, status) in their order -> status of the job, replacements started
ENDS = [
    (0, [(0, 0), (1, 0), (2, 0)], 0, 0),
    (0, [(0, 7), (1, 8), (2, 9)], 7, 0),  # the status of the first error
    (0, [(2, 9), (1, 0), (0, 7)], 9, 0),
    (0, [(0, -9), (1, 0), (2, 0)], 0, 0),  # killed: what the others go on without
    (0, [(2, -9), (1, -15), (0, 0)], 0, 0),
    (0, [(0, -9), (1, -9), (2, -15)], 128 + 15, 0),
    (0, [(0, -9), (1, 5), (2, -15)], 5, 0),
    (1, [(0, -9), (0, -9), (1, 0), (2, 0)], 0, 1),
    (2, [(2, -9), (0, 3), (2, 4), (0, 0), (1, 0)], 4, 2),  # the third that ends so is not replaced
    (3, [(1, 0), (0, -9), (2, 0)], 0, 0),  # one has finished: the training is over
    (3, [(0, -9), (1, -9), (2, -9), (0, 0), (1, 0), (2, 0)], 0, 3),
]


@pytest.mark.parametrize(("replacements", "ends", "status", "started"), ENDS)
def test_who_is_replaced_and_what_the_job_ends_with(replacements, ends, status, started, monkeypatch):
    run = Ends(3, replacements, monkeypatch)
    run.joined = set(range(1, 9))
    for place, code in ends:
        run.end(place, code)
    assert not run.running and (run.error, run.started) == (status, started)
    assert sum("replacement" in text and "at most" in text for text in run.said) == started
    assert (
        sum(text.endswith("is not replaced") for text in run.said)
        == sum(code != 0 for _, code in ends) - started
    )
    assert [number for _, number in run.killed] == [signal.SIGKILL] * len(ends)  # what they had started


def test_what_is_said_of_an_end(monkeypatch):
    run = Ends(2, 2, monkeypatch)
    run.end(1, -9)
    assert run.places() == [(0, 0), (1, 1)]
    run.end(1, 3)
    run.joined = {2}
    run.end(1, -15)
    assert run.said == [
        "rank 1 was killed by signal 9: replacement 1 of 2 at most",
        "rank 1, replacement 1 ended with status 3 before it was taken in: replacement 2 of 2 at most",
        "rank 1, replacement 2 was killed by signal 15, and is not replaced",
    ]


def test_replacements_that_nobody_is_left_to_take_in_are_ended(monkeypatch):
    """While one that was taken in runs, the others wait for it."""
    run = Ends(2, 3, monkeypatch)
    run.end(0, -9)
    run.joined = {1}
    run.end(1, -9)
    assert run.places() == [(0, 1), (1, 2)] and "nobody is left" not in run.said[-1]
    run.end(0, 0)
    assert run.said[-1] == "nobody is left to take a replacement in" and not run.running
    assert run.killed[-1][0].number == 2 and run.killed[-1][1] == signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_kills(number, monkeypatch):
    """The first error sets the status; a rank that ends later is not replaced."""
    run = Ends(2, 3, monkeypatch)
    run._stop(number, None)
    assert [(process.place, sent) for process, sent in run.killed] == [(0, number), (1, number)]
    run.end(1, -number)
    assert run.places() == [(0, 0)] and not run.said
    run.killed.clear()
    run._stop(signal.SIGINT, None)
    assert [(process.place, sent) for process, sent in run.killed] == [(0, signal.SIGKILL)]
    run.end(0, -9)
    assert not run.running and run.stopping[0] == number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_status_after_a_signal_is_its_number(number, monkeypatch):
    """Whatever the ranks end with then; and the handlers from before are there again."""
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    run = Ends(2, 3, monkeypatch, begun=False)

    def stopped():
        signal.raise_signal(number)
        run._look = lambda: Job._look(run)
        run.end(0, 0)
        run.end(1, 7)

    run._look = stopped
    assert run.run() == 128 + number
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_who_does_not_end_after_a_signal_is_killed(monkeypatch):
    now = 100.0
    monkeypatch.setattr(job.time, "monotonic", lambda: now)
    run = Ends(2, 0, monkeypatch)
    run._stop(signal.SIGTERM, None)
    run.killed.clear()
    now += job.GRACE_S - 0.01
    run._look()
    assert not run.killed and len(run.running) == 2
    now += 0.02
    run._look()
    assert [sent for _, sent in run.killed] == [signal.SIGKILL] * 2 and not run.running


def test_places_in_the_environment(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    run = Ends(3, 1, monkeypatch)
    for place, number in ((0, 0), (2, 0), (1, 300)):
        found = run._environment(place, number)
        assert [found[name] for name in ("RANK", "LOCAL_RANK", "PYCOMM_REPLACEMENT")] == [
            *[str(place)] * 2,
            str(number),
        ]
        assert [found[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")] == ["3"] * 3
        assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", str(run.store.port))


# --- lines --------------------


@contextlib.contextmanager
def pipes(*names):
    """An Output that reads from pipes; their ends to write to; what comes out."""
    with Output() as output:
        written = io.BytesIO()
        ends = []
        for name in names:
            reading, writing = os.pipe()
            output.add(os.fdopen(reading, "rb"), name, written)
            ends.append(writing)
        yield output, ends, written


def test_lines_come_whole_under_the_names_of_their_ranks():
    with pipes("rank 0", "rank 1'2") as (output, (first, second), written):
        for piece in (b"a", b"b\n\nc", b"d"):
            os.write(first, piece)
            os.write(second, piece.upper())
            output.pump(5)
        assert sorted(written.getvalue().splitlines()) == sorted(
            [b"[rank 0] ab", b"[rank 0] ", b"[rank 1'2] AB", b"[rank 1'2] "]
        )
        written.seek(0), written.truncate()
        os.close(first)
        output.pump(5)
        assert written.getvalue() == b"[rank 0] cd\n"  # its last line had no end
        os.write(second, b"E\r\nF")
        output.pump(5)
    os.close(second)
    assert written.getvalue() == b"[rank 0] cd\n[rank 1'2] CDE\r\n[rank 1'2] F\n"


def test_a_line_longer_than_a_block():
    with pipes("rank 7") as (output, (end,), written):
        for _ in range(3):
            os.write(end, b"x" * (BLOCK - 1))
            output.pump(5)
        assert not written.getvalue()
        os.write(end, b"\nrest")
        os.close(end)
        for _ in range(2):
            output.pump(5)
    assert written.getvalue() == b"[rank 7] " + b"x" * (3 * (BLOCK - 1)) + b"\n[rank 7] rest\n"


def test_what_the_last_ranks_have_printed_is_not_lost(monkeypatch):
    """After the last of them has ended, all that is in the pipes comes out, a line without end as well."""
    run = Ends(1, 0, monkeypatch, begun=False)
    reading, writing = os.pipe()
    out = io.BytesIO()
    run.output.add(os.fdopen(reading, "rb"), "rank 0", out)
    pump = run.output.pump

    def ends_meanwhile():
        os.write(writing, b"last words\nand more")
        os.close(writing)
        run._look = lambda: Job._look(run)
        run.end(0, 0)

    run._look = ends_meanwhile
    run.output.pump = lambda timeout: pump(min(timeout, 0.001))
    assert run.run() == 0
    assert out.getvalue() == b"[rank 0] last words\n[rank 0] and more\n"


# --- what a rank runs --------------------


def run_as_a_rank(folder, launcher, *command):
    """(status, what it printed, errors too) of rank.py in a process in this folder."""
    # Not as a module: that would import all of pycomm.
    ended = subprocess.run(
        [sys.executable, rank.__file__, str(launcher), *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return ended.returncode, ended.stdout


def test_a_script_and_a_module_run_as_python_runs_them(tmp_path):
    (tmp_path / "inside").mkdir()
    (tmp_path / "beside.py").write_text("NAME = 'beside the module'")
    (tmp_path / "inside" / "beside.py").write_text("NAME = 'beside the script'")
    text = "import beside, os, sys; os.write(1, repr((sys.argv, __name__, beside.NAME)).encode())"
    (tmp_path / "module.py").write_text(text)
    (tmp_path / "inside" / "script.py").write_text(text)
    status, printed = run_as_a_rank(tmp_path, os.getpid(), "inside/script.py", "-m", "--x=1")
    expected = ["inside/script.py", "-m", "--x=1"], "__main__", "beside the script"
    assert (status, printed) == (0, repr(expected))
    status, printed = run_as_a_rank(tmp_path, os.getpid(), "-m", "module", "--x", "2")
    assert status == 0, printed
    argv, *others = ast.literal_eval(printed)
    assert (argv[1:], others) == (["--x", "2"], ["__main__", "beside the module"])
    assert os.path.realpath(argv[0]) == str(tmp_path / "module.py")


def test_a_rank_whose_launcher_has_ended_does_not_begin(tmp_path):
    (tmp_path / "script.py").write_text("import os; os.write(1, b'began')")
    assert run_as_a_rank(tmp_path, os.getpid() + 1, "script.py") == (1, "")


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (["--nproc", "1", "a.py"], Settings(1, 3, ["a.py"])),
        (["--nproc", "300", "--replacements", "0", "a.py", "--nproc", "2"],
         Settings(300, 0, ["a.py", "--nproc", "2"])),
        (["--nproc", "2", "-m", "a.b", "-m", "c"], Settings(2, 3, ["-m", "a.b", "-m", "c"])),
    ],
)  # fmt: skip
def test_command_lines(arguments, settings):
    """What stands after the script is the script's."""
    assert parse(arguments) == settings
