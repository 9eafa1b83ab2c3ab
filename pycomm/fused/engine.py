"""Runs one operation in the form that choice.py names: the matrices of api.py in, those of the result out.

Triton is imported only when a kernel runs, so pycomm works without it.
"""

import functools
import importlib.util

import torch

from pycomm import env
from pycomm.fused import plain
from pycomm.fused.choice import choose

__all__ = ["forward"]

Result = plain.Result


def forward(problem, a, b, bias, ranks, *, save=False, keep=False):
    """Collective on the ranks. Returns a plain.Result.

    a: rows (outer, piece or whole, inner) of K columns; b: (k, columns), any strides; bias: (columns,) or None. save: the preactivation is
    wanted where there is an activation; keep: the gathered a, of all_gather_matmul.
    """
    if problem.world_size == 1 and problem.op != "matmul":
        result = forward(problem._replace(op="matmul"), a, b, bias, ranks, save=save)
        return result._replace(gathered=a if keep else None)
    choice = _choose(problem, a.device, ranks)
    kept = {"keep": keep} if problem.op == "all_gather_matmul" else {}
    if choice.name == "fused":
        return _launch(problem, choice.config, ranks, a, b, bias, save=save, **kept)
    if problem.op == "matmul":
        return plain.matmul(problem, a, b, bias, save=save)
    return getattr(plain, problem.op)(problem, ranks, a, b, bias, choice.chunks, save=save, **kept)


def _choose(problem, device, ranks):
    forced, peer_memory = env.fused(), ranks.communicator is not None
    if device.type == "cpu":
        interpreted = forced == "fused" and env.triton_interpret()
        return choose(problem, "cpu", peer_memory=peer_memory, forced=forced, triton=has_triton(), interpreted=interpreted)
    measured = None
    if has_triton():
        from pycomm.fused import tuner

        measured = tuner.lookup(problem, device)
    resident = problem.op == "matmul" or not peer_memory or _resident(ranks, device)
    return choose(problem, "cuda", peer_memory=peer_memory, resident=resident, measured=measured, forced=forced, triton=has_triton())


@functools.cache
def has_triton():
    return importlib.util.find_spec("triton") is not None


def _resident(ranks, device):
    """Whether kernels of all ranks run at the same time (csrc/cuda/topology.h). Known, on all ranks alike, once the group has used the
    device."""
    if "resident" not in ranks.cache:
        if ranks.communicator.describe()["cuda"] is None:
            ranks.all_reduce(torch.zeros(1, 1, device=device), async_op=False)
        ranks.cache["resident"] = ranks.communicator.describe()["cuda"]["protocol"] == "resident"
    return ranks.cache["resident"]


@functools.cache
def _arch(device):
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _launch(problem, config, ranks, a, b, bias, **options):
    from pycomm.fused import context, launch
    from pycomm.fused.config import default

    if config is None:
        arch = _arch(a.device) if a.is_cuda else 80
        config = default(problem.op, problem.dtype, arch, problem.world_size, problem.panels)
    if problem.op == "matmul":
        return Result(*launch.matmul(problem, a, b, bias, config, **options))
    return Result(*getattr(launch, problem.op)(problem, context.of(ranks, a.device), a, b, bias, config, **options))
