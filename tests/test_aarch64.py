"""csrc/ compiles for aarch64: all of it but what needs torch or Python, whose headers are of this machine."""

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiers import tier

ROOT = Path(__file__).parent.parent
WITH_TORCH = ("bindings", "torch")
FLAGS = ["-std=c++20", "-O1", "-fwrapv", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-unknown-pragmas"]
SOURCES = sorted(
    path
    for path in (ROOT / "csrc").rglob("*.cc")
    if path.relative_to(ROOT / "csrc").parts[0] not in WITH_TORCH
)
AARCH64 = 183  # of ELF machines


@tier(deep=1)
@pytest.mark.timeout(1800)
def test_every_file_compiles_for_aarch64(tmp_path):
    """By the cross compiler in the wheel of ziglang, which `make test-deep` installs; glibc 2.28."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("needs ziglang, which has a cross compiler: make test-deep installs it")
    folders = {f"ZIG_{kind}_CACHE_DIR": str(tmp_path / "cache") for kind in ("GLOBAL", "LOCAL")}
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu.2.28", *FLAGS]

    def compiled(source: Path) -> str:
        target = tmp_path / source.relative_to(ROOT).with_suffix(".o").as_posix().replace("/", "_")
        command = [*compiler, "-c", str(source), "-o", str(target)]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **folders}, timeout=600
        )
        if done.returncode:
            return f"{source.relative_to(ROOT)}: {done.stderr[-2000:]}"
        machine = int.from_bytes(target.read_bytes()[18:20], "little")
        return "" if machine == AARCH64 else f"{target.name} is for machine {machine}"

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        problems = [problem for problem in pool.map(compiled, SOURCES) if problem]
    assert len(SOURCES) > 50 and not problems, "\n".join(problems)
