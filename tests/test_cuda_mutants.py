"""The check that the checkers see: one fault at a time is planted into the CUDA kernels, and
tests/cpp/cuda/kernel_test.cc must find it.

A fault replaces one exact text of a source in csrc/cuda, which must occur exactly as often as said: so a
fault whose place has changed fails instead of testing nothing. What must find it:

    run    the plain program: a wrong value, a deadlock, a fault that the kernels report, or a crash, under
           one of a few seeds
    race   ThreadSanitizer: x86 shows no order that is too weak, and the fibers none at all
    weak   the plain program under the memory of weak_ctx.h: payloads are relaxed atomics, which are never a
           race
"""

import functools
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import test_cuda_kernels as kernels
from compiled import in_parallel, link, unit_in
from cuda_faults import FAULTS
from planting import plant, programs_of, without_place
from test_cuda_kernels import (
    FEW_KERNELS,
    ROOT,
    TESTS,
    WEAK,
    run,
)
from tiers import tier

pytestmark = pytest.mark.timeout(900)  # of which most is for compilers on a busy machine

FLAGS = ["-O0", "-g0", FEW_KERNELS]
DETECTORS = {  # (flags of the kernels, flags of all)
    "run": (FLAGS, []),
    "race": (FLAGS, ["-fsanitize=thread"]),
    "weak": ([*FLAGS, WEAK], []),
}
SUITES = {  # what kernel_test is asked for until something is found
    "run": {
        "collectives": [f"mutants {seed} 150" for seed in range(1, 5)],
        "dtypes": ["forms 5 1", "random 1 150", "random 2 150"],
        "rings": ["rings 1 60", "rings 2 60"],
        "messages": ["streams 1", "streams 2", "streams 3"],
        "faults": ["faults"],
    },
    "race": {
        "collectives": ["mutants 1 60", "mutants 2 60"],
        "rings": ["rings 1 20"],
        "messages": ["streams 1"],
    },
    "weak": {
        "collectives": ["mutants 1 60", "mutants 2 60", "forms 3 2"],
        "messages": ["streams 1"],
        "records": ["records 1", "records 2"],
    },
}


def recompiled(file: str, parts: dict[str, list[Path]]) -> list[str]:
    """The parts of the program that hold the code of `file`: kernels are templates, which one source
    instantiates.
    """
    if file == "sync_words.h":
        return ["kernel_suites"]
    source = Path("csrc", "cuda", file) if file.endswith(".cc") else kernels.KERNELS
    return [name for name, sources in parts.items() if source in sources]


class Base(NamedTuple):
    """The program without a fault, as one detector needs it."""

    sources: Path  # a copy, of the state that the objects are of
    flags: tuple
    objects: dict
    program: Path


def build(detector: str, folder: Path) -> Base:
    flags = DETECTORS[detector]
    sources = folder / "sources"
    shutil.copytree(ROOT / "csrc", sources / "csrc", ignore=shutil.ignore_patterns("torch"))
    shutil.copytree(ROOT / TESTS, sources / TESTS)
    objects = kernels.compile_parts(*flags)
    for copy in (path for path in sources.rglob("*") if path.is_file()):
        assert copy.read_bytes() == (ROOT / copy.relative_to(sources)).read_bytes(), "the sources change"
    program = link([*objects.values(), *kernels.beside()], folder / "base", flags[1])
    return Base(sources, flags, objects, program)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """base("run") is the Base for a detector, built when first asked for."""
    return functools.cache(lambda detector: build(detector, tmp_path_factory.mktemp(detector)))


def cases_for(fault):
    return SUITES[fault.detector][fault.suite or ("messages" if "message" in fault.file else "collectives")]


def outcome_of(detector, status, output):
    """What went wrong, or None."""
    if status == 0:
        return None
    if detector == "race":
        return "race" if "ThreadSanitizer: data race" in output else None
    found = re.search(
        r"is wrong|DEADLOCK|FAULT|reported fault|passed a barrier|a write beyond|expected:", output
    )
    return found[0] if found else f"signal {-status}" if status < 0 else None


def compile_with(names, base, folder):
    """The program with these faults."""
    root = Path(shutil.copytree(base.sources, folder))
    plant([FAULTS[name] for name in names], root)
    objects, parts = dict(base.objects), kernels.parts(base.flags[1])
    flags = ["-std=c++20", "-pthread", *base.flags[0], *base.flags[1], "-w", "-include", folder / "planted.h"]
    for part in {part for name in names for part in recompiled(FAULTS[name].file, parts)}:
        objects[part] = unit_in(folder, part, [root / source for source in parts[part]], flags)
    program = link([*objects.values(), *kernels.beside()], folder / "kernel_test", base.flags[1])
    for kept in (folder / "csrc", folder / "tests"):
        shutil.rmtree(kept)
    if len(names) > 1:
        status, output = run(program, cases_for(FAULTS[names[0]])[0], PLANTED_FAULT="0")
        assert status == 0, f"{names}: finds something while none of them acts:\n{output[-2000:]}"
    return program


def find(name, number, program):
    """(what was found or None, text)."""
    fault = FAULTS[name]
    output = ""
    for case in cases_for(fault):
        status, output = run(program, case, PLANTED_FAULT=str(number))
        if outcome := outcome_of(fault.detector, status, output):
            return outcome, f"{case}: {outcome}"
    return None, f"{cases_for(fault)} found nothing:\n{output[-1000:]}"


def test_every_fault_has_its_place():
    lost = without_place(FAULTS)
    assert not lost, f"the sources have changed; say where these faults belong now: {lost}"


def survivors(names, base, tmp_path):
    """The faults that are not found, with what was said."""
    for detector in {FAULTS[name].detector for name in names}:
        base(detector)

    def make(members):
        folder = tmp_path / re.sub(r"\W", "_", members[0])
        return compile_with(members, base(FAULTS[members[0]].detector), folder)

    def find_one(place):
        name, number, program = place
        outcome, text = find(name, number, program)
        print(f"{name}: {text}")  # for pytest -s
        return None if outcome else f"{name}: {text}"

    programs = programs_of(names, FAULTS, lambda one, other: one.detector == other.detector)
    made = in_parallel(make, programs)
    places = [
        (name, number, program)
        for members, program in zip(programs, made, strict=True)
        for number, name in enumerate(members, 1)
    ]
    return [text for text in in_parallel(find_one, places) if text]


@tier(slow=1)
def test_a_fault_is_found(base, tmp_path):
    assert not survivors(["epoch not advanced"], base, tmp_path)


@tier(slow=1)
def test_every_fault_is_found(base, tmp_path, deep):
    """In one test, two at a time."""
    assert not survivors(list(FAULTS) if deep else some_of(FAULTS), base, tmp_path)


def some_of(faults):
    """One of each detector, suite and file, if possible one that shares a program with others: a fault that
    needs another program is compiled alone.
    """
    programs = programs_of(faults, FAULTS, lambda one, other: one.detector == other.detector)
    first = {}
    for name in (name for members in sorted(programs, key=len, reverse=True) for name in members):
        first.setdefault((FAULTS[name].detector, FAULTS[name].suite, FAULTS[name].file), name)
    return list(first.values())


@tier(slow=1 / 3)
@pytest.mark.parametrize("detector", DETECTORS)
def test_nothing_is_found_without_a_fault(base, detector):
    cases = [case for cases in SUITES[detector].values() for case in cases]
    outcomes = in_parallel(lambda case: (case, run(base(detector).program, case)), cases)
    for case, (status, output) in outcomes:
        assert status == 0, f"{case} ended with {status}:\n{output[-5000:]}"
