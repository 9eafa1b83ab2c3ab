"""The steps of gpu-check: each a process with a limit of its own, so that a hang costs one step. Four parts
need nothing of each other:

    bench    the collectives' speed          values   their results, order, memory, torch.distributed
    fused    pycomm.fused                    faults   ranks that differ, do not come, die

Each part begins with the versions, the build where it is needed, and one all_reduce. Within a part the steps
stand in order of importance, since all of them share one limit: what does not fit into it is reported as not
run.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from gpu.checks import CHECKS
from pycomm import env

ROOT = Path(__file__).parents[2]
TRITON_CACHE = ROOT / "build" / "gpu_triton"  # of all steps and parts; `pack` fills it elsewhere
TOTAL_SECONDS = 480.0  # of all steps of a part; the report and the start come on top
LEAST_SECONDS = 8.0  # a step is not begun with less
SLACK = 3.0  # seconds between a check's own limit and ours: it stops early, and says what it did not reach
END_SECONDS = 10.0  # for a process to end after SIGKILL; one that waits in a driver may never do so
ON_GPU = ("--ranks-per-gpu", "PYCOMM_CUDA")  # words that are left out on host tensors
ONE_CHECK = ("{python}", "tests/gpu", "one")
OPS = "all_reduce,all_gather,all_to_all,reduce_scatter"
PRODUCTS = (
    "--shapes",
    "8192x8192x8192,4096x4096x4096",
    "--dtype",
    "bf16",
    "--activation",
    "bare,gelu_tanh,swiglu",
)
COLLECTIVES = "all_gather_matmul,matmul_reduce_scatter,matmul_all_reduce"
# A layer of 8192 on all ranks together, with many rows and with few.
FUSED = (
    "--op",
    COLLECTIVES,
    "--shapes",
    "8192x8192x1024,512x8192x1024",
    "--dtype",
    "bf16",
    "--ranks-as",
    "threads",
)
SIZES, GRAPH_SIZES, FEW_SIZES = "8K,64K,512K,4M,16M,64M,256M", "8K,64K,1M,16M,64M,256M", "8K,1M,64M"
START = ("versions", "build", "smoke")
PARTS = {
    "bench": (
        *START,
        *(
            f"bench_{name}"
            for name in ("8_graph", "8", "4_graph", "2_graph", "2_processes", "4_processes", "4", "2")
        ),
    ),
    "values": (
        *START,
        "queues",
        "values_threads",
        "graphs",
        "streams",
        "registered",
        "messages",
        "torch",
        "groups",
        "barrier",
        "arrays",
        "values_processes",
    ),
    "fused": (
        *START,
        "fused_values",
        "bench_fused_matmul",
        "bench_fused_8",
        "fused_order",
        "bench_fused_2",
        "bench_fused_4",
        "fused_tuned",
    ),
    "faults": (*START, "queues", "mismatches", "missing", "deaths"),
}


class Step(NamedTuple):
    name: str
    seconds: float  # its limit
    command: tuple  # of words; {python}, {seconds}, {records}, {json}, {device} are filled in
    about: str


class Outcome(NamedTuple):
    step: Step
    status: str  # "pass", "fail", "cut short" (passed as far as it came), "not run"
    seconds: float
    note: str = ""
    log: str = ""  # the end of what it printed
    records: tuple = ()  # of a check
    bench: dict | None = None  # of a benchmark


def _bench(name, seconds, about, *words):
    options = ("--device", "{device}", "--json", "{json}")
    return Step(name, seconds, ("{python}", "-m", "pycomm.benchmarks", *words, *options), about)


def _collectives(name, seconds, about, *words):
    return _bench(name, seconds, about, *words, "--timeout", "30")


def _fused(name, seconds, about, *words):
    """It begins no case when little time is left, so what it has measured by then is not lost."""
    limits = ("--rounds", "3", "--seconds", "0.03", "--limit", f"{0.75 * seconds:g}")
    return _bench(name, seconds, about, "fused", *words, *limits)


def _share(n):
    """Options for n ranks on one GPU."""
    return "--ranks", str(n), f"--ranks-per-gpu={n}"


def _with(variables):
    return ("env", *variables) if variables else ()


def _check(name, check):
    options = ("{records}", "--device", "{device}", "--seconds", "{seconds}")
    command = (*_with(check.variables), *ONE_CHECK, name, *options)
    return Step(name, check.seconds, command, check.about)


def all_steps():
    """Every step by its name."""
    checks = [_check(name, check) for name, check in CHECKS.items()]
    quick = ("--rounds", "3", "--seconds", "0.02")
    threads, processes = (
        ("--ranks-as", "threads", "--backends", "pycomm"),
        ("--ranks-as", "processes", "--backends", "pycomm,pycomm-torch"),
    )
    steps = [
        Step(
            "versions",
            30,
            ("{python}", "tests/gpu", "versions"),
            "driver, GPU, packages, compiler, commit",
        ),
        Step(
            "build",
            240,
            # Without CUDA, or for other GPUs, it would be of no use here.
            (
                *("env", "PYCOMM_CUDA=1", "PYCOMM_CUDA_ARCH=native"),
                *("{python}", "setup.py", "egg_info", "build_ext", "--inplace"),
            ),
            "the extension, into the source tree",
        ),
        *checks,
        _fused(
            "bench_fused_matmul", 90, "products with an epilogue beside cuBLAS", "--op", "matmul", *PRODUCTS
        ),
    ]
    for n, seconds, sizes in ((8, 90, SIZES), (4, 40, FEW_SIZES), (2, 40, FEW_SIZES)):
        ranks = (*_share(n), *threads, *quick)
        graph_sizes = GRAPH_SIZES if n == 8 else FEW_SIZES
        steps += [
            _collectives(f"bench_{n}", seconds, f"{n} threads on one GPU", OPS, *ranks, "--sizes", sizes),
            _collectives(
                f"bench_{n}_graph",
                seconds,
                f"{n} threads, replayed graphs",
                OPS,
                *ranks,
                "--sizes",
                graph_sizes,
                "--graph",
            ),
            _fused(f"bench_fused_{n}", 90, f"{n} threads, replayed graphs", *FUSED, "--graph", *_share(n)),
        ]
    for n in (2, 4):
        ranks = (*_share(n), *processes, *quick)
        steps.append(
            _collectives(
                f"bench_{n}_processes", 60, f"{n} processes on one GPU", OPS, *ranks, "--sizes", FEW_SIZES
            )
        )
    return {step.name: step for step in steps}


def choose(part=None, only=None):
    """The steps of a part, in its order, or those named in only (a list). Raises ValueError."""
    steps = all_steps()
    if part is not None and part not in PARTS:
        raise ValueError(f"no such part: {part}. There are: {', '.join(PARTS)}.")
    unknown = [name for name in only or () if name not in steps]
    if unknown:
        raise ValueError(f"no such step: {', '.join(unknown)}. There are: {', '.join(steps)}.")
    parts = [PARTS[part]] if part else PARTS.values()
    names = only or dict.fromkeys(name for names in parts for name in names)
    return [steps[name] for name in names]


def built():
    """Whether the extension is there, with CUDA, for the torch that runs this; asked of a new process."""
    code = "from pycomm import _C; import sys; sys.exit(not _C.built_with_cuda())"
    with tempfile.TemporaryFile() as ignored:
        return run_process([sys.executable, "-c", code], env.for_child(), ignored, 60.0)[0] == 0


def run_step(step, folder, limit, on="cuda"):
    """Runs a step for `limit` seconds at most and returns its Outcome. Its files go to folder."""
    folder.mkdir(parents=True, exist_ok=True)
    records, bench, log = (folder / f"{step.name}.{kind}" for kind in ("jsonl", "json", "log"))
    for file in (records, bench):
        file.unlink(missing_ok=True)
    words = {
        "python": sys.executable,
        "records": records,
        "json": bench,
        "device": on,
        "seconds": f"{max(1.0, limit - SLACK):.1f}",
    }
    command = [word.format(**words) for word in step.command if on == "cuda" or not word.startswith(ON_GPU)]
    child_env = env.for_child(
        TRITON_CACHE_DIR=TRITON_CACHE,
        CUDA_DEVICE_MAX_CONNECTIONS=env.THREAD_RANKS["CUDA_DEVICE_MAX_CONNECTIONS"],
        PYTHONUNBUFFERED=1,
        OMP_NUM_THREADS=1,
        RANK=None,
        WORLD_SIZE=None,
    )
    began = time.monotonic()
    with open(log, "w") as file:
        code, left = run_process(command, child_env, file, limit)
    seconds, found = round(time.monotonic() - began, 1), _lines(records)
    notes = _notes(step, code, found, limit) + ([left] if left else [])
    missed = [record for record in found if record.get("reached") is False]
    status = "fail" if notes else "cut short" if missed else "pass"
    notes += [f"{len(missed)} of {len(found)} records were not reached"] if missed else []
    said = log.read_text(errors="replace")[-4000:]
    return Outcome(step, status, seconds, "; ".join(notes), said, tuple(found), _object(bench))


def run_process(command, child_env, file, limit):
    """(exit status, None: it did not end in time; what could not be ended, or ""). Takes limit + END_SECONDS
    at most.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=child_env,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = None
    return code, _end_session(process)


def _end_session(process):
    """Ends what the step left behind: it is in the session that we made for it. Returns "" or what is left of
    it.
    """
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        return f"process {process.pid} is still there {END_SECONDS:g} s after SIGKILL: it waits in a driver"
    return ""


def _notes(step, code, records, limit):
    """What went wrong in a step, as texts. code: its exit status; None: it did not end in time."""
    wrong = [record for record in records if record["ok"] is False]
    notes = [f"did not end within {limit:.0f} s"] if code is None else [f"ended with {code}"] if code else []
    if wrong:
        notes.append(f"{len(wrong)} of {len(records)} records failed")
    if code == 0 and not records and set(ONE_CHECK) <= set(step.command):
        notes.append("it recorded nothing")
    return notes


def run_all(steps, folder, total=TOTAL_SECONDS, on="cuda", tell=print, done=lambda outcomes: None):
    """Runs the steps one after the other and returns their Outcomes; whatever happens, one for each. done is
    called with those so far after every step.
    """
    deadline, outcomes = time.monotonic() + total, []
    for step in steps:
        left = deadline - time.monotonic()
        failed_build = any(done.step.name == "build" and done.status == "fail" for done in outcomes)
        if failed_build or left < LEAST_SECONDS:
            note = "the build failed" if failed_build else f"the time of {total:.0f} s had run out"
            outcomes.append(Outcome(step, "not run", 0.0, note))
            tell(f"         {step.name}: not run, {note}")
            continue
        limit = min(step.seconds, left)
        tell(f"{total - left:6.0f} s {step.name}: {step.about} (at most {limit:.0f} s)")
        outcome = run_step(step, folder, limit, on)
        outcomes.append(outcome)
        done(outcomes)
        tell(
            f"         {step.name}: {outcome.status} after {outcome.seconds:.1f} s"
            + (f" ({outcome.note})" if outcome.note else "")
        )
        for line in problems(outcome)[:6]:
            tell(f"           {line[:300]}")
    return outcomes


def problems(outcome):
    """What to show of a step that failed: its failed records, else the end of its log."""
    if outcome.status == "pass":
        return []
    wrong = [
        f"{record['case']}: {' '.join(record['detail'].split())}"
        for record in outcome.records
        if record["ok"] is False
    ]
    return wrong or [line for line in outcome.log.splitlines() if line.strip()][-6:]


def _lines(path):
    if not path.exists():
        return []
    found = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # cut off when the step was ended
            continue
    return found


def _object(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
