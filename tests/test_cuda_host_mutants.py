"""The check that the checkers see, for the host code of csrc/cuda: one fault at a time is planted, and a
program of tests/test_cuda_group.py must find it. Those of the kernels: tests/test_cuda_mutants.py.
"""

import os
import shutil
import subprocess

import compiled
import pytest
from cuda_host_faults import FAULTS
from planting import plant, programs_of, without_place
from test_cuda_group import CUDA, FIBERS, FLAGS, HERE, HOST, MAIN
from test_cuda_host import FAKE, ROOT
from test_sanitizers import core_sources
from tiers import tier

pytestmark = pytest.mark.timeout(900)  # of which most is for compilers on a busy machine
SECONDS = 150  # of a run; what takes longer hangs
EVERY = 4  # faults of which `make test-slow` has one


def objects():
    """{source: object file} of everything but the programs."""
    extension, device = [*core_sources(ROOT / "csrc"), *HOST], [*FAKE, *FIBERS]
    files = compiled.built(extension) + compiled.objects(device, FLAGS)
    return dict(zip([*extension, *device], files, strict=True))


def programs_with(names, files, folder):
    """{name of a program: itself} with these faults: all programs that must find one of them."""
    root = folder / "_".join(names)[:60].replace(" ", "_").replace("/", "_")
    shutil.copytree(ROOT / "csrc", root / "csrc", ignore=shutil.ignore_patterns("torch", "bindings"))
    faults = [FAULTS[name] for name in names]
    plant(faults, root)
    changed = {CUDA / fault.file for fault in faults}
    targets = {source: root / f"{source.stem}.o" for source in changed}
    flags = [*MAIN, "-w", "-include", root / "planted.h"]
    compiled.in_parallel(
        lambda source: compiled.command(
            [*flags, "-c", root / "csrc" / source.relative_to(ROOT / "csrc"), "-o", targets[source]]
        ),
        sorted(changed),
    )
    others = [target for source, target in files.items() if source not in changed]
    return {
        program: compiled.link(
            [*others, *targets.values(), compiled.object_file(HERE / f"{program}.cc", MAIN)], root / program
        )
        for program in {fault.program for fault in faults}
    }


def found(program, suites, number):
    """What the program says; None: it finds nothing."""
    command = [str(program), *suites.split(", ")]
    environment = {**os.environ, "PLANTED_FAULT": str(number)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return "it hangs"
    return None if done.returncode == 0 else done.stdout[-300:] or f"status {done.returncode}"


def survivors(names, folder):
    """The faults that are not found."""
    files = objects()
    places = [
        (name, number, programs[FAULTS[name].program])
        for members in programs_of(names, FAULTS)
        for programs in [programs_with(members, files, folder)]
        for number, name in enumerate(members, 1)
    ]

    def find(place):
        name, number, program = place
        text = found(program, FAULTS[name].suites, number)
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
