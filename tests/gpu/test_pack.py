"""What gpu-check's `pack` carries."""

import os
import subprocess
import sys
import tarfile

import pytest
from tiers import tier

from gpu import pack, steps

ROOT = steps.ROOT


def test_copied_sources(tmp_path):
    """Complete, links are links; a second time only what has changed is written."""
    pack.copy_tree(tmp_path)
    assert (tmp_path / "pycomm" / "parallel").is_symlink()
    names = ("setup.py", "csrc/cuda/group.cc", "tests/gpu/pack.py", "pycomm/parallel/__init__.py")
    for name in names:
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes()
    assert not list(tmp_path.glob("pycomm/_C*.so")), "what was built here is not taken for there"
    (tmp_path / "setup.py").write_text("old")
    before = (tmp_path / "csrc/cuda/group.cc").stat().st_mtime_ns
    pack.copy_tree(tmp_path)
    assert (tmp_path / "setup.py").read_bytes() == (ROOT / "setup.py").read_bytes()
    assert (tmp_path / "csrc/cuda/group.cc").stat().st_mtime_ns == before


def test_archive(tmp_path):
    tree, cache, there = tmp_path / "tree", tmp_path / "cache", tmp_path / "there"
    (tree / "pycomm").mkdir(parents=True)
    (cache / "ABC").mkdir(parents=True)
    library = f"_C{pack.sysconfig.get_config_var('EXT_SUFFIX')}"
    (tree / "pycomm" / library).write_text("library")
    (tree / "pycomm" / "_build_info.py").write_text("info")
    (cache / "ABC" / "kernel.cubin").write_text("kernel")
    pack.archive(tree, cache, tmp_path / "out" / "packed.tar.gz")
    with tarfile.open(tmp_path / "out" / "packed.tar.gz") as file:
        assert all(member.uname == "" and member.uid == 0 for member in file.getmembers())
    there.mkdir()
    subprocess.run(["tar", "xzf", tmp_path / "out" / "packed.tar.gz", "-C", there], check=True, timeout=60)
    found = {str(path.relative_to(there)): path.read_text() for path in there.rglob("*") if path.is_file()}
    assert found == {
        f"pycomm/{library}": "library",
        "pycomm/_build_info.py": "info",
        "build/gpu_triton/ABC/kernel.cubin": "kernel",
    }
    assert there / "build" / "gpu_triton" == there / steps.TRITON_CACHE.relative_to(ROOT)


def warm(folder, *words):
    variables = {**os.environ, "TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    variables.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "tests/gpu", "warm", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@tier(slow=1)
@pytest.mark.timeout(600)
def test_warm(tmp_path):
    """A second time nothing is compiled; another architecture has kernels of its own."""
    pytest.importorskip("triton")
    assert "4 launches, 0 refused" in warm(tmp_path, "--part", "values", "--most", "4")
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert len([path for path in files if path.suffix == ".cubin"]) == 4
    warm(tmp_path, "--part", "values", "--most", "4")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == files
    warm(tmp_path, "--part", "values", "--most", "1", "--arch", "80", "--programs", "108")
    assert len(list(tmp_path.rglob("*.cubin"))) == 5


def test_as_many_programs_as_on_the_gpu():
    """[Note: places] in pycomm/fused/context.py"""
    from gpu import warm

    layout = (ROOT / "csrc" / "cuda" / "kernels" / "layout.h").read_text()
    assert f"inline constexpr int max_blocks = {warm.MOST_PLACES};" in layout


def test_every_launch_is_warmed():
    """Those of the checks, and what the tuner tries in the benchmarks."""
    from gpu import fused_cases, warm

    values = {(problem.op, problem.world_size) for problem, *_ in warm.of_values_problems()}
    assert values == {("matmul", 1)} | {(op, n) for op in fused_cases.COLLECTIVES for n in (2, 4, 8)}
    shapes = {(p.op, p.m, p.n, p.k) for p, *_ in warm.of_bench(90)}
    for op, text in (("matmul", steps.PRODUCTS[1]), ("matmul_all_reduce", steps.FUSED[3])):
        assert {(op, *map(int, shape.split("x"))) for shape in text.split(",")} <= shapes


def test_a_build_without_cuda_is_an_error():
    (build,) = steps.choose(only=["build"])
    assert build.command[:3] == ("env", "PYCOMM_CUDA=1", "PYCOMM_CUDA_ARCH=native")
    on_host = [word for word in build.command if not word.startswith(steps.ON_GPU)]
    assert on_host[:2] == ["env", "{python}"]
