"""A test that reaches its time limit fails alone: the others of its run are run and reported, also where it
hangs in C, in which no Python code can end it (workers.py).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from tiers import tier

ROOT = Path(__file__).parent.parent
FILE = """
import ctypes, time
def test_before(): pass
def test_hangs_in_python(): time.sleep(1000)
def test_between(): pass
def test_hangs_in_c(): ctypes.CDLL(None).pause()
def test_hangs_with_the_lock_of_the_interpreter(): ctypes.PyDLL(None).pause()
def test_after(): pass
"""


@tier(slow=1)
def test_a_limit_fails_one_test(tmp_path):
    options = re.search(r"^PYTEST := .* -m pytest (.*)$", (ROOT / "Makefile").read_text(), re.M)[1]
    (tmp_path / "test_hang.py").write_text(FILE)
    (tmp_path / "test_other.py").write_text("def test_other(): pass\n")
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\nfrom workers import *\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", *options.replace("$(WORKERS)", "2").split()]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "--timeout", "2"]
    result = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, timeout=100, env=environment
    )
    assert re.search(r"\b3 failed, 4 passed", result.stdout), result.stdout + result.stderr
    assert len(re.findall(r"^FAILED .*::test_hangs", result.stdout, re.M)) == 3, result.stdout
    for name in re.findall(r"test_hangs_\w+", FILE):
        assert re.search(rf"^Timeout(?s:.*)in {name}$", result.stderr, re.M), result.stderr
