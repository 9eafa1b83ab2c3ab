"""The runtime that runs CUDA kernels on a CPU (tests/cpp/cuda/fiber.h): tests/cpp/cuda/fiber_test.cc, plain,
under ThreadSanitizer, and under AddressSanitizer with UndefinedBehaviorSanitizer.

The scheduler is never instrumented ([Note: instrumented and not], fiber_core.h).
"""

import functools
import os
import re
import subprocess
from pathlib import Path

import compiled
import pytest
from test_sanitizers import without_randomisation
from tiers import tier

FOLDER = Path(__file__).parent / "cpp" / "cuda"
INSTRUMENTED = [FOLDER / "machine.cc", FOLDER / "fiber_test.cc"]
FLAGS = ["-std=c++20", "-O0", "-g1", "-pthread", *compiled.WARNINGS, "-Werror"]
SANITIZERS = {
    "plain": [],
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
}
pytestmark = pytest.mark.timeout(300)  # of which most is for compilers on a busy machine


def build(folder: Path, sanitizer: str) -> Path:
    flags = SANITIZERS[sanitizer]
    own = compiled.unit("fiber_test", INSTRUMENTED, [*FLAGS, *flags])
    return compiled.link([*compiled.fibers(), own], folder / sanitizer, flags)


def run(program, case, seconds=60):
    """(exit status, output); with ThreadSanitizer the program ends at its first report."""
    command = [*without_randomisation(), str(program), case]
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, env=environment
    )
    return result.returncode, result.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Of a sanitizer; compiled when it is first asked for."""
    return functools.cache(functools.partial(build, tmp_path_factory.mktemp("fiber")))


VALUES = ["exchange", "two_streams", "stream_values", "block_functions", "multimem", "words", "counter",
          "deadlock", "timeouts", "traps", "os_threads", "processes", "same_seed_same_run",
          "gpu_scope_in_rank", "many_machines", "missed_store"]  # fmt: skip
FAULTS = ["sync_before_post", "sync_after_wait", "relaxed_post", "relaxed_wait", "gpu_post", "gpu_wait",
          "shared_race", "no_end_barrier", "no_event"]  # fmt: skip


@pytest.mark.parametrize("case", VALUES)
@pytest.mark.parametrize(
    "sanitizer", [pytest.param(name, marks=[pytest.mark.slow] * (name != "plain")) for name in SANITIZERS]
)
def test_runs_without_report(program, sanitizer, case):
    status, output = run(program(sanitizer), case)
    assert status == 0 and output == f"{case} ok\n", f"{case} ended with {status}:\n{output[-5000:]}"


@pytest.mark.parametrize("case", ["large", "values_show_fault"])
def test_plain(program, case):
    """Many threads, and a fault that shows in the values: under ThreadSanitizer the first is slow and the
    second a race.
    """
    status, output = run(program("plain"), case)
    assert status == 0 and output.endswith(f"{case} ok\n"), f"{case} ended with {status}:\n{output[-5000:]}"


@tier(slow=1)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_a_race(program, fault):
    """x86 does not show these faults in values; ThreadSanitizer must, and must name the CUDA thread."""
    status, output = run(program("thread"), f"fault_{fault}")
    assert status == 66 and "ThreadSanitizer: data race" in output, (
        f"no race was reported; exit status {status}:\n{output[-5000:]}"
    )
    thread = (
        r"rank0\.stream1\.block0\.thread2" if fault == "no_event" else r"rank[01]\.block[01]\.thread[0-7]"
    )
    assert re.search(thread, output), output[:5000]


def test_scheduler_shares_no_code():
    """No inline function of the scheduler may be merged with an instrumented copy: [Note: instrumented and
    not].
    """
    for path in compiled.fibers():
        symbols = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True)
        assert " T pycomm" in symbols.stdout and not re.findall(r"^\w+ W .*", symbols.stdout, re.M)


def test_every_case_is_run(program):
    cases = run(program("plain"), "no such case")[1].split()
    assert sorted(cases) == sorted(
        [*VALUES, "large", "values_show_fault", *(f"fault_{fault}" for fault in FAULTS)]
    )
