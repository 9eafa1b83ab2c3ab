"""csrc/torch and csrc/bindings compile against the oldest and the newest torch that pycomm supports.

Only the headers of these versions are needed, as the compiler parses and checks the sources but writes no
code (-fsyntax-only). torch's headers take longer than the sources: 15 to 20 s of processor time for each
file, about 60 s for all files as one unit. So the sources of a group are included by one generated file.
"""

import os
import subprocess
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch_headers

ROOT = Path(__file__).parent.parent
# Each group is one unit. All sources of csrc/ that include headers of torch or Python: test_layering.py.
GROUPS = {"torch and bindings": sorted([*ROOT.glob("csrc/torch/*.cc"), *ROOT.glob("csrc/bindings/*.cc")])}
FLAGS = ["-std=c++20", "-fsyntax-only", "-fvisibility=hidden", "-Wall", "-Wextra"]
FLAGS += ["-Wno-unused-parameter", "-Wno-unknown-pragmas"]

VERSIONS = [
    pytest.param("2.11", marks=pytest.mark.slow),
    pytest.param("2.15", marks=[pytest.mark.slow, pytest.mark.deep]),
]


def folders_of(minor: str) -> list[Path]:
    """Include folders of this torch. Without an index the test is skipped where pip is told that there is
    none, and fails elsewhere.
    """
    try:
        return torch_headers.include_folders(minor)
    except torch_headers.NotFound as error:
        offline = os.environ.get("PIP_NO_INDEX", "0").lower() not in ("", "0", "false", "no", "off")
        place = torch_headers.cache() / f"torch-{minor}" / "include"
        message = (
            f"The headers of torch {minor} are missing: {error}\nWithout a package index, copy torch/include "
            f"of a wheel of torch {minor} to {place}, or set PIP_NO_INDEX=1 to skip this test."
        )
        (pytest.skip if offline else pytest.fail)(message)


def unit(sources: list[Path], minor: str) -> str:
    """One source of all; it does not compile with the headers of another version."""
    major, number = minor.split(".")
    lines = [f'#include "{source}"' for source in sources]
    lines += ["#include <torch/headeronly/version.h>"]
    lines += [f"static_assert(TORCH_VERSION_MAJOR == {major} && TORCH_VERSION_MINOR == {number});"]
    return "\n".join([*lines, ""])


def check_syntax(source: Path, folders: list[Path]) -> subprocess.CompletedProcess[str]:
    system = [*map(str, folders), sysconfig.get_path("include")]
    command = ["g++", *FLAGS, *(word for folder in system for word in ("-isystem", folder)), str(source)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.timeout(1800)  # the first run downloads a wheel
@pytest.mark.parametrize("minor", VERSIONS)
@pytest.mark.parametrize("group", GROUPS)
def test_sources_compile(minor, group, tmp_path):
    source = tmp_path / "unit.cc"
    source.write_text(unit(GROUPS[group], minor))
    done = check_syntax(source, folders_of(minor))
    assert done.returncode == 0, done.stderr[:5000]


@pytest.mark.parametrize(
    ("source", "found", "error"),
    [
        ("int right = 1;", "2.11", None),
        ("int right = 1;", "2.13", "static assertion failed"),
        ("int wrong = of_another_version();", "2.11", "of_another_version"),
    ],
)
def test_what_does_not_compile_is_found(source, found, error, tmp_path):
    """An error in a source, and headers of another version than 2.11."""
    header = tmp_path / "include" / "torch" / "headeronly" / "version.h"
    header.parent.mkdir(parents=True)
    names = zip(("MAJOR", "MINOR"), found.split("."), strict=True)
    header.write_text("".join(f"#define TORCH_VERSION_{name} {value}\n" for name, value in names))
    (tmp_path / "source.cc").write_text(f"{source}\n")
    (tmp_path / "unit.cc").write_text(unit([tmp_path / "source.cc"], "2.11"))
    done = check_syntax(tmp_path / "unit.cc", [tmp_path / "include"])
    assert (done.returncode == 0) == (error is None) and (error or "") in done.stderr


# --- how the headers are fetched, with a small wheel in place of torch's --------------------------


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """The folder where pip looks for wheels, in place of an index, and an empty cache."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    settings = {"FIND_LINKS": str(folder), "NO_INDEX": "1", "CONFIG_FILE": os.devnull}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def write_wheel(folder: Path, version: str) -> None:
    """Says that it is torch, and has its version in a header."""
    info = f"torch-{version}.dist-info"
    files = {
        "torch/include/c10/version.h": version,
        "torch/include/torch/csrc/api/include/torch/all.h": version,
        "torch/lib/libtorch.so": "not a header",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


def test_headers_are_fetched_once(wheels, tmp_path, monkeypatch):
    """Constraints do not count; what a killed process left does not, either; only the headers are kept."""
    for version in ("2.11.0", "2.11.1", "2.13.0"):
        write_wheel(wheels, version)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("torch<2.0\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(constraints))
    left = torch_headers.cache() / "torch-2.11.new" / "include" / "c10"
    left.mkdir(parents=True)
    (left / "half.h").touch()

    folders = torch_headers.include_folders("2.11")
    assert (folders[0] / "c10" / "version.h").read_text() == "2.11.1"
    assert (folders[1] / "torch" / "all.h").read_text() == "2.11.1"
    kept = sorted(path.name for path in torch_headers.cache().rglob("*") if path.is_file())
    assert kept == ["all.h", "torch-2.11.lock", "version.h"]
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert torch_headers.include_folders("2.11") == folders


def test_without_an_index(wheels, monkeypatch):
    """A skip where PIP_NO_INDEX says so, else a failure; the text says what to do; nothing stays behind."""
    write_wheel(wheels, "2.13.0")
    with pytest.raises(pytest.skip.Exception, match="(?s)torch==2.11.*set PIP_NO_INDEX=1"):
        folders_of("2.11")
    monkeypatch.setattr(torch_headers, "include_folders", raise_not_found)
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    with pytest.raises(pytest.fail.Exception, match="torch 2.11 are missing: pip failed"):
        folders_of("2.11")
    assert [path.name for path in torch_headers.cache().iterdir()] == ["torch-2.11.lock"]


def raise_not_found(minor: str) -> list[Path]:
    raise torch_headers.NotFound("pip failed")
