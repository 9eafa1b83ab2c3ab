"""The host code of csrc/cuda without a GPU: over a driver that lives in tests/cpp/cuda/fake_driver.h, and
against the toolkit's cuda.h.
"""

import subprocess
from pathlib import Path

import compiled
import pytest
from test_sanitizers import core_sources

ROOT = Path(__file__).parent.parent
CUDA = ROOT / "csrc" / "cuda"
HERE = ROOT / "tests" / "cpp" / "cuda"
FLAGS = compiled.DEVICE_FLAGS
HOST = [
    *sorted((CUDA / "device").glob("*.cc")),
    CUDA / "budget.cc",
    CUDA / "protocol.cc",
]
STUB = CUDA / "kernels" / "stub.cc"  # not in an extension that has kernels
MAIN = [*FLAGS, "-O0"]  # of the programs: the compiler takes longer than they run
PROGRAMS = ("host_test", "peer_memory_test")
MACHINES = {
    "none": "No CUDA driver was found on this machine (libcuda.so.1).; cuInit called 0 times",
    "old": "The CUDA driver of this machine is too old: it has no cuMulticastCreate of CUDA 12.1. "
    "Update it.; cuInit called 0 times",
    "broken": "cuInit failed: error 999; cuInit called 1 times",
    "whole": "usable; cuInit called 1 times",
}
HEADERS = sorted(Path("/usr/local").glob("cuda*/include/cuda.h"))
pytestmark = pytest.mark.timeout(400)  # of which most is for compilers on a busy machine


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The command of each program, by name."""
    mains = compiled.unit("cuda_host", [HERE / f"{name}.cc" for name in PROGRAMS], MAIN)
    files = [*compiled.built([*core_sources(ROOT / "csrc"), *HOST]), compiled.fake_driver()]
    files += [mains, compiled.object_file(STUB, FLAGS)]
    program = compiled.link(files, tmp_path_factory.mktemp("cuda_host") / "cuda_host")
    return {name: [str(program), name] for name in PROGRAMS}


# All of it, or what is quick.
QUICK = ["ways", "no way", "last step", "too large", "wrong mapping", "dead peer", "multicast"]
SUITES = [
    ("host_test", []),
    ("peer_memory_test", QUICK),
    pytest.param("peer_memory_test", [], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name, suites", SUITES)
def test_program(programs, name, suites):
    result = subprocess.run(
        [*programs[name], *suites], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    assert result.returncode == 0 and ", 0 failed" in result.stdout and "\n0 passed" not in result.stdout, (
        result.stdout[-5000:]
    )


def test_loading_of_the_driver(tmp_path):
    program = str(tmp_path / "driver_load_test")
    main = compiled.object_file(HERE / "driver_load_test.cc", MAIN)
    compiled.link([main, *compiled.built([CUDA / "device" / "driver.cc"]), compiled.fake_driver()], program)
    for machine, report in MACHINES.items():
        assert (
            subprocess.run([program, machine], capture_output=True, text=True, timeout=20).stdout
            == report + "\n"
        )


@pytest.mark.skipif(not HEADERS, reason="needs the headers of a CUDA toolkit")
def test_driver_table_agrees_with_cuda_h():
    """Struct layouts, values and signatures of driver.h. cuda.h of 12.5 or later: older ones lack some of
    them.
    """
    command = [
        "g++",
        "-std=c++20",
        "-fsyntax-only",
        "-isystem",
        str(HEADERS[-1].parent),
        str(HERE / "driver_abi_test.cc"),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
