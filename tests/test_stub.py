"""pycomm/_C.pyi has every name, parameter and default of the extension, and nothing else; the types of words
(Literal) have the words that the extension has.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from typing import NamedTuple, get_args

import pytest
import torch
from source_tree import ROOT

import pycomm
from pycomm import _C, env, options

STUB = ast.parse((ROOT / "pycomm" / "_C.pyi").read_text())
ALONE = torch.distributed.HashStore


class Signature(NamedTuple):
    """Of a function or method without self: a name is None where only its position counts."""

    names: list[str | None]
    defaults: list[str]


def of_stub(function: ast.FunctionDef, is_method: bool) -> Signature:
    arguments = function.args
    positional = [None for _ in arguments.posonlyargs]
    names = [*positional, *(each.arg for each in arguments.args)]
    return Signature(names[is_method:], [ast.unparse(default) for default in arguments.defaults])


def of_extension(text: str, is_method: bool) -> Signature:
    """From the first line of what pybind11 writes: name(self: T, arg0: int, wire_delay_us: int = 0) -> R."""
    text = re.sub(r"pycomm::(\w+)", r"\1", text.splitlines()[0])
    function = ast.parse(f"def {text}: ...").body[0]
    found = of_stub(function, is_method)
    return found._replace(names=[None if re.fullmatch(r"arg\d+", name) else name for name in found.names])


def members_of(node: ast.ClassDef | ast.Module) -> dict[str, ast.stmt]:
    found = {}
    for each in node.body:
        if isinstance(each, (ast.FunctionDef, ast.ClassDef)):
            found[each.name] = each
        elif isinstance(each, ast.AnnAssign) and not ast.unparse(each.annotation) == "TypeAlias":
            found[each.target.id] = each
    return found


def own_names(owner: object) -> set[str]:
    hidden = {"__init__"} if inspect.isclass(owner) and "__init__" in vars(owner) else set()
    return {name for name in vars(owner) if not name.startswith(("__", "_pybind11"))} | hidden


def is_property(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(decorator) == "property" for decorator in node.decorator_list
    )


def differences(stub: ast.ClassDef | ast.Module, real: object) -> Iterator[str]:
    where, is_class = getattr(real, "__name__", "?"), isinstance(stub, ast.ClassDef)
    listed, there = members_of(stub), own_names(real)
    # Python's own __init__ of a class that cannot be made is there, and says nothing
    if is_class and (real.__init__.__doc__ or "").startswith("Initialize self"):
        there.discard("__init__")
    yield from (f"{where}.{name} is not in the stub" for name in sorted(there - listed.keys()))
    yield from (f"{where}.{name} is only in the stub" for name in sorted(listed.keys() - there))
    for name in sorted(there & listed.keys()):
        node, value = listed[name], inspect.getattr_static(real, name)
        if is_property(node) != isinstance(value, property):
            yield f"{where}.{name}: a property in the stub or in the extension alone"
        elif isinstance(node, ast.ClassDef):
            yield from differences(node, value)
        elif isinstance(node, ast.FunctionDef) and not is_property(node):
            text = (value.__doc__ or "").splitlines()
            if text and "*args" not in text[0]:
                one, other = of_stub(node, is_class), of_extension(text[0], is_class)
                if one != other:
                    yield f"{where}.{name}: {one} in the stub, {other} in the extension"


def test_the_stub_has_what_the_extension_has():
    assert list(differences(STUB, _C)) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("class Work:\n    def _wait(self, limit: float, /): ...", "Work._done is not in the stub"),
        ("class Work:\n    def more(self): ...", "Work.more is only in the stub"),
        ("class TunedRows:\n    def has(self, world_size: int, /): ...", "TunedRows.has: "),
        ("class LocalStore:\n    def __init__(self, wire_delay_us: int = 1): ...", "LocalStore.__init__: "),
        ("class UcxWire:\n    def connect(self, places): ...", "UcxWire.connect: "),
        ("class Communicator:\n    def rank(self): ...", "Communicator.rank: a property"),
    ],
)
def test_a_wrong_stub_is_found(text, found):
    [node] = ast.parse(text).body
    assert any(each.startswith(found) for each in differences(node, getattr(_C, node.name)))


def without_text():
    """The methods that are not pybind11's: a wrong call says how many arguments they take."""
    stub = members_of(members_of(STUB)["Communicator"])
    return sorted(name for name in own_names(_C.Communicator) if not _said(name) and name in stub)


def _said(name):
    value = inspect.getattr_static(_C.Communicator, name)
    return isinstance(value, property) or value.__doc__


@pytest.mark.parametrize("name", without_text())
def test_calls_take_as_many_arguments_as_the_stub_says(name):
    node = members_of(members_of(STUB)["Communicator"])[name]
    with pycomm.Communicator(ALONE(), 0, 1) as comm:
        with pytest.raises(TypeError, match=rf"{name} takes {len(of_stub(node, True).names)} arguments"):
            getattr(comm._comm, name)(*[None] * 20)


def test_collectives_and_messages_are_what_is_counted():
    assert len(without_text()) == 14


@pytest.mark.parametrize(
    ("words", "there"),
    [
        (options.ReduceName, [name for name in _C.reduce_ops if name != "premul_sum"]),
        (options.Algorithm, _C.algorithms),
        (env.Wire, ["gloo", "ucx"]),
    ],
)
def test_types_of_words_have_the_extensions_words(words, there):
    assert list(get_args(words)) == there


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "pycomm" / "py.typed").exists()
