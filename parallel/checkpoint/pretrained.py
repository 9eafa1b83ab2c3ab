"""save_pretrained() of Hugging Face's models under a plan: the files of one process, written by one rank.

The method would look at this rank's part: shards, freed parameters, meta tensors. It is given the whole
values instead (whole.py), on rank 0; the others wait and hear how it went. Collective over all ranks.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, TypeAlias, cast

from pycomm.parallel.checkpoint.agree import together
from pycomm.parallel.checkpoint.whole import full_state_dict
from pycomm.parallel.parts import parts_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping
    from types import MethodType

    import torch
    from torch import nn

    # What save_pretrained of a model of transformers takes.
    Option: TypeAlias = str | os.PathLike[str] | int | Mapping[str, torch.Tensor] | Callable[..., None] | None

__all__ = ["save_pretrained_whole"]


def save_pretrained_whole(model: nn.Module) -> None:
    """Changes save_pretrained, where there is one, of the model and of the models in it."""
    for name, module in model.named_modules():
        if callable(getattr(module, "save_pretrained", None)):
            prefix = f"{name}." if name else ""
            module.save_pretrained = functools.partial(_save, model, prefix, module.save_pretrained)


def _save(model: nn.Module, prefix: str, save: MethodType, *args: Option, **options: Option) -> None:
    """Arguments as the method's own. What it raises on rank 0 is raised on every rank."""
    parts = parts_of(model)
    options = {**dict(zip(inspect.signature(save).parameters, args, strict=False)), **options}
    if options.get("state_dict") is None:
        whole = full_state_dict(model).items()
        options["state_dict"] = {
            name.removeprefix(prefix): value for name, value in whole if name.startswith(prefix)
        }
    state = cast("Mapping[str, torch.Tensor]", options["state_dict"])

    def write() -> None:
        if parts.mesh.world.rank == 0:
            save(**{**options, "state_dict": _apart(state)})
            if parts.compute_dtype is not None:
                _note_dtype(cast("nn.Module", save.__self__), state, options)

    together(parts, write)


def _note_dtype(model: nn.Module, state: Mapping[str, torch.Tensor], options: Mapping[str, Option]) -> None:
    """The method notes the dtype in which the model computes, to which from_pretrained would round."""
    whole = (value.dtype for value in state.values() if value.is_floating_point())
    config, dtype = getattr(model, "config", None), next(whole, None)
    if dtype is not None and config is not None and hasattr(config, "save_pretrained"):
        computes, config.dtype = config.dtype, dtype
        config.save_pretrained(options["save_directory"])
        config.dtype = computes


def _apart(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in memory of their own, tied ones together, as the method tells ties by their memory."""
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
    for tensor in state.values():
        copies.setdefault((tensor.data_ptr(), tensor.shape), tensor.clone())
    return {name: copies[tensor.data_ptr(), tensor.shape] for name, tensor in state.items()}
