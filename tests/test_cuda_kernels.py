"""The CUDA kernels on a CPU (tests/cpp/cuda/kernel_test.cc): values of every form of every collective, and no
report by the sanitizers.

Weak: under a memory that delays and reorders relaxed accesses (weak_ctx.h), which no sanitizer sees.
Plain: every kernel x memory x protocol x size x number of ranks, every dtype x op, random calls under random
schedules. AddressSanitizer with UndefinedBehaviorSanitizer, and ThreadSanitizer: the same forms with fewer
types. tests/test_cuda_mutants.py shows what these see.
"""

import functools
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import compiled
import pytest
from test_fiber import SANITIZERS
from test_sanitizers import without_randomisation
from tiers import tier

ROOT = Path(__file__).parent.parent
TESTS = Path("tests", "cpp", "cuda")
PLANS = [
    Path("csrc", "cuda", f"{name}.cc")
    for name in ("planner", "plan_reduce", "plan_move", "plan_bracket", "plan_message", "choice", "announce")
]
KERNELS = TESTS / "kernel_launch.cc"
SUITES = [TESTS / f"{name}.cc" for name in ("kernel_test", "kernel_faults", "kernel_faults_more", "machine")]
# What all these call beside, which is correct without a sanitizer: as it was built for users.
BESIDE = [
    *sorted((ROOT / "csrc" / "arithmetic").glob("*.cc")),
    ROOT / "csrc" / "op" / "fingerprint.cc",
]
FLAGS = ["-std=c++20", "-O1", "-pthread", *compiled.WARNINGS, "-Wno-maybe-uninitialized", "-Werror"]
FEW_KERNELS, WEAK = "-DPYCOMM_FEW_KERNELS", "-DPYCOMM_WEAK"
BUILDS = {  # (flags of the kernels, flags of all)
    "plain": ([], []),
    "thread": ([FEW_KERNELS], SANITIZERS["thread"]),
    "weak": ([FEW_KERNELS, WEAK], []),
    "address": ([FEW_KERNELS], SANITIZERS["address"]),
}
# Each run makes and destroys thousands of buffers: the allocator keeps their memory.
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
JOBS = 2
SECONDS = 400  # of a run; the longest takes 15 on a free machine, and took 120 beside a load of 18
pytestmark = pytest.mark.timeout(1500)  # of which most is for compilers on a busy machine


def parts(sanitizer: list[str]) -> dict[str, list[Path]]:
    """{name: sources} of a program, as they are compiled together."""
    plans = {"plans": PLANS} if sanitizer else {path.stem: [path] for path in PLANS}
    return {"kernel_launch": [KERNELS], "kernel_suites": SUITES, **plans}


def compile_parts(kernels: list[str], sanitizer: list[str]) -> dict[str, Path]:
    """{name: object file}; `kernels` are flags of the kernels alone. Plans without a sanitizer are those that
    were built for users.
    """

    def compile_one(part: tuple[str, list[Path]]) -> Path:
        name, sources = part[0], [ROOT / source for source in part[1]]
        if not sanitizer and part[1][0] in PLANS:
            return compiled.built(sources)[0]
        flags = [*FLAGS, *sanitizer, *(["-g1"] if sanitizer else [])]
        flags += kernels if part[1] == [KERNELS] else []
        return compiled.unit(name, sources, flags)

    wanted = parts(sanitizer)
    return dict(zip(wanted, compiled.in_parallel(compile_one, wanted.items()), strict=True))


def beside() -> list[Path]:
    return [*compiled.built(BESIDE), *compiled.fibers()]


def build(folder: Path, name: str) -> Path:
    """The program."""
    kernels, sanitizer = BUILDS[name]
    files = [*compile_parts(kernels, sanitizer).values(), *beside()]
    return compiled.link(files, folder / name, sanitizer)


@pytest.fixture(scope="module")
def quick_program(tmp_path_factory):
    """All kernels, not optimised: the compiler takes longer than it runs."""
    flags = [*FLAGS, "-O0"]
    kernels = compiled.unit("kernel_launch", [ROOT / KERNELS], flags)
    suites = compiled.unit("kernel_suites", [ROOT / source for source in SUITES], flags)
    plans = compiled.built([ROOT / source for source in PLANS])
    return compiled.link(
        [kernels, suites, *plans, *beside()], tmp_path_factory.mktemp("cuda_kernels") / "quick"
    )


def run(program, arguments, seconds=SECONDS, **variables):
    """(exit status, output); with a sanitizer the program ends at its first report."""
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", **variables}
    result = subprocess.run(
        [*without_randomisation(), str(program), *arguments.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=seconds,
        env=environment,
    )
    return result.returncode, result.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """name -> its program, built when it is first asked for."""
    folder = tmp_path_factory.mktemp("cuda_kernels")
    return functools.cache(lambda name: build(folder, name))


def check_all(program, cases):
    with ThreadPoolExecutor(JOBS) as pool:
        outcomes = dict(zip(cases, pool.map(lambda case: run(program, case, **MEMORY), cases), strict=True))
    for case, (status, output) in outcomes.items():
        assert status == 0 and re.fullmatch(r"[1-9]\d* runs\n", output), (
            f"kernel_test {case} ended with {status}:\n{output[:8000]}"
        )


CASES = {
    "plain": [*(f"table {n}" for n in range(8, 0, -1)), *(f"random {seed} 150" for seed in range(1, 7)),
              "mutants 1 100", "forms 5 1", "values 4", "rings 1 100", "faults",
              *(f"streams {seed}" for seed in range(5)), "records 1"],
    "weak": ["forms 4 1", "mutants 1 60", "mutants 2 60", "rings 1 20", "faults", "streams 1", "records 1"],
    "address": [*(f"forms {n} {n}" for n in (4, 3, 2, 1)), *(f"random {seed} 60" for seed in (11, 12, 13)),
                "values 2", "rings 2 30", "faults", "streams 1", "streams 2", "records 2"],
    "thread": ["forms 4 3", "forms 3 2", "mutants 1 60", "random 21 25", "rings 3 15", "faults",
               "streams 1", "records 3"],
}  # fmt: skip
# Many more seeds, for changes of the kernels.
MANY_CASES = {
    "plain": [f"random {seed} 400" for seed in range(100, 140)],
    "weak": [f"{suite} {seed} 150" for suite in ("mutants", "random") for seed in range(100, 110)],
    "address": [f"random {seed} 200" for seed in range(100, 110)],
    "thread": [f"mutants {seed} 200" for seed in range(100, 110)]
    + [f"forms {n} {100 + n}" for n in (2, 5, 6, 7, 8)]
    + [f"random {seed} 25" for seed in (22, 23, 24)],
}


QUICK = ["values 3", "faults", "forms 3 1", "mutants 1 40", "rings 1 20", "records 1"]


@pytest.mark.parametrize("case", QUICK)
def test_values_and_faults(quick_program, case):
    check_all(quick_program, [case])


@tier(slow=1)
@pytest.mark.parametrize(
    "name",
    ["weak", "thread", *(pytest.param(name, marks=pytest.mark.deep) for name in ("plain", "address"))],
)
def test_values_and_reports(program, name):
    check_all(program(name), CASES[name])


@tier(deep=1)
@pytest.mark.parametrize("name", BUILDS)
def test_many_seeds(program, name, some):
    check_all(program(name), some(MANY_CASES[name]))


@tier(slow=1)
def test_every_suite_is_run(program):
    suites = run(program("weak"), "no such suite")[1].removeprefix("suites: ").strip().split(", ")
    assert set(suites) == {case.split()[0] for cases in CASES.values() for case in cases}
