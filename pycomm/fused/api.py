"""The four public functions: checks of the arguments, flattening to matrices, gradients. What is computed
where is dispatch.py's.

Gradients, with dz the gradient at the preactivation z (before the activation, after the bias), [] the rows of
a piece, G and S the whole gathered from, and summed and cut among, the ranks:

    matmul                  grad_a = dz b^T         grad_b = a^T dz          grad_bias = sum of rows of dz
    all_gather_matmul       grad_a = S(dz b^T)      grad_b = G(a)^T dz       grad_bias = sum of rows of dz
    matmul_reduce_scatter   grad_a = G(dz) b^T      grad_b = a^T G(dz)       grad_bias = sum of rows of G(dz)
    matmul_all_reduce       as matmul: the gradient of the result is taken to be equal on all ranks

So the backward pass of one of the two in the middle is the other one, fused like it. all_gather_matmul
gathers a again instead of keeping it (Megatron's sequence parallelism, Korthikanti et al. 2022), while the
product for grad_a runs. Second derivatives: twice.py.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from pycomm.fused import dispatch, twice
from pycomm.fused.arguments import DTYPES, plan
from pycomm.fused.plain import activation_backward, product
from pycomm.fused.problem import join_rows
from pycomm.fused.ranks import ALONE, of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.autograd.function import FunctionCtx
    from typing_extensions import Unpack

    from pycomm.fused.arguments import Cut
    from pycomm.fused.problem import Activation, Op, Problem
    from pycomm.fused.ranks import AnyGroup, Ranks

    class _Call(FunctionCtx):
        """What a Function keeps of one call."""

        needs_input_grad: tuple[bool, ...]
        saved_tensors: tuple[torch.Tensor, ...]
        kept: _Call | None  # of _Keep, where that has saved a and b
        problem: Problem
        ranks: Ranks
        device: torch.device

        def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...


__all__ = ["all_gather_matmul", "matmul", "matmul_all_reduce", "matmul_reduce_scatter"]


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """activation(a @ b + bias) on this process alone.

    Args:
        a: (..., K), at least one leading dimension.
        b: (K, N), any strides: the weight of a torch.nn.Linear is passed as weight.t(). For "swiglu" (K, 2N):
            the columns of the gate, then those of the up projection.
        bias: (N,), "swiglu": (2N,); or None.
        activation: None, "relu", "silu", "gelu" (by erf, torch's default), "gelu_tanh", or "swiglu":
        silu(gate) * up.

    a, b and bias have one device and one dtype of float32, float16, bfloat16, on the CPU also float64; under
    autocast they are converted to its dtype, as for torch's products. Products accumulate in float32 (float64
    for float64). Returns (..., N). Differentiable once. Raises ValueError or TypeError for arguments that do
    not fit.
    """
    return _run("matmul", a, b, bias, activation, ALONE)


def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: AnyGroup = None,
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """matmul(all_gather(a, dim), b, bias, activation), the gathering overlapped with the product.

    Args:
        a: this rank's piece along `dim`, which is one of the leading dimensions; negative counts from the
        end.
        b, bias, activation: as in matmul. Each rank has its own, e.g. its columns of a weight.
        group: torch ProcessGroup, pycomm.Communicator, or None: torch's default group, this process alone
        where there is none.
        sizes: the length of every rank's piece along dim, equal on all ranks; None: all as here. A piece may
        be empty.
        shards: the columns of every rank's b, equal on all ranks; None: all as here. Forms are chosen by the
            longest, so that all ranks choose alike.

    Returns the product with sum(sizes) along dim. Backward: collective on the group, so requires_grad of a, b
    and bias must be the same on all ranks. Raises ValueError or TypeError before anything is sent;
    MismatchError where ranks disagree.
    """
    return _run(
        "all_gather_matmul", a, b, bias, activation, _ranks(group, a), dim=dim, sizes=sizes, shards=shards
    )


def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    group: AnyGroup = None,
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """This rank's piece along `dim` of activation(sum over ranks of a @ b, + bias), the reduction overlapped
    with the product.

    Args:
        a: (..., K) where K is this rank's part of the inner dimension; whole along `dim`, which is one of its
        leading dimensions.
        b: (K, N). bias, activation: as in matmul; applied after the sum, so all ranks pass the same bias.
        group: as in all_gather_matmul.
        sizes: the length of every rank's piece of the result; None: cut like torch.tensor_split, longer
        pieces first.
        shards: every rank's K, as in all_gather_matmul.

    Returns the piece: sizes[rank] along dim. Backward: collective on the group, so requires_grad of a, b and
    bias must be the same on all ranks; grad_bias is that of the whole result, equal on all ranks. Raises as
    all_gather_matmul.
    """
    return _run(
        "matmul_reduce_scatter", a, b, bias, activation, _ranks(group, a), dim=dim, sizes=sizes, shards=shards
    )


def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    group: AnyGroup = None,
    *,
    shards: Sequence[int] | None = None,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """activation(sum over ranks of a @ b, + bias), whole on every rank and with the same bits.

    Args: as in matmul_reduce_scatter.

    Backward: no communication; the gradient of the result is taken to be equal on all ranks, as it is where
    they all go on with the same computation (Megatron). Whether a gradient is needed must be the same on all
    ranks. Raises as all_gather_matmul.
    """
    return _run("matmul_all_reduce", a, b, bias, activation, _ranks(group, a), shards=shards)


def _ranks(group: AnyGroup, a: torch.Tensor) -> Ranks:
    return of(group, a.device if isinstance(a, torch.Tensor) else "cpu")


def _run(
    op: Op,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
    ranks: Ranks,
    **cut: Unpack[Cut],
) -> torch.Tensor:
    if isinstance(a, torch.Tensor) and a.device.type in DTYPES and torch.is_autocast_enabled(a.device.type):
        dtype = torch.get_autocast_dtype(a.device.type)
        a, b, bias = _lowered(a, dtype), _lowered(b, dtype), None if bias is None else _lowered(bias, dtype)
        with torch.autocast(a.device.type, enabled=False):
            return _run(op, a, b, bias, activation, ranks, **cut)
    problem, rows, shape = plan(op, a, b, bias, activation, ranks, **cut)
    # Kernels and collectives read memory as it is.
    a, b = _resolved(a), _resolved(b)
    bias = None if bias is None else _resolved(bias)
    a = a.reshape(rows, problem.k)
    if torch.is_grad_enabled() and (
        a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)
    ):
        kept = None
        if (
            problem.activation is None
            and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        ):
            a, b = _Keep.apply(a, b)
            kept = cast("_Call", a.grad_fn or b.grad_fn)
        out: torch.Tensor = _FUNCTIONS[problem.op].apply(a, b, bias, kept, problem, ranks)
    else:
        out = dispatch.forward(problem, a, b, bias, ranks).out
    return out.view(shape)


def _resolved(x: torch.Tensor) -> torch.Tensor:
    return x.resolve_neg() if x.is_neg() else x


def _lowered(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As torch's products take an operand under autocast; float64 and integers stay."""
    narrows = isinstance(x, torch.Tensor) and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return x.to(dtype) if narrows else x


# --- gradients --------------------


class _Keep(torch.autograd.Function):
    """a and b as they are, saved before anything is computed. A Function's own are saved behind its forward,
    where the recomputation of a checkpoint (torch.utils.checkpoint, by hooks on what is saved), which ends
    when it has all of it, would do a last product and its collective for nothing."""

    @staticmethod
    def forward(ctx: _Call, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(a, b)
        ctx.set_materialize_grads(False)
        views = a.view_as(a), b.view_as(b)
        ctx.mark_non_differentiable(
            *(view for view, needed in zip(views, ctx.needs_input_grad, strict=True) if not needed)
        )
        return views

    @staticmethod
    def backward(
        ctx: _Call, grad_a: torch.Tensor | None, grad_b: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        return grad_a, grad_b


def _forward(
    ctx: _Call,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    kept: _Call | None,
    problem: Problem,
    ranks: Ranks,
) -> torch.Tensor:
    result = dispatch.forward(problem, a, b, bias, ranks, save=problem.activation is not None)
    ctx.kept = kept
    ctx.save_for_backward(*(() if kept else (a, b)), result.z)
    ctx.problem, ctx.ranks, ctx.device = problem, ranks, a.device
    return result.out


class _Saved(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
    z: torch.Tensor | None  # the preactivation, where there is an activation


def _saved(ctx: _Call) -> _Saved:
    """[Note: backward of ranks that are threads] torch runs the backward passes of all threads of a
    process in one thread per GPU. Where ranks are threads, the first of them to wait there for its peers
    would keep them from ever coming.
    """
    here = ctx.ranks.cache.machines.get(ctx.device)
    if here and here.threads and isinstance(threading.current_thread(), threading._DummyThread):
        raise RuntimeError(
            f"{ctx.ranks} pycomm.fused.{ctx.problem.op}: the ranks are threads of one process on one GPU, "
            "and torch runs the backward passes of all of them in one thread, where they would wait for each "
            "other for ever. Call backward() inside torch.autograd.set_multithreading_enabled(False); "
            "pycomm.testing.run_ranks does so."
        )
    return _Saved(*(ctx.kept.saved_tensors if ctx.kept else ()), *ctx.saved_tensors)


def _gradient_of_b(a: torch.Tensor, b: torch.Tensor, dz: torch.Tensor) -> torch.Tensor:
    """a^T dz in the layout of b: that of a weight (N, K) passed as weight.t() is then dense, and added to
    .grad without a transposition.
    """
    return product(dz.t(), a).t() if b.stride(0) < b.stride(1) else product(a.t(), dz)


def _backward_problem(problem: Problem, op: Op) -> Problem:
    """The product of dz and b^T, as the op that moves the rows the other way."""
    return problem._replace(op=op, n=problem.k, k=problem.columns, activation=None, bias=False)


def _bias_gradient(dz: torch.Tensor, needed: bool) -> torch.Tensor | None:
    return dz.sum(0) if needed else None  # torch sums 16-bit types in fp32


class _Matmul(torch.autograd.Function):
    """matmul and matmul_all_reduce, whose backward passes are the same: local."""

    forward = staticmethod(_forward)

    @staticmethod
    def backward(ctx: _Call, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (a, b, z), (need_a, need_b, need_bias) = _saved(ctx), ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            found = twice.gradients(ctx.problem, ctx.ranks, a, b, grad)
            needed = zip(found, (need_a, need_b, need_bias), strict=True)
            return *(each if need else None for each, need in needed), None, None, None
        dz = activation_backward(ctx.problem, grad, z)
        grad_b = _gradient_of_b(a, b, dz) if need_b else None
        return product(dz, b.t()) if need_a else None, grad_b, _bias_gradient(dz, need_bias), None, None, None


class _AllGatherMatmul(torch.autograd.Function):
    forward = staticmethod(_forward)

    @staticmethod
    def backward(ctx: _Call, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (a, b, z), (need_a, need_b, need_bias) = _saved(ctx), ctx.needs_input_grad[:3]
        problem, ranks = ctx.problem, ctx.ranks
        twice.refuse(problem, ranks)
        dz = activation_backward(problem, grad, z)
        grad_a = grad_b = None
        if need_b:
            pieces = a.new_empty(problem.m, problem.k)
            own = a.contiguous()  # alive until the work is done
            work = ranks.all_gather(list(pieces.split(problem.piece_rows)), own)
        if need_a:
            grad_a = dispatch.forward(
                _backward_problem(problem, "matmul_reduce_scatter"), dz, b.t(), None, ranks
            ).out
        if need_b:
            work.wait()
            grad_b = _gradient_of_b(join_rows(problem, pieces), b, dz)
        return grad_a, grad_b, _bias_gradient(dz, need_bias), None, None, None


class _MatmulReduceScatter(torch.autograd.Function):
    forward = staticmethod(_forward)

    @staticmethod
    def backward(ctx: _Call, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (a, b, z), (need_a, need_b, need_bias) = _saved(ctx), ctx.needs_input_grad[:3]
        problem, ranks = ctx.problem, ctx.ranks
        twice.refuse(problem, ranks)
        dz = activation_backward(problem, grad, z)
        grad_a = None
        if need_a:
            result = dispatch.forward(
                _backward_problem(problem, "all_gather_matmul"),
                dz,
                b.t(),
                None,
                ranks,
                keep=need_b or need_bias,
            )
            grad_a, gathered = result.out, result.gathered
        else:
            pieces = dz.new_empty(problem.m, problem.columns)
            ranks.all_gather(list(pieces.split(problem.piece_rows)), dz.contiguous()).wait()
            gathered = join_rows(problem, pieces)
        if gathered is None:  # neither b nor a bias needs it
            return grad_a, None, None, None, None, None
        grad_b = _gradient_of_b(a, b, gathered) if need_b else None
        return grad_a, grad_b, _bias_gradient(gathered, need_bias), None, None, None


_FUNCTIONS: dict[Op, type[torch.autograd.Function]] = {
    "matmul": _Matmul,
    "all_gather_matmul": _AllGatherMatmul,
    "matmul_reduce_scatter": _MatmulReduceScatter,
    "matmul_all_reduce": _Matmul,
}
