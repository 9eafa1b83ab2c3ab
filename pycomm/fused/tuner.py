"""Measures which form of a problem is fastest on this machine, and remembers it on disk: what makes "never
slower" true.

At the first call of a problem on a CUDA device all ranks of the group compare what their caches say (decide).
If they agree, that is it: a few hundred bytes over the CPU side of the group, once. Otherwise all measure,
together: the plain form and each configuration of the kernel (config.candidates), in turns, on the tensors of
the call. The slowest rank's median counts, and a kernel must beat plain by MARGIN. While a graph is captured
nothing can be measured: then the table of choice.py decides, and a kernel runs only if it does so on all
ranks.

    cache file   {"H100 80GB HBM3, sm_90, triton 3.7.1, torch 2.13.0":
                     {"<problem>": {"form": "fused", "config": [...], "us": {...}}}}

Problems that differ little in m share an entry: m is rounded up to two significant bits, so that batches of
many lengths do not measure each. The file (PYCOMM_CACHE, else ~/.cache/pycomm/fused.json) is replaced as a
whole by rename; writers take turns by a lock on a file beside it. A file that is damaged, or cannot be read
or written, is as good as none: then the process measures for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import triton
from triton.runtime.errors import PTXASError

from pycomm import env
from pycomm.cached import read_json
from pycomm.fused import machine
from pycomm.fused.choice import Choice
from pycomm.fused.config import Config, candidates, fitting
from pycomm.fused.form import on_device_of
from pycomm.fused.form import run as run_form
from pycomm.fused.machine import exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import NotRequired

    from pycomm.fused.choice import Form
    from pycomm.fused.machine import Machine
    from pycomm.fused.plain import Result
    from pycomm.fused.problem import Problem
    from pycomm.fused.ranks import Ranks

__all__ = ["cache_path", "decide", "lookup", "tune"]

MOST_BYTES = 16 << 20  # of the cache file
MARGIN = 1.02
ROUNDS = 5
# Of calls of one form in a round: the host's part of the first is not hidden by the device's.
ROUND_SECONDS = 0.02
# Of staging, half of what it takes: one-shot is for small results, and what a form takes when it is measured
# the group keeps.
MOST_ONE_SHOT_BYTES = 64 << 20

# In errors of a form that another may not have: a pass of Triton's compiler, the driver's memory, code that
# loading.py refuses.
NO_FORM = ("PassManager::run failed", "CUDA_ERROR_OUT_OF_MEMORY", "gives wrong results")

LOCK_SECONDS = 5.0  # that another writer of the cache is waited for

_memory: dict[tuple[str, str], Choice | None] = {}  # by place and key_of, of this process


class Entry(TypedDict):
    """A Choice as JSON."""

    form: Form
    config: list[int] | None
    reason: str
    us: NotRequired[dict[str, float | None]]  # what plain and the best kernel took


def cache_path() -> Path:
    return Path(env.cache_folder()) / "fused.json"


def place(device: torch.device, ranks_on_device: int = 1) -> str:
    """What figures are valid for."""
    versions = f"triton {triton.__version__}, torch {torch.__version__}"
    if device.type != "cuda":
        return f"cpu, {versions}"
    major, minor = torch.cuda.get_device_capability(device)
    return (
        f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}, {ranks_on_device} ranks on it, {versions}"
    )


def rounded(m: int) -> int:
    """m, rounded up to two significant bits: 1, 2, 3, 4, 6, 8, 12, 16, .."""
    step = 1 << max(0, m.bit_length() - 2)
    return -(-m // step) * step


def key_of(problem: Problem) -> str:
    """What of a problem an entry is for, in numbers that all ranks have alike; of m and the pieces only the
    size.
    """
    problem = problem.shared()
    parts = [
        problem.op,
        rounded(problem.m),
        problem.n,
        problem.k,
        str(problem.dtype).partition(".")[2],
        problem.world_size,
    ]
    return " ".join(map(str, [*parts, problem.activation or "none", "bias" if problem.bias else "no_bias"]))


def lookup(problem: Problem, device: torch.device | str, ranks_on_device: int = 1) -> Choice | None:
    """What was measured for a problem in this process or found in the cache file."""
    where, key = place(torch.device(device), ranks_on_device), key_of(problem)
    if (where, key) not in _memory:
        _memory[where, key] = _find(_read(), where, key)
    return _memory[where, key]


def decide(
    problem: Problem,
    ranks: Ranks,
    device: torch.device,
    here: Machine,
    fallback: Choice,
    run: Callable[[Choice], Result],
) -> Choice:
    """The Choice of all ranks for a problem; collective at its first use in the group.

    fallback: this rank's Choice by the table; run(choice): computes the call in that form.
    """
    decided = ranks.cache.decided
    key = (device, key_of(problem))  # a process may have different GPUs
    if key not in decided:
        found = lookup(problem, device, here.ranks_on_device)
        known = exchange(ranks.communicator, _entry(found) if found else None)
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if found is not None and _alike(known):
            decided[key] = found
        elif capturing:
            said = exchange(ranks.communicator, _entry(fallback))
            return (
                fallback
                if _alike(said)
                else Choice(
                    "plain", 1, None, "the ranks' tables differ, and nothing can be measured during a capture"
                )
            )
        else:
            decided[key] = measure(problem, ranks, device, here, run)
    return decided[key]


def tune(
    problem: Problem, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, ranks: Ranks
) -> Choice:
    """Collective. Measures all forms of a problem on these tensors (as dispatch.forward takes them) and
    returns the best, which is from then on used and cached. Raises what the forms raise."""
    with on_device_of(a):
        choice = measure(
            problem,
            ranks,
            a.device,
            machine.of(ranks, a.device),
            lambda form: run_form(problem, form, a, b, bias, ranks),
        )
    ranks.cache.decided[a.device, key_of(problem)] = choice
    return choice


def measure(
    problem: Problem,
    ranks: Ranks,
    device: torch.device,
    here: Machine,
    run: Callable[[Choice], Result],
) -> Choice:
    """Collective: see tune."""
    plain = Choice("plain", 1, None, "")
    configs = candidates(problem.op, problem.dtype, here.arch, problem.panels, problem.activation)
    configs = list(
        dict.fromkeys(fitting(problem, config) for config in configs)
    )  # what comes to the same is measured once
    if here.ranks_on_device > 1:  # there movers are cut to a rank's share, so these would be the same
        configs = [
            config for config in configs if config.movers <= max(here.programs // 2, configs[0].movers)
        ]
    if (
        problem.world_size > 2
        and problem.world_size * problem.m * problem.columns * problem.dtype.itemsize > MOST_ONE_SHOT_BYTES
    ):
        configs = [config for config in configs if not config.one_shot]
    forms = [plain] + [Choice("fused", 1, config, "") for config in configs]
    seconds = [
        _once(run, form, device) for form in forms
    ]  # compiles, grows contexts, and tells how many calls a round takes
    usable = [
        form
        for form, times in zip(forms, zip(*exchange(ranks.communicator, seconds), strict=True), strict=True)
        if None not in times
    ]
    calls = max(1, min(100, int(ROUND_SECONDS / max(1e-6, _slowest(ranks, seconds[0] or ROUND_SECONDS)))))
    samples: dict[Choice, list[float]] = {form: [] for form in usable}
    for i in range(ROUNDS):
        for form in usable[i % len(usable) :] + usable[: i % len(usable)]:
            samples[form].append(_time(run, form, device, calls))
    medians = exchange(ranks.communicator, [statistics.median(samples[form]) for form in usable])
    times = dict(zip(usable, map(max, zip(*medians, strict=True)), strict=True))
    best = min(times, key=times.__getitem__)
    if times[best] * MARGIN > times[plain]:
        best = plain
    kernels = [form for form in times if form.name == "fused"]
    fastest = min(kernels, key=times.__getitem__, default=None)
    said = f"plain {1e6 * times[plain]:.4g} us" + (
        f", best kernel {1e6 * times[fastest]:.4g} us" if fastest else ", no kernel compiles"
    )
    choice = best._replace(reason=f"measured on this machine: {said}")
    where, key = place(device, here.ranks_on_device), key_of(problem)
    _memory[where, key] = choice
    if ranks.rank == 0:
        us = {"plain": 1e6 * times[plain], "kernel": 1e6 * times[fastest] if fastest else None}
        _write(where, key, {**_entry(choice), "us": us})
    return choice


def _once(run: Callable[[Choice], Result], form: Choice, device: torch.device) -> float | None:
    """Seconds of the second call of a form; None if this machine cannot run it (shared memory, registers,
    room for the staging).
    """
    try:
        run(form)
    except (triton.OutOfResources, triton.CompilationError, PTXASError):
        return None
    except RuntimeError as error:  # CommError is one: all ranks raise it when the staging of one has no room
        if not any(reason in str(error) for reason in NO_FORM):
            raise
        env.logger().debug("pycomm.fused: %s is not measured: %s", form.config, error)
        return None
    return _time(run, form, device, 1)


def _time(run: Callable[[Choice], Result], form: Choice, device: torch.device, calls: int) -> float:
    """Seconds per call on this rank."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(calls):
            run(form)
        return (time.perf_counter() - began) / calls
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        run(form)
    end.record()
    end.synchronize()
    return 1e-3 * begin.elapsed_time(end) / calls


def _slowest(ranks: Ranks, seconds: float) -> float:
    return max(exchange(ranks.communicator, seconds))


def _alike(entries: Sequence[Entry | None]) -> bool:
    """Whether all ranks have an entry, of one form."""
    first = entries[0]
    return first is not None and all(
        entry is not None and (entry["form"], entry["config"]) == (first["form"], first["config"])
        for entry in entries
    )


def _entry(choice: Choice) -> Entry:
    return {
        "form": choice.name,
        "config": list(choice.config) if choice.config else None,
        "reason": choice.reason,
    }


def _find(found: dict[str, Any], where: str, key: str) -> Choice | None:
    """The Choice of an entry of the cache. None: there is none, it is another version's, or it is damaged."""
    try:
        entry = found[where][key]
        config = Config(*entry["config"]) if entry["config"] else None
        choice = Choice(entry["form"], 1, config, entry["reason"])
    except (KeyError, TypeError):
        return None
    types = list(Config.__annotations__.values())
    sound = config is None or ([type(value) for value in config] == types and min(config[:7]) > 0)
    known = (choice.name, config is None) in {("plain", True), ("fused", False)}
    return choice if sound and known and isinstance(choice.reason, str) else None


def _read() -> dict[str, Any]:
    try:
        found = read_json(cache_path(), MOST_BYTES)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(where: str, key: str, entry: Entry) -> None:
    path = cache_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            found = _read()
            if not isinstance(found.get(where), dict):
                found[where] = {}
            found[where][key] = entry
            temporary = path.with_suffix(".new")
            temporary.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
            temporary.replace(path)
    except OSError as error:
        env.logger().warning("pycomm.fused: the measured choice cannot be cached in %s: %s", path, error)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Raises OSError where the lock cannot be had within LOCK_SECONDS: its holder may be stopped."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        limit = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise TimeoutError(f"another process has held {path} for {LOCK_SECONDS:g} s") from None
            time.sleep(0.01)
        yield
    finally:
        os.close(fd)
