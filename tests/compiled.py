"""Object files of the tests that are written in C++, each compiled once.

They are kept in build/tests/ by what the compiler sees: the preprocessed source, the flags and the version
of the compiler. So all tests, all workers of a run and all runs share them, and a change compiles only what
it changes. Sources of csrc/ that need no flags of a test's own are not compiled again: `built` finds the
object files of the extension, so that what is tested is what users get.
"""

import fcntl
import functools
import hashlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINKED = ROOT / "build" / "objects.json"  # written by setup.py: {source: object file}
KEPT = ROOT / "build" / "tests"
JOBS = 2
DAYS = 7  # that an object file is kept after its last use
# Of the fake device (tests/cpp/cuda/fake_*.cc, fiber*.cc, machine.cc) wherever nothing else is asked for.
DEVICE_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"]
DEVICE_FLAGS += ["-Wno-unused-parameter", "-Wno-unknown-pragmas", "-Wno-missing-field-initializers"]
STANDARD = """algorithm atomic bit cerrno chrono condition_variable cstdint cstring deque functional map
memory mutex optional set sstream stdexcept string thread vector""".split()
# GCC forgets that a precompiled header is of the system, and warns of a copy in it that never happens.
QUIET = ["-Wno-stringop-overflow"]


def command(arguments):
    """Returns what the compiler prints; fails with what it says."""
    result = subprocess.run(["g++", *map(str, arguments)], capture_output=True)
    assert result.returncode == 0, result.stderr.decode(errors="replace")
    return result.stdout


def in_parallel(function, jobs):
    with ThreadPoolExecutor(JOBS) as pool:
        return list(pool.map(function, jobs))


def built(sources: Iterable[Path]) -> list[Path]:
    """The object files of the extension that hold these sources of csrc/, in their order. Those of csrc/torch
    and csrc/bindings hold several, and come once.
    """
    linked = json.loads(LINKED.read_text()) if LINKED.exists() else {}
    names = {source: linked.get(str(Path(source).relative_to(ROOT)), "not compiled") for source in sources}
    found = {source: ROOT / name for source, name in names.items()}
    old = [str(source) for source, file in found.items() if not file.exists() or is_newer(source, file)]
    assert not old, f"build the extension first: {old}"
    return list(dict.fromkeys(found.values()))


def is_newer(source, file):
    return Path(source).stat().st_mtime > file.stat().st_mtime


def objects(sources, flags):
    """The object files of the sources, in their order."""
    return in_parallel(lambda source: object_file(source, flags), sources)


def object_file(source, flags, many=False):
    """many: many sources have these flags."""
    seen = command([*flags, "-E", source])
    target = KEPT / f"{Path(source).stem}-{_key(flags, seen, many)}.o"
    return _made(target, lambda: [*flags, *(standard(flags) if many else []), "-c", source])


def standard(flags):
    """Flags that are added to `flags`, with which the standard library's headers are found compiled."""
    # it knows no macro of the command line
    kept = [str(flag) for flag in flags if not str(flag).startswith(("-D", "-W"))]
    text = "".join(f"#include <{name}>\n" for name in STANDARD)
    header = KEPT / f"standard-{_key(kept, text.encode())}.h"
    if not header.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        own = header.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        own.write_text(text)
        own.rename(header)
    _made(header.with_suffix(".h.gch"), lambda: [*kept, "-x", "c++-header", header])
    return ["-include", header, *QUIET]


def _key(flags, seen, many=True):
    facts = [_compiler(), *map(str, flags), *((*STANDARD, *QUIET) if many else ())]
    return hashlib.sha256("\0".join(facts).encode() + seen).hexdigest()[:24]


def _made(target, arguments):
    """The file `target`, which the compiler writes with these arguments unless it is there."""
    KEPT.mkdir(parents=True, exist_ok=True)
    with open(f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be compiling it
        if target.exists():
            os.utime(target)
        else:
            command([*arguments(), "-o", f"{target}.new"])
            os.rename(f"{target}.new", target)
    return target


def link(files, program, flags=()):
    command(["-pthread", *flags, *files, "-o", program])
    return Path(program)


@functools.cache
def _compiler():
    for path in (*KEPT.glob("*.o*"), *KEPT.glob("standard-*")):
        if time.time() - path.stat().st_mtime > DAYS * 86400:
            path.unlink(missing_ok=True)
    return command(["--version"]).decode()
