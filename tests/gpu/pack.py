"""Builds on this machine what gpu-check needs on another, and packs it: the extension, what it was built for,
and a warm cache of Triton's kernels.

    PYTHON tests/gpu pack [--arch 90] [--out build/gpu_check.tar.gz]

PYTHON is an interpreter of the version there, in a virtual environment that has the torch and the Triton of
there, setuptools and ninja; a torch for CPUs of the same minor version will do. nvcc is needed, a GPU is not.
There, `tar -xzf gpu_check.tar.gz` in the root of the same sources puts all in its place: gpu-check finds the
extension and builds nothing, and its steps find the kernels.

    pycomm/_C*.so, pycomm/_build_info.py, build/gpu_triton/
"""

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

from gpu.steps import ROOT, TRITON_CACHE
from pycomm import env

BUILD_SECONDS, WARM_SECONDS = 1800.0, 3600.0


def sources():
    """The files of the project, relative to its root, as git knows them."""
    told = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return [name for name in told.stdout.splitlines() if (ROOT / name).exists()]


def copy_tree(target):
    """The sources in a folder of their own, so that this checkout keeps its extension. What has not changed
    is left alone: ninja goes by time.
    """
    for name in sources():
        here, there = ROOT / name, target / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if here.is_symlink():
            if not there.is_symlink():
                there.symlink_to(here.readlink())
        elif not there.exists() or there.read_bytes() != here.read_bytes():
            shutil.copyfile(here, there)


def run(command, folder, seconds, **variables):
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=env.for_child(**variables), timeout=seconds
    )
    if done.returncode:
        raise SystemExit(f"gpu-check pack: {' '.join(command)} ended with {done.returncode}")


def archive(tree, cache, out):
    """The files that are packed, by their names in the archive."""
    libraries = [tree / "pycomm" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"]
    found = {f"pycomm/{path.name}": path for path in [*libraries, tree / "pycomm" / "_build_info.py"]}
    place = TRITON_CACHE.relative_to(ROOT)
    found |= {f"{place}/{path.relative_to(cache)}": path for path in cache.rglob("*") if path.is_file()}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out, "w:gz") as file:
        for name, path in sorted(found.items()):
            file.add(path, name, filter=anonymous)
    return found


def anonymous(member):
    """Without the user of this machine."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python tests/gpu pack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", default="90", help="of the GPU there; 90 for H100 and H200")
    parser.add_argument("--programs", default="132", help="its multiprocessors")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_check.tar.gz")
    parser.add_argument("--most", help="launches that are compiled; all, where left out")
    given = parser.parse_args(arguments)
    tree = ROOT / "build" / "pack" / f"{sys.implementation.cache_tag}"
    cache = tree / TRITON_CACHE.relative_to(ROOT)
    copy_tree(tree)
    build = ("setup.py", "egg_info", "build_ext", "--inplace")
    run(build, tree, BUILD_SECONDS, PYCOMM_CUDA=1, PYCOMM_CUDA_ARCH=given.arch, PYTHONPATH=None)
    warm = ("tests/gpu", "warm", "--arch", given.arch, "--programs", given.programs)
    warm += ("--most", given.most) if given.most else ()
    run(warm, tree, WARM_SECONDS, TRITON_CACHE_DIR=cache, TRITON_INTERPRET=None, PYTHONPATH=None)
    found = archive(tree, cache, given.out)
    print(f"packed {len(found)} files, {given.out.stat().st_size >> 20} MiB: {given.out}")
    return 0
