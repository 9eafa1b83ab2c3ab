"""Embeddings with a forward of their own, cut by rows: subclasses of nn.Embedding that do something to each
row (a scale by sqrt(h) in Gemma and BART).

    ids of this rank's rows    the module's own forward, with its rows
    ids of others              0
    result                     sum over the ranks: each id's from the rank that has its row

The module stays what it is, with its buffers and attributes, and has fewer rows. Whether its forward does to
each id by itself what it does, is tried on a small one of random rows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

from pycomm.parallel.ground import differentiable
from pycomm.parallel.tensor.slices import Take, even_slices

if TYPE_CHECKING:
    from pycomm.parallel.ground.comm import Group

__all__ = ["cut_table", "is_table"]

ROWS = 7  # of a trial


def is_table(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether it is an embedding whose rows may be cut."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    if module.scale_grad_by_freq or module.sparse:
        return False
    return type(module).forward is nn.Embedding.forward or _is_by_row(module)


def _is_by_row(module: nn.Embedding) -> bool:
    """Tried without the module's values, which another pipeline stage may have alone."""
    if [name for name, _ in module.named_parameters()] != ["weight"] or module._modules:
        return False
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn((ROWS, module.embedding_dim), generator=generator)
    buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
    for name, buffer in buffers.items():
        random = torch.rand(buffer.shape, generator=generator) + 0.5
        buffers[name] = random.to(buffer.dtype)
    ids = torch.tensor([[0, 3, 6], [5, 3, 1]])
    try:
        with torch.no_grad():
            whole = _trial(module, rows, buffers)(ids)
            for first, part in ((0, rows[:4]), (4, rows[4:])):
                here = (ids >= first) & (ids < first + len(part))
                out = _trial(module, part, buffers)(torch.where(here, ids - first, 0))
                if out.shape != (*ids.shape, module.embedding_dim) or not torch.allclose(
                    out[here], whole[here]
                ):
                    return False
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False
    return True


def _trial(module: nn.Embedding, rows: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> nn.Embedding:
    twin = copy.copy(module)
    twin.__dict__.pop("forward", None)
    twin._parameters, twin._buffers = {"weight": nn.Parameter(rows)}, dict(buffers)
    twin._forward_hooks, twin._forward_pre_hooks = {}, {}
    twin.num_embeddings, twin.padding_idx = len(rows), None
    return twin


def cut_table(table: nn.Embedding, group: Group, take: Take) -> None:
    """Cuts the rows of a table in place."""
    total = table.num_embeddings
    slices = even_slices(total, group)
    table._parameters["weight"] = take(table.weight, slices.layout(table.weight, 0))
    start, stop = slices.ranges[0]
    table.num_embeddings = stop - start
    if table.padding_idx is not None:
        has_it = start <= table.padding_idx < stop
        table.padding_idx = table.padding_idx - start if has_it else None
    vars(table)["forward"] = TableForward(table, group, start, total)


class TableForward:
    """Takes the place of a table's forward. start: its first row; total: rows of all ranks."""

    def __init__(self, table: nn.Embedding, group: Group, start: int, total: int) -> None:
        self.inner, self.table, self.group, self.start, self.total = table.forward, table, group, start, total

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.device.type == "cpu" and ids.numel() and (ids.min() < 0 or ids.max() >= self.total):
            raise IndexError(
                f"embedding: ids from {int(ids.min())} to {int(ids.max())}, but there are {self.total} rows"
            )
        weight = self.table.weight
        if len(weight):
            here = (ids >= self.start) & (ids < self.start + len(weight))
            out = self.inner(torch.where(here, ids - self.start, 0)).masked_fill(~here.unsqueeze(-1), 0)
        else:  # through the empty weight, so that the result asks for a gradient as on the other ranks
            out = weight.sum() + weight.new_zeros((*ids.shape, weight.shape[1]))
        return differentiable.reduce_from(out, self.group)
