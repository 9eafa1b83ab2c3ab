"""The variants that are compared, each a function without arguments that does the whole call anew and returns
its results. command.py's description says what each is.

A variant that cannot run here raises Unavailable with the reason, on all ranks alike. The exact result is
`plain` in float64 (float32 from EXACT_FLOPS on): tests/fused/test_benchmark.py compares that one with a
single process.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F

import pycomm
from pycomm import env, fused
from pycomm.benchmarks.fused.cases import DTYPES, Case, Tensors
from pycomm.benchmarks.fused.peers import Apart, Collectives, Peers
from pycomm.fused import form as fused_form
from pycomm.fused import machine
from pycomm.fused.choice import FORCED_CHUNKS, Choice
from pycomm.fused.problem import Problem
from pycomm.fused.ranks import of
from pycomm.groups import even_sizes

if TYPE_CHECKING:
    from pycomm.fused.ranks import Ranks

Results: TypeAlias = tuple[torch.Tensor, ...]  # the result; with the backward pass the gradients, too
Variant: TypeAlias = Callable[[], Results]

EXACT_FLOPS = {"cpu": 4e10, "cuda": 2e12}  # of the product; above, float64 takes too long


class Unavailable(Exception):
    """Why a variant cannot run."""


def names(case: Case, peers: Peers) -> list[str]:
    """All variants of a case, the one that ratios refer to first."""
    found = ["plain", "pycomm.fused"]
    if case.op != "matmul":
        found[1:1] = [*(f"torch, {name}" for name in peers.others), "chunked", "fused"]
    if peers.device.type == "cuda":
        found += ["fused", "addmm_act"] if case.op == "matmul" else ["symm_mem"]
    return found


def make(name: str, case: Case, tensors: Tensors, peers: Peers, backward: bool = False) -> Variant:
    """Raises Unavailable."""
    if name == "plain":
        return lambda: by_hand(case, tensors, peers.ours, backward)
    if name.startswith("torch, "):
        return lambda: by_hand(case, tensors, peers.others[name.removeprefix("torch, ")], backward)
    if name == "pycomm.fused":
        return public(case, tensors, peers, backward)
    if backward:
        raise Unavailable("forward only")
    return {"chunked": chunked, "fused": kernel, "symm_mem": symmetric, "addmm_act": addmm_activation}[name](
        case, tensors, peers
    )


def exact(case: Case, tensors: Tensors, peers: Peers, backward: bool = False) -> Results:
    """The results of this rank, in float64 or float32."""
    return by_hand(case, tensors.to(_exact_dtype(case, peers)), peers.ours, backward)


def _exact_dtype(case: Case, peers: Peers) -> torch.dtype:
    return torch.float64 if case.flops <= EXACT_FLOPS[peers.device.type] else torch.float32


def load_kernels(case: Case, tensors: Tensors, peers: Peers, backward: bool = False) -> None:
    """Runs what a rank computes by itself, so that no kernel is loaded later while another rank waits in a
    collective on the same GPU. See
    [Note: ranks that share a GPU] in device.py."""
    for wanted in (tensors, tensors.to(_exact_dtype(case, peers))):
        by_hand(case, wanted, Apart(peers.size), backward)


# --- by hand --------------------


def activate(case: Case, z: torch.Tensor) -> torch.Tensor:
    match case.activation:
        case None:
            return z
        case "swiglu":
            gate, up = z.chunk(2, -1)
            return F.silu(gate) * up
        case "gelu_tanh":
            return F.gelu(z, approximate="tanh")
        case name:
            return getattr(F, name)(z)


def linear(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.matmul(a, b) if bias is None else torch.addmm(bias, a, b)


def by_hand(case: Case, tensors: Tensors, group: Collectives, backward: bool) -> Results:
    """(result,) or (result, gradients of a, b and, if there is one, bias)."""
    a, b, bias, weights = tensors
    gathered = a
    if case.op == "all_gather_matmul":
        gathered = a.new_empty(case.m, case.k)
        group.all_gather(a, gathered)
    if case.op in ("matmul", "all_gather_matmul"):
        z = linear(gathered, b, bias)
    else:
        z = torch.matmul(a, b)
        if case.op == "matmul_reduce_scatter":
            partial, z = z, z.new_empty(case.m // group.size, case.columns)
            group.reduce_scatter(partial, z)
        else:
            group.all_reduce(z)
        if bias is not None:
            z += bias
    if not backward:
        return (activate(case, z),)
    out, dz = preactivation_gradient(case, z, weights)
    return (out, *gradients(case, tensors, gathered, dz, group))


def preactivation_gradient(
    case: Case, z: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the result, the gradient of z)"""
    if case.activation is None:
        return z, weights
    z.requires_grad_()
    out = activate(case, z)
    return out.detach(), torch.autograd.grad(out, z, weights)[0]


def gradients(
    case: Case, tensors: Tensors, gathered: torch.Tensor, dz: torch.Tensor, group: Collectives
) -> Results:
    """The gathered input of the forward pass is kept for this one."""
    a, b, bias, _ = tensors
    if case.op == "matmul_reduce_scatter":
        piece, dz = dz, dz.new_empty(case.m, case.columns)
        group.all_gather(piece, dz)
    grad_a = torch.matmul(dz, b.t())
    if case.op == "all_gather_matmul":
        whole, grad_a = grad_a, torch.empty_like(a)
        group.reduce_scatter(whole, grad_a)
    return (grad_a, torch.matmul(gathered.t(), dz), *(() if bias is None else (dz.sum(0),)))


# --- pycomm.fused --------------------


def public(case: Case, tensors: Tensors, peers: Peers, backward: bool) -> Variant:
    a, b, bias, weights = tensors
    group = () if case.op == "matmul" else (peers.ours.handle,)
    inputs = [x.detach().requires_grad_(backward) for x in (a, b, bias) if x is not None]

    def call() -> Results:
        out = getattr(fused, case.op)(
            *inputs[:2], *group, bias=inputs[2] if case.bias else None, activation=case.activation
        )
        return (out.detach(), *torch.autograd.grad(out, inputs, weights)) if backward else (out,)

    return call


def problem_of(case: Case, peers: Peers) -> Problem:
    """As pycomm.fused sees it."""
    pieces = (
        tuple(even_sizes(case.m, peers.size))
        if case.op in ("all_gather_matmul", "matmul_reduce_scatter")
        else ()
    )
    dtype = getattr(torch, DTYPES[case.dtype])
    return Problem(
        case.op,
        case.m,
        case.n,
        case.k,
        dtype,
        peers.size,
        peers.rank,
        case.activation,
        case.bias,
        1,
        1,
        pieces,
    )


def ranks_of(peers: Peers) -> Ranks:
    return of(peers.ours.handle, peers.device)


def choice_of(case: Case, peers: Peers) -> str:
    """What pycomm.fused chooses, in a line: by measurement, which its first call on CUDA takes, else by its
    tables.
    """
    if measured := measured_choice(case, peers):
        return f"{measured.name}: {measured.reason}"
    dtype = DTYPES[case.dtype]
    said = pycomm.explain(
        case.op,
        (case.m, case.n, case.k),
        peers.size,
        device="cuda" if peers.device.type == "cuda" else "cpu",
        dtype=dtype,
        activation=case.activation,
    )
    return said.partition(": ")[2]


def measured_choice(case: Case, peers: Peers) -> Choice | None:
    if peers.device.type != "cuda" or importlib.util.find_spec("triton") is None or env.fused() != "auto":
        return None
    from pycomm.fused import tuner

    here = machine.of(ranks_of(peers), peers.device)
    return tuner.lookup(problem_of(case, peers), peers.device, here.ranks_on_device)


def chunked(case: Case, tensors: Tensors, peers: Peers) -> Variant:
    return forced(case, tensors, peers, Choice("chunked", FORCED_CHUNKS, None, "forced"))


def kernel(case: Case, tensors: Tensors, peers: Peers) -> Variant:
    """The Triton kernel: as it was tuned, else in its default configuration."""
    if peers.device.type != "cuda":
        raise Unavailable("the kernels need a GPU")
    if importlib.util.find_spec("triton") is None:
        raise Unavailable("triton is not installed")
    if obstacle := machine.of(ranks_of(peers), peers.device).obstacle:
        raise Unavailable(obstacle)
    found = measured_choice(case, peers)
    return forced(
        case, tensors, peers, found if found and found.name == "fused" else Choice("fused", 1, None, "forced")
    )


def forced(case: Case, tensors: Tensors, peers: Peers, form: Choice) -> Variant:
    problem, ranks = problem_of(case, peers), ranks_of(peers)
    return lambda: (fused_form.run(problem, form, *tensors[:3], ranks).out,)


# --- torch's --------------------


def symmetric(case: Case, tensors: Tensors, peers: Peers) -> Variant:
    """Neither has a bias or an activation; matmul_all_reduce has no counterpart."""
    if not peers.own_gpu or "nccl" not in peers.others:
        raise Unavailable("needs a GPU for each rank, and NCCL")
    if case.op == "matmul_all_reduce":
        raise Unavailable("torch has no fused matmul_all_reduce")
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    group = peers.others["nccl"].handle.group_name
    enable_symm_mem_for_group(group)
    a, b, bias, _ = tensors

    def call() -> Results:
        if case.op == "all_gather_matmul":
            z = torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, group, return_A=False)[1][0]
        else:
            z = torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, group)
        return (activate(case, z if bias is None else z.add_(bias)),)

    return call


def addmm_activation(case: Case, tensors: Tensors, peers: Peers) -> Variant:
    """On CUDA its gelu is the one by tanh."""
    a, b, bias, _ = tensors
    if bias is None or case.epilogue not in ("relu", "gelu_tanh"):
        raise Unavailable("it has relu and gelu_tanh only")
    return lambda: (torch._addmm_activation(bias, a, b, use_gelu=case.epilogue == "gelu_tanh"),)
