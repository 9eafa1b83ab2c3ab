"""What saving and loading say alike: keys, boxes, and what is written beside the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypedDict

from pycomm.parallel.checkpoint.agree import exchange
from pycomm.parallel.checkpoint.boxes import Boxes
from pycomm.parallel.checkpoint.holdings import persistent_buffers

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pycomm.parallel.checkpoint.boxes import State
    from pycomm.parallel.checkpoint.holdings import Holding
    from pycomm.parallel.parts import Parallelized

__all__ = ["FORMAT", "About", "WholeModel", "add_boxes", "class_of", "whole_model"]

FORMAT = 1


class _AboutModel(TypedDict):
    format: int
    plan: str
    optimizer: str | None  # its class


class About(_AboutModel, total=False):
    """What is written beside the values; the rest with an optimizer."""

    groups: list[dict[str, object]]  # hyperparameters of each
    members: Mapping[str, int]  # as in WholeModel
    averages: Mapping[str, int]  # name of each average -> its updates; also without an optimizer


class WholeModel(NamedTuple):
    """What all ranks have together."""

    members: dict[str, int]  # parameter that is or was trained -> index of its group in the optimizer
    buffers: set[str]


def add_boxes(state: State, key: str, holding: Holding, values: torch.Tensor, counted: bool) -> None:
    boxes = holding.boxes(values, counted)
    if boxes:
        kept = state.setdefault(key, Boxes(holding.info.layout.full_shape, values.dtype))
        assert isinstance(kept, Boxes)  # a key has one kind on all ranks
        kept.boxes.extend(boxes)


def whole_model(parts: Parallelized) -> WholeModel:
    """Collective over all ranks."""
    placed = {key for reducer in parts.reducers.values() for key in reducer.places}
    members = {
        info.name: info.option for info in parts.infos if info.option is not None and id(info.param) in placed
    }
    told = exchange(parts, (members, list(persistent_buffers(parts))))
    return WholeModel(
        {name: number for rank in told for name, number in rank[0].items()},
        {name for rank in told for name in rank[1]},
    )


def class_of(opt: torch.optim.Optimizer) -> str:
    return f"{type(opt).__module__}.{type(opt).__qualname__}"
