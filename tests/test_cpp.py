"""The tests that are written in C++: tests/cpp/*_test.cc, each a program that compares with an oracle of its own."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(300)
def test_reduce(tmp_path):
    """Every dtype, reduce op and SIMD level of csrc/reduce, all patterns of the 16-bit floats."""

    def compile_one(source):
        target = tmp_path / f"{source.stem}.o"
        command = ["g++", "-O2", "-std=c++20", "-c", str(source), "-o", str(target)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, [ROOT / "tests" / "cpp" / "reduce_test.cc", *sorted((ROOT / "csrc" / "reduce").glob("*.cc"))]))
    program = str(tmp_path / "reduce_test")
    subprocess.run(["g++", *objects, "-o", program], check=True)
    result = subprocess.run([program], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0 and ", 0 failed" in result.stdout and "\n0 passed" not in result.stdout, result.stdout[-3000:]
