"""Layers whose result for one row depends on the other rows of the batch."""

import torch
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["batch_norms"]


def batch_norms(model: torch.nn.Module) -> dict[str, _BatchNorm]:
    """Those that compute statistics over the rows of one process, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, torch.nn.SyncBatchNorm)
    }
