"""timm and torchvision, where they are installed: `make test-models` puts them into build/vision.

torchvision's wheel of the usual index is made for a torch with CUDA. Beside a CPU torch its compiled
operators do not load, and then the import fails at the first name that it looks up. The models here call none
of them, so their names are declared and nothing more.
"""

import importlib.util

import torch

__all__ = ["have_vision", "timm_model", "torchvision_model"]


def have_vision():
    return all(importlib.util.find_spec(name) for name in ("timm", "torchvision"))


def torchvision_model(name, **options):
    import torchvision

    return getattr(torchvision.models, name)(**options)


def timm_model(name, **options):
    import timm

    return timm.create_model(name, **options)


if have_vision() and torch.version.cuda is None:  # before transformers looks for torchvision
    _operators = torch.library.Library("torchvision", "FRAGMENT")  # the names go with it
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
