"""Runs the quick tests with reach.py, and keeps what they reach in build/planted/reach."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from planted import campaign, choose, fault, native
from planted.reach import FOLDER, MARKS
from planted.trial import QUICK, Copy

WORKERS = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
# What uses the extension for its own sake; the others reach it through `parallel` or not at all.
NATIVE = [
    "tests/hosts",
    *(f"tests/{name}" for name in os.listdir(fault.ROOT / "tests") if name.startswith("test_")),
]


def record(tests: Sequence[str], *, native_too: bool) -> int:
    """The status of pytest."""
    root, shared = fault.ROOT, list[fault.Fault]()
    if native_too:
        copy = Copy(campaign.FOLDER / "native")
        shared = native.numbered(fault.load().values())
        native.build(copy, shared)
        root, tests = copy.folder, tests or NATIVE
    reach = choose.load()
    with tempfile.TemporaryDirectory() as folder:
        status = run_pytest(root, tests, Path(folder), marks=native_too)
        reach.add(Path(folder), [one.name for one in shared])
    reach.keep_sources()
    reach.save()
    print(f"{len(reach.lines)} tests are known in {choose.DATABASE}")
    return status


def run_pytest(root: Path, tests: Sequence[str], folder: Path, *, marks: bool) -> int:
    here = [root, root / "tests", root / "tests" / "planted" / "site"]
    environment = {**os.environ, FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(map(str, here))}
    if marks:
        environment[MARKS] = str(folder / "marks-{worker}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "planted.reach", "-m", QUICK]
    return subprocess.run([*command, *WORKERS, *tests], cwd=root, env=environment).returncode
