"""The rules of the source tree that no compiler checks: who may use whom, where the environment is read, how long a file may be."""

import ast
import re
from pathlib import Path

import pytest

import pycomm

ROOT = Path(__file__).parent.parent
MAX_LINES = 500
CPP_SUFFIXES = {".h", ".cc", ".inc", ".cuh", ".cu"}

# Layers of csrc/, top to bottom: a layer may include itself and what is below it, not what is beside it. A part is a folder, or a file
# without suffix; other files that lie directly in csrc/ belong to the communicator.
LAYERS = [
    {"bindings"},
    {"torch"},
    {"cuda"},
    {"collectives"},
    {"communicator"},
    {"transport", "reduce"},
    {"memory", "store"},
    {"types", "error"},
]
KNOWS_TORCH = {"bindings", "torch"}
TORCH_HEADER = re.compile(r"#include <(torch|c10|ATen|caffe2|pybind11)/|#include <Python\.h>")


def cpp_files():
    return sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in CPP_SUFFIXES)


def python_files(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def part_of(path):
    relative = path.relative_to(ROOT / "csrc")
    name = relative.parts[0] if len(relative.parts) > 1 else relative.stem
    return name if any(name in layer for layer in LAYERS) or len(relative.parts) > 1 else "communicator"


def may_include(user, used):
    depth = {part: number for number, layer in enumerate(LAYERS) for part in layer}
    assert user in depth and used in depth, f"give csrc/{user} and csrc/{used} a place in LAYERS"
    return user == used or depth[user] < depth[used] or {user, used} == {"types", "error"}


def imports(path):
    """The (module, name) pairs that a Python file imports, anywhere in it; name is None for `import module`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the package's name"
            yield from ((node.module, alias.name) for alias in node.names)


def show(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", cpp_files(), ids=show)
def test_cpp_includes_point_down(path):
    user = part_of(path)
    for include in re.findall(r'#include "([^"]+)"', path.read_text()):
        used = next((base / include for base in (path.parent, ROOT / "csrc") if (base / include).exists()), None)
        assert used, f"{show(path)} includes {include!r}, which is not in csrc/"
        assert may_include(user, part_of(used.resolve())), f"{show(path)} ({user}) may not include {include}"


@pytest.mark.parametrize("path", cpp_files(), ids=show)
def test_cpp_stays_in_its_place(path):
    text, part = path.read_text(), part_of(path)
    assert part in KNOWS_TORCH or not TORCH_HEADER.search(text), "torch and Python headers only in csrc/torch and csrc/bindings.cc"
    assert "getenv" not in text, "environment variables are read in pycomm/env.py and passed down"
    assert part != "transport" or not re.search(r"\bReduceOp\b", text), "a transport knows no ReduceOp"


@pytest.mark.parametrize("path", python_files("pycomm", "parallel", "benchmarks"), ids=show)
def test_environment_is_read_in_one_file(path):
    found = re.search(r"\bos\.(environb?|getenv)\b|from os import .*\b(environ|getenv)\b", path.read_text())
    assert path == ROOT / "pycomm" / "env.py" or not found, "use pycomm.env (env.for_child for a process that you start)"


@pytest.mark.parametrize("path", python_files("parallel"), ids=show)
def test_parallel_uses_public_names(path):
    for module, name in imports(path):
        public = module == "pycomm" and (name is None or name in pycomm.__all__)
        allowed = public or module.startswith(("pycomm.parallel", "pycomm.testing")) or module.split(".")[0] != "pycomm"
        assert allowed, f"parallel may not use {module}{'.' + name if name else ''}: it is not public"


@pytest.mark.parametrize("path", python_files("pycomm", "parallel"), ids=show)
def test_python_imports_point_down(path):
    above = ("pycomm.benchmarks", "benchmarks", "examples", "tests")
    if path.is_relative_to(ROOT / "pycomm"):
        above += ("pycomm.parallel", "parallel")
    for module, name in imports(path):
        full = f"{module}.{name}" if name else module
        assert not any(full == upper or full.startswith(upper + ".") for upper in above), f"may not import {full}"


@pytest.mark.parametrize("path", cpp_files() + python_files("pycomm", "parallel", "benchmarks", "examples", "tests"), ids=show)
def test_files_stay_short(path):
    nlines = len(path.read_text().splitlines())
    assert nlines <= MAX_LINES, f"{nlines} lines: files aim at 300 and stop at {MAX_LINES}; split by idea"
