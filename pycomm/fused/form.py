"""Runs one operation in a given form: a product and a collective (plain.py), or one kernel (launch.py).

Triton is imported only when a kernel runs, so pycomm works without it.
"""

import contextlib
import functools
import importlib.util

import torch

from pycomm.fused import context, machine, plain
from pycomm.fused.config import default
from pycomm.fused.ranks import ALONE

__all__ = ["has_triton", "on_device_of", "run"]


def run(problem, choice, a, b, bias, ranks, *, save=False, keep=False):
    """Computes the operation in the form of a choice.Choice, which is equal on all ranks. Collective on them.
    Returns a plain.Result. The arguments are those of dispatch.forward.
    """
    kept = {"keep": keep} if problem.op == "all_gather_matmul" else {}
    if choice.name == "fused":
        return _launch(problem, choice.config, ranks, a, b, bias, save=save, **kept)
    if problem.op == "matmul":
        return plain.matmul(problem, a, b, bias, save=save)
    return getattr(plain, problem.op)(problem, ranks, a, b, bias, choice.chunks, save=save, **kept)


def on_device_of(x):
    """Makes the tensor's GPU the current one: that is where Triton launches, and whose streams events are
    for.
    """
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


@functools.cache
def has_triton():
    return importlib.util.find_spec("triton") is not None


def _launch(problem, config, ranks, a, b, bias, **options):
    from pycomm.fused import launch  # imports Triton

    if config is None:
        arch = machine.of(ALONE, a.device).arch
        config = default(
            problem.op, problem.dtype, arch, problem.world_size, problem.panels, problem.activation
        )
    bias = bias if bias is None else bias.contiguous()  # the kernels take its columns as neighbours
    if problem.op == "matmul":
        return plain.Result(*launch.matmul(problem, a, b, bias, config, **options))
    return plain.Result(
        *getattr(launch, problem.op)(problem, context.of(ranks, a.device), a, b, bias, config, **options)
    )
