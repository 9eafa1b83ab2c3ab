"""compiled.py and units.py: nothing is compiled twice, nothing stale is linked, and sources of a unit do not
see each other's names.
"""

import os
import shutil
import subprocess
from pathlib import Path

import compiled
import pytest

FLAGS = ["-std=c++20", "-O0"]
HEADER = "#pragma once\ninline int base() {{ return {}; }}\n"
ONE = """#include "base.h"
namespace {
struct Own { int value = 1; };
int count(int) { return Own().value; }  // count
}  // namespace
int one() { return base() + count(0); }
"""
TWO = """#include "base.h"
#include <cstring>
namespace {
struct Own { const char* text = "count"; };
int count(long) { return static_cast<int>(std::strlen(Own().text)); }
}  // namespace
int two() { return base() + count(0); }
"""
MAIN = """#include <cstdio>
int one();
int two();
int main(int count, char**) { return std::printf("%d %d %d", one(), two(), count) < 0; }
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "KEPT", tmp_path / "kept")
    texts = {"base.h": HEADER.format(10), "one.cc": ONE, "two.cc": TWO, "main.cc": MAIN, "other.cc": MAIN}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def unit(folder: Path, *names: str) -> Path:
    return compiled.unit("unit", [folder / f"{name}.cc" for name in names], FLAGS)


def output(program: Path, *arguments: str) -> str:
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20).stdout


def test_names_of_a_source_are_its_own(folder):
    program = compiled.link([unit(folder, "one", "two", "main")], folder / "program")
    assert output(program) == "11 15 1"


def test_several_programs(folder):
    program = compiled.link([unit(folder, "one", "two", "main", "other")], folder / "program")
    assert output(program, "other", "more") == "11 15 2" and output(program, "none") == ""


def test_a_change_of_a_header_is_seen(folder):
    def both() -> list[Path]:
        return [compiled.object_file(folder / "one.cc", FLAGS), unit(folder, "one", "two")]

    before = both()
    (folder / "base.h").write_text(HEADER.format(20))
    after = both()
    assert not set(before) & set(after)
    (folder / "base.h").write_text(HEADER.format(10))
    assert both() == before
    (folder / "base.h").unlink()
    with pytest.raises(AssertionError, match="base.h"):
        both()


def test_a_file_of_the_future(folder):
    os.utime(folder / "base.h", (2**32, 2**32))
    assert compiled.object_file(folder / "one.cc", FLAGS).exists()


def test_two_workers_compile_once(folder, monkeypatch):
    compiler, log = folder / "g++", folder / "log"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {shutil.which("g++")} "$@"\n')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    compiler.chmod(0o755)
    compiled.in_parallel(lambda _: compiled.object_file(folder / "one.cc", FLAGS), range(2))
    assert sum(" -c " in line for line in log.read_text().splitlines()) == 1
