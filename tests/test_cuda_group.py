"""csrc/cuda/group.h without a GPU: threads and processes as ranks, over tests/cpp/cuda/fake_driver.h, with
the kernels on fibers.
"""

import subprocess

import compiled
import pytest
from test_cuda_host import CUDA, FAKE, HERE, QUIET, ROOT
from test_sanitizers import core_sources

# Not optimised: the compiler takes longer than the programs.
FLAGS = ["-std=c++20", "-pthread", "-Wall", "-Wextra", *QUIET]
HOST = [*sorted(CUDA.glob("*.cc")), *sorted((CUDA / "device").glob("*.cc"))]
FIBERS = [HERE / f"{name}.cc" for name in ("fiber", "fiber_ops", "machine", "fake_launch", "fake_processors")]
PROGRAMS = ("group_test", "group_streams_test", "group_faults_test", "group_budget_test")
pytestmark = pytest.mark.timeout(400)  # of which most is for compilers on a busy machine


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The path of each program, by name."""
    folder = tmp_path_factory.mktemp("cuda_group")

    optimised = compiled.objects(FIBERS, [*FLAGS, "-O1"])  # the compiler takes longer than the rest runs
    shared = [*core_sources(ROOT / "csrc"), *HOST, *FAKE]
    files = compiled.objects([*shared, *(HERE / f"{name}.cc" for name in PROGRAMS)], FLAGS)
    for name, main in zip(PROGRAMS, files[len(shared) :], strict=True):
        compiled.link([*optimised, *files[: len(shared)], main], folder / name)
    return {name: folder / name for name in PROGRAMS}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(programs, name):
    result = subprocess.run(
        [str(programs[name])], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    assert result.returncode == 0 and ", 0 failed" in result.stdout and "\n0 passed" not in result.stdout, (
        result.stdout[-5000:]
    )
