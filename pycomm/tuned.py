"""The table that `python -m pycomm.benchmarks tune` has measured: its file, and whether it counts here.

    {"format": 1, "pycomm": "0.1.0", "machine": {"cpu": "Intel Xeon", "cores": 2}, "measured": "2026-11-22",
     "rows": [
      {"ranks": 2, "cores": 2, "access": "kernel", "op": "all_reduce",
       "choices": [[24576, "one_shot"], [100663296, "direct"]]},
      ...]}

A row is for groups of so many ranks on so many cores (together; they may be fewer than the machine's) that
get at each other's buffers in this way: through `staging` memory, by the `kernel` (process_vm_readv), or
because every rank has them `mapped`. A choice: up to so many bytes of a rank's whole buffer, this algorithm.
What no row speaks of is decided by the built-in table (csrc/collectives/select.cc).

The file counts on the processor it was measured on, for the pycomm it was measured with. Otherwise, or when
it is damaged, a group that found it by itself warns and takes the built-in table; if PYCOMM_TUNED names it,
making the group fails: who names a file wants it used. A file is read when a group is made, never later; of
a group's ranks rank 0's counts (csrc/collectives/tuned.h, decision 0014).
"""

import errno
import functools
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import pycomm
from pycomm import _C, env
from pycomm.cached import read_json

__all__ = ["Tuned", "default_path", "load", "machine", "write"]

FORMAT = 1
AGAIN = "`python -m pycomm.benchmarks tune` measures again"
NONE_THERE = (errno.ENOENT, errno.ENOTDIR)
MOST_TOLD = 80  # characters of what a damaged file says


class Machine(TypedDict):
    """What the figures depend on."""

    cpu: str
    cores: int


class Tuned(NamedTuple):
    """What this process knows of the table."""

    path: Path | None  # None: PYCOMM_TUNED=0
    rows: _C.TunedRows | None  # None: there is no file, or it does not count
    problem: str | None  # why a file that is there does not count


@functools.cache
def machine() -> Machine:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.processor(), "cores": os.cpu_count() or 1}


def default_path() -> Path:
    """Where the table of this machine lies: machines that share a home folder have a file each."""
    here = machine()
    cpu = re.sub(r"[^a-z0-9]+", "-", here["cpu"].lower()).strip("-") or "cpu"
    return Path(env.cache_folder()) / f"tuned-{cpu}-{here['cores']}.json"


def load() -> Tuned:
    """The Tuned of this process, for a new group. Raises ValueError where PYCOMM_TUNED names a file that does
    not count.
    """
    named = env.tuned_file()
    if named == "0":
        return Tuned(None, None, None)
    path = Path(named) if named else default_path()
    try:
        state = path.stat()
    except OSError as error:
        there = named or error.errno not in NONE_THERE
        found = Tuned(path, None, f"it cannot be read: {error.strerror}" if there else None)
    else:
        found = _read(path, state.st_mtime_ns, state.st_size, state.st_ino)
    if found.problem and named:
        raise ValueError(f"PYCOMM_TUNED={named!r} in the environment: {found.problem}.")
    if found.problem and env.is_first_rank():
        _warn(f"{path} is not used, the built-in table is: {found.problem}.")
    return found


def write(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]], measured: object) -> None:
    """Writes a file, by rename. rows: {"ranks", "cores", "access", "op", "choices"}; of a file of this
    machine and version that is there, the rows of other ranks and cores stay.
    """
    path = Path(path)
    new = {(row["ranks"], row["cores"]) for row in rows}
    try:
        kept = [row for row in _checked(path)["rows"] if (row["ranks"], row["cores"]) not in new]
    except (OSError, ValueError, KeyError, TypeError):  # damaged: nothing of it is kept
        kept = []
    rows = sorted([*kept, *rows], key=lambda row: (row["ranks"], row["cores"]))
    head = {"format": FORMAT, "pycomm": pycomm.__version__, "machine": machine(), "measured": measured}
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    text = json.dumps(head)[:-1] + ', "rows": [\n' + lines + "\n]}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


@functools.lru_cache(maxsize=4)
def _read(path: Path, mtime_ns: int, size: int, inode: int) -> Tuned:
    """The file in this state: a process that makes many groups reads it once."""
    try:
        content = _checked(path)
    except OSError as error:
        return Tuned(path, None, f"it cannot be read: {error.strerror}")
    except ValueError as error:
        return Tuned(path, None, str(error))
    try:
        lines = [
            (row["ranks"], row["cores"], row["access"], row["op"], *choice)
            for row in content["rows"]
            for choice in row["choices"]
        ]
        return Tuned(path, _C.TunedRows(lines), None)
    except ValueError as error:
        return Tuned(path, None, f"it is damaged, {error}; {AGAIN}")
    except (KeyError, TypeError):
        return Tuned(path, None, f"it is damaged, a row is not as it should be; {AGAIN}")


def _checked(path: Path) -> dict[str, Any]:
    """The content of a file of this machine and version. Raises OSError, ValueError."""
    try:
        content = read_json(path)
    except ValueError as error:
        raise ValueError(f"it is damaged, {error}; {AGAIN}") from None
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise ValueError(f"it is damaged, there are no rows; {AGAIN}")
    written = content.get("format"), content.get("pycomm")
    if written != (FORMAT, pycomm.__version__):
        text = _short(f"it is of pycomm {written[1]}, format {written[0]}")
        raise ValueError(f"{text}, and this is pycomm {pycomm.__version__}, format {FORMAT}; {AGAIN}")
    if content.get("machine") != machine():
        there, here = map(_told, (content.get("machine"), machine()))
        raise ValueError(f"it is of another machine ({there}), and this is {here}; {AGAIN}")
    return content


def _told(which: object) -> str:
    if not isinstance(which, dict):
        return "not named"
    return _short(f"{which.get('cpu')}, {which.get('cores')} cores")


def _short(text: str) -> str:
    """What a file says, so that any log can take it."""
    return text[:MOST_TOLD].encode(errors="backslashreplace").decode()


@functools.cache
def _warn(text: str) -> None:
    env.logger().warning("%s", text)
