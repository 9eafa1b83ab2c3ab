"""The core under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer: tests/cpp/stress.cc with
no report at all.

[Note: fences] GCC's ThreadSanitizer does not model atomic_thread_fence (it warns so, -Wtsan). The core uses
fences only for the decision whether a sleeper must be woken (csrc/transport/wait.h); data are ordered by
acquire and release alone, so nothing is suppressed here.
"""

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import compiled
import pytest
from tiers import tier

ROOT = Path(__file__).parent.parent
FLAGS = ["-std=c++20", "-O1", "-g1", "-pthread"]
SANITIZERS = {
    "thread": ["-fsanitize=thread", "-Wno-tsan"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
}
JOBS = 2
ROUNDS = 60  # of a run
SECONDS = 100  # of a run; one takes about one second on a free machine
pytestmark = pytest.mark.timeout(600)  # of which most is for compilers on a busy machine


def core_sources(csrc):
    """All of the core, without Python and torch."""
    folders = ("memory", "trace", "transport", "arithmetic", "op", "communicator", "collectives", "hosts")
    return sorted(path for folder in folders for path in (csrc / folder).glob("*.cc"))


def level_here() -> str:
    """The SIMD level that csrc/arithmetic/reduce.cc takes on this CPU."""
    words = set(Path("/proc/cpuinfo").read_text().split())
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= words:
        return "avx512"
    return "avx2" if "avx2" in words else "baseline"


def units(root: Path) -> dict[str, list[Path]]:
    """{name: sources} of the program, as they are compiled together; `root` holds csrc and tests."""
    levels = f"kernels_{level_here()}"
    sources = [path for path in core_sources(root / "csrc") if not path.stem.startswith("kernels_")]
    return {
        "collectives": [path for path in sources if path.parent.name == "collectives"],
        "core": [
            *(path for path in sources if path.parent.name != "collectives"),
            *(root / "tests" / "cpp" / name for name in ("one_level.cc", "stress.cc")),
        ],
        levels: [root / "csrc" / "arithmetic" / f"{levels}.cc"],
    }


def compile_units(
    wanted: dict[str, list[Path]], sanitizer: str, compile: Callable = compiled.unit
) -> dict[str, Path]:
    """{name: object file}, two compilers at a time."""

    def compile_one(name: str) -> Path:
        flags = [*FLAGS, *SANITIZERS[sanitizer], f"-DPYCOMM_LEVEL_{level_here()}"]
        if sanitizer == "address" and name.startswith("kernels"):  # minutes else
            flags.append("-fno-sanitize=undefined")
        return compile(name, wanted[name], flags)

    return dict(zip(wanted, compiled.in_parallel(compile_one, wanted), strict=True))


def link(objects: dict[str, Path], target: Path, sanitizer: str) -> Path:
    wrap = "-Wl,--wrap=mmap,--wrap=munmap"  # see stress.cc
    return compiled.link(objects.values(), target, [*FLAGS, *SANITIZERS[sanitizer], wrap])


@pytest.fixture(scope="module")
def stress(tmp_path_factory):
    """stress("thread") is (program, its object files), built when first asked for."""
    built = {}

    def build(sanitizer):
        if sanitizer not in built:
            objects = compile_units(units(ROOT), sanitizer)
            folder = tmp_path_factory.mktemp(sanitizer)
            built[sanitizer] = link(objects, folder / "stress", sanitizer), objects
        return built[sanitizer]

    return build


def without_randomisation():
    """A prefix for commands: randomised addresses confuse older sanitizers. Empty where it is not
    permitted.
    """
    prefix = ["setarch", "-R"]
    works = shutil.which("setarch") and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    return prefix if works else []


def run(program, seed, ranks, reach, ending, hosts=None):
    """(exit status, output) of a run, which ends with its first report: to print one costs more
    than the run.
    """
    command = [*without_randomisation(), str(program), str(seed), str(ranks), str(ROUNDS), reach, ending]
    command += [hosts] if hosts else []
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS, env=environment
    )
    return result.returncode, result.stdout


def check(outcomes):
    for arguments, (status, output) in outcomes.items():
        assert "Sanitizer" not in output and "runtime error" not in output, (
            f"stress {arguments}:\n{output[:6000]}"
        )
        assert status == 0 and re.search(
            r"^[1-9]\d* collectives, [1-9]\d* messages, [1-9]\d* expected errors, 0 wrong$", output, re.M
        ), f"stress {arguments} ended with {status}:\n{output[-3000:]}"


def run_all(program, cases):
    with ThreadPoolExecutor(JOBS) as pool:
        return dict(zip(cases, pool.map(lambda case: run(program, *case), cases), strict=True))


ENDINGS = ("close", "abort", "leave", "timeout")
CASES = [(1, 2, "pointer", "close"), (2, 4, "pointer", "leave"), (3, 3, "pointer", "timeout"),
         (4, 2, "none", "leave"), (5, 4, "none", "abort"), (6, 3, "none", "close"),
         (7, 3, "none", "close")]  # fmt: skip
HOSTS_CASES = [(1, 2, "pointer", "close", "01"), (2, 4, "pointer", "leave", "0101"),
               (3, 4, "none", "abort", "0012"), (4, 3, "pointer", "close", "011")]  # fmt: skip
FAULT_CASES = CASES[-2:]  # those for the planted faults; clean without them
MANY_CASES = [
    (seed, ranks, reach, ENDINGS[seed % 4])
    for seed in range(10, 22)
    for ranks in (2, 3, 4)
    for reach in ("pointer", "none")
]
MANY_CASES += [
    (seed, len(hosts), reach, ENDINGS[seed % 3], hosts)
    for seed in range(22, 28)
    for hosts in ("01", "0101", "0012")
    for reach in ("pointer", "none")
]


# Of the two, ThreadSanitizer sees what is most likely to break: the order of two ranks.
@tier(slow=1)
@pytest.mark.parametrize(
    "sanitizer",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "thread")) for name in SANITIZERS],
)
def test_no_report(stress, sanitizer):
    program, _ = stress(sanitizer)
    cases = [*CASES, *HOSTS_CASES]
    check(run_all(program, cases if sanitizer == "thread" else [*cases, (8, 3, "kernel", "close")]))


@tier(deep=1)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_no_report_in_many_runs(stress, sanitizer, some):
    check(run_all(stress(sanitizer)[0], some(MANY_CASES)))


@tier(slow=1)
def test_end_of_a_work(tmp_path):
    """Whoever sees a work done may free it at once."""
    source = ROOT / "tests" / "cpp" / "work_test.cc"
    flags = [*FLAGS, *SANITIZERS["thread"]]
    program = compiled.link([compiled.object_file(source, flags)], tmp_path / "work_test", flags)
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    command = [*without_randomisation(), str(program)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    assert "Sanitizer" not in result.stderr and result.returncode == 0, result.stderr[:6000] + result.stdout
    assert result.stdout == "4 passed, 0 failed\n", result.stdout


# One ordering of the core each, made too weak: (file, what it says, what the planted fault says).
FAULTS = {
    "filled": (
        "collectives/pipeline.h",
        "counters(call.rank, stage)->value.store(step, std::memory_order_release)",
        "relaxed",
    ),
    "header": (
        "collectives/call.cc",
        "slot.key.store(pack_key(op, sequence), std::memory_order_release)",
        "relaxed",
    ),
    "message": (
        "collectives/outgoing.cc",
        "slot.id.store(posted_, std::memory_order_release)",
        "relaxed",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_place_of_a_planted_fault(fault):
    """Quick, so that a change of the core learns at once that the slow test below must follow."""
    name, correct, _ = FAULTS[fault]
    count = (ROOT / "csrc" / name).read_text().count(correct)
    assert count == 1, f"{name} has changed: say where it stores with release order now"


@tier(slow=1)
@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.deep] * (name == "filled")) for name in FAULTS]
)
def test_planted_fault_is_reported(stress, fault, tmp_path):
    """The check that the checker sees: with one release weakened to relaxed, ThreadSanitizer must find a data
    race.
    """
    _, objects = stress("thread")
    name, correct, weak = FAULTS[fault]
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc", ignore=shutil.ignore_patterns("torch"))
    shutil.copytree(ROOT / "tests" / "cpp", tmp_path / "tests" / "cpp")
    file = tmp_path / "csrc" / name
    text = file.read_text()
    file.write_text(text.replace(correct, correct.replace("memory_order_release", f"memory_order_{weak}")))
    users = {
        unit: sources
        for unit, sources in units(tmp_path).items()
        if any(path == file or f'{file.name}"' in path.read_text() for path in sources)
    }
    changed = compile_units(users, "thread", functools.partial(compiled.unit_in, tmp_path))
    program = link({**objects, **changed}, tmp_path / "stress", "thread")
    outputs = [output for _, output in run_all(program, FAULT_CASES).values()]
    assert any("ThreadSanitizer: data race" in output for output in outputs), outputs
