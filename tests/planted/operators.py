"""Faults in Python that a program draws: mistakes of this field, at places that its syntax shows.

Each operator is a function of a node that yields its changes. `draw` takes some of all possible faults of a
folder: all kinds in turn, no two in the same function until each function has one. The seed decides, so two
runs draw the same.
"""

import ast
import functools
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from planted.fault import ROOT, Fault

SIZES = re.compile(
    r"(^|_)(world_?size|size|count|n|ranks|nodes|degree|steps|microbatches|accumulat\w*|scale)$"
)
AXES = ["dp", "tp", "pp", "ep", "cp"]
WAITS = re.compile(
    r"(wait|copy_|synchronize|record|record_stream|barrier|join|flush|fence|notify_all|set|put)$"
)
RELEASES = re.compile(r"(clear|free|release|close|reset|zero_|pop|remove|discard|unlink|stop)$")
RANDOM = re.compile(r"(manual_seed|set_rng_state|set_state|seed|fork_rng|advance|restore)$")
PAIRS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
         ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}  # fmt: skip


class Change(NamedTuple):
    kind: str
    what: str
    node: ast.AST
    new: str


def name_of(node: ast.AST) -> str:
    """The last name of a value: size of self.mesh.size."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def sizes(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[Change]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div, ast.FloorDiv)):
        if SIZES.search(name_of(node.right)):
            yield Change(
                "a size of the group", f"{text(node)} without {text(node.right)}", node, text(node.left)
            )
        if isinstance(node.op, ast.Mult) and SIZES.search(name_of(node.left)):
            yield Change(
                "a size of the group", f"{text(node)} without {text(node.left)}", node, text(node.right)
            )


def groups(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[Change]:
    if isinstance(node, ast.Call):
        for each in node.args:
            if isinstance(each, ast.Constant) and each.value in AXES:
                other = AXES[(AXES.index(each.value) + 1) % len(AXES)]
                yield Change(
                    "another group", f"{other} in place of {each.value} in {text(node)}", each, f'"{other}"'
                )


def places(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[Change]:
    if isinstance(node, ast.Slice):
        for bound in filter(None, (node.lower, node.upper)):
            if not (isinstance(bound, ast.Constant) and bound.value is None):
                yield Change("off by one", f"bound {text(bound)} + 1", bound, f"({text(bound)}) + 1")
    if isinstance(node, ast.Call) and name_of(node) == "range" and node.args:
        last = node.args[-1] if len(node.args) < 3 else node.args[1]
        yield Change("a rank left out", f"the last of {text(node)} is left out", last, f"({text(last)}) - 1")
        if len(node.args) == 1:
            yield Change(
                "a rank left out", f"the first of {text(node)} is left out", node, f"range(1, {text(last)})"
            )
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        if isinstance(node.right, ast.Constant) and node.right.value == 1:
            yield Change("off by one", f"{text(node)} without the 1", node, text(node.left))


def orders(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[Change]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
        if node.func.id in ("sorted", "reversed") and not node.keywords:
            new = f"list({text(node.args[0])})"
            yield Change("an order exchanged", f"{text(node)} in the order given", node, new)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod)):
        if not isinstance(node.right, ast.Constant) and not isinstance(node.left, ast.Constant):
            operator = text(node)[len(text(node.left)) : -len(text(node.right))]
            new = f"({text(node.right)}){operator.strip(' ()')}({text(node.left)})"
            yield Change("an order exchanged", f"{text(node)} the other way round", node, new)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        other = {"min": "max", "max": "min"}[node.func.id]
        yield Change("a wrong value", f"{other} in place of {text(node)}", node.func, other)


def statements(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[Change]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = name_of(node.value)
        kind = "something left out" if WAITS.search(name) else "not reset" if RELEASES.search(name) else ""
        kind = "a random state" if RANDOM.search(name) else kind or "something left out"
        yield Change(kind, f"{text(node)} is left out", node, "pass")
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, (ast.Attribute, ast.Subscript)):
            yield Change("not reset", f"{text(node)} is left out", node, "pass")
    if isinstance(node, ast.Raise) and node.exc:
        yield Change("a limit ignored", f"{text(node)} is left out", node, "pass")


def conditions(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in PAIRS:
        new = f"{text(node.left)} {PAIRS[type(node.ops[0])]} {text(node.comparators[0])}"
        yield Change("a condition", f"{text(node)} became {new}", node, new)
    if isinstance(node, ast.BoolOp):
        for left_out in range(len(node.values)):
            word = " and " if isinstance(node.op, ast.And) else " or "
            new = word.join(f"({text(each)})" for i, each in enumerate(node.values) if i != left_out)
            kind = "not compared" if isinstance(node.op, ast.And) else "a condition"
            yield Change(kind, f"{text(node)} without {text(node.values[left_out])}", node, f"({new})")
    if isinstance(node, ast.IfExp):
        yield Change("a condition", f"{text(node)}: always the first", node, f"({text(node.body)})")
        yield Change("a condition", f"{text(node)}: always the second", node, f"({text(node.orelse)})")
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value > 1:
        new = node.value + 1 if node.value < 9 else 2 * node.value
        yield Change("a wrong value", f"{node.value} became {new}", node, f"{new}")


OPERATORS = (sizes, groups, places, orders, statements, conditions)


def possible(file: str, root: Path = ROOT) -> Iterator[tuple[str, str, Callable[[], Fault | None]]]:
    """(function, kind, what makes the fault) of all that the operators see in the functions of a file."""
    source = (root / file).read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    encoded = source.encode()

    def span(node: ast.AST) -> tuple[int, int]:
        return (starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset)

    def text(node: ast.AST) -> str:
        begin, end = span(node)
        return encoded[begin:end].decode()

    for function in functions_of(ast.parse(source)):
        for node in nodes_of(function):
            for change in (change for operator in OPERATORS for change in operator(node, text)):
                begin, end = span(change.node)
                new = encoded[:begin].decode() + change.new + encoded[end:].decode()
                yield (
                    f"{file}:{function.name}",
                    change.kind,
                    functools.partial(as_fault, file, change, source, new),
                )


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def nodes_of(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Of the body; not of functions inside, of annotations, nor of texts and what is printed in them."""
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop(0)
        yield node
        if isinstance(node, (ast.JoinedStr, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        skipped = {id(node.annotation)} if isinstance(node, ast.AnnAssign) else set()
        left += [child for child in ast.iter_child_nodes(node) if id(child) not in skipped]


def as_fault(file: str, change: Change, source: str, new: str) -> Fault | None:
    """With as many lines before and after as make the old text unique. None if it is not valid Python."""
    node = change.node
    try:
        ast.parse(new)
    except SyntaxError:
        return None
    before, after = source.splitlines(keepends=True), new.splitlines(keepends=True)
    first, last = node.lineno - 1, node.end_lineno
    added = len(after) - len(before)
    while source.count("".join(before[first:last])) > 1:
        first, last = max(0, first - 1), min(len(before), last + 1)
    what = re.sub(r"\s+", " ", change.what)[:90]
    name = f"{file}:{node.lineno}: {what}"
    return Fault(
        name,
        file,
        change.kind,
        "".join(before[first:last]),
        "".join(after[first : last + added]),
        by="machine",
    )


def draw(folder: str, number: int, seed: int, root: Path = ROOT) -> list[Fault]:
    """`number` faults of the files of a folder and below it."""
    random_ = random.Random(f"{folder} {seed}")
    found: dict[str, list] = defaultdict(list)  # {kind: [(function, what makes the fault)]}
    paths = (root / folder).rglob("*.py") if "/" in folder else (root / folder).glob("*.py")
    for path in sorted(paths):
        for function, kind, make in possible(path.relative_to(root).as_posix(), root):
            found[kind].append((function, make))
    for faults in found.values():
        random_.shuffle(faults)
    drawn: dict[str, Fault] = {}
    used: set[str] = set()
    while len(drawn) < number and any(found.values()):
        before = len(used)
        for kind in sorted(found):
            fresh = next((one for one in found[kind] if one[0] not in used), None)
            if fresh and len(drawn) < number:
                found[kind].remove(fresh)
                used.add(fresh[0])
                if fault := fresh[1]():
                    drawn[fault.name] = fault
        if len(used) == before:
            used.clear()
    return list(drawn.values())


def as_toml(faults: list[Fault]) -> str:
    def quoted(text: str) -> str:
        assert "'''" not in text, text
        return f"'''\n{text}'''"

    return "\n".join(
        f'["{fault.name.translate(ESCAPES)}"]\nfile = "{fault.file}"\nkind = "{fault.kind}"\n'
        f"old = {quoted(fault.old)}\nnew = {quoted(fault.new)}\n"
        for fault in faults
    )


ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"'})
