"""Ranks on one GPU for the checks, and the record of what they found.

A body is a function body(comm, check, ...) that runs on every rank and returns "" when all is well, else what
is wrong. Threads have a stream each, and so have processes. A process that has used CUDA must not fork, so a
check is gone through twice: first its ranks that are processes run, and what concerns threads is passed over;
then the other way round (Check.now). With device "cpu" the same bodies run on host tensors, which is how the
checks themselves are tested without a GPU.

Records go to a file line by line, so that what was found before a hang is not lost with the process.
"""

import contextlib
import json
import time
import traceback

import torch

LEAST_SECONDS = 1.0  # a case is not begun with less
TIMEOUT = 10.0  # seconds of an operation whose peers do not come, unless a check says otherwise
CYCLES_PER_SECOND = (
    2.0e9  # of torch.cuda._sleep: at most so many, since a check needs at least the time it asked for
)
MAX_TEXT = 600  # characters of an error in a record


class Check:
    """One check under way: where it runs and what it found."""

    def __init__(self, name, path, *, on="cuda", seconds=60.0):
        self.name, self.path, self.on = name, path, on
        self.deadline = time.monotonic() + seconds
        self.failed = 0
        self.now = "processes"  # or "threads": what runs at present

    def go_through(self, steps):
        """Runs steps(self) twice. An error in it is recorded too."""
        for self.now in ("processes", "threads"):
            try:
                steps(self)
            except Exception as error:
                self.record(f"with {self.now}", False, "".join(traceback.format_exception(error))[-MAX_TEXT:])

    def left(self):
        return self.deadline - time.monotonic()

    def record(self, case, ok, detail="", **more):
        """Appends a line. ok: True, False, or None for what does not apply here."""
        self.failed += ok is False
        line = json.dumps(
            {"check": self.name, "case": case, "ok": ok, "detail": str(detail)[:MAX_TEXT], **more}
        )
        with open(self.path, "a") as file:
            file.write(line + "\n")

    def not_reached(self, case, why="the time ran out"):
        """Appends a line for what was not tried: neither right nor wrong."""
        self.record(case, None, f"not reached: {why}", reached=False)

    def run(self, world_size, body, *args, mode="threads", timeout=TIMEOUT, seconds=None, **options):
        """body on every rank; the results by rank, with the exception of a rank that failed in its place. []
        when it is not their turn.
        """
        if mode != self.now:
            return []
        from pycomm import testing  # needs the extension, which is built after the table of checks was read

        seconds = min(seconds or 60.0, max(1.0, self.left()))
        devices = ["cuda:0"] * world_size if self.on == "cuda" else None
        options |= {"mode": mode, "devices": devices, "timeout": seconds, "operation_timeout": timeout}
        return testing.run_ranks(world_size, on_device, self, body, args, fail=False, **options)

    def each(self, case, world_size, body, *args, mode="threads", **options):
        """Runs body and records it as one case, when it is the turn of `mode`."""
        if mode != self.now:
            return
        if self.left() < LEAST_SECONDS:
            self.not_reached(f"{case}, {world_size} {mode}")
            return
        began = time.monotonic()
        texts = [describe(result) for result in self.run(world_size, body, *args, mode=mode, **options)]
        problems = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        self.record(
            f"{case}, {world_size} {mode}",
            not problems,
            "; ".join(problems),
            seconds=round(time.monotonic() - began, 2),
        )

    def together(self, cases, world_size, *, mode="processes", **options):
        """Runs the bodies of cases, [(case, body, *arguments)], one after the other in one group, and records
        each: a process takes seconds to begin with CUDA. What follows a body that raises is not run.
        """
        if mode != self.now:
            return
        if self.left() < LEAST_SECONDS:
            for case, *_ in cases:
                self.not_reached(f"{case}, {world_size} {mode}")
            return
        results = self.run(world_size, in_turn, cases, mode=mode, **options)
        for number, (case, *_) in enumerate(cases):
            problems = []
            for rank, result in enumerate(results):
                texts = [describe(result)] if isinstance(result, BaseException) else result
                text = texts[number] if number < len(texts) else "not run"
                problems += [f"rank {rank}: {text}"] if text else []
            self.record(f"{case}, {world_size} {mode}", not problems, "; ".join(problems))

    def tensor(self, values, dtype=None):
        return torch.as_tensor(values, dtype=dtype).to(self.on)


def in_turn(comm, check, cases):
    """What went wrong in each body, up to the first that raises."""
    texts = []
    for _, body, *args in cases:
        try:
            texts.append(body(comm, check, *args))
        except Exception as error:
            return [*texts, describe(error)]
        settle(check, comm)
    return texts


def on_device(comm, check, body, args):
    """What a rank does: run the body, wait for what was enqueued."""
    result = body(comm, check, *args)
    wait(check)
    return result


def describe(result):
    """A rank's result as text: "" when all is well."""
    if isinstance(result, BaseException):
        return f"{type(result).__name__}: {result}"
    return result or ""


def settle(check, comm):
    """Waits for this rank's stream, then for all ranks. See [Note: ranks that share a GPU] in device.py."""
    if check.on == "cuda":
        torch.cuda.current_stream().synchronize()
    comm.barrier()


def wait(check):
    """Until all that this rank enqueued is done."""
    if check.on == "cuda":
        torch.cuda.current_stream().synchronize()


def delay(check, seconds):
    """Keeps the current stream busy; the host goes on."""
    if check.on == "cuda":
        torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))


def stream(check):
    """A new stream as a context; nothing on the CPU."""
    return torch.cuda.stream(torch.cuda.Stream()) if check.on == "cuda" else contextlib.nullcontext()


def differs(got, expected, what="result"):
    """ "" when a tensor equals `expected` (a tensor or a number), else how it differs. Copies to the host: it
    waits for the stream.
    """
    got = got.detach().cpu()
    expected = torch.full_like(got, expected) if not isinstance(expected, torch.Tensor) else expected.cpu()
    if got.shape != expected.shape:
        return f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    wrong = (got != expected).flatten().nonzero().flatten()
    if not len(wrong):
        return ""
    first = int(wrong[0])
    return (
        f"{what}: {len(wrong)} of {got.numel()} elements wrong, first at {first}: "
        f"{got.flatten()[first].item()}, expected {expected.flatten()[first].item()}"
    )
