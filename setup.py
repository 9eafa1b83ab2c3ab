"""Builds the extension module pycomm._C from csrc/, with ninja. Everything static is in pyproject.toml.

    python setup.py build_ext --inplace      the extension alone (`make build`)
    pip install --no-build-isolation .       an installation beside the torch that is there

Build isolation must be off: the extension is compiled against the torch that is installed, and works with
that minor version only (c10d::Backend is a C++ class whose vtable changes with each).

What is compiled, where its objects lie, and what they depend on. A second run compiles only what changed:

    csrc/**.cc without torch and Python   build/core/         the compiler alone; every torch links them
    csrc/torch, csrc/bindings             build/torch-*/      this torch and this Python
    csrc/cuda/kernels/*.cu                build/cuda/         nvcc and the architectures

[Note: units] A compiler reads torch's headers in 20 s and compiles one of our files in 2 s. So csrc/torch and
csrc/bindings are compiled in a few units, each a file of #include lines. COLD files, which run once per group
or job, are optimised less; they are half of that code. The core has no units: its files take 2 s each, and
tests link some of them.

Kernels for CUDA tensors are built where torch is a CUDA build, or where PYCOMM_CUDA=1 asks for them; never by
whether a GPU is visible, as login nodes and containers see none. PYCOMM_CUDA=0 leaves them out. They are
built for the GPU of this machine if there is one, else for sm_80 and sm_90, and as PTX for later ones.
PYCOMM_CUDA_ARCH=90, native or all chooses. The kernels use nothing of torch and link the CUDA runtime
statically, so neither torch's CUDA version nor a driver matters to the build.
"""

import functools
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
BUILD = ROOT / "build"
OBJECTS = BUILD / "objects.json"  # {source: object}, for tests that link what users get
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
for name in ("parallel", "benchmarks"):
    if not (ROOT / "pycomm" / name / "__init__.py").exists():
        raise SystemExit(
            f"pycomm/{name} must be a link to ../{name}, but this copy of the sources has lost its links "
            "(git with core.symlinks=false and some archive programs write small files in their place). Make "
            f"it again: ln -sfn ../{name} pycomm/{name}"
        )


class Torch(NamedTuple):
    """The torch that the extension is built for. To import it takes 3 s, so it is not."""

    folder: Path
    version: str  # "2.13.0+cpu"
    cuda: str | None  # the version of CUDA that it was built with


def installed_torch() -> Torch:
    spec = importlib.util.find_spec("torch")
    if not spec or not spec.origin:
        raise SystemExit("pycomm is built for the torch that is installed, but none is: pip install torch")
    folder = Path(spec.origin).parent
    facts = runpy.run_path(str(folder / "version.py"))
    version = facts["__version__"]
    if not OLDEST_TORCH <= tuple(int(part) for part in version.split(".")[:2]) <= NEWEST_TORCH:
        raise SystemExit(f"pycomm supports torch 2.11 to 2.15; torch {version} is installed.")
    return Torch(folder, version, facts["cuda"])


TORCH = installed_torch()
FLAGS = ["-std=c++20", "-fPIC", "-pthread", "-DNDEBUG", "-fwrapv", "-fvisibility=hidden"]
FLAGS += ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-unknown-pragmas"]
HOT, ONCE = "-O3", "-O1"
# Folders and files of csrc/ that no operation of a group passes through, or that wait for a network.
COLD = ("bindings/", "cuda/device/", "hosts/ucx", "torch/")
# Exceptions: an operation on tensors passes through these files.
CALLED = (
    *("bindings/collectives", "bindings/messages", "bindings/python_call", "bindings/work"),
    *("torch/backend", "torch/device", "torch/flight_recorder", "torch/interpreter", "torch/lists"),
    *("torch/registered_tensor", "torch/submit", "torch/tensors", "torch/torch_work"),
)
WITH_TORCH = ("bindings", "torch")
LONGEST = ("kernels_",)  # of the core's files: they are started first

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
OLDEST_NVCC = (12, 5)  # cudaGetDriverEntryPointByVersion


# --- what is compiled ----------------------------------------------------------------------------


class Unit(NamedTuple):
    """One call of a compiler."""

    object: Path
    source: Path  # what the compiler is given: one of `sources`, or a file that includes them all
    sources: list[Path]
    rule: str  # core, torch or kernels: the flags
    optimise: str
    says: str  # how the progress calls it


def is_cold(name: str) -> bool:
    return name.startswith(COLD) and not name.startswith(CALLED)


def core_units(with_kernels: bool) -> list[Unit]:
    """A unit per file of csrc/ that needs neither torch nor Python."""
    units = []
    for source in sorted((ROOT / "csrc").rglob("*.cc")):
        name = source.relative_to(ROOT / "csrc").as_posix()
        if name.split("/")[0] in WITH_TORCH or (with_kernels and source.name == "stub.cc"):
            continue
        target = BUILD / "core" / Path(name).with_suffix(".o")
        units.append(Unit(target, source, [source], "core", ONCE if is_cold(name) else HOT, name))
    return sorted(units, key=lambda unit: not unit.source.name.startswith(LONGEST))


def torch_units(folder: Path) -> list[Unit]:
    """[Note: units]"""
    units = []
    for part in WITH_TORCH:
        files = sorted((ROOT / "csrc" / part).glob("*.cc"))
        cold = [file for file in files if is_cold(f"{part}/{file.stem}")]
        hot = [file for file in files if file not in cold]
        for name, sources, optimise in ((part, hot, HOT), (f"{part}_once", cold, ONCE)):
            unit = folder / f"{name}.cc"
            text = "".join(f'#include "{os.path.relpath(source, folder)}"\n' for source in sources)
            write(unit, text)
            says = f"{part}/: {', '.join(source.stem for source in sources)}"
            units.append(Unit(unit.with_suffix(".o"), unit, sources, "torch", optimise, says))
    return units


def kernel_units() -> list[Unit]:
    sources = sorted((ROOT / "csrc" / "cuda" / "kernels").glob("*.cu"), key=lambda path: -len(path.name))
    return [
        Unit(
            BUILD / "cuda" / f"{source.stem}.o",
            source,
            [source],
            "kernels",
            "",
            f"cuda/kernels/{source.name}",
        )
        for source in sources
    ]


def write(path: Path, text: str) -> None:
    """Leaves a file alone that says this already: ninja goes by time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


# --- nvcc ----------------------------------------------------------------------------------------


def gpu() -> str | None:
    """The number of the architecture of this machine's GPU, such as "90"; None where torch sees no GPU."""
    if not TORCH.cuda:
        return None
    import torch

    return "{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None


def architectures(asked: str | None) -> list[str]:
    """The numbers of the architectures that the kernels are built for: ["80", "90"], or one. asked:
    PYCOMM_CUDA_ARCH.
    """
    if asked in (None, "", "native"):
        found = gpu()
        if asked == "native" and not found:
            raise SystemExit("PYCOMM_CUDA_ARCH=native, but torch finds no GPU.")
        asked = found or "all"
    if asked == "all":
        return re.findall(r"code=\[?sm_(\d+)", " ".join(NVCC_FLAGS))
    if not re.fullmatch(r"\d{2,3}", asked) or int(asked) < 80:
        raise SystemExit(f"PYCOMM_CUDA_ARCH={asked}: native, all, or a number like 90, at least 80.")
    return [asked]


def flags_for(archs: list[str]) -> list[str]:
    """NVCC_FLAGS, for one architecture alone where one is given."""
    if len(archs) > 1:
        return NVCC_FLAGS
    (arch,) = archs
    return [*NVCC_FLAGS[: NVCC_FLAGS.index("-gencode")], "-gencode", f"arch=compute_{arch},code=sm_{arch}"]


class Cuda(NamedTuple):
    """What builds the kernels."""

    nvcc: str
    libraries: Path  # the folder of libcudart_static.a
    archs: list[str]  # ["80", "90"]


def find_cuda() -> Cuda | None:
    """None where the kernels are not built."""
    wanted = os.environ.get("PYCOMM_CUDA", "auto")
    if wanted not in ("0", "1", "auto"):
        raise SystemExit(f"PYCOMM_CUDA={wanted}: 0, 1 or auto.")
    if wanted == "0" or (wanted == "auto" and not TORCH.cuda):
        return None
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    places: list[Path | str | None] = [Path(home, "bin", "nvcc") for home in homes if home]
    places += [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
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
            return Cuda(nvcc, folder, architectures(os.environ.get("PYCOMM_CUDA_ARCH")))
    if wanted == "1":
        raise SystemExit(f"PYCOMM_CUDA=1, but {problem}.")
    say(f"pycomm: built without the kernels for CUDA tensors, because {problem}.")
    return None


def cudart_folder(nvcc: str) -> Path | None:
    """nvcc in PATH may be a script that calls the real one, which knows its place."""
    report = subprocess.run(
        [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull], capture_output=True, text=True
    ).stderr
    top = re.search(r"^#\$ TOP=(.+)$", report, re.M)
    names = ["lib64", "lib", f"targets/{os.uname().machine}-linux/lib"]
    folders = [Path(top.group(1), name) for name in names] if top else []
    return next((folder.resolve() for folder in folders if (folder / "libcudart_static.a").exists()), None)


# --- ninja ---------------------------------------------------------------------------------------


def compile_and_link(cuda: Cuda | None) -> Path:
    """Brings the shared library up to date and returns its path."""
    folder = BUILD / f"torch-{TORCH.version}-{sys.implementation.cache_tag}"
    library = folder / "_C.so"
    units = [*torch_units(folder), *(kernel_units() if cuda else []), *core_units(cuda is not None)]
    write(BUILD / "build.ninja", ninja_file(units, library, cuda))
    run_ninja()
    linked = {
        str(source.relative_to(ROOT)): str(unit.object.relative_to(ROOT))
        for unit in units
        for source in unit.sources
    }
    OBJECTS.write_text(json.dumps(linked, indent=1))
    return library


def ninja_file(units: list[Unit], library: Path, cuda: Cuda | None) -> str:
    cxx, depends = os.environ.get("CXX", "c++"), "-MMD -MF $out.d -c $in -o $out"
    flags = f"{cxx} {shlex.join(FLAGS)} $optimise {os.environ.get('CXXFLAGS', '')}"
    # As system headers torch's and Python's warnings stay out of the log, so that ours are seen.
    include = TORCH.folder / "include"
    folders = [include, include / "torch" / "csrc" / "api" / "include", sysconfig.get_path("include")]
    system = shlex.join([word for folder in folders for word in ("-isystem", str(folder))])
    commands = {"core": f"{flags} {depends}", "torch": f"{flags} {system} {depends}"}
    after = [f"-L{TORCH.folder / 'lib'}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    if cuda:
        nvcc = f"{shlex.join([cuda.nvcc, *flags_for(cuda.archs)])} {depends.replace('-MMD', '-MD')}"
        # What ptxas says lies beside the object.
        commands["kernels"] = f"{nvcc} > $out.log 2>&1 || (cat $out.log; exit 1)"
        # exclude-libs: torch may have loaded a CUDA runtime of its own, which must not be called from here.
        after += [f"-L{cuda.libraries}", "-lcudart_static", "-lrt", "-ldl"]
        after += ["-Wl,--exclude-libs,libcudart_static.a"]
    lines = ["ninja_required_version = 1.3", f"builddir = {BUILD}"]
    for name, command in commands.items():
        lines += [f"rule {name}", f"  command = {command}", "  description = $says"]
        lines += ["  depfile = $out.d", "  deps = gcc"]
    link = f"{cxx} -shared -pthread {os.environ.get('LDFLAGS', '')} -o $out $in {shlex.join(after)}"
    lines += ["rule link", f"  command = {link}", "  description = the extension"]
    for unit in units:
        lines += [f"build {path_of(unit.object)}: {unit.rule} {path_of(unit.source)}"]
        lines += [f"  optimise = {unit.optimise}", f"  says = {unit.says}"]
    lines += [f"build {path_of(library)}: link {' '.join(path_of(unit.object) for unit in units)}", ""]
    return "\n".join(lines)


def path_of(path: Path) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))


def find_ninja() -> str:
    """The one beside the interpreter before one in PATH: a virtual environment need not be activated, and
    another version of ninja does not know what was built and compiles all again.
    """
    beside = str(Path(sys.executable).with_name("ninja"))
    ninja = beside if os.access(beside, os.X_OK) else shutil.which("ninja")
    if not ninja:
        raise SystemExit("pycomm is built with ninja, which was not found: pip install ninja")
    return ninja


def run_ninja() -> None:
    """Shows a line for each file when it is compiled. Raises SystemExit after what the compiler says."""
    jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    start = time.monotonic()
    with subprocess.Popen(
        [find_ninja(), "-C", str(BUILD), "-j", jobs],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "NINJA_STATUS": "@%f %t "},
    ) as process:
        for line in progress(process.stdout or (), lambda: time.monotonic() - start):
            say(line)
    if process.returncode:
        raise SystemExit("pycomm was not built: see the compiler's message above.")


def progress(lines: Iterable[str], seconds: Callable[[], float]) -> Iterator[str]:
    """What ninja prints, for people: "[ 7 of 104,   12 s] transport/wait.cc". Of a compiler that fails, its
    message without its command, which fills a page.
    """
    command_is_next = False
    for line in map(str.rstrip, lines):
        done = re.match(r"@(\d+) (\d+) (.*)", line)
        if command_is_next:
            command_is_next = False
        elif done:
            number, total, what = done.groups()
            yield f"[{number:>{len(total)}} of {total}, {seconds():4.0f} s] {what}"
        elif line.startswith("FAILED:"):
            command_is_next = True
            yield f"FAILED: {os.path.relpath(line.split()[-1], ROOT)}"
        elif line and not line.startswith(("ninja: Entering", "ninja: no work")):
            yield line


def say(line: str) -> None:
    """Prints a line; under pip, which hides what a build prints, also to the terminal if there is one."""
    print(line, flush=True)
    if also := terminal():
        print(line, file=also, flush=True)


@functools.cache
def terminal() -> TextIO | None:
    under_pip = "_PYPROJECT_HOOKS_BUILD_BACKEND" in os.environ or "PEP517_BUILD_BACKEND" in os.environ
    if sys.stdout.isatty() or not under_pip:
        return None
    try:
        return open("/dev/tty", "w")
    except OSError:
        return None


# --- setuptools ----------------------------------------------------------------------------------


class BuildExt(build_ext):
    """The extension by ninja, and what it belongs to in pycomm/_build_info.py."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.cuda = find_cuda()
        shutil.copy(compile_and_link(self.cuda), target)

    def run(self) -> None:
        super().run()
        write(
            Path(self.get_ext_fullpath("pycomm._C")).with_name("_build_info.py"),
            f'"""Written by setup.py."""\n\nTORCH_VERSION = "{TORCH.version}"\n'
            f"CUDA_ARCHITECTURES = {tuple(self.cuda.archs if self.cuda else ())!r}\n",
        )


# --- metadata that pyproject.toml cannot state ----------------------------------------------------


def required_torch(version: str) -> str:
    """What a wheel requires that was built for torch `version`: torch>=2.13,<2.14 for "2.13.0+cpu". A preview
    ("2.14.0a0+git12") is older than 2.14 for pip, so the range begins before it.
    """
    found = re.match(r"(\d+)\.(\d+)([^+]*)", version)
    if not found:
        raise SystemExit(f"torch has the version {version!r}; expected one like 2.13.0")
    major, minor, rest = found.groups()
    preview = ".0.dev0" if re.search(r"a|b|rc|dev", rest) else ""
    return f"torch>={major}.{minor}{preview},<{major}.{int(minor) + 1}"


def repository(folder: Path) -> str | None:
    """The web address of the sources. The publisher sets it in PYCOMM_REPOSITORY; a source
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

    def changed(found: re.Match[str]) -> str:
        name = found["name"]
        if not name or re.match(r"[a-z]+:|#", name):
            return found[0]  # code, or a link that needs no change
        if address:
            return f"[{found['text']}]({link(address, name)})"
        return found["text"] if found["text"] == name else f"{found['text']} ({name})"

    return re.sub(r"```.*?```|`[^`]*`|\[(?P<text>[^]]*)\]\((?P<name>[^)\s]+)\)", changed, text, flags=re.S)


def metadata() -> dict[str, object]:
    """Arguments of setup(). A source distribution leaves open which torch it is built for: pip would replace
    the one that is installed. A wheel works with the minor version that it was built for.
    """
    address = repository(ROOT)
    pages = {"Repository": "", "Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
    return {
        "install_requires": [
            "torch" if "sdist" in sys.argv else required_torch(TORCH.version),
            "tomli; python_version < '3.11'",
        ],
        "long_description": readable_elsewhere((ROOT / "README.md").read_text(encoding="utf-8"), address),
        "long_description_content_type": "text/markdown",
        "project_urls": {
            label: link(address, page) if page else address for label, page in pages.items() if address
        },
    }


def main() -> None:
    os.chdir(ROOT)
    files = sorted(path.relative_to(ROOT) for path in (ROOT / "csrc").rglob("*") if path.is_file())
    # `depends` brings the files into a source distribution; what is compiled is found by BuildExt.
    extension = Extension("pycomm._C", ["csrc/types.h"], depends=[str(path) for path in files])
    setup(ext_modules=[extension], cmdclass={"build_ext": BuildExt}, **metadata())


if __name__ == "__main__":  # also under pip; tests import this file
    main()
