"""Object files of the tests that are written in C++, each compiled once.

They are kept in build/tests/ by what the compiler reads (the contents of the source and of all files that it
includes), the flags and the version of the compiler. So all tests, all workers of a run and all runs share
them, and a change compiles only what it changes. Sources of csrc/ that need no flags of a test are not
compiled again: `built` finds the object files of the extension, so the tests run what users get.

[Note: units] Most of the time of a small source goes into the headers of the standard library. So sources
that are always compiled together form a unit: one file with the text of all of them (`units.py`).
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import units

ROOT = Path(__file__).parent.parent
LINKED = ROOT / "build" / "objects.json"  # written by setup.py: {source: object file}
KEPT = ROOT / "build" / "tests"
JOBS = 2
DAYS = 7  # that an object file is kept after its last use
WARNINGS = ["-Wall", "-Wextra", "-Wno-unknown-pragmas"]
# Of the fake device (tests/cpp/cuda/fake_*.cc, fiber*.cc, machine.cc) wherever nothing else is asked for.
DEVICE_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-pthread", "-fvisibility=hidden", *WARNINGS]
DEVICE_FLAGS += ["-Wno-unused-parameter", "-Wno-missing-field-initializers"]
FAKE = ROOT / "tests" / "cpp" / "cuda"
OF_UNITS = ["-Wno-subobject-linkage"]  # what a `#line` names is taken for a header


def command(arguments: Iterable[object]) -> bytes:
    """Returns what the compiler prints; fails with what it says."""
    result = subprocess.run(["g++", *map(str, arguments)], capture_output=True)
    assert result.returncode == 0, result.stderr.decode(errors="replace")
    return result.stdout


def in_parallel(function: Callable, jobs: Iterable) -> list:
    with ThreadPoolExecutor(JOBS) as pool:
        return list(pool.map(function, jobs))


def built(sources: Iterable[Path]) -> list[Path]:
    """The object files of the extension that hold these sources of csrc/, in their order. Objects of
    csrc/torch and csrc/bindings hold several sources and come once.
    """
    linked = json.loads(LINKED.read_text()) if LINKED.exists() else {}
    names = {source: linked.get(str(Path(source).relative_to(ROOT)), "not compiled") for source in sources}
    found = {source: ROOT / name for source, name in names.items()}
    old = [str(source) for source, file in found.items() if not file.exists() or is_newer(source, file)]
    assert not old, f"build the extension first: {old}"
    return list(dict.fromkeys(found.values()))


def is_newer(source: Path, file: Path) -> bool:
    return Path(source).stat().st_mtime > file.stat().st_mtime


# --- the fake device -----------------------------------------------------------------------------


def fake_driver() -> Path:
    """The CUDA driver of tests/cpp/cuda/fake_driver.h."""
    sources = _of_device("fake_driver", "fake_streams", "fake_virtual_memory")
    return unit("fake_driver", sources, [*DEVICE_FLAGS, "-O0"])


def fake_launch() -> list[Path]:
    """The kernels on fibers, in place of csrc/cuda/kernels/."""
    sources = _of_device("fake_launch", "fake_processors", "machine")
    return [unit("fake_launch", sources, DEVICE_FLAGS), *fibers()]


def fibers() -> list[Path]:
    """The scheduler of the fibers. Not in a unit, and without a sanitizer: [Note: instrumented and not] in
    fiber_core.h.
    """
    return objects(_of_device("fiber", "fiber_ops"), [*DEVICE_FLAGS, "-Werror"])


def _of_device(*names: str) -> list[Path]:
    return [FAKE / f"{name}.cc" for name in names]


# --- compiling -----------------------------------------------------------------------------------


def objects(sources: Iterable[Path], flags: Sequence[object]) -> list[Path]:
    """The object files of the sources, in their order."""
    return in_parallel(lambda source: object_file(source, flags), sources)


def unit(name: str, sources: Sequence[Path], flags: Sequence[object]) -> Path:
    """One object file of several sources. See [Note: units]."""
    text = units.joined([Path(source) for source in sources])
    file = KEPT / f"{name}-{_hash(text.encode())}.cc"
    KEPT.mkdir(parents=True, exist_ok=True)
    with locked(file):
        if not file.exists():
            own = file.with_suffix(".new")
            own.write_text(text)
            own.rename(file)
        os.utime(file, times=(time.time(), file.stat().st_mtime))
    return object_file(file, [*flags, *OF_UNITS])


def unit_in(folder: Path, name: str, sources: Sequence[Path], flags: Sequence[object]) -> Path:
    """The same in `folder`, for sources of this run alone."""
    file = folder / f"{name}.cc"
    file.write_text(units.joined([Path(source) for source in sources]))
    command([*flags, *OF_UNITS, "-c", file, "-o", file.with_suffix(".o")])
    return file.with_suffix(".o")


def object_file(source: Path, flags: Sequence[object]) -> Path:
    """A list of the files that the compiler read is kept with it; their contents are a part of its name."""
    source = Path(source)
    first = _hash("\0".join([_compiler(), *map(str, flags), str(source)]).encode())
    listed = KEPT / f"{source.stem}-{first}.files"
    KEPT.mkdir(parents=True, exist_ok=True)
    with locked(listed):  # another worker may be compiling it
        target = _target(source, first, listed)
        if target is None or not target.exists():
            target = _compiled(source, flags, first, listed)
        for file in (target, listed):
            os.utime(file)
    return target


def _target(source: Path, first: str, listed: Path) -> Path | None:
    """The name of the object file as the sources are now."""
    if not listed.exists():
        return None
    names = listed.read_text().splitlines()
    try:
        contents = [_contents(name) for name in names]
    except FileNotFoundError:  # it is included no longer
        return None
    return KEPT / f"{source.stem}-{_hash(' '.join([first, *names, *contents]).encode())}.o"


def _compiled(source: Path, flags: Sequence[object], first: str, listed: Path) -> Path:
    made, needs = listed.with_suffix(".new.o"), listed.with_suffix(".new.d")
    before: dict[str, tuple[int, int]] = {}
    for _ in range(5):
        began = time.time()
        time.sleep(0.01)  # times of files are those of the last tick
        command([*flags, "-c", source, "-o", made, "-MD", "-MF", needs])
        names = units.needed(needs.read_text())
        after = {name: _changed(name) for name in names}
        if after == before or all(changed < began * 1e9 for changed, _ in after.values()):
            break
        before = after
    else:
        raise AssertionError(f"{source} or what it includes changes all the time")
    listed.write_text("\n".join(names))
    target = _target(source, first, listed)
    os.rename(made, target)
    needs.unlink()
    return target


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """By one worker at a time."""
    with open(f"{file}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _changed(name: str) -> tuple[int, int]:
    facts = os.stat(name)
    return facts.st_mtime_ns, facts.st_size


def _contents(name: str) -> str:
    return _hash_of_file(name, *_changed(name))


@functools.cache
def _hash_of_file(name: str, changed: int, size: int) -> str:
    return _hash(Path(name).read_bytes())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]


def link(files: Iterable[Path], program: Path, flags: Sequence[object] = ()) -> Path:
    command(["-pthread", *flags, *files, "-o", program])
    return Path(program)


@functools.cache
def _compiler() -> str:
    for path in KEPT.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # another worker was first
            if time.time() - max(path.stat().st_mtime, path.stat().st_atime) > DAYS * 86400:
                path.unlink()
    return command(["--version"]).decode()
