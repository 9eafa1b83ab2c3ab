"""The tests that are written in C++: tests/cpp/*_test.cc, each a program that compares with an oracle of its
own.
"""

import subprocess
from pathlib import Path

import compiled
import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(300)
def test_reduce(tmp_path):
    """Every dtype, reduce op and SIMD level of csrc/arithmetic, all patterns of the 16-bit floats."""
    run("reduce_test", sorted((ROOT / "csrc" / "arithmetic").glob("*.cc")), tmp_path)


def test_hosts(tmp_path):
    """Placements of up to 4 hosts and cuts of up to 5 ranks against a count of every element; what the wire
    between threads promises.
    """
    run("hosts_test", [ROOT / "csrc" / "hosts" / name for name in ("placement.cc", "loop_wire.cc")], tmp_path)


def test_lanes(tmp_path):
    """Calls of changing numbers of lanes, any of which may throw."""
    run("lanes_test", [ROOT / "csrc" / "communicator" / "lanes.cc"], tmp_path)


def test_kernel_copy(tmp_path):
    """How often a rank looks at its own memory, and that the heap does not decide about the route."""
    run("kernel_copy_test", [ROOT / "csrc" / "transport" / "kernel_copy.cc"], tmp_path)


@pytest.mark.timeout(300)
def test_hand_off(tmp_path):
    """10,000 operations in which the answer changes at random: it is one on all ranks."""
    sources = [
        path
        for part in ("transport", "memory")
        for path in sorted((ROOT / "csrc" / part).glob("*.cc"))
        if path.name != "kernel_copy.cc"
    ]
    run("hand_off_test", sources, tmp_path)


def test_survivors(tmp_path):
    """A member that ends before it has the new group, or claims the verdict and ends before it writes one."""
    sources = [
        path for part in ("transport", "memory") for path in sorted((ROOT / "csrc" / part).glob("*.cc"))
    ]
    run("survivors_test", sources, tmp_path)


def run(name, sources, folder):
    main = compiled.object_file(ROOT / "tests" / "cpp" / f"{name}.cc", ["-O1", "-std=c++20"])
    program = str(compiled.link([main, *compiled.built(sources)], folder / name))
    result = subprocess.run([program], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0 and ", 0 failed" in result.stdout and "\n0 passed" not in result.stdout, (
        result.stdout[-3000:]
    )
