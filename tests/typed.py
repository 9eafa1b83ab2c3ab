"""How much of the source tree is typed, by folder.

    python tests/typed.py

A function is whole when all its parameters (without self and cls) and its result have types. An annotation is
vague when it is Any, object or a container without what it contains. Trees: Batch and Tree of
parallel/given.py, which are Any with a name. Ignores: comments that silence the checker.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from source_tree import ROOT, python_files

FOLDERS = ("pycomm", "parallel", "benchmarks", "examples")
VAGUE = {"Any", "object"}
TREES = {"Batch", "Tree"}
BARE = {
    "list",
    "dict",
    "tuple",
    "set",
    "frozenset",
    "type",
    "Callable",
    "Sequence",
    "Mapping",
    "Iterable",
    "Iterator",
}
IGNORE = re.compile(r"#\s*type:\s*ignore(\[[\w,\- ]+\])?(\s+#\s+\S)?")


class Counts(NamedTuple):
    """Of some files."""

    functions: int
    whole: int
    annotations: int
    vague: int
    trees: int
    ignores: int


def counts(path: Path) -> Counts:
    text = path.read_text()
    found: Counter[str] = Counter()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            annotations = [each.annotation for each in _parameters(node)] + [node.returns]
            found["functions"] += 1
            found["whole"] += None not in annotations
            given = [each for each in annotations if each is not None]
            found["annotations"] += len(given)
            found["vague"] += sum(_is_one_of(each, VAGUE | BARE) for each in given)
            found["trees"] += sum(_is_one_of(each, TREES) for each in given)
    found["ignores"] = len(IGNORE.findall(text))
    return Counts(*(found[field] for field in Counts._fields))


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.arg]:
    arguments = node.args
    extra = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *extra):
        if each.arg not in ("self", "cls"):
            yield each


def _is_one_of(annotation: ast.expr, names: set[str]) -> bool:
    """Whether the whole annotation is; a part of it may be (dict[str, Any])."""
    text = ast.unparse(annotation).strip("'\"")
    return any(part.strip() in names for part in text.split(" | "))


def by_folder() -> dict[str, Counts]:
    """For each folder of the product its files' counts together."""
    found: dict[str, list[Counts]] = {}
    for path in python_files(*FOLDERS):
        parts = path.relative_to(ROOT).parts[:-1]
        found.setdefault("/".join(parts[:2]), []).append(counts(path))
    return {folder: _together(of) for folder, of in sorted(found.items())}


def _together(several: list[Counts]) -> Counts:
    return Counts(*map(sum, zip(*several, strict=True)))


def main() -> None:
    folders = by_folder()
    print("| folder | functions | whole | annotations | vague | trees | ignores |")
    print("|---|---|---|---|---|---|---|")
    for folder, one in {**folders, "all": _together(list(folders.values()))}.items():
        vague, trees = (f"{100 * each / max(1, one.annotations):.1f}%" for each in (one.vague, one.trees))
        cells = folder, one.functions, one.whole, one.annotations, vague, trees, one.ignores
        print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
