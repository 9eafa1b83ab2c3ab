"""What a training leaves: all that may be compared with another one, bit for bit."""

import random

import torch
from torch import nn

import pycomm.parallel as par


def state_of(model, losses):
    """Of a parallelized model. Collective over its ranks."""
    return {
        "losses": losses,
        "parameters": {key: value.clone() for key, value in par.full_state_dict(model).items()},
        "buffers": {key: value.clone() for key, value in model.named_buffers() if not value.is_meta},
        "attributes": {key: held(module) for key, module in model.named_modules() if is_here(module)},
        "random numbers": (torch.get_rng_state(), random.getstate()),
    }


def is_here(module):
    """Whether no other stage has it."""
    return not any(parameter.is_meta for parameter in module.parameters())


def held(module):
    """What a module holds beside modules and tensors that are named elsewhere."""
    hidden = {"_modules", "_parameters", "_buffers", "_parallel"}
    return {name: plain(value) for name, value in vars(module).items() if name not in hidden}


def plain(value, deep=4):
    """Something that may be compared with that of another model."""
    if type(value) in (torch.Tensor, nn.Parameter):  # a stand-in of another stage has no values
        return value.detach().clone()
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    if deep and isinstance(value, dict):  # keys may be numbers of hooks
        return [type(value).__name__, *(plain(each, deep - 1) for each in value.values())]
    if deep and isinstance(value, (list, tuple, set)):
        return [type(value).__name__, *(plain(each, deep - 1) for each in value)]
    if deep and type(value).__module__.startswith("test_"):
        return plain(vars(value), deep - 1)
    return type(value).__name__


def differences(one, other, where=""):
    """The places at which two trees differ."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):  # a NaN is one
        same = one.dtype == other.dtype and one.shape == other.shape
        return [] if same and torch.equal(one.nan_to_num(), other.nan_to_num()) else [where]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        pairs = [(one[key], other[key], f"{where}[{key!r}]") for key in one]
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = [(a, b, f"{where}[{at}]") for at, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        return [] if type(one) is type(other) and one == other else [f"{where}: {one!r} and {other!r}"]
    return [each for pair in pairs for each in differences(*pair)]
