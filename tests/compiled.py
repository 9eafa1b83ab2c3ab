"""Object files of the tests that are written in C++, each compiled once.

They are kept in build/tests/ by what the compiler sees: the preprocessed source, the flags and the version
of the compiler. So all tests, all workers of a run and all runs share them, and a change compiles only what
it changes. Sources of csrc/ that need no flags of a test's own are not compiled again: `built` finds the
object files of the extension, so that what is tested is what users get.
"""

import fcntl
import functools
import hashlib
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "build" / "tests"
JOBS = 2
DAYS = 7  # that an object file is kept after its last use
# Of the fake device (tests/cpp/cuda/fake_*.cc, fiber*.cc, machine.cc) wherever nothing else is asked for.
DEVICE_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"]
DEVICE_FLAGS += ["-Wno-unused-parameter", "-Wno-unknown-pragmas", "-Wno-missing-field-initializers"]


def command(arguments):
    """Returns what the compiler prints; fails with what it says."""
    result = subprocess.run(["g++", *map(str, arguments)], capture_output=True)
    assert result.returncode == 0, result.stderr.decode(errors="replace")
    return result.stdout


def in_parallel(function, jobs):
    with ThreadPoolExecutor(JOBS) as pool:
        return list(pool.map(function, jobs))


def built(sources):
    """The object files of the extension for sources of csrc/, in their order."""
    folder = ROOT / "build" / f"temp-{'.'.join(version('torch').split('.')[:2])}"
    found = {source: (folder / Path(source).relative_to(ROOT)).with_suffix(".o") for source in sources}
    old = [str(source) for source, file in found.items() if not file.exists() or is_newer(source, file)]
    assert not old, f"build the extension first: {old}"
    return list(found.values())


def is_newer(source, file):
    return Path(source).stat().st_mtime > file.stat().st_mtime


def objects(sources, flags):
    """The object files of the sources, in their order."""
    return in_parallel(lambda source: object_file(source, flags), sources)


def object_file(source, flags):
    seen = command([*flags, "-E", source])
    facts = [_compiler(), *map(str, flags)]
    key = hashlib.sha256("\0".join(facts).encode() + seen).hexdigest()[:24]
    KEPT.mkdir(parents=True, exist_ok=True)
    target = KEPT / f"{Path(source).stem}-{key}.o"
    with open(f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be compiling it
        if target.exists():
            os.utime(target)
        else:
            command([*flags, "-c", source, "-o", f"{target}.new"])
            os.rename(f"{target}.new", target)
    return target


def link(files, program, flags=()):
    command(["-pthread", *flags, *files, "-o", program])
    return Path(program)


@functools.cache
def _compiler():
    for path in KEPT.glob("*.o*"):
        if time.time() - path.stat().st_mtime > DAYS * 86400:
            path.unlink(missing_ok=True)
    return command(["--version"]).decode()
