"""What saving and loading say alike: keys, boxes, and what is written beside the tensors."""

from pycomm.parallel.checkpoint.agree import exchange
from pycomm.parallel.checkpoint.boxes import Boxes
from pycomm.parallel.checkpoint.holdings import persistent_buffers

__all__ = ["FORMAT", "add_boxes", "class_of", "whole_model"]

FORMAT = 1


def add_boxes(state, key, holding, values, counted):
    boxes = holding.boxes(values, counted)
    if boxes:
        state.setdefault(key, Boxes(holding.info.layout.full_shape, values.dtype)).boxes.extend(boxes)


def whole_model(parts):
    """({parameter: index of its parameter group}, names of buffers) of the whole model."""
    members = {
        info.name: info.option for info in parts.infos if info.option is not None and info.param.requires_grad
    }
    told = exchange(parts, (members, list(persistent_buffers(parts))))
    return {name: number for rank in told for name, number in rank[0].items()}, {
        name for rank in told for name in rank[1]
    }


def class_of(opt):
    return f"{type(opt).__module__}.{type(opt).__qualname__}"
