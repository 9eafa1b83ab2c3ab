"""Builds the one extension module, pycomm._C, from csrc/. Everything static is in pyproject.toml.

    pip install --no-build-isolation -e .        an editable install (what the Makefile does); a second run compiles only what changed
    python setup.py build_ext --inplace          the extension alone

Build isolation must be off: the extension is compiled against the torch that is installed, and works with that minor version only
(c10d::Backend is a C++ class whose vtable changes with each).
"""

import os
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
# Folder of each package. parallel and benchmarks lie beside pycomm because they use only its public names.
PACKAGES = {"pycomm": "pycomm", "pycomm.parallel": "parallel", "pycomm.benchmarks": "benchmarks"}

torch_minor = tuple(int(part) for part in torch.__version__.split(".")[:2])
if not OLDEST_TORCH <= torch_minor <= NEWEST_TORCH:
    raise SystemExit(f"pycomm supports torch 2.11 to 2.15; torch {torch.__version__} is installed.")


def extension():
    sources = sorted(path.relative_to(ROOT) for path in (ROOT / "csrc").rglob("*.cc") if "cuda" not in path.relative_to(ROOT).parts)
    ext = CppExtension(
        "pycomm._C",
        [str(path) for path in sources],
        extra_compile_args=["-O3", "-g0", "-std=c++20", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"],
    )
    # As system headers torch's warnings stay out of the log, so that ours are seen.
    for folder in ext.include_dirs:
        ext.extra_compile_args += ["-isystem", folder]
    ext.include_dirs = []
    return ext


class BuildExt(BuildExtension):
    """Keeps object files in build/temp, where ninja finds them again, and writes down which torch the extension belongs to."""

    def finalize_options(self):
        super().finalize_options()
        self.build_temp = str(ROOT / "build" / f"temp-{'.'.join(map(str, torch_minor))}")

    def run(self):
        super().run()
        extension_file = ROOT / self.get_ext_fullpath("pycomm._C")
        info = extension_file.with_name("_build_info.py")
        info.write_text(f'"""Written by setup.py."""\n\nTORCH_VERSION = "{torch.__version__}"\n')


os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
os.chdir(ROOT)
present = {name: folder for name, folder in PACKAGES.items() if (ROOT / folder / "__init__.py").exists()}
setup(packages=list(present), package_dir=present, ext_modules=[extension()], cmdclass={"build_ext": BuildExt})
