"""csrc/cuda/group.h without a GPU: threads and processes as ranks, over tests/cpp/cuda/fake_driver.h, with
the kernels on fibers.
"""

import subprocess
from pathlib import Path

import compiled
import pytest
from test_cuda_host import CUDA, HERE, MAIN, ROOT
from test_sanitizers import core_sources
from tiers import tier

HOST = [*sorted(CUDA.glob("*.cc")), *sorted((CUDA / "device").glob("*.cc"))]
PROGRAMS = (
    "group_test",
    "group_streams_test",
    "group_faults_test",
    "group_deadlines_test",
    "group_budget_test",
    "group_ends_test",
    "group_times_test",
)
pytestmark = pytest.mark.timeout(400)  # of which most is for compilers on a busy machine


def mains() -> Path:
    """The object file of all programs; the first argument chooses one."""
    return compiled.unit("cuda_group", [HERE / f"{name}.cc" for name in PROGRAMS], MAIN)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The command of each program, by name."""
    files = [*compiled.built([*core_sources(ROOT / "csrc"), *HOST]), compiled.fake_driver()]
    files += [*compiled.fake_launch(), mains()]
    program = compiled.link(files, tmp_path_factory.mktemp("cuda_group") / "cuda_group")
    return {name: [str(program), name] for name in PROGRAMS}


# Its other suites need a machine that does not stand still for some tenths of a second: limits are their
# subject.
ON_ANY_MACHINE = {"group_deadlines_test": ["late rank", "busy for long"]}


@tier(slow=1 / 2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(programs, name):
    check([*programs[name], *ON_ANY_MACHINE.get(name, [])])


@tier(deep=1)
def test_deadlines(programs):
    check(programs["group_deadlines_test"])


def check(command):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert result.returncode == 0 and ", 0 failed" in result.stdout and "\n0 passed" not in result.stdout, (
        result.stdout[-5000:]
    )
