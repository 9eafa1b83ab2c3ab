"""Layers whose result for one row depends on the other rows of the batch."""

import torch
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["batch_norms"]


def batch_norms(model):
    """{name: layer} of those that compute statistics over the rows of one process."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, torch.nn.SyncBatchNorm)
    }
