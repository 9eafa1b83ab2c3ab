"""The check that the checkers see: one fault at a time is planted into the CUDA kernels, and
tests/cpp/cuda/kernel_test.cc must find it.

A fault replaces one exact text of a source in csrc/cuda, which must occur exactly as often as said: so a
fault whose place has changed fails instead of testing nothing. What must find it:

    run    the plain program: a wrong value, a deadlock, a fault that the kernels report, or a crash, under
           one of a few seeds
    race   ThreadSanitizer: x86 shows no order that is too weak, and the fibers none at all
    weak   the plain program under the memory of weak_ctx.h: payloads are relaxed atomics, which are never a
           race

[Note: several faults in one program] Compiling takes longer than running. So faults whose texts are whole
statements or expressions go into one program, where a number chooses which one acts: `{ if (planted_fault ==
7) { new } else { old } }`. The others, and those whose place is taken, have programs of their own.
"""

import functools
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import test_cuda_kernels as kernels
from compiled import command, in_parallel, link, standard
from cuda_faults import FAULTS
from test_cuda_kernels import (
    FEW_KERNELS,
    OWN,
    ROOT,
    TESTS,
    WEAK,
    run,
)

pytestmark = pytest.mark.timeout(900)  # of which most is for compilers on a busy machine

FLAGS = ["-O0", "-g0", FEW_KERNELS]
DETECTORS = {"run": FLAGS, "race": [*FLAGS, "-fsanitize=thread"], "weak": [*FLAGS, WEAK]}
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
PLANTED = """#include <cstdlib>
inline const int planted_fault = std::getenv("PLANTED_FAULT") ? std::atoi(std::getenv("PLANTED_FAULT")) : 0;
"""


def recompiled(file):
    """The sources that hold the code of `file`: kernels are templates, which one source instantiates."""
    if file.endswith(".cc"):
        return [Path("csrc", "cuda", file)]
    users = ("kernel_test", "kernel_faults") if file == "sync_words.h" else ("kernel_launch",)
    return [TESTS / f"{name}.cc" for name in users]


def compile_all(jobs):
    """jobs: (root of the sources, source, object file, flags). Not kept by compiled.py: the copies of the
    sources are of this run.
    """
    in_parallel(lambda job: command([*kernels.FLAGS, *job[3], "-c", job[0] / job[1], "-o", job[2]]), jobs)


class Base(NamedTuple):
    """The program without a fault, as one detector needs it."""

    sources: Path  # a copy, so that all objects are of one state
    flags: list
    objects: dict
    program: Path


def build(detector, folder):
    sources = folder / "sources"
    shutil.copytree(ROOT / "csrc", sources / "csrc", ignore=shutil.ignore_patterns("torch"))
    shutil.copytree(ROOT / TESTS, sources / TESTS)
    flags = DETECTORS[detector]
    with_header = [*flags, *standard([*kernels.FLAGS, *flags])]
    own = {source: folder / f"{source.parent.name}-{source.stem}.o" for source in OWN}
    compile_all([(sources, source, target, with_header) for source, target in own.items()])
    objects = {**own, **kernels.beside()}
    return Base(sources, with_header, objects, link(objects.values(), folder / "base", flags))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """base("run") is the Base for a detector, built when first asked for."""
    return functools.cache(lambda detector: build(detector, tmp_path_factory.mktemp(detector)))


DECLARATION = re.compile(r"^\s*(?:const|auto|bool|u?int\d*(?:_t)?|Span|U4|Announcement)\b[^;(]*=", re.M)


def _closed(text):
    """Every bracket has its partner in the text."""
    open_ones = []
    for letter in re.findall(r"[][(){}]", text):
        if letter in "([{":
            open_ones.append(letter)
        elif not open_ones or open_ones.pop() + letter not in ("()", "[]", "{}"):
            return False
    return not open_ones


def places_of(fault):
    """[(begin, end), ...] of its text in its file."""
    text = (ROOT / "csrc" / "cuda" / fault.file).read_text()
    return [found.span() for found in re.finditer(re.escape(fault.old), text)]


def is_statements(fault):
    """Can what it replaces, and what it puts there, stand in braces?"""
    text = (ROOT / "csrc" / "cuda" / fault.file).read_text()
    begin, end = places_of(fault)[0]
    before, after = text[:begin].rstrip(), text[end:].lstrip()
    whole = before[-1] in ";{})" and not (after.startswith("else") and fault.old.startswith("if"))
    return whole and all(
        not each.strip() or (each.rstrip()[-1] in ";}" and _closed(each) and not DECLARATION.search(each))
        for each in (fault.old, fault.new)
    )


def is_expression(fault):
    """Is it a whole argument, operand or value, and so is what it puts there?"""
    text = (ROOT / "csrc" / "cuda" / fault.file).read_text()
    begin, end = places_of(fault)[0]
    before, after = text[:begin].rstrip(), text[end:].lstrip()
    return (
        fault.times == 1
        and (before[-1] in "(,[" or before.endswith("return"))
        and after[0] in "),;]"
        and all(each and ";" not in each and "=" not in each.replace("==", "") and _closed(each)
                for each in (fault.old, fault.new))
    )  # fmt: skip


def programs_of(names):
    """The names, those together that go into one program. See [Note: several faults in one program]."""
    together, alone = [], []
    for name in names:
        fault = FAULTS[name]
        if not (is_statements(fault) or is_expression(fault)):
            alone.append([name])
        elif members := next((each for each in together if has_room(each, fault)), None):
            members.append(name)
        else:
            together.append([name])
    return together + alone


def has_room(members, fault):
    """Is no place of the fault taken in the program of these?"""
    others = [FAULTS[name] for name in members]
    taken = [place for other in others if other.file == fault.file for place in places_of(other)]
    free = all(end <= b or begin >= e for begin, end in places_of(fault) for b, e in taken)
    return free and others[0].detector == fault.detector


def planted(names, sources, folder):
    """A copy of the sources with these faults; the n-th acts where PLANTED_FAULT=n, a single one always."""
    shutil.copytree(sources, folder)
    (folder / "planted.h").write_text(PLANTED)
    edits = {}  # {file: [(begin, end, text)]}
    for number, name in enumerate(names, 1):
        fault = FAULTS[name]
        text = fault.new
        if len(names) > 1:
            text = f"{{ if (planted_fault == {number}) {{ {text} }} else {{ {fault.old} }} }}"
            if is_expression(fault):
                text = f"(planted_fault == {number} ? ({fault.new}) : ({fault.old}))"
        edits.setdefault(fault.file, []).extend((*place, text) for place in places_of(fault))
    for name, changes in edits.items():
        file = folder / "csrc" / "cuda" / name
        text = file.read_text()
        for begin, end, new in sorted(changes, reverse=True):
            text = text[:begin] + new + text[end:]
        file.write_text(text)
    return folder


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
    root = planted(names, base.sources, folder)
    objects = dict(base.objects)
    for source in {source for name in names for source in recompiled(FAULTS[name].file)}:
        objects[source] = folder / f"{source.stem}.o"
        flags = [*base.flags, "-include", folder / "planted.h"]
        command(["-std=c++20", "-pthread", *flags, "-w", "-c", root / source, "-o", objects[source]])
    program = link(objects.values(), folder / "kernel_test", DETECTORS[FAULTS[names[0]].detector])
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
    texts = {fault.file: (ROOT / "csrc" / "cuda" / fault.file).read_text() for fault in FAULTS.values()}
    lost = [
        f"{name} ({fault.file})"
        for name, fault in FAULTS.items()
        if texts[fault.file].count(fault.old) != fault.times
    ]
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

    programs = programs_of(names)
    made = in_parallel(make, programs)
    places = [
        (name, number, program)
        for members, program in zip(programs, made, strict=True)
        for number, name in enumerate(members, 1)
    ]
    return [text for text in in_parallel(find_one, places) if text]


def test_a_fault_is_found(base, tmp_path):
    assert not survivors(["epoch not advanced"], base, tmp_path)


@pytest.mark.slow
def test_every_fault_is_found(base, tmp_path):
    """All in one test, two at a time."""
    assert not survivors(FAULTS, base, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("detector", DETECTORS)
def test_nothing_is_found_without_a_fault(base, detector):
    cases = [case for cases in SUITES[detector].values() for case in cases]
    outcomes = in_parallel(lambda case: (case, run(base(detector).program, case)), cases)
    for case, (status, output) in outcomes:
        assert status == 0, f"{case} ended with {status}:\n{output[-5000:]}"
