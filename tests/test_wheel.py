"""`make wheel`: what it makes installs into a fresh virtual environment and works there, and the source
distribution can be built again.
"""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from tiers import tier

ROOT = Path(__file__).parent.parent
pytestmark = [tier(slow=1), pytest.mark.timeout(1800)]

# Packages that are links in the source tree: their files must be inside, each under its name.
EXPECTED = (
    "pycomm/__init__.py",
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


def run(*command, cwd=ROOT, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


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
    run("make", "wheel", f"DIST={folder}")
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


def test_sdist_holds_real_files(sdist):
    with tarfile.open(sdist) as archive:
        members = {member.name.split("/", 1)[-1]: member for member in archive.getmembers()}
    assert not [name for name, member in members.items() if member.issym() or member.islnk()]
    wanted = [*EXPECTED, "LICENSE", "CHANGELOG.md", "SECURITY.md", "README.md", "setup.py", "csrc/types.h"]
    assert not set(wanted) - set(members)
    assert not [name for name in members if FORBIDDEN.search(name)]
    assert not [name for name in members if name.endswith(".so") or "_build_info" in name]


def test_wheel_works_in_a_fresh_environment(wheel, tmp_path):
    """Installed with what it requires and nothing else; the torch that it was built for is the pinned one."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "requirements-test.txt", wheel, cwd=tmp_path)
    packages = run(python, "-c", SMOKE, cwd=tmp_path).split()[-2:]
    assert all(Path(folder).is_relative_to(tmp_path / "env") for folder in packages)
    license_files = list((tmp_path / "env").rglob("pycomm_runtime-*.dist-info/licenses/LICENSE"))
    assert len(license_files) == 1


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
