"""The headers of torch versions other than the installed one, for tests that only parse them.

A wheel of torch has half a gigabyte, its headers 60 MB. The headers are kept outside of the clone, in
$XDG_CACHE_HOME/pycomm/torch-2.11/include (~/.cache without the variable), for later runs and other clones. A
folder with this name is complete: it is made under another name in the same folder and then renamed. A lock
lets one process make it while the others wait.

pip finds the wheel where its own settings say, except constraints: they are about what is installed.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

DOWNLOAD_SECONDS = 900
PART = "torch/include/"  # of the wheel
NEW = ".new"  # ends the name of a folder that is not complete


class NotFound(Exception):
    """pip did not bring the wheel."""


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pycomm"


def include_folders(minor: str) -> list[Path]:
    """The folders that sources for torch `minor` ("2.11") are compiled with. Raises NotFound."""
    folder = cache() / f"torch-{minor}"
    with _lock(folder):
        if not folder.exists():
            _make(folder, minor)
    include = folder / "include"
    return [include, include / "torch" / "csrc" / "api" / "include"]


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Its holder waits for pip at most, whose time is limited."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: Path, minor: str) -> None:
    new = folder.with_name(folder.name + NEW)
    shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
    wheel_folder = new / "wheel"
    wheel_folder.mkdir(parents=True)
    try:
        _unpack(_download(minor, wheel_folder), new / "include")
        shutil.rmtree(wheel_folder)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _download(minor: str, folder: Path) -> Path:
    """The wheel of torch `minor` in `folder`, where pip keeps its temporary files, too."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--dest", str(folder), f"torch=={minor}.*"]
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull, "TMPDIR": str(folder)}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise NotFound(f"pip did not end within {DOWNLOAD_SECONDS} s") from None
    if done.returncode:
        raise NotFound(f"pip failed:\n{done.stderr[-2000:]}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def _unpack(wheel: Path, folder: Path) -> None:
    """The part of the wheel with the headers, as `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(PART) and not name.endswith("/")]
        if not names:
            raise NotFound(f"{wheel.name} has no {PART}")
        for name in names:
            target = folder / name.removeprefix(PART)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))
