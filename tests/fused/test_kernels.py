"""The Triton kernels of pycomm.fused in Triton's interpreter: 2 processes over shared memory, 4 of them in
the slow tests.

The cases are bodies in kernel_cases.py, which runs in a process of its own; a test here reads the line that
tells how its case went. The process runs the cases of the tests that were selected, in their order, so a
single one can be run by -k.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kernel_cases import CASES
from kernel_faults import FAULTS, QUICK_FAULTS
from kernel_quick import QUICK
from tiers import tier

HERE = Path(__file__).parent
NAMES = [*CASES, *FAULTS]
LIMIT = {2: 100.0, 4: 600.0}  # seconds that a test waits for its line


class Process:
    """kernel_cases.py with some cases. Its forked ranks are in its session, so that they can be ended with
    it.
    """

    def __init__(self, world_size, names):
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(HERE.parent.parent), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        )
        # The logistic function of large values: exp is infinite, the result right.
        command = [
            sys.executable,
            "-W",
            "ignore:overflow encountered in exp",
            str(HERE / "kernel_cases.py"),
            str(world_size),
            *names,
        ]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, start_new_session=True
        )
        self.text, self.records, self.late = b"", {}, False

    def record(self, name, limit):
        """What the case with this name left; fails after `limit` seconds, and for all later cases then."""
        assert not self.late, "an earlier case took too long"
        deadline = time.monotonic() + limit
        while name not in self.records:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            self.late = not ready
            assert ready, f"{name} did not end within {limit:g} s"
            text = os.read(self.process.stdout.fileno(), 1 << 16)
            assert text, f"the process of the cases ended with {self.process.wait()} before {name}"
            *lines, self.text = (self.text + text).split(b"\n")
            self.records |= {found["name"]: found for found in map(json.loads, lines)}
        return self.records[name]

    def end(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def processes(request):
    """world_size -> Process, started when a test asks for it."""
    started = {}

    def get(world_size):
        if world_size not in started:
            items = [item for item in request.session.items if item.module is request.module]
            names = [
                item.callspec.params["name"]
                for item in items
                if item.callspec.params["world_size"] == world_size
            ]
            started[world_size] = Process(world_size, dict.fromkeys(names))
        return started[world_size]

    yield get
    for process in started.values():
        process.end()


@tier(quick=1 / 60, slow=1 / 12)
@pytest.mark.parametrize(
    "world_size",
    [2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.timeout(LIMIT[4] + 10)])],
    ids=["2_ranks", "4_ranks"],
)
@pytest.mark.parametrize("name", NAMES)
def test_kernels(name, world_size, processes):
    error = processes(world_size).record(name, LIMIT[world_size])["error"]
    assert not error, error


@pytest.mark.parametrize("world_size", [2], ids=["2_ranks"])
@pytest.mark.parametrize("name", [*QUICK, *QUICK_FAULTS])
def test_a_little_of_everything(name, world_size, processes):
    """All operations, special values, and what becomes of ranks that are late or compute something else."""
    error = processes(world_size).record(name, LIMIT[world_size])["error"]
    assert not error, error
