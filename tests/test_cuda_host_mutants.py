"""The check that the checkers see, for the host code of csrc/cuda: one fault at a time is planted, and a
program of tests/test_cuda_group.py must find it. Those of the kernels: tests/test_cuda_mutants.py.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import compiled
import pytest
from cuda_host_faults import FAULTS
from planting import plant, programs_of, without_place
from test_cuda_group import CUDA, HOST, MAIN, mains
from test_cuda_host import ROOT
from test_sanitizers import core_sources
from tiers import tier

pytestmark = pytest.mark.timeout(900)  # of which most is for compilers on a busy machine
SECONDS = 150  # of a run; what takes longer hangs
EVERY = 6  # faults of which `make test-slow` has one
TRIES = 8


class Files(NamedTuple):
    """What a program is linked of."""

    extension: dict  # {source: object file}
    others: list  # the fake device and the programs


def files_of_programs() -> Files:
    sources = [*core_sources(ROOT / "csrc"), *HOST]
    extension = dict(zip(sources, compiled.built(sources), strict=True))
    return Files(extension, [compiled.fake_driver(), *compiled.fake_launch(), mains()])


def program_with(names: list[str], files: Files, folder: Path) -> Path:
    """The programs with these faults, as one: the first argument chooses."""
    root = folder / "_".join(names)[:60].replace(" ", "_").replace("/", "_")
    shutil.copytree(ROOT / "csrc", root / "csrc", ignore=shutil.ignore_patterns("torch", "bindings"))
    faults = [FAULTS[name] for name in names]
    plant(faults, root)
    changed = {CUDA / fault.file for fault in faults}
    flags = [*MAIN, "-w", "-include", root / "planted.h"]
    sources = sorted(root / source.relative_to(ROOT) for source in changed)
    own = compiled.unit_in(root, "faults", sources, flags)
    others = [target for source, target in files.extension.items() if source not in changed]
    return compiled.link([*others, *files.others, own], root / "programs")


def found(program, fault, number):
    """What the program says; None: it finds nothing."""
    command = [str(program), fault.program, *fault.suites.split(", ")]
    environment = {**os.environ, "PLANTED_FAULT": str(number)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return "it hangs"
    return None if done.returncode == 0 else done.stdout[-300:] or f"status {done.returncode}"


def survivors(names, folder):
    """The faults that are not found. Some show only if a thread looks at the right moment: TRIES of each."""
    files = files_of_programs()
    places = [
        (name, number, program)
        for members in programs_of(names, FAULTS)
        for program in [program_with(members, files, folder)]
        for number, name in enumerate(members, 1)
    ]

    def find(place):
        name, number, program = place
        text = next(filter(None, (found(program, FAULTS[name], number) for _ in range(TRIES))), None)
        print(f"{name}: {text}")  # for pytest -s
        return None if text else name

    return [name for name in compiled.in_parallel(find, places) if name]


def test_every_fault_has_its_place():
    lost = without_place(FAULTS)
    assert not lost, f"the sources have changed; say where these faults belong now: {lost}"


@tier(slow=1)
def test_a_fault_in_some_is_found(tmp_path):
    assert not survivors(list(FAULTS)[::EVERY], tmp_path)


@tier(deep=1)
@pytest.mark.timeout(2400)
def test_every_fault_is_found(tmp_path):
    assert not survivors(list(FAULTS), tmp_path)
