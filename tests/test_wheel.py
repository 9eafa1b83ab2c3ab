"""`make wheel`: what it makes installs into a fresh virtual environment and works there, and the source
distribution can be built again.
"""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from test_user_types import PROGRAMS, checked, judge
from tiers import tier

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://example.org/pycomm"  # as a publisher sets it
pytestmark = [tier(slow=1), pytest.mark.timeout(1800)]

# Packages that are links in the source tree: their files must be inside, each under its name.
EXPECTED = (
    "pycomm/__init__.py",
    "pycomm/_C.pyi",
    "pycomm/py.typed",
    "pycomm/fused/kernels/matmul.py",
    "pycomm/parallel/__init__.py",
    "pycomm/parallel/zero/__init__.py",
    "pycomm/benchmarks/__main__.py",
    "pycomm/benchmarks/strategies/__init__.py",
)
FORBIDDEN = re.compile(r"(^|/)(tests|examples|docs|results|gpu_check)/|^(parallel|benchmarks)/")

# Runs in the fresh environment, outside of the source tree. Nothing but pycomm and what it requires is there.
SMOKE = """
import os
import torch
import torch.distributed as dist
backend = "PYCOMM" in dist.Backend._plugins            # registered by torch's entry point alone

import pycomm, pycomm.benchmarks, pycomm.fused, pycomm.parallel as par
from pycomm.testing import run_ranks

def main(comm):
    x = torch.full((1000,), float(comm.rank + 1))
    comm.all_reduce(x)
    return x.sum().item()

assert run_ranks(2, main) == [3000.0, 3000.0]
assert run_ranks(2, main, mode="processes") == [3000.0, 3000.0]
assert backend

dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(4)
dist.all_reduce(x)
assert dist.get_backend() == "pycomm" and x.sum() == 4
model, opt = torch.nn.Linear(4, 2), None
model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), par.Plan())
assert par.step(model, opt, (torch.ones(3, 4), torch.zeros(3, 2)), torch.nn.functional.mse_loss) > 0
dist.destroy_process_group()
print(os.path.dirname(pycomm.__file__), os.path.dirname(par.__file__))
"""

# What a user of torch.distributed writes; under torchrun.
SCRIPT = """
import torch
import torch.distributed as dist
dist.init_process_group("pycomm")
x = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
assert dist.get_backend() == "pycomm" and x.eq(3).all()
dist.destroy_process_group()
"""


def run(*command, cwd=ROOT, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def required(metadata: email.message.Message) -> list[str]:
    """What is installed with pycomm when no extra is asked for."""
    return [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]


def check_pages(metadata: email.message.Message) -> None:
    """Authors, addresses and classifiers are there, and links lead somewhere from any place."""
    assert metadata["Author"] == "The pycomm authors"
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert urls["Repository"] == REPOSITORY and urls.keys() > {"Documentation", "Changelog"}
    assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier")
    assert len(metadata["Keywords"].split(",")) > 5
    text = metadata.get_payload()
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.S))
    for address in [*links, *urls.values()]:
        assert re.match("https?://|#", address), f"a relative link: {address}"
        name = address.removeprefix(f"{REPOSITORY}/blob/HEAD/")
        assert name == address or (ROOT / name).is_file(), f"no such file: {address}"
    assert any(address.startswith(REPOSITORY) for address in links)


def packaged_files(wheel):
    """The files of a wheel, without its metadata; none of them may be a link."""
    with zipfile.ZipFile(wheel) as archive:
        links = [info.filename for info in archive.infolist() if info.external_attr >> 28 == 0o12]
        assert not links
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def dist_folder(tmp_path_factory):
    """What `make wheel` makes: one wheel, one source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    run("make", "wheel", f"DIST={folder}", PYCOMM_REPOSITORY=REPOSITORY)
    return folder


@pytest.fixture(scope="module")
def wheel(dist_folder):
    (path,) = dist_folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist(dist_folder):
    (path,) = dist_folder.glob("*.tar.gz")
    return path


def test_wheel_holds_the_packages_alone(wheel):
    files = packaged_files(wheel)
    assert not set(EXPECTED) - files
    assert not [name for name in files if FORBIDDEN.search(name)]
    assert all(name.startswith("pycomm/") for name in files)
    assert sum(name.endswith(".so") for name in files) == 1 and "pycomm/_build_info.py" in files


def test_wheel_says_which_torch_it_fits(wheel):
    """The minor version that the extension was built for."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
        info = archive.read("pycomm/_build_info.py").decode()
    major, minor = map(int, re.search(r'TORCH_VERSION = "(\d+)\.(\d+)', info).groups())
    torch, *others = required(metadata)
    assert Requirement(torch) == Requirement(f"torch>={major}.{minor},<{major}.{minor + 1}")
    assert others == ['tomli; python_version < "3.11"']
    check_pages(metadata)


def test_sdist_leaves_open_which_torch(sdist):
    with tarfile.open(sdist) as archive:
        (name,) = [name for name in archive.getnames() if re.fullmatch("[^/]+/PKG-INFO", name)]
        metadata = email.message_from_bytes(archive.extractfile(name).read())
    assert required(metadata) == ["torch", 'tomli; python_version < "3.11"']
    check_pages(metadata)


def test_sdist_holds_real_files(sdist):
    with tarfile.open(sdist) as archive:
        members = {member.name.split("/", 1)[-1]: member for member in archive.getmembers()}
    assert not [name for name, member in members.items() if member.issym() or member.islnk()]
    wanted = [*EXPECTED, "LICENSE", "CHANGELOG.md", "SECURITY.md", "README.md", "setup.py", "csrc/types.h"]
    assert not set(wanted) - set(members)
    assert not [name for name in members if FORBIDDEN.search(name)]
    assert not [name for name in members if name.endswith(".so") or "_build_info" in name]


def installed(wheel, folder):
    """The Python of a fresh environment: installed with what it requires and nothing else; the torch that it
    was built for is the pinned one.
    """
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "requirements-test.txt", wheel, cwd=folder)
    return python


def test_wheel_works_in_a_fresh_environment(wheel, tmp_path):
    python = installed(wheel, tmp_path)
    packages = run(python, "-c", SMOKE, cwd=tmp_path).split()[-2:]
    assert all(Path(folder).is_relative_to(tmp_path / "env") for folder in packages)
    run(python, "-m", "pip", "check", cwd=tmp_path)  # the torch that is there is the one that it asks for
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run(python, *launcher, "script.py", cwd=tmp_path)
    assert run(python, "-m", "pycomm.doctor", cwd=tmp_path).endswith("pycomm can be used here.\n")
    license_files = list((tmp_path / "env").rglob("pycomm_runtime-*.dist-info/licenses/LICENSE"))
    assert len(license_files) == 1


@tier(
    deep=1
)  # mypy reads all of torch; the same programs are checked in the source tree by test_user_types.py
def test_types_are_in_the_wheel(wheel, tmp_path):
    python = installed(wheel, tmp_path)
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "requirements-test.txt", "mypy", "numpy")
    programs = [shutil.copy(program, tmp_path) for program in PROGRAMS]
    said = checked([Path(program) for program in programs], folder=tmp_path, python=python)
    assert [text for program in PROGRAMS for text in judge(said[program.name], program)] == []


def test_sdist_holds_all_sources(sdist):
    """What setup.py compiles and packs is there, byte by byte."""
    with tarfile.open(sdist) as archive:
        there = {
            member.name.split("/", 1)[-1]: archive.extractfile(member).read()
            for member in archive.getmembers()
            if member.isfile()
        }
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    for package in ("", "parallel", "benchmarks"):
        sources += (ROOT / "pycomm" / package).rglob("*.py")
    sources += [ROOT / "pycomm" / "_C.pyi", ROOT / "pycomm" / "py.typed"]
    assert len(sources) > 300
    for path in sources:
        name = str(path.relative_to(ROOT))
        assert name == "pycomm/_build_info.py" or there.get(name) == path.read_bytes(), name


@tier(deep=1)  # it compiles everything a second time
def test_sdist_builds_the_same_wheel(sdist, wheel, tmp_path):
    """From the source distribution alone; without the CUDA kernels, which add no file."""
    command = (
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        tmp_path,
        sdist,
    )
    run(*command, cwd=tmp_path, PYCOMM_CUDA="0")
    (rebuilt,) = tmp_path.glob("*.whl")
    assert packaged_files(rebuilt) == packaged_files(wheel)
