"""Processes of ranks, with a pipe to each.

    this process                         rank 0              rank 1
    links[0] <------- pipe ------------> link
    links[1] <--------------- pipe ------------------------> link
                                         main(0, link, ...)  main(1, link, ...)

main may send and receive what it likes. What it returns or raises is the last message, an Outcome.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkContext
    from multiprocessing.process import BaseProcess
    from types import TracebackType

Main: TypeAlias = "Callable[..., object]"  # main(rank, link, *args)
Args: TypeAlias = tuple[object, ...]
Method: TypeAlias = Literal["fork", "spawn", "forkserver"]  # as in multiprocessing
EXTRA_S = 5.0  # operations may take the whole time limit; their errors then need a moment to come
POLL_S = 0.1  # a pipe does not tell of a rank's death when a process that the rank started holds it open


class Outcome(NamedTuple):
    """What main has returned (ok), or the exception that it has raised."""

    ok: bool
    value: object


class RankProcesses:
    """Processes that run main(rank, link, *args). A context manager: leaving it kills those that still run.

    Attributes: `processes` and `links`, by rank.
    """

    def __init__(
        self,
        ranks: int | Iterable[int],
        main: Main,
        *args: object,
        method: Method = "fork",
        limit: float | None = None,
    ) -> None:
        """Starts them.

        Args:
            ranks: how many, or the ranks to start here.
            main: with another method than "fork" it and its arguments must be picklable.
            limit: seconds after which a rank ends itself, whatever has become of this process. None: never.
        """
        context = cast("ForkContext", multiprocessing.get_context(method))  # the others are used like it
        self.processes: dict[int, BaseProcess] = {}
        self.links: dict[int, Connection] = {}
        try:
            for rank in range(ranks) if isinstance(ranks, int) else ranks:
                self.links[rank], theirs = context.Pipe()
                # a forked rank inherits our ends of the pipes: it closes them, else no rank would see us end
                ours = list(self.links.values()) if method == "fork" else []
                process = context.Process(target=_run, args=(rank, theirs, ours, limit, main, args))
                process.start()
                theirs.close()
                self.processes[rank] = process
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def recv(self, rank: int, timeout: float) -> Any:
        """The next message of a rank. Raises TimeoutError, and ChildProcessError when the rank has ended."""
        deadline = time.monotonic() + timeout
        while not self.links[rank].poll(min(POLL_S, max(0.0, deadline - time.monotonic()))):
            if self.processes[rank].exitcode is not None and not self.links[rank].poll():
                raise self.death(rank)
            if time.monotonic() >= deadline:
                raise TimeoutError(f"rank {rank} said nothing for {timeout} s")
        try:
            return self.links[rank].recv()
        except (EOFError, ConnectionError):
            raise self.death(rank) from None

    def outcomes(self, timeout: float, grace: float | None = None) -> dict[int, Outcome]:
        """Waits for all ranks; in the order in which they came.

        A rank that died has a ChildProcessError as its value. One that does not finish within `timeout` s
        (and EXTRA_S) is killed and has a TimeoutError; so is one that does not finish within `grace` s of the
        first failure.
        """
        found: dict[int, Outcome] = {}
        why, deadline = f"within {timeout} s", time.monotonic() + timeout + EXTRA_S
        waiting = dict(self.links)
        while waiting and (left := deadline - time.monotonic()) > 0:
            multiprocessing.connection.wait(waiting.values(), min(POLL_S, left))
            for rank in list(waiting):
                outcome = self._outcome(rank)
                if outcome is None:
                    continue
                found[rank] = outcome
                del waiting[rank]
                if not outcome.ok and grace is not None and deadline > time.monotonic() + grace:
                    why, deadline = f"within {grace} s of the first failure", time.monotonic() + grace
        for rank in waiting:
            self.kill(rank)
            found[rank] = Outcome(False, TimeoutError(f"rank {rank} did not finish {why}"))
        return found

    def _outcome(self, rank: int) -> Outcome | None:
        """A rank's outcome if it is there. Other messages are passed over."""
        try:
            while True:
                message = self.recv(rank, 0)
                if isinstance(message, Outcome):
                    return message
        except TimeoutError:
            return None
        except ChildProcessError as death:
            return Outcome(False, death)

    def death(self, rank: int) -> ChildProcessError:
        """How a rank ended."""
        self.processes[rank].join()
        status = self.processes[rank].exitcode or 0
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        return ChildProcessError(f"rank {rank} {how}")

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a rank that still runs."""
        process = self.processes[rank]
        if process.exitcode is None and process.pid is not None:
            os.kill(process.pid, number)

    def join(self, timeout: float | None = None) -> list[int]:
        """Waits until all have ended, for `timeout` s at most. Returns the ranks that have not."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for process in self.processes.values():
            process.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return [rank for rank, process in self.processes.items() if process.exitcode is None]

    def close(self) -> None:
        """Kills those that still run, and leaves nothing of any."""
        for rank in self.processes:
            self.kill(rank)
        for rank, process in self.processes.items():
            process.join()
            process.close()
            self.links[rank].close()
        for link in self.links.values():
            link.close()
        self.processes, self.links = {}, {}


def _run(
    rank: int, link: Connection, inherited: Iterable[Connection], limit: float | None, main: Main, args: Args
) -> NoReturn:
    """What a process does. An orderly exit would wait for peers that may be gone."""
    for other in inherited:
        other.close()
    # A collection that looked at what was inherited would copy its pages: 0.2 s each, with torch loaded.
    gc.freeze()
    if limit is not None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil(limit))
    torch.set_num_threads(1)
    try:
        outcome = Outcome(True, main(rank, link, *args))
    except BaseException as error:
        outcome = Outcome(False, _with_traceback(error))
    # pickled here: multiprocessing's own pickler sends tensors as handles of memory that ends with the
    # process
    with contextlib.suppress(BrokenPipeError, ConnectionError):
        link.send_bytes(_pickled(rank, outcome))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0 if outcome.ok else 1)


def _with_traceback(error: BaseException) -> BaseException:
    """The exception with its traceback as a note, since a traceback cannot be pickled."""
    with contextlib.suppress(Exception):  # Python 3.10 has no notes
        error.add_note("".join(traceback.format_exception(error)))
    return error


def _pickled(rank: int, outcome: Outcome) -> bytes:
    try:
        data = pickle.dumps(outcome)
        if not outcome.ok:
            pickle.loads(data)  # some exceptions can be written and not be read
        return data
    except Exception as error:
        problem = RuntimeError(f"rank {rank}: cannot send {outcome.value!r}: {error}")
        return pickle.dumps(Outcome(False, problem))
