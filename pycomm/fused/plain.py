"""The fused operations made of a matrix product and a collective: on any device, with any backend; what the
kernels are checked against.

chunks=1: one product, one collective, one after the other. With more chunks the collective of a chunk runs
while the product of the next one does; two ranks, all_gather_matmul (the first chunk is the own piece, which
needs no peer) and the two that reduce:

    gather    | others, 1st half | others, 2nd half |
    product   | own piece        | 1st half         | 2nd half |

    product   | chunk 0 | chunk 1 | chunk 2 |
    reduce              | chunk 0 | chunk 1 | chunk 2 |

A chunk of matmul_reduce_scatter holds chunk i of the rows of every destination.

Partial sums on the CPU lie in memory that the group keeps and has registered (_staging): the collective then
reads the peers' sums where they are, and no pages are mapped anew in each call. It pays where the result is
somewhere else anyway: in matmul_reduce_scatter, and in matmul_all_reduce when a bias or an activation writes
the result. It holds all of a call, or two chunks of it.

Cost: product and collective; every chunk adds a smaller, slower product. choice.py has the table and what was
measured. The bits do not depend on chance: all ranks cut alike and pycomm's collectives add in the order of
the ranks. A different number of chunks may change the last bit, since BLAS does not promise that a row comes
out alike in matrices of different heights.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from pycomm.fused.problem import cut, join_rows, split_rows

if TYPE_CHECKING:
    from pycomm.fused.problem import Problem
    from pycomm.fused.ranks import Parts, Ranks, Work

__all__ = [
    "Result",
    "activation_backward",
    "all_gather_matmul",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "product",
]

# Bytes of partial sums. Below the least, ordinary memory is not slower; the most bounds what a group keeps.
LEAST_STAGING, MOST_STAGING = 256 << 10, 16 << 20


class Result(NamedTuple):
    """Rows of the result; of the preactivation, if it was to be saved; of the gathered input, if it was to be
    kept.
    """

    out: torch.Tensor
    z: torch.Tensor | None = None
    gathered: torch.Tensor | None = None


def matmul(
    problem: Problem, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, *, save: bool = False
) -> Result:
    return _finish(problem, product(a, b, bias), None, save)


def all_gather_matmul(
    problem: Problem,
    ranks: Ranks,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    chunks: int,
    *,
    save: bool = False,
    keep: bool = False,
) -> Result:
    a, pieces = a.contiguous(), a.new_empty(problem.m, problem.k)
    if chunks == 1:
        ranks.all_gather(_pieces(problem, pieces), a, async_op=False)
        whole = join_rows(problem, pieces)
        return _finish(problem, product(whole, b, bias), None, save)._replace(
            gathered=whole if keep else None
        )
    parts, bounds = pieces.split(problem.piece_rows), [cut(rows, chunks - 1) for rows in problem.piece_rows]
    works = []
    for i in range(chunks - 1):
        targets = [part[slice(*bound[i])] for part, bound in zip(parts, bounds, strict=True)]
        works.append(ranks.all_gather(targets, a[slice(*bounds[problem.rank][i])]))
    z, b = a.new_empty(problem.m, problem.columns), _operand(b)
    products = z.split(problem.piece_rows)
    product(a, b, bias, out=products[problem.rank])
    for i, work in enumerate(works):
        work.wait()
        for r in range(problem.world_size):
            if r != problem.rank:
                rows = slice(*bounds[r][i])
                product(parts[r][rows], b, bias, out=products[r][rows])
    gathered = join_rows(problem, pieces) if keep else None
    return _finish(problem, join_rows(problem, z), None, save)._replace(gathered=gathered)


def matmul_reduce_scatter(
    problem: Problem,
    ranks: Ranks,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    chunks: int,
    *,
    save: bool = False,
) -> Result:
    z = a.new_empty(problem.piece_rows[problem.rank], problem.columns)
    a = split_rows(problem, a)
    if chunks == 1:
        slots = _staging(ranks, a, problem.m * problem.columns, 1)
        partial = (
            slots[0].view(problem.m, problem.columns) if slots else a.new_empty(problem.m, problem.columns)
        )
        ranks.reduce_scatter(z, _pieces(problem, product(a, b, out=partial)), async_op=False)
    else:
        _reduce_scatter_in_chunks(problem, ranks, a, _operand(b), z, chunks)
    return _finish(problem, z, bias, save)


def _reduce_scatter_in_chunks(
    problem: Problem, ranks: Ranks, a: torch.Tensor, b: torch.Tensor, z: torch.Tensor, chunks: int
) -> None:
    parts, bounds = a.split(problem.piece_rows), [cut(rows, chunks) for rows in problem.piece_rows]
    counts = [
        [stop - start for start, stop in chunk] for chunk in zip(*bounds, strict=True)
    ]  # rows of a chunk for every destination
    slots = _staging(ranks, a, max(map(sum, counts)) * problem.columns, 2)
    works: deque[Work] = deque()
    for i, rows in enumerate(counts):
        if len(works) == 2:
            works.popleft().wait()  # then its slot is free
        count = sum(rows) * problem.columns
        partial = (slots[i % 2][:count] if slots else a.new_empty(count)).view(sum(rows), problem.columns)
        targets = list(partial.split(rows))
        for part, bound, target in zip(parts, bounds, targets, strict=True):
            product(part[slice(*bound[i])], b, out=target)
        works.append(ranks.reduce_scatter(z[slice(*bounds[problem.rank][i])], targets))
    for work in works:
        work.wait()


def matmul_all_reduce(
    problem: Problem,
    ranks: Ranks,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    chunks: int,
    *,
    save: bool = False,
) -> Result:
    writes = bias is not None or problem.activation is not None
    slots = _staging(ranks, a, problem.m * problem.columns, 1) if writes and chunks == 1 else None
    z = slots[0].view(problem.m, problem.columns) if slots else a.new_empty(problem.m, problem.columns)
    if chunks == 1:
        ranks.all_reduce(product(a, b, out=z), async_op=False)
    else:
        b, bounds = _operand(b), cut(problem.m, chunks)
        for work in [
            ranks.all_reduce(product(a[start:stop], b, out=z[start:stop])) for start, stop in bounds
        ]:
            work.wait()
    return _finish(problem, z, bias, save, borrowed=slots is not None)


# --- parts --------------------


def product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """a @ b + bias, into `out` if given. No gradients."""
    if _slow_half(a):
        bias = None if bias is None else bias.float()
        z = product(a.float(), _operand(b), bias)
        return z.to(torch.float16) if out is None else out.copy_(z)
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)


def _operand(b: torch.Tensor) -> torch.Tensor:
    """b as product() would convert it, where it is used more than once."""
    return b.float() if _slow_half(b) else b


def _slow_half(x: torch.Tensor) -> bool:
    """Float16 on a CPU without instructions for it: torch multiplies 10 to 100 times slower than float32, and
    conversions are cheap.
    """
    return (
        x.dtype == torch.float16
        and x.device.type == "cpu"
        and not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    )


def _pieces(problem: Problem, matrix: torch.Tensor) -> Parts:
    """Rows sorted by rank, as Ranks takes them."""
    return matrix if min(problem.sizes) == max(problem.sizes) else list(matrix.split(problem.piece_rows))


def _staging(ranks: Ranks, like: torch.Tensor, count: int, slots: int) -> tuple[torch.Tensor, ...] | None:
    """`slots` flat tensors of `count` elements in the group's registered memory. None where ordinary memory
    will do, on all ranks alike.

    Collective where the memory has to grow.
    """
    nbytes = count * like.element_size() * slots
    if ranks.communicator is None or like.device.type != "cpu" or not LEAST_STAGING <= nbytes <= MOST_STAGING:
        return None
    memory = ranks.cache.staging
    if memory is None or memory.numel() < nbytes:
        with torch.inference_mode(
            False
        ):  # kept for calls outside it, which may not write to a tensor made inside
            memory = ranks.cache.staging = ranks.empty(
                1 << (nbytes - 1).bit_length(), torch.uint8, like.device
            )
    return memory[:nbytes].view(like.dtype).split(count)


def _finish(
    problem: Problem, z: torch.Tensor, bias: torch.Tensor | None, save: bool, borrowed: bool = False
) -> Result:
    """Bias and activation. borrowed: z is staging memory, which must not be in the result; there is a bias or
    an activation then.
    """
    if bias is not None:
        z, borrowed = (z + bias, False) if borrowed else (z.add_(bias), False)
    if problem.activation is None:
        return Result(z)
    return Result(
        _activate(problem, z, not save and not borrowed), (z.clone() if borrowed else z) if save else None
    )


def _activate(problem: Problem, z: torch.Tensor, in_place: bool) -> torch.Tensor:
    name = problem.activation
    if name == "swiglu":
        return F.silu(z[:, : problem.n]).mul_(z[:, problem.n :])
    if name == "relu":
        return F.relu(z, inplace=in_place)
    if name == "silu":
        return F.silu(z, inplace=in_place)
    gelu = torch.ops.aten.gelu_ if in_place else torch.ops.aten.gelu
    return gelu(z, approximate="tanh" if name == "gelu_tanh" else "none")


def activation_backward(problem: Problem, grad: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
    """The gradient at the preactivation z from that of the result. z None: there is no activation."""
    name, aten = problem.activation, torch.ops.aten
    if z is None:
        return grad
    if name == "swiglu":
        gate, up = z[:, : problem.n], z[:, problem.n :]
        return torch.cat([aten.silu_backward(grad * up, gate), grad * F.silu(gate)], 1)
    if name == "relu":
        return aten.threshold_backward(grad, z, 0)
    if name == "silu":
        return aten.silu_backward(grad, z)
    return aten.gelu_backward(grad, z, approximate="tanh" if name == "gelu_tanh" else "none")
