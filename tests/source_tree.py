"""The files of the source tree and who uses whom, for the tests that read them as text."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
CPP_SUFFIXES = {".h", ".cc", ".inc", ".cuh", ".cu"}


def cpp_files(*folders):
    return sorted(
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in CPP_SUFFIXES
    )


def python_files(*folders):
    """Links are not followed: pycomm/parallel and pycomm/benchmarks are the folders of the top level."""
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents)
    )


def markdown_files():
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def show(path):
    return str(path.relative_to(ROOT))


def module_of(path):
    """The name under which a file of the package is imported: parallel/plan.py is pycomm.parallel.plan."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "pycomm" else ("pycomm", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path, typed=True):
    """The (module, name) pairs that a Python file imports, anywhere in it; `import module` has name None.
    typed=False: without those under TYPE_CHECKING, which no run makes.
    """
    tree = ast.parse(path.read_text())
    passed_over = set() if typed else set(_for_types_alone(tree))
    for node in ast.walk(tree):
        if node in passed_over:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the package's name"
            yield from ((node.module, alias.name) for alias in node.names)


def _for_types_alone(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from (inner for statement in node.body for inner in ast.walk(statement))


def python_graph(*folders):
    """module -> the modules of these folders that it imports when it runs. A package imports what its
    __init__ does; that importing a module also imports the packages around it is left out.
    """
    files = {module_of(path): path for path in python_files(*folders)}
    graph = {}
    for module, path in files.items():
        named = {f"{m}.{name}" if f"{m}.{name}" in files else m for m, name in imports(path, typed=False)}
        graph[module] = {other for other in named if other in files and other != module}
    return graph


def cpp_graph():
    """Header -> the headers that it includes. What a source includes binds nobody else."""
    headers = {path for path in cpp_files("csrc") if path.suffix in (".h", ".cuh", ".inc")}
    graph = {}
    for path in headers:
        named = re.findall(r'#include "([^"]+)"', path.read_text())
        used = {base / include for include in named for base in (path.parent, ROOT / "csrc")}
        graph[show(path)] = {show(other.resolve()) for other in used if other.resolve() in headers}
    return graph


def circles(graph):
    """The sets of nodes that reach each other, as sorted lists (Tarjan 1972)."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            component = [stack.pop()]
            while component[-1] != node:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found
