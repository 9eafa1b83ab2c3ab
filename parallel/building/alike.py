"""Whether all ranks were given the same to parallelize(): plan, weights, model, optimizer.

Each rank describes what it was given as texts by place, and the ranks exchange a digest of them. Only where
digests differ are the texts exchanged as well, to name the first place:

    plan        the fields of the Plan; weights=
    model       names and classes of modules; of torch's own classes what their constructors were given (p of
                Dropout, eps, kernel sizes); names, shapes and dtypes of parameters and buffers, which of them
                are on meta, which parameters are trained and which are one and the same
    optimizer   its class; the group of each parameter; the plain values of each group

Values of parameters are not compared: those of rank 0 are taken. Nor is anything in a class that is not
torch's own: what it does with an attribute is not known (`self.rank`). Numbers there that differ are one
warning on rank 0.
"""

import hashlib
import inspect
import logging
import os
from collections.abc import Iterator
from dataclasses import fields
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from pycomm.parallel.checkpoint.agree import exchange_over
from pycomm.parallel.ground.comm import Group
from pycomm.parallel.ground.hyperparameters import hyperparameters_of, shortened
from pycomm.parallel.ground.plain import class_text, text_of
from pycomm.parallel.ground.plan import Plan

__all__ = ["Given", "refuse_unlike"]

LOG = logging.getLogger("pycomm.parallel")
WAY_OUT = {
    "plans": "Give all ranks the same Plan",
    "weights=": "Give all ranks the same folder, or none",
    "models": "Build the model alike on all ranks, with the same arguments (seeds may differ)",
    "optimizers": "Make the optimizer alike on all ranks, with the same arguments",
}
Texts: TypeAlias = dict[tuple[str, str], str]  # (a key of WAY_OUT, a place) -> what is there
Folder: TypeAlias = str | os.PathLike[str]


class Given(NamedTuple):
    """What parallelize() was given on this rank."""

    model: nn.Module
    opt: torch.optim.Optimizer | None
    plan: Plan
    weights: Folder | None = None
    begins: bool = True  # False: a training goes on, in which ranks may be a step apart: no hyperparameters
    refused: ValueError | None = None  # what check() has raised on this rank


def refuse_unlike(given: Given, group: Group, device: torch.device) -> None:
    """Raises ValueError, on all ranks, where they were given different things, or where check() has refused
    them on one. Collective over the group.
    """
    if group.size > 1:
        texts, numbers = _texts_of(given), _numbers_of(given.model)
        refused = None if given.refused is None else str(given.refused)
        told = exchange_over(group, device, (_digest(texts), _digest(numbers), refused))
        digests, of_numbers, refusals = map(list, zip(*told, strict=True))
        if None in refusals and len(set(digests)) > 1:
            _refuse(exchange_over(group, device, texts), group.rank)
        if given.refused is None:
            _refuse_with(refusals, group.rank)
            if len(set(of_numbers)) > 1:
                _warn(exchange_over(group, device, numbers), group.rank)
    if given.refused is not None:
        raise given.refused


def _refuse_with(refusals: list[str | None], rank: int) -> None:
    """Raises what another rank has raised by itself."""
    for number, text in enumerate(refusals):
        if text is not None:
            raise ValueError(f"[rank {rank}] parallelize: rank {number} failed: {text}")


def _digest(texts: Texts) -> bytes:
    return hashlib.sha256(repr(list(texts.items())).encode()).digest()


def _refuse(told: list[Texts], rank: int) -> None:
    other = _other(told, rank)
    (kind, place), values = _first_difference(told[0], told[other])
    raise ValueError(
        f"[rank {rank}] parallelize: ranks 0 and {other} were given different {kind}: {place} is "
        f"{shortened(values[0])} on rank 0 and {shortened(values[1])} on rank {other}. {WAY_OUT[kind]}; "
        "nothing was changed"
    )


def _other(told: list[Texts], rank: int) -> int:
    """The rank that is compared with rank 0: this one, where it differs, or the first that does."""
    differing = [number for number, texts in enumerate(told) if list(texts.items()) != list(told[0].items())]
    return rank if rank in differing else differing[0]


def _first_difference(one: Texts, other: Texts) -> tuple[tuple[str, str], tuple[str | None, str | None]]:
    """(the key of the first text that differs, both texts); None for what is missing."""
    for key in {**one, **other}:
        if one.get(key) != other.get(key):
            return key, (_name_in(one.get(key), other.get(key)), _name_in(other.get(key), one.get(key)))
    kind, number, (first, second) = next(
        (first[0], number, (first[1], second[1]))
        for number, (first, second) in enumerate(zip(one, other, strict=True))
        if first != second
    )
    return (kind, f"number {number} of all names"), (first, second)


def _name_in(text: str | None, other: str | None) -> str | None:
    """A text without the module of its class, where its name alone differs from the other."""
    short, other_short = (each and each.rpartition(".")[2] for each in (text, other))
    is_class = text is not None and text.startswith("torch.")
    return short if is_class and short != other_short else text


def _warn(told: list[Texts], rank: int) -> None:
    if rank == 0:
        other = _other(told, 0)
        (_, place), values = _first_difference(told[0], told[other])
        LOG.warning(
            "parallelize: %s is %s on rank 0 and %s on rank %d. That is right where the model does not "
            "compute with it",
            *(place, *map(shortened, values), other),
        )


# What was given, as texts.


def _texts_of(given: Given) -> Texts:
    texts = {("plans", field.name): text_of(getattr(given.plan, field.name)) for field in fields(given.plan)}
    weights = "None" if given.weights is None else repr(str(given.weights))
    texts["weights=", "weights="] = weights
    texts.update({("models", place): text for place, text in _texts_of_model(given.model)})
    texts.update({("optimizers", place): text for place, text in _texts_of_optimizer(given)})
    return texts


def _texts_of_model(model: nn.Module) -> Iterator[tuple[str, str]]:
    constants = {kind: _constants_of(kind) for kind in set(map(type, model.modules()))}
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        yield where, class_text(type(module))
        for key in constants[type(module)]:
            if key in vars(module):
                yield (
                    f"{key} of {where} ({type(module).__name__})",
                    text_of(vars(module)[key], on_device=True),
                )
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            yield f"parameter {name!r}", f"the same as {owner!r}"
            continue
        yield from _texts_of_tensor(f"parameter {name!r}", parameter)
        yield f"requires_grad of parameter {name!r}", str(parameter.requires_grad)
    for name, buffer in model.named_buffers():
        yield from _texts_of_tensor(f"buffer {name!r}", buffer)


def _texts_of_tensor(where: str, tensor: torch.Tensor) -> Iterator[tuple[str, str]]:
    yield f"the shape of {where}", str(tuple(tensor.shape))
    yield f"the dtype of {where}", str(tensor.dtype)
    yield f"the kind of device of {where}", tensor.device.type


def _constants_of(kind: type) -> tuple[str, ...]:
    """Names of attributes that torch's classes among the bases of a class keep of their arguments."""
    found = {}
    for base in kind.__mro__:
        if base.__module__.split(".")[0] == "torch" and issubclass(base, nn.Module):
            arguments = inspect.signature(base.__init__).parameters
            found.update(dict.fromkeys((*vars(base).get("__constants__", ()), *arguments)))
    return tuple(sorted(set(found) - {"self", "args", "kwargs", "device", "training"}))


def _texts_of_optimizer(given: Given) -> Iterator[tuple[str, str]]:
    opt = given.opt
    yield "the optimizer", "None" if opt is None else class_text(type(opt))
    if opt is None:
        return
    if given.begins:
        yield from hyperparameters_of(opt, on_device=True).items()
    group_of = {id(each): number for number, group in enumerate(opt.param_groups) for each in group["params"]}
    for name, parameter in given.model.named_parameters():
        yield f"the group of parameter {name!r}", str(group_of.get(id(parameter)))


def _numbers_of(model: nn.Module) -> Texts:
    """Numbers that modules of classes that are not torch's keep."""
    constants = {kind: _constants_of(kind) for kind in set(map(type, model.modules()))}
    return {
        ("models", f"{key} of {f'module {name!r}' if name else 'the model'} ({type(module).__name__})"): text
        for name, module in model.named_modules()
        if type(module).__module__.split(".")[0] != "torch"
        for key, text in _plain_numbers(module, constants[type(module)])
    }


def _plain_numbers(module: nn.Module, constants: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(key, text) of numbers that a module keeps, but for the constants of torch's classes."""
    for key, value in vars(module).items():
        numbers = value if type(value) is tuple else (value,)
        is_compared = not key.startswith("_") and key != "training" and key not in constants
        if is_compared and numbers and all(type(number) in (bool, int, float) for number in numbers):
            yield key, text_of(value)
