"""What the model returns for a batch, whole on every rank.

    rows             0 1 2   3 4          of a microbatch, over the data ranks (dp, ep); where these are
                                          more, some run a row that is left out again
    positions      a b | c d          over ring and ulysses, as the sequence is cut
    last stage     has the output     the ranks before it have none
    ranks of tp    have the same      the first counts

Every rank tells what it has (the tree of the output, shapes, failures), then one all_reduce of zeros into
which each has put its part, over bytes, so that bits come through. Cost: the whole output in memory on every
rank, 2(n-1)/n of its bytes sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from pycomm.parallel.checkpoint.agree import exchange
from pycomm.parallel.checkpoint.whole import zeros_of
from pycomm.parallel.checks.exchange import Cuts
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.batch import (
    Microbatch,
    check_microbatches,
    row_of,
    rows_in,
    split_batch,
    stand_in,
)
from pycomm.parallel.ground.plan import AXES
from pycomm.parallel.ground.same_batch import mark_of
from pycomm.parallel.run.evaluate import each_stage
from pycomm.parallel.run.loss import sharded_logits
from pycomm.parallel.run.passes import agree, gathering_in
from pycomm.parallel.run.prepare import place
from pycomm.parallel.run.questions import Questions
from pycomm.parallel.sequence.split import positions

if TYPE_CHECKING:
    from pycomm.parallel.given import Tree
    from pycomm.parallel.parts import Parallelized

__all__ = ["run_prediction"]

_KEPT = (type(None), bool, int, float, str)  # what an output may hold beside tensors


class _Slot:
    """The place of a tensor, the how-manieth."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Kind(NamedTuple):
    """Of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole


class _Part(NamedTuple):
    """What a rank tells of its outputs; those without the last stage tell `mark` and `lost` alone."""

    mark: int  # of the inputs
    lost: str | None = None  # a write of the user's
    problem: str | None = None
    tree: Tree = None  # the output, with _Slots in the place of tensors
    kinds: list[_Kind] | None = None  # of the tensors
    of: tuple[int, ...] | None = None  # which part of the whole it is: all coordinates but that of tp
    found: int = 0  # mark of the values, where there are several tensors


@torch.no_grad()
def run_prediction(parts: Parallelized, inputs: Tree, microbatches: int = 1) -> Tree:
    """Returns the output's tree on every rank. Raises ValueError on all of them."""
    with parts.writes.inside("predict"):
        return _predicted(parts, inputs, microbatches)


def _predicted(parts: Parallelized, inputs: Tree, microbatches: int) -> Tree:
    check_microbatches(microbatches)
    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    if isinstance(inputs, dict):
        inputs.pop("labels", None)
    mark = mark_of(inputs)
    inputs, _ = place(parts, (inputs, None))
    rows = rows_in(inputs)
    outputs, numbers = [], torch.arange(rows, device=parts.device)
    split = split_batch((inputs, numbers), microbatches, *parts.mesh.rows)
    pieces = [stand_in(piece, row_of((inputs, numbers))) for piece in split]  # targets: numbers of the rows
    questions = Questions(parts, Cuts(microbatches, sharded=False), None, None)
    questions.rows.heard(questions.rows.told(inputs, numbers))
    questions.ask(inputs, numbers, pieces[0])
    agree(parts, pieces)
    with sharded_logits(parts.tensor.head, None):
        for number, piece in enumerate(pieces):
            with gathering_in(parts, pieces):
                each_stage(parts, number, piece, lambda out: outputs.append(_result_of(out)))
    told = exchange(parts, _told(parts, pieces, outputs, rows, mark)._replace(lost=parts.writes.problem))
    parts.writes.refuse_told("predict", parts.mesh.world.rank, [part.lost for part in told])
    _check(parts, told)
    part, kinds = next((part, part.kinds) for part in told if part.kinds is not None)
    flat, views = zeros_of([(number, *kind) for number, kind in enumerate(kinds)], parts.device)
    if outputs and parts.mesh.coordinate("tp") == 0:
        for piece, output in zip(pieces, outputs, strict=True):
            if piece.counts:
                _put(parts, piece, _tensors(output), views)
    comm.all_reduce(flat, parts.mesh.world)
    return tree_map(lambda leaf: views[leaf.number] if isinstance(leaf, _Slot) else leaf, part.tree)


def _result_of(output: Tree) -> Tree:
    """Of an object with logits, these."""
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, torch.Tensor) else output


def _tensors(output: Tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _told(
    parts: Parallelized, pieces: Sequence[Microbatch], outputs: Sequence[Tree], rows: int, mark: int
) -> _Part:
    if not outputs:
        return _Part(mark)
    strange = [leaf for leaf in tree_leaves(outputs[0]) if not isinstance(leaf, (torch.Tensor, *_KEPT))]
    if strange:
        kind = type(strange[0]).__name__
        return _Part(mark, None, f"the model returns a {kind}; let it return tensors (use_cache=False)")
    try:
        kinds = [_kinds(parts, piece, each, rows) for piece, each in zip(pieces, outputs, strict=True)]
    except ValueError as error:
        return _Part(mark, None, str(error))
    if not kinds[0] or any(each != kinds[0] for each in kinds):
        shown = [[tuple(kind) for kind in each] for each in kinds]
        return _Part(
            mark, None, f"the model returns no tensors, or other shapes for some microbatches: {shown}"
        )
    mesh = parts.mesh
    of = tuple(mesh.coordinate(axis) for axis in AXES if axis != "tp")
    found = mark_of([_tensors(each) for each in outputs]) if len(kinds[0]) > 1 else 0
    slots = map(_Slot, itertools.count())
    tree = tree_map(lambda leaf: next(slots) if isinstance(leaf, torch.Tensor) else leaf, outputs[0])
    return _Part(mark, None, None, tree, kinds[0], of, found)


def _kinds(parts: Parallelized, piece: Microbatch, output: Tree, rows: int) -> list[_Kind]:
    """Of an output's tensors."""
    found, split = [], parts.split
    here = len(piece.targets)
    for tensor in _tensors(output):
        shape = list(tensor.shape)
        if not shape or shape[0] != here:
            raise ValueError(
                f"the model returns a tensor {tuple(shape)} for {here} rows: a tensor of the output needs "
                "the rows as dim 0, so that those of all ranks can be joined"
            )
        if split is not None and split.degree > 1:
            if len(shape) < 2 or shape[1] != sum(split.sizes):
                raise ValueError(
                    f"the model returns a tensor {tuple(shape)} where this rank has {sum(split.sizes)} of "
                    f"{split.length} positions: a tensor of the output needs the positions as dim 1, so that "
                    "those of all ranks can be joined"
                )
            shape[1] = split.length
        found.append(_Kind(tensor.dtype, (rows, *shape[1:])))
    return found


def _check(parts: Parallelized, told: Sequence[_Part]) -> None:
    """Raises ValueError, on every rank, for what some rank has told."""
    who = f"[rank {parts.mesh.world.rank}] predict:"
    for rank, part in enumerate(told):
        if part.mark != told[0].mark:
            raise ValueError(f"{who} ranks 0 and {rank} were given different inputs; give all ranks the same")
    for rank, part in enumerate(told):
        if part.problem is not None:
            raise ValueError(f"{who} on rank {rank} {part.problem}")
    first: dict[tuple[int, ...], int] = {}
    for rank, part in enumerate(told):
        if part.of is None:
            continue
        other = first.setdefault(part.of, rank)
        if (part.kinds, part.found) != (told[other].kinds, told[other].found):
            raise ValueError(
                f"{who} the output differs between ranks {other} and {rank} of tp, so something in it is cut "
                "by heads or features (attention weights, keys). Return what is whole: the logits alone"
            )


def _put(
    parts: Parallelized, piece: Microbatch, tensors: Sequence[torch.Tensor], views: Mapping[int, torch.Tensor]
) -> None:
    start, split = int(piece.targets[0]), parts.split
    for tensor, whole in zip(tensors, views.values(), strict=True):
        place = whole[start : start + len(piece.targets)]
        if split is not None and split.degree > 1:
            held = positions(split.length, split.ring, split.ulysses, split.zigzag, device=tensor.device)
            place.index_copy_(1, held, tensor)
        else:
            place.copy_(tensor)
