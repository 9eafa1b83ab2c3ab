"""Builds the one extension module, pycomm._C, from csrc/. Everything static is in pyproject.toml.

    pip install --no-build-isolation -e .    an editable install (what the Makefile does); a second run
                                             compiles only what changed
    python setup.py build_ext --inplace      the extension alone

Build isolation must be off: the extension is compiled against the torch that is installed, and works with
that minor version only (c10d::Backend is a C++ class whose vtable changes with each).

Where nvcc is found, the kernels for CUDA tensors are built too: PYCOMM_CUDA=0 leaves them out, PYCOMM_CUDA=1
insists; PYCOMM_CUDA_ARCH=90, or native, builds them for one architecture alone. They use nothing of torch and
link the CUDA runtime statically, so neither torch's own CUDA version nor a driver matters to the build. The
rules of torch's CUDAExtension, which say otherwise, are therefore not used.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, verify_ninja_availability

ROOT = Path(__file__).parent
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
torch_minor = tuple(int(part) for part in torch.__version__.split(".")[:2])
if not OLDEST_TORCH <= torch_minor <= NEWEST_TORCH:
    raise SystemExit(f"pycomm supports torch 2.11 to 2.15; torch {torch.__version__} is installed.")
for name in ("parallel", "benchmarks"):
    if not (ROOT / "pycomm" / name / "__init__.py").exists():
        raise SystemExit(
            f"pycomm/{name} must be a link to ../{name}, but this copy of the sources has lost its links "
            "(git with core.symlinks=false and some archive programs write small files in their place). Make "
            f"it again: ln -sfn ../{name} pycomm/{name}"
        )

# sm_80 and sm_90 are compiled here, later ones by the driver. tests/test_nvcc.py compiles with the same
# flags.
NVCC_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fmad=false",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden",
    "-Xptxas",
    "-v",
    "-Xfatbin",
    "-compress-all",
]
NVCC_FLAGS += [
    "-gencode",
    "arch=compute_80,code=sm_80",
    "-gencode",
    "arch=compute_90,code=[sm_90,compute_90]",
]


def flags_for(arch):
    """NVCC_FLAGS, for one architecture alone where it is given: 90, or native, that of this machine's GPU."""
    if not arch:
        return NVCC_FLAGS
    if arch == "native":
        if not torch.cuda.is_available():
            raise SystemExit("PYCOMM_CUDA_ARCH=native, but torch finds no GPU.")
        arch = "{}{}".format(*torch.cuda.get_device_capability())
    if not re.fullmatch(r"\d{2,3}", arch) or int(arch) < 80:
        raise SystemExit(f"PYCOMM_CUDA_ARCH={arch}: native, or a number like 90, at least 80.")
    return [*NVCC_FLAGS[: NVCC_FLAGS.index("-gencode")], "-gencode", f"arch=compute_{arch},code=sm_{arch}"]


OLDEST_NVCC = (12, 5)  # cudaGetDriverEntryPointByVersion


def find_nvcc():
    """Path of an nvcc that can build the kernels and the folder of its libcudart_static.a; (None, None)
    without.
    """
    wanted = os.environ.get("PYCOMM_CUDA", "auto")
    if wanted not in ("0", "1", "auto"):
        raise SystemExit(f"PYCOMM_CUDA={wanted}: 0, 1 or auto.")
    if wanted == "0":
        return None, None
    places = [
        Path(CUDA_HOME or "/usr/local/cuda", "bin", "nvcc"),
        shutil.which("nvcc"),
        "/usr/local/cuda/bin/nvcc",
    ]
    nvcc = next((str(place) for place in places if place and os.access(place, os.X_OK)), None)
    if not nvcc:
        problem = "no nvcc was found in CUDA_HOME, PATH or /usr/local/cuda"
    else:
        release = re.search(
            r"release (\d+)\.(\d+)",
            subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout,
        )
        folder = cudart_folder(nvcc)
        if not release or (int(release[1]), int(release[2])) < OLDEST_NVCC:
            problem = f"{nvcc} is older than {OLDEST_NVCC[0]}.{OLDEST_NVCC[1]}"
        elif not folder:
            problem = f"{nvcc} has no libcudart_static.a beside it"
        else:
            return nvcc, folder
    if wanted == "1":
        raise SystemExit(f"PYCOMM_CUDA=1, but {problem}.")
    print(f"pycomm: without CUDA, because {problem}.")
    return None, None


def cudart_folder(nvcc):
    """nvcc in PATH may be a script that calls the real one, which knows its place."""
    report = subprocess.run(
        [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull], capture_output=True, text=True
    ).stderr
    top = re.search(r"^#\$ TOP=(.+)$", report, re.M)
    names = ["lib64", "lib", f"targets/{os.uname().machine}-linux/lib"]
    folders = [Path(top.group(1), name) for name in names] if top else []
    return next((folder.resolve() for folder in folders if (folder / "libcudart_static.a").exists()), None)


def extension(nvcc):
    files = sorted(path.relative_to(ROOT) for path in (ROOT / "csrc").rglob("*") if path.is_file())
    sources = [path for path in files if path.suffix == ".cc" and not (nvcc and path.name == "stub.cc")]
    ext = CppExtension(
        "pycomm._C",
        [str(path) for path in sources],
        extra_compile_args=[
            "-O3",
            "-g0",
            "-std=c++20",
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            "-Wno-unused-parameter",
            "-Wno-unknown-pragmas",
        ],
    )
    # As system headers torch's warnings stay out of the log, so that ours are seen.
    for folder in ext.include_dirs:
        ext.extra_compile_args += ["-isystem", folder]
    ext.include_dirs = []
    ext.depends = [str(path) for path in files]  # which also brings them into a source distribution
    if nvcc:
        # exclude-libs: torch may have loaded a CUDA runtime of its own, which must not be called from here.
        ext.extra_link_args += [f"-L{CUDART}", "-lcudart_static", "-lrt", "-ldl", "-lpthread"]
        ext.extra_link_args += ["-Wl,--exclude-libs,libcudart_static.a"]
    return ext


def compile_kernels(nvcc, folder):
    """Begins to compile those of csrc/cuda/kernels/*.cu whose sources changed. Returns the objects and the
    process that makes them. What ptxas says lies beside each of them in a .log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flags = flags_for(os.environ.get("PYCOMM_CUDA_ARCH"))
    command = " ".join([nvcc, *flags, "-MD", "-MF", "$out.d", "-c", "$in", "-o", "$out"])
    lines = ["ninja_required_version = 1.3", "rule kernels"]
    lines += [
        f"  command = {command} > $out.log 2>&1 || (cat $out.log; exit 1)",
        "  depfile = $out.d",
        "  deps = gcc",
    ]
    objects = []
    for source in sorted((ROOT / "csrc" / "cuda" / "kernels").glob("*.cu"), key=lambda path: -len(path.name)):
        objects.append(str(folder / f"{source.stem}.o"))
        lines.append(f"build {objects[-1]}: kernels {source}")
    (folder / "build.ninja").write_text("\n".join([*lines, ""]))
    return objects, subprocess.Popen(["ninja", "-C", str(folder), "-j", os.environ["MAX_JOBS"]])


def find_ninja():
    """One beside the interpreter will do: a virtual environment need not be activated."""
    if not shutil.which("ninja"):
        os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
    verify_ninja_availability()


class BuildExt(BuildExtension):
    """Keeps object files in build/temp, where ninja finds them again, and writes down which torch the
    extension belongs to.
    """

    def finalize_options(self):
        super().finalize_options()
        self.build_temp = str(ROOT / "build" / f"temp-{'.'.join(map(str, torch_minor))}")

    def build_extensions(self):
        self.force = (
            self.force or self.use_ninja
        )  # ninja knows better than setuptools, which looks at no header
        find_ninja()
        if NVCC:
            (ext,) = self.extensions
            ext.extra_objects, kernels = compile_kernels(NVCC, Path(self.build_temp) / "cuda")
            link = self.compiler.link_shared_object

            def link_when_compiled(*args, **options):
                if kernels.wait():
                    raise SystemExit("The CUDA kernels were not compiled: see above.")
                link(*args, **options)

            self.compiler.link_shared_object = link_when_compiled
        super().build_extensions()

    def run(self):
        super().run()
        extension_file = ROOT / self.get_ext_fullpath("pycomm._C")
        info = extension_file.with_name("_build_info.py")
        info.write_text(f'"""Written by setup.py."""\n\nTORCH_VERSION = "{torch.__version__}"\n')


# --- metadata that pyproject.toml cannot state ----------------------------------------------------


def required_torch(version: str) -> str:
    """What a wheel requires that was built for torch `version`: torch>=2.13,<2.14 for "2.13.0+cpu". A preview
    ("2.14.0a0+git12") is older than 2.14 for pip, so the range begins before it.
    """
    major, minor, rest = re.match(r"(\d+)\.(\d+)([^+]*)", version).groups()
    preview = ".0.dev0" if re.search(r"a|b|rc|dev", rest) else ""
    return f"torch>={major}.{minor}{preview},<{major}.{int(minor) + 1}"


def repository(folder: Path) -> str | None:
    """The web address of the sources. Whoever publishes pycomm names it in PYCOMM_REPOSITORY; a source
    distribution keeps it in PKG-INFO.
    """
    given, kept = os.environ.get("PYCOMM_REPOSITORY"), folder / "PKG-INFO"
    if given and not re.fullmatch(r"https?://[^\s,@]+", given):
        raise SystemExit(f"PYCOMM_REPOSITORY={given}: a web address, such as https://example.org/pycomm.")
    if not given and kept.exists():
        found = re.search(r"^Project-URL: Repository, (\S+)$", kept.read_text(encoding="utf-8"), re.M)
        given = found and found[1]
    return given.rstrip("/") if given else None


def link(address: str | None, name: str) -> str | None:
    """The web address of a file of the repository."""
    return address and f"{address}/blob/HEAD/{name}"


def readable_elsewhere(text: str, address: str | None) -> str:
    """A page of the repository as others show it: its relative links are absolute, or, where the repository
    has no address, the names of the files.
    """

    def changed(found: re.Match) -> str:
        name = found["name"]
        if not name or re.match(r"[a-z]+:|#", name):
            return found[0]  # code, or a link that needs no change
        if address:
            return f"[{found['text']}]({link(address, name)})"
        return found["text"] if found["text"] == name else f"{found['text']} ({name})"

    return re.sub(r"```.*?```|`[^`]*`|\[(?P<text>[^]]*)\]\((?P<name>[^)\s]+)\)", changed, text, flags=re.S)


def metadata() -> dict:
    """Arguments of setup(). A source distribution leaves open which torch it is built for: pip would replace
    the one that is installed. A wheel works with the minor version that it was built for.
    """
    address = repository(ROOT)
    pages = {"Repository": "", "Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
    return {
        "install_requires": [
            "torch" if "sdist" in sys.argv else required_torch(torch.__version__),
            "tomli; python_version < '3.11'",
        ],
        "long_description": readable_elsewhere((ROOT / "README.md").read_text(encoding="utf-8"), address),
        "long_description_content_type": "text/markdown",
        "project_urls": {
            label: link(address, page) if page else address for label, page in pages.items() if address
        },
    }


os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
os.chdir(ROOT)
NVCC, CUDART = find_nvcc()
setup(ext_modules=[extension(NVCC)], cmdclass={"build_ext": BuildExt}, **metadata())
