"""csrc/cuda/group.h without a GPU: threads and processes as ranks, over tests/cpp/cuda/fake_driver.h, with the kernels on fibers."""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_cuda_host import CUDA, FAKE, HERE, ROOT
from test_sanitizers import core_sources

FLAGS = ["-std=c++20", "-pthread", "-Wall", "-Wextra"]
QUIET = ["-Wno-unused-parameter", "-Wno-unknown-pragmas", "-Wno-missing-field-initializers"]
NAMES = "driver topology device_memory peer_memory announce choice plan plan_message group group_watch".split()
FIBERS = [HERE / f"{name}.cc" for name in ("fiber", "fiber_ops", "machine", "fake_launch")]
PROGRAMS = ("group_test", "group_streams_test", "group_faults_test")
pytestmark = pytest.mark.timeout(400)  # of which most is for compilers on a busy machine


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The path of each program, by name."""
    folder = tmp_path_factory.mktemp("cuda_group")

    def compile_one(source):
        target = folder / f"{source.parent.name}-{source.stem}.o"
        optimise = ["-O1"] if source in FIBERS else []  # the compiler takes longer than the rest runs
        command = ["g++", *FLAGS, *QUIET, *optimise, "-c", str(source), "-o", str(target)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return target

    shared = [*FIBERS, *core_sources(ROOT / "csrc"), *(CUDA / f"{name}.cc" for name in NAMES), *FAKE]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, [*shared, *(HERE / f"{name}.cc" for name in PROGRAMS)]))
    for name, main in zip(PROGRAMS, objects[len(shared) :], strict=True):
        subprocess.run(["g++", "-pthread", *map(str, objects[: len(shared)]), str(main), "-o", str(folder / name)], check=True)
    return {name: folder / name for name in PROGRAMS}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(programs, name):
    result = subprocess.run([str(programs[name])], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert result.returncode == 0 and ", 0 failed" in result.stdout and "\n0 passed" not in result.stdout, result.stdout[-5000:]
