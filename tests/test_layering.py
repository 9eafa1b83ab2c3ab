"""The rules of the source tree that no compiler checks: who may use whom, and where the environment is
read. How long a file, a class, a function or a line may be: test_style.py.
"""

import re
import shutil
import subprocess
import sys

import pytest
from source_tree import ROOT, circles, cpp_files, cpp_graph, imports, python_files, python_graph, show

import pycomm

# Layers of csrc/, top to bottom: a layer may include itself and what is below it, not what is beside it. A
# part is a folder (a folder of a folder where it is named here), or a file that lies directly in csrc/,
# without its suffix.
LAYERS = [
    {"bindings"},
    {"torch"},
    {"cuda", "hosts"},
    {"cuda/kernels"},
    {"cuda/device"},
    {"collectives"},
    {"communicator"},
    {"op", "transport"},
    {"arithmetic", "trace"},
    {"memory", "store"},
    {"types", "error"},
]
KNOWS_TORCH = {"bindings", "torch"}
TORCH_HEADER = re.compile(r"#include <(torch|c10|ATen|caffe2|pybind11)/|#include <Python\.h>")


def part_of(path):
    relative = path.relative_to(ROOT / "csrc")
    inner = "/".join(relative.parts[:2])
    if len(relative.parts) > 2 and any(inner in layer for layer in LAYERS):
        return inner
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def may_include(user, used):
    depth = {part: number for number, layer in enumerate(LAYERS) for part in layer}
    assert user in depth and used in depth, f"give csrc/{user} and csrc/{used} a place in LAYERS"
    return user == used or depth[user] < depth[used] or {user, used} == {"types", "error"}


@pytest.mark.parametrize("path", cpp_files("csrc"), ids=show)
def test_cpp_includes_point_down(path):
    user = part_of(path)
    for include in re.findall(r'#include "([^"]+)"', path.read_text()):
        used = next(
            (base / include for base in (path.parent, ROOT / "csrc") if (base / include).exists()), None
        )
        assert used, f"{show(path)} includes {include!r}, which is not in csrc/"
        assert may_include(user, part_of(used.resolve())), f"{show(path)} ({user}) may not include {include}"


@pytest.mark.parametrize("path", cpp_files("csrc"), ids=show)
def test_cpp_stays_in_its_place(path):
    text, part = path.read_text(), part_of(path)
    assert part in KNOWS_TORCH or not TORCH_HEADER.search(text), (
        "torch and Python headers only in csrc/torch and csrc/bindings"
    )
    assert "getenv" not in text, "environment variables are read in pycomm/env.py and passed down"
    assert part != "transport" or not re.search(r"\bReduceOp\b", text), "a transport knows no ReduceOp"


@pytest.mark.parametrize("path", python_files("pycomm", "parallel", "benchmarks"), ids=show)
def test_environment_is_read_in_one_file(path):
    found = re.search(r"\bos\.(environb?|getenv)\b|from os import .*\b(environ|getenv)\b", path.read_text())
    assert path == ROOT / "pycomm" / "env.py" or not found, (
        "use pycomm.env (env.for_child for a process that you start)"
    )


@pytest.mark.parametrize("path", python_files("parallel"), ids=show)
def test_parallel_uses_public_names(path):
    for module, name in imports(path):
        public = module == "pycomm" and (name is None or name in pycomm.__all__)
        allowed = (
            public
            or module.startswith(("pycomm.parallel", "pycomm.testing", "pycomm.groups", "pycomm.quantities"))
            or (module, name) == ("pycomm", "trace")  # spans: a module, not a name of the package
            or module.split(".")[0] != "pycomm"
        )
        assert allowed, f"parallel may not use {module}{'.' + name if name else ''}: it is not public"


@pytest.mark.parametrize("path", python_files("pycomm", "parallel"), ids=show)
def test_python_imports_point_down(path):
    above = ("pycomm.benchmarks", "benchmarks", "examples", "tests")
    if path.is_relative_to(ROOT / "pycomm"):
        above += ("pycomm.parallel", "parallel")
    for module, name in imports(path):
        full = f"{module}.{name}" if name else module
        assert not any(full == upper or full.startswith(upper + ".") for upper in above), (
            f"may not import {full}"
        )


# Parts of parallel/, top to bottom, read like LAYERS: strategies do not know each other, and what several of
# them need lies in ground/. A part is a folder, or a file of parallel/ without its suffix.
PARALLEL = [
    {"trainers"},
    {"__init__"},
    {"recovery"},
    {"planning"},
    {"api", "verification"},
    {"building"},
    {"run"},
    {"checks"},
    {"checkpoint"},
    {"parts"},
    {"zero"},
    {"data", "expert", "pipeline", "sequence", "tensor"},
    {"ground", "models"},
    {"given"},
]
# The same for the folders of benchmarks/.
BENCHMARKS = [
    {"__main__", "__init__"},
    {"planned"},
    {"collectives", "fused", "strategies", "tune", "plot", "registered", "snapshots", "zero_memory"},
    {"common"},
]


@pytest.mark.parametrize(
    ("folder", "layers"), [("parallel", PARALLEL), ("benchmarks", BENCHMARKS)], ids=["parallel", "benchmarks"]
)
def test_parts_use_what_is_below_them(folder, layers):
    depth = {part: number for number, layer in enumerate(layers) for part in layer}
    graph, wrong = python_graph(folder), []
    for user, modules in graph.items():
        for used in modules:
            above, below = part_of_python(user), part_of_python(used)
            assert above in depth and below in depth, f"give {above} and {below} a place in the table"
            if above != below and depth[above] >= depth[below]:
                wrong.append(f"{user} may not use {used}")
    assert not wrong, "\n".join(wrong)


def part_of_python(module):
    """The folder or file below pycomm.parallel or pycomm.benchmarks that a module lies in or is."""
    parts = module.split(".")
    return parts[2] if len(parts) > 2 else "__init__"


@pytest.mark.parametrize(
    "graph", [python_graph("pycomm", "parallel", "benchmarks"), cpp_graph()], ids=["python", "cpp"]
)
def test_no_circles_of_modules(graph):
    assert not circles(graph), (
        "modules that use each other are one module, or one of them has a part too many"
    )


def test_setup_asks_for_the_links(tmp_path):
    """A copy of the sources whose links became files says how to mend it, before anything is built."""
    (tmp_path / "pycomm").mkdir()
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "pycomm" / "parallel").write_text("../parallel")
    command = [sys.executable, "setup.py", "--version"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode != 0 and "ln -sfn ../parallel pycomm/parallel" in result.stderr


def test_imports_for_types_alone_are_told_apart(tmp_path):
    (tmp_path / "one.py").write_text("import a\nif TYPE_CHECKING:\n    import b\n    from c import d\n")
    assert list(imports(tmp_path / "one.py", typed=False)) == [("a", None)]
    assert sorted(imports(tmp_path / "one.py"), key=str) == [("a", None), ("b", None), ("c", "d")]


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f"}}
    assert sorted(circles(graph)) == [["a", "b", "c"], ["f", "g"]]
