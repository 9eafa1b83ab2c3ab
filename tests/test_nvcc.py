"""What nvcc makes of the kernels: nothing spills, few registers, and the memory accesses that
docs/memory_model.md counts on.

The build leaves what ptxas says in build/cuda/*.log. Where that is older than the sources, or the
build was made without CUDA, the kernels are compiled here.
"""

import ast
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiers import tier

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "csrc" / "cuda" / "kernels"
SOURCES = sorted(KERNELS.glob("*.cu"))
ARCHITECTURES = {"sm_80", "sm_90"}
MAX_REGISTERS = 128  # of 65536 for max_threads = 512
MAX_SECONDS = 300  # of compiling, of processors; about 90 are needed
NVCC = next(
    (str(p) for p in (shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc") if p and os.access(p, os.X_OK)), None
)
pytestmark = [
    pytest.mark.skipif(not NVCC, reason="needs nvcc"),
    pytest.mark.timeout(4 * MAX_SECONDS),
    tier(slow=1),  # `make test` builds no kernels
]


def flags():
    """NVCC_FLAGS of setup.py."""
    nodes = [
        node
        for node in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(node, (ast.Assign, ast.AugAssign))
    ]
    found = [node.value for node in nodes if "NVCC_FLAGS" in ast.unparse(node).split("=")[0]]
    return [flag for value in found for flag in ast.literal_eval(value)]


def with_includes(path, seen=None):
    """`path` and every file that it includes."""
    seen = {} if seen is None else seen
    if path not in seen:
        seen[path] = True
        for name in re.findall(r'#include "([^"]+)"', path.read_text()):
            with_includes((path.parent / name).resolve(), seen)
    return list(seen)


def log_of_build(source):
    """What ptxas said in the last build, if nothing has changed since."""
    log = ROOT / "build" / "cuda" / f"{source.stem}.o.log"
    changed = max(path.stat().st_mtime for path in [ROOT / "setup.py", *with_includes(source)])
    ended = log.with_name(f"{source.stem}.o").exists() and log.stat().st_mtime > changed
    text = log.read_text() if ended else ""
    return text if all(arch in text for arch in ARCHITECTURES) else None  # PYCOMM_CUDA_ARCH has one alone


def compile_all(sources, folder):
    def compile_one(source):
        command = [NVCC, *flags(), "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert result.returncode == 0, result.stdout[-5000:]
        return result.stdout

    began = os.times()
    with ThreadPoolExecutor(2) as pool:
        logs = dict(zip(sources, pool.map(compile_one, sources), strict=True))
    seconds = os.times().children_user - began.children_user
    print(f"compiled {len(sources)} files in {seconds:.0f} s of a processor")
    assert seconds < MAX_SECONDS
    return logs


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """ptxas -v of each source."""
    logs = {source: log_of_build(source) for source in SOURCES}
    missing = [source for source, log in logs.items() if log is None]
    return {**logs, **compile_all(missing, tmp_path_factory.mktemp("nvcc"))} if missing else logs


def test_no_kernel_spills(reports):
    text = "\n".join(reports.values())
    assert ARCHITECTURES == set(re.findall(r"Compiling entry function '\w+' for '(\w+)'", text))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    assert spills and set(spills) == {("0", "0")}


def test_registers(reports):
    text = "\n".join(reports.values())
    for architecture in ARCHITECTURES:
        pattern = (
            rf"Compiling entry function '(\w+)' for '{architecture}'\n(?:.*\n){{2}}"
            r"ptxas info\s+: Used (\d+) registers"
        )
        registers = {name: int(used) for name, used in re.findall(pattern, text)}
        print(
            f"{architecture}: {len(registers)} kernels, {min(registers.values())} to "
            f"{max(registers.values())} registers"
        )
        assert len(registers) > 100 and max(registers.values()) <= MAX_REGISTERS


def test_registers_of_the_budget(reports):
    """registers_of() in csrc/cuda/budget.h: what the fake device takes a block for, and why a place is a
    multiprocessor.
    """
    kernels = re.search(
        r"enum class Kernel : uint8_t \{(.*?)\}", (KERNELS / "layout.h").read_text(), re.DOTALL
    )
    names = [name.strip() for name in kernels[1].split(",")]
    function = re.search(r"int registers_of\(.*?\n\}", (KERNELS.parent / "budget.h").read_text(), re.DOTALL)[
        0
    ]
    bounds, seen = {}, []
    for name, bound in re.findall(r"(?:case Kernel::(\w+)|default):(?: return (\d+);)?", function):
        seen.append(name)
        if bound:
            bounds |= dict.fromkeys(seen, int(bound))
            seen = []
    text = "\n".join(reports.values())
    pattern = (
        r"Compiling entry function '\w*6KernelE(\d+)E\w*' for '\w+'\n(?:.*\n){2}ptxas info\s+: Used (\d+) "
    )
    used = {}
    for number, registers in re.findall(pattern, text):
        name = names[int(number)]
        used[name] = max(used.get(name, 0), int(registers))
    assert used.keys() == set(names)
    print(used)
    for name, registers in used.items():
        assert registers <= bounds.get(name, bounds[""]), f"{name} needs {registers} registers"


def test_shared_memory(reports):
    """Far below the 48 KiB that need no asking: registers alone decide how many blocks fit."""
    used = [
        int(size)
        for size in re.findall(r"Used \d+ registers.* (\d+) bytes smem", "\n".join(reports.values()))
    ]
    print(f"{max(used)} bytes")
    assert len(used) > 100 and max(used) <= 1024


def test_accesses_in_ptx(tmp_path):
    """One file of data movement is enough: all kernels share the accesses of ctx.cuh."""
    target = tmp_path / "launch.ptx"
    command = [NVCC, *flags()[:3], "-arch=compute_90", "--ptx", str(KERNELS / "launch.cu"), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True)
    ptx = target.read_text()
    # .nc reads through a cache that is not coherent: stale data of a peer.
    assert "ld.global.nc" not in ptx
    # Flags: ordered among GPUs, by the access itself. A fence beside it would be paid twice.
    for access in ("ld.acquire.sys.global.u64", "st.release.sys.global.u64"):
        assert access in ptx
    assert not re.search(r"\b(membar|fence)\.", ptx)
    # Data: 16 bytes at a time.
    assert "ld.global.L1::no_allocate.v4.u32" in ptx and "st.global.v4.u32" in ptx
