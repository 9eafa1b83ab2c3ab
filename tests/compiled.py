"""Object files of the tests that are written in C++, each compiled once.

They are kept in build/tests/ by what the compiler sees: the preprocessed source, the flags and the version
of the compiler. So all tests, all workers of a run and all runs share them, and a change compiles only what
it changes.
"""

import fcntl
import functools
import hashlib
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

KEPT = Path(__file__).parent.parent / "build" / "tests"
JOBS = 2
DAYS = 7  # that an object file is kept after its last use


def command(arguments):
    """Returns what the compiler prints; fails with what it says."""
    result = subprocess.run(["g++", *map(str, arguments)], capture_output=True)
    assert result.returncode == 0, result.stderr.decode(errors="replace")
    return result.stdout


def in_parallel(function, jobs):
    with ThreadPoolExecutor(JOBS) as pool:
        return list(pool.map(function, jobs))


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
