"""Launches the kernels: which arguments, how many programs, which way each operand is loaded.

A rank has `context.programs` programs that run at the same time (its share of the GPU's multiprocessors). Of
these Config.movers push, reduce or finish, the others multiply; with more movers than that, all multiply and
the movers come after them, which is allowed because who waits has a higher id than who is waited for
(kernels/signal.py, [Note: who may wait]).

Every call returns what pycomm.fused.plain returns for it, so that the two can be exchanged.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pycomm.fused.config import fitting
from pycomm.fused.kernels import tile
from pycomm.fused.kernels.all_gather_matmul import all_gather_matmul as all_gather_matmul_kernel
from pycomm.fused.kernels.matmul import matmul as matmul_kernel
from pycomm.fused.kernels.matmul_all_reduce import matmul_all_reduce as matmul_all_reduce_kernel
from pycomm.fused.kernels.matmul_reduce_scatter import matmul_reduce_scatter as matmul_reduce_scatter_kernel
from pycomm.fused.loading import Miscompiled, miscompiled, start
from pycomm.fused.machine import INTERPRETED_PROGRAMS
from pycomm.fused.plain import Result

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pycomm.fused.config import Config
    from pycomm.fused.context import Context
    from pycomm.fused.loading import Arguments, Constant
    from pycomm.fused.problem import Op, Problem

__all__ = [
    "all_gather_matmul",
    "interpreted",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]

POINTERS, DESCRIPTOR, TRANSPOSED = (mode.value for mode in (tile.POINTERS, tile.DESCRIPTOR, tile.TRANSPOSED))
WIRES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
COPY_UNITS = 1024  # of 16 bytes, by one program at a time


class Roles(NamedTuple):
    """Programs of a launch."""

    multipliers: int
    movers: int


class _Ways(TypedDict, total=False):
    """How operands are loaded, and what partial tiles travel as: fields of a Tile."""

    a_mode: int
    b_mode: int
    wire: tl.dtype


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter in this process."""
    return not isinstance(matmul_kernel, triton.JITFunction)


def roles(config: Config, context: Context, others: int = 1) -> Roles:
    """How many programs of each role; others: how many roles there are beside those that multiply.

    [Note: ranks that share a GPU] Its multiprocessors must hold all programs of all these ranks at once. Else
    those of one rank that wait could take the place of those of another that they wait for, which then never
    begin. So all roles fit into a rank's share.
    """
    programs, movers = context.programs, max(1, config.movers)
    if context.shares_device:
        movers = min(movers, programs // (others + 1))
        return Roles(programs - others * movers, movers)
    return Roles(programs - movers if movers < programs else programs, movers)


@functools.cache
def _processors(device: torch.device) -> int:
    """Programs of a kernel that has the device for itself."""
    return (
        INTERPRETED_PROGRAMS
        if interpreted()
        else torch.cuda.get_device_properties(device).multi_processor_count
    )


def _operand(
    x: torch.Tensor, rows: int, columns: int, allowed: bool
) -> tuple[int, torch.Tensor | TensorDescriptor]:
    """(how to load tiles of `rows` x `columns` of a matrix, the argument for it). Rows that overlap, as in a
    tensor that was expanded, are not what the accelerator's driver has promised to take."""
    if allowed and x.numel():
        unit = 16 // x.element_size()
        if (
            x.stride(1) == 1
            and x.stride(0) >= x.shape[1]
            and x.stride(0) % unit == 0
            and x.data_ptr() % 16 == 0
        ):
            return DESCRIPTOR, TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])
        if (
            x.stride(0) == 1
            and x.stride(1) >= x.shape[0]
            and x.stride(1) % unit == 0
            and x.data_ptr() % 16 == 0
        ):
            return TRANSPOSED, TensorDescriptor(
                x.t(), list(x.t().shape), list(x.t().stride()), [columns, rows]
            )
    return POINTERS, x


def _compiled_for(
    problem: Problem,
    config: Config,
    bias: torch.Tensor | None,
    save: bool,
    device: torch.device,
    **ways: Unpack[_Ways],
) -> dict[str, Constant]:
    """What all kernels take by keyword: the Tile, and options for Triton's compiler."""
    fp32 = problem.dtype == torch.float32
    compiled = tile.Tile(
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=config.block_k,
        group_m=config.group_m,
        panels=problem.panels,
        activation=problem.activation or "none",
        has_bias=bias is not None,
        save=save and problem.activation is not None,
        even_k=problem.k % config.block_k == 0,
        upcast=interpreted(),
        precision="tf32" if fp32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee",
        **ways,
    )
    return {"TILE": compiled, **({} if interpreted() else _options(config, problem.op, fp32, device))}


@functools.cache
def _options(config: Config, op: Op, fp32: bool, device: torch.device) -> dict[str, int]:
    """For Triton's compiler. On sm_80, and on sm_100 in two kernels, ptxas spills registers to come down to
    96, 128 or 168, so that more programs fit on a multiprocessor; here one is on each, and it may have all.
    Elsewhere a bound made the code worse."""
    major, bound = torch.cuda.get_device_properties(device).major, {}
    if major < 9:
        bound = {"maxnreg": 255 if config.warps == 8 else 200}
    elif major >= 10 and op in ("matmul_reduce_scatter", "matmul_all_reduce") and not fp32:
        bound = {"maxnreg": 255}
    return {"num_warps": config.warps, "num_stages": config.stages, **bound}


def _outputs(
    problem: Problem, a: torch.Tensor, rows: int, save: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    out = a.new_empty(rows, problem.n)
    z = a.new_empty(rows, problem.columns) if save and problem.activation is not None else None
    return out, z


def matmul(
    problem: Problem,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    config: Config,
    *,
    save: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """activation(a @ b + bias), and the preactivation if it is to be saved, by the Triton kernel. a: (m, k),
    b: (k, panels * n), any strides.
    """
    config = fitting(problem, config, save)
    out, z = _outputs(problem, a, problem.m, save)
    if not out.numel():
        return out, z
    a_mode, a_operand = _operand(a, config.block_m, config.block_k, config.tma)
    b_mode, b_operand = _operand(b, config.block_k, config.block_n, config.tma)
    # The accelerator stores whole tiles and cuts them at the edge of the tensor; with a preactivation to save
    # there is no room for both.
    out_mode, out_operand = _operand(
        out, config.block_m, config.block_n, config.tma and z is None and problem.n > 1
    )
    tiles = triton.cdiv(problem.m, config.block_m) * triton.cdiv(problem.n, config.block_n)
    compiled = matmul_kernel[(min(tiles, _processors(a.device)),)](
        a_operand, b_operand, bias, out_operand, z, problem.m, problem.n, problem.k, *a.stride(), *b.stride(),
        OUT_MODE=out_mode, FLATTEN=config.flatten, WARP_SPECIALIZE=config.specialize,
        **_compiled_for(problem, config, bias, save, a.device, a_mode=a_mode, b_mode=b_mode),
    )  # fmt: skip
    if not interpreted() and (wrong := miscompiled(compiled)):
        raise Miscompiled(wrong)
    return out, z


def all_gather_matmul(
    problem: Problem,
    context: Context,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    config: Config,
    *,
    save: bool = False,
    keep: bool = False,
) -> Result:
    """a: this rank's rows (outer, piece, inner); results: all rows."""
    config = fitting(problem, config, save)
    unit = 16 // a.element_size()
    most_rows = max(problem.piece_rows)
    most_rows += -most_rows % unit  # so that every piece in the staging begins at a multiple of 16 bytes
    row_tiles = triton.cdiv(most_rows, config.block_m)
    half = problem.world_size * most_rows * problem.k * a.element_size()
    whole = _whole_units(
        a, unit
    )  # first: at the first call no rank is in its kernel yet while another loads that of a copy
    block, mark = context.enter(problem, config, problem.world_size * row_tiles, half)
    out, z = _outputs(problem, a, problem.m, save)
    kept = a.new_empty(problem.m, problem.k) if keep else None
    counts = roles(config, context, others=1 + keep)
    keepers = counts.movers if keep else 0

    def arguments(b: torch.Tensor, bias: torch.Tensor | None) -> Arguments:
        b_mode, b_operand = _operand(b, config.block_k, config.block_n, config.tma)
        return (
            whole, b_operand, bias, out, z, kept, block.table, block.local, context.record,
            context.spans_of(problem),
            mark, context.limit, problem.rank, problem.outer, problem.n, problem.k, most_rows,
            block.staging_offset, block.half, *b.stride(),
        ), dict(
            WORLD=problem.world_size, PUSHERS=counts.movers, MULTIPLIERS=counts.multipliers, KEEPERS=keepers,
            UNIT=unit, COPY=COPY_UNITS,
            **_compiled_for(problem, config, bias, save, a.device, a_mode=POINTERS, b_mode=b_mode),
        )  # fmt: skip

    programs = counts.movers + counts.multipliers + keepers
    use = (mark, z is not None, keep, block.wide)
    start(context, use, all_gather_matmul_kernel, programs, (b, bias), arguments)
    context.leave()
    return Result(out, z, kept)


def _whole_units(a: torch.Tensor, unit: int) -> torch.Tensor:
    """a as dense rows that begin at a multiple of 16 bytes and may be read up to the next one; itself where
    it is that already.
    """
    a = a.contiguous()
    if a.numel() % unit == 0 and a.data_ptr() % 16 == 0 and a.numel():
        return a
    padded = a.new_zeros(max(unit, a.numel() + -a.numel() % unit))
    padded[: a.numel()] = a.view(-1)
    return padded


def matmul_reduce_scatter(
    problem: Problem,
    context: Context,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    config: Config,
    *,
    save: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """This rank's rows of the result, and of the preactivation. a: all rows (outer, full, inner)."""
    config = fitting(problem, config, save)
    most_rows = max(problem.piece_rows)
    slots = triton.cdiv(most_rows, config.block_m) * triton.cdiv(problem.n, config.block_n) * problem.panels
    slot_bytes = config.block_m * config.block_n * a.element_size()
    block, mark = context.enter(
        problem, config, problem.world_size * slots, problem.world_size * slots * slot_bytes
    )
    out, z = _outputs(problem, a, problem.piece_rows[problem.rank], save)
    counts = roles(config, context)

    def arguments(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> Arguments:
        a_mode, a_operand = _operand(a, config.block_m, config.block_k, config.tma and problem.outer == 1)
        b_mode, b_operand = _operand(b, config.block_k, config.block_n, config.tma)
        return (
            a_operand, b_operand, bias, out, z, block.table, block.local, context.record,
            context.spans_of(problem), mark, context.limit, problem.rank, problem.outer, problem.n, problem.k,
            most_rows, block.staging_offset, block.half, *a.stride(), *b.stride(),
        ), dict(
            WORLD=problem.world_size, PRODUCERS=counts.multipliers, REDUCERS=counts.movers,
            **_compiled_for(
                problem, config, bias, save, a.device,
                a_mode=a_mode, b_mode=b_mode, wire=WIRES[problem.dtype],
            ),
        )  # fmt: skip

    programs, use = counts.multipliers + counts.movers, (mark, z is not None, block.wide)
    start(context, use, matmul_reduce_scatter_kernel, programs, (a, b, bias), arguments)
    context.leave()
    return out, z


def matmul_all_reduce(
    problem: Problem,
    context: Context,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    config: Config,
    *,
    save: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result and the preactivation, whole and with the same bits on every rank."""
    config = fitting(problem, config, save)
    tiles = triton.cdiv(problem.m, config.block_m) * triton.cdiv(problem.n, config.block_n)
    slots = (tiles if config.one_shot else triton.cdiv(tiles, problem.world_size)) * problem.panels
    flags = staged = problem.world_size * slots
    if not config.one_shot:  # behind the partial tiles the results, and preactivations
        flags += tiles
        staged += tiles * (1 + (problem.panels if save and problem.activation is not None else 0))
    block, mark = context.enter(
        problem, config, flags, staged * config.block_m * config.block_n * a.element_size()
    )
    out, z = _outputs(problem, a, problem.m, save)
    counts = roles(config, context, others=2 - config.one_shot)
    finishers = 0 if config.one_shot else counts.movers

    def arguments(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> Arguments:
        a_mode, a_operand = _operand(a, config.block_m, config.block_k, config.tma)
        b_mode, b_operand = _operand(b, config.block_k, config.block_n, config.tma)
        return (
            a_operand, b_operand, bias, out, z, block.table, block.local, context.record,
            mark, context.limit, problem.rank, problem.m, problem.n, problem.k,
            block.staging_offset, block.half, *a.stride(), *b.stride(),
        ), dict(
            WORLD=problem.world_size, PRODUCERS=counts.multipliers, REDUCERS=counts.movers,
            FINISHERS=finishers, ONE_SHOT=config.one_shot,
            **_compiled_for(
                problem, config, bias, save, a.device,
                a_mode=a_mode, b_mode=b_mode, wire=WIRES[problem.dtype],
            ),
        )  # fmt: skip

    programs = counts.multipliers + counts.movers + finishers
    use = (mark, z is not None, block.wide)
    start(context, use, matmul_all_reduce_kernel, programs, (a, b, bias), arguments)
    context.leave()
    return out, z
