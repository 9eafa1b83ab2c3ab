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

    reduce = sorted((ROOT / "csrc" / "arithmetic").glob("*.cc"))
    main = compiled.object_file(ROOT / "tests" / "cpp" / "reduce_test.cc", ["-O2", "-std=c++20"])
    program = str(compiled.link([main, *compiled.built(reduce)], tmp_path / "reduce_test"))
    result = subprocess.run([program], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0 and ", 0 failed" in result.stdout and "\n0 passed" not in result.stdout, (
        result.stdout[-3000:]
    )
