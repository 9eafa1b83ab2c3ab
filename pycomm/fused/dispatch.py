"""Chooses the form of one operation and runs it: the matrices of api.py in, those of the result out."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pycomm import _C, env, trace
from pycomm.fused import form, machine
from pycomm.fused.choice import choose
from pycomm.fused.ranks import ALONE

if TYPE_CHECKING:
    import torch

    from pycomm.fused.choice import Choice, Forced
    from pycomm.fused.plain import Result
    from pycomm.fused.problem import Problem
    from pycomm.fused.ranks import Ranks

__all__ = ["forward"]

# [Note: loading] in loading.py: nobody tells this rank that its peers are in no kernel.
AMONG_THREADS = (
    "ranks are threads of this process on this GPU, and a kernel of one rank alone cannot be loaded while "
    "one of theirs may wait for it"
)


def forward(
    problem: Problem,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    ranks: Ranks,
    *,
    save: bool = False,
    keep: bool = False,
) -> Result:
    """Collective on the ranks.

    a: rows (outer, piece or whole, inner) of K columns; b: (k, columns), any strides; bias: (columns,). save:
    the preactivation is wanted where there is an activation; keep: the gathered a, of all_gather_matmul.
    """
    with form.on_device_of(a), trace.span(problem.op):
        return form.run(problem, _choose(problem, a, b, bias, ranks), a, b, bias, ranks, save=save, keep=keep)


def _choose(
    problem: Problem, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, ranks: Ranks
) -> Choice:
    forced = env.fused()
    if not a.is_cuda:
        return _choose_on_cpu(
            problem.shared(),
            ranks.communicator is not None,
            forced,
            forced == "fused" and env.triton_interpret(),
        )
    peer_memory, triton = ranks.communicator is not None, form.has_triton()
    if problem.op == "matmul":
        ranks = ALONE
    talks = problem.op == "matmul" or peer_memory
    here = machine.of(ranks, a.device) if talks and triton else None
    obstacle = here.obstacle if here else ""
    if problem.world_size == 1 and _C.ranks_are_threads(a.device.index):
        obstacle = AMONG_THREADS
    choice = choose(
        problem.shared(), "cuda", peer_memory=peer_memory, obstacle=obstacle, forced=forced, triton=triton
    )
    if not (choice.open and here):
        return choice
    from pycomm.fused import tuner  # imports Triton

    return tuner.decide(
        problem, ranks, a.device, here, choice, lambda choice: form.run(problem, choice, a, b, bias, ranks)
    )


@functools.lru_cache(4096)
def _choose_on_cpu(problem: Problem, peer_memory: bool, forced: Forced, interpreted: bool) -> Choice:
    return choose(
        problem,
        "cpu",
        peer_memory=peer_memory,
        forced=forced,
        triton=form.has_triton(),
        interpreted=interpreted,
    )
