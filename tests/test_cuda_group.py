"""csrc/cuda/group.h without a GPU: threads and processes as ranks, over tests/cpp/cuda/fake_driver.h, with
the kernels on fibers.
"""

import subprocess

import compiled
import pytest
from test_cuda_host import CUDA, FAKE, FLAGS, HERE, ROOT
from test_sanitizers import core_sources
from tiers import tier

MAIN = [*FLAGS, "-O0"]  # of the programs: the compiler takes longer than they run
HOST = [*sorted(CUDA.glob("*.cc")), *sorted((CUDA / "device").glob("*.cc"))]
FIBERS = [HERE / f"{name}.cc" for name in ("fiber", "fiber_ops", "machine", "fake_launch", "fake_processors")]
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


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The path of each program, by name."""
    folder = tmp_path_factory.mktemp("cuda_group")

    shared = compiled.built([*core_sources(ROOT / "csrc"), *HOST])
    shared += compiled.objects([*FAKE, *FIBERS], FLAGS)
    mains = compiled.objects([HERE / f"{name}.cc" for name in PROGRAMS], MAIN)
    for name, main in zip(PROGRAMS, mains, strict=True):
        compiled.link([*shared, main], folder / name)
    return {name: folder / name for name in PROGRAMS}


# Its other suites need a machine that does not stand still for some tenths of a second: limits are their
# subject.
ON_ANY_MACHINE = {"group_deadlines_test": ["late rank", "busy for long"]}


@tier(quick=1 / 8)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(programs, name):
    check([str(programs[name]), *ON_ANY_MACHINE.get(name, [])])


@tier(deep=1)
def test_deadlines(programs):
    check([str(programs["group_deadlines_test"])])


def check(command):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert result.returncode == 0 and ", 0 failed" in result.stdout and "\n0 passed" not in result.stdout, (
        result.stdout[-5000:]
    )
