"""The check that the checkers see, for the host code of csrc/cuda: one fault at a time is planted, and a
program of tests/test_cuda_group.py must find it. Those of the kernels: tests/test_cuda_mutants.py.
"""

import shutil
import subprocess
from typing import NamedTuple

import compiled
import pytest
from test_cuda_group import CUDA, FIBERS, FLAGS, HERE, HOST, MAIN
from test_cuda_host import FAKE, ROOT
from test_sanitizers import core_sources

pytestmark = pytest.mark.timeout(900)  # of which most is for compilers on a busy machine


class Fault(NamedTuple):
    program: str
    file: str
    old: str
    new: str = ""


FAULTS = {
    "the watching thread's capture mode": Fault("group_streams_test", "watch.cc",
        "void Watcher::run() {\n  RelaxedCapture relaxed;\n", "void Watcher::run() {\n"),
    "the capture mode of poll()": Fault("group_streams_test", "works.cc",
        "  {\n    RelaxedCapture relaxed;\n", "  {\n"),
    "release without drain": Fault("group_streams_test", "group.cc",
        "  watcher_.drain(held, for_ever);  // what was issued may still use it\n"),
    "close without drain": Fault("group_streams_test", "group.cc",
        "    drained = watcher_.drain(held, longest_farewell);\n    watcher_.stop();",
        "    drained = true;\n    watcher_.stop();"),
    "places are not taken": Fault("group_budget_test", "budget.cc",
        "  count.taken += count_;\n"),
    "places are not given back": Fault("group_budget_test", "group.cc",
        "  if (state_.setup.places) state_.setup.places->keep(0);\n"),
    "messages spin on a shared device": Fault("group_budget_test", "group.cc",
        "  shape.messages_in_order = setup.uses_sync_words();\n"),
    "streams of lines are not counted": Fault("group_budget_test", "budget.cc",
        "  ++count.streams;\n"),
}  # fmt: skip


def objects():
    """{source: object file} of everything but the programs."""
    extension, device = [*core_sources(ROOT / "csrc"), *HOST], [*FAKE, *FIBERS]
    files = compiled.built(extension) + compiled.objects(device, FLAGS)
    return dict(zip([*extension, *device], files, strict=True))


def found(fault, files, folder):
    """What the program says; None: it finds nothing."""
    shutil.copytree(ROOT / "csrc", folder / "csrc", ignore=shutil.ignore_patterns("torch", "bindings"))
    file = folder / "csrc" / "cuda" / fault.file
    file.write_text(file.read_text().replace(fault.old, fault.new))
    changed = folder / "changed.o"
    compiled.command([*MAIN, "-w", "-c", file, "-o", changed])
    others = [target for source, target in files.items() if source != CUDA / fault.file]
    main = compiled.object_file(HERE / f"{fault.program}.cc", MAIN)
    program = compiled.link([*others, changed, main], folder / "program")
    try:
        done = subprocess.run([str(program)], capture_output=True, text=True, timeout=150)
    except subprocess.TimeoutExpired:
        return "it hangs"
    return None if done.returncode == 0 else done.stdout[-300:] or f"status {done.returncode}"


def test_every_fault_has_its_place():
    lost = [
        f"{name} ({fault.file})"
        for name, fault in FAULTS.items()
        if (CUDA / fault.file).read_text().count(fault.old) != 1
    ]
    assert not lost, f"the sources have changed; say where these faults belong now: {lost}"


@pytest.mark.slow
def test_every_fault_is_found(tmp_path):
    files = objects()
    missed = []
    for number, (name, fault) in enumerate(FAULTS.items()):
        text = found(fault, files, tmp_path / str(number))
        print(f"{name}: {text}")  # for pytest -s
        missed += [] if text else [name]
    assert not missed
