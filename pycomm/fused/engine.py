"""Runs one operation in the form that choice.py names: the matrices of api.py in, those of the result out.

Triton is imported only when a kernel runs, so pycomm works without it.
"""

import contextlib
import functools
import importlib.util

import torch

from pycomm import env
from pycomm.fused import machine, plain
from pycomm.fused.choice import choose
from pycomm.fused.ranks import ALONE

__all__ = ["forward"]

Result = plain.Result


def forward(problem, a, b, bias, ranks, *, save=False, keep=False):
    """Collective on the ranks. Returns a plain.Result.

    a: rows (outer, piece or whole, inner) of K columns; b: (k, columns), any strides; bias: (columns,) or None. save: the preactivation is
    wanted where there is an activation; keep: the gathered a, of all_gather_matmul.
    """
    with on_device_of(a):
        return run(problem, _choose(problem, a, b, bias, ranks), a, b, bias, ranks, save=save, keep=keep)


def on_device_of(x):
    """Makes the tensor's GPU the current one: that is where Triton launches, and whose streams events are for."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def run(problem, choice, a, b, bias, ranks, *, save=False, keep=False):
    """The same in a form that is given: a choice.Choice, equal on all ranks."""
    kept = {"keep": keep} if problem.op == "all_gather_matmul" else {}
    if choice.name == "fused":
        return _launch(problem, choice.config, ranks, a, b, bias, save=save, **kept)
    if problem.op == "matmul":
        return plain.matmul(problem, a, b, bias, save=save)
    return getattr(plain, problem.op)(problem, ranks, a, b, bias, choice.chunks, save=save, **kept)


def _choose(problem, a, b, bias, ranks):
    forced = env.fused()
    if not a.is_cuda:
        return _choose_on_cpu(problem.shared(), ranks.communicator is not None, forced, forced == "fused" and env.triton_interpret())
    options = {"peer_memory": ranks.communicator is not None, "forced": forced, "triton": has_triton()}
    if problem.op == "matmul":
        ranks = ALONE
    talks = problem.op == "matmul" or options["peer_memory"]
    here = machine.of(ranks, a.device) if talks and has_triton() else None
    choice = choose(problem.shared(), "cuda", obstacle=here.obstacle if here else "", **options)
    if not (choice.open and here):
        return choice
    from pycomm.fused import tuner

    return tuner.decide(problem, ranks, a.device, here, choice, lambda form: run(problem, form, a, b, bias, ranks))


@functools.lru_cache(4096)
def _choose_on_cpu(problem, peer_memory, forced, interpreted):
    return choose(problem, "cpu", peer_memory=peer_memory, forced=forced, triton=has_triton(), interpreted=interpreted)


@functools.cache
def has_triton():
    return importlib.util.find_spec("triton") is not None


def _launch(problem, config, ranks, a, b, bias, **options):
    from pycomm.fused import context, launch
    from pycomm.fused.config import default

    if config is None:
        arch = machine.of(ALONE, a.device).arch
        config = default(problem.op, problem.dtype, arch, problem.world_size, problem.panels, problem.activation)
    bias = bias if bias is None else bias.contiguous()  # the kernels take its columns as neighbours
    if problem.op == "matmul":
        return Result(*launch.matmul(problem, a, b, bias, config, **options))
    return Result(*getattr(launch, problem.op)(problem, context.of(ranks, a.device), a, b, bias, config, **options))
