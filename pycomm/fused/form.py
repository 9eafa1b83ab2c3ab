"""Runs one operation in a given form: a product and a collective (plain.py), or one kernel (launch.py).

Triton is imported only when a kernel runs, so pycomm works without it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import TYPE_CHECKING

import torch

from pycomm.fused import context, machine, plain
from pycomm.fused.config import default
from pycomm.fused.ranks import ALONE

if TYPE_CHECKING:
    from pycomm.fused.choice import Choice
    from pycomm.fused.config import Config
    from pycomm.fused.problem import Problem
    from pycomm.fused.ranks import Ranks

__all__ = ["has_triton", "on_device_of", "run"]


def run(
    problem: Problem,
    choice: Choice,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    ranks: Ranks,
    *,
    save: bool = False,
    keep: bool = False,
) -> plain.Result:
    """Computes the operation in the form of the choice, which is equal on all ranks. Collective on them. The
    arguments are those of dispatch.forward.
    """
    kept = {"keep": keep} if problem.op == "all_gather_matmul" else {}
    if choice.name == "fused":
        return _launch(problem, choice.config, ranks, a, b, bias, save=save, **kept)
    if problem.op == "matmul":
        return plain.matmul(problem, a, b, bias, save=save)
    result: plain.Result = getattr(plain, problem.op)(
        problem, ranks, a, b, bias, choice.chunks, save=save, **kept
    )
    return result


def on_device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Makes the tensor's GPU the current one: that is where Triton launches, and whose streams events are
    for.
    """
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _launch(
    problem: Problem,
    config: Config | None,
    ranks: Ranks,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    **options: bool,
) -> plain.Result:
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
