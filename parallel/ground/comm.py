"""Groups of ranks, the collectives on them, and the count of both. Every byte that the strategies move goes
through this file, or is recorded here by tensor/products.py.

In a Group (pycomm.groups) of one rank every function here is a copy or nothing, so its callers need no branch
for that.

[Note: counting] `with count_traffic() as traffic:` records each call of this process with the least number of
bytes that this rank must send. The formulas in docs/strategies.md count the same (n = size of the group, B =
bytes of the whole buffer):

    all_reduce 2(n-1)/n B · reduce_scatter, all_gather (n-1)/n B · all_to_all what goes to others · send B ·
    broadcast, gather B

Backward passes on CUDA run in threads of their own, so the list of recorders belongs to the process and not
to a thread.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias, cast, overload

import torch
import torch.distributed as dist

from pycomm import CommError
from pycomm.groups import (
    ALONE,
    Group,
    all_gather_flat,
    as_group,
    even_sizes,
    pad_pieces,
    reduce_scatter_flat,
    unpad_pieces,
)

__all__ = [
    "ALONE",
    "Call",
    "Group",
    "Traffic",
    "Work",
    "all_gather",
    "all_gather_dim",
    "all_reduce",
    "all_to_all",
    "as_group",
    "broadcast",
    "broadcast_values",
    "count_traffic",
    "empty",
    "even_sizes",
    "gather",
    "irecv",
    "isend",
    "reduce_scatter",
    "reduce_scatter_dim",
    "split_dim",
]


ReduceOp: TypeAlias = "dist.ReduceOp | dist.ReduceOp.RedOpType"


class Call(NamedTuple):
    op: str
    group: str  # name of the group
    nbytes: int  # sent by this rank


class Work(Protocol):
    """A collective under way, or done."""

    def wait(self) -> bool: ...

    def is_completed(self) -> bool: ...


class Traffic:
    """What was recorded; `op` and `group` choose among the calls, None takes all."""

    def __init__(self) -> None:
        self.log: list[Call] = []

    def chosen(self, op: str | None = None, group: str | None = None) -> list[Call]:
        return [call for call in self.log if op in (None, call.op) and group in (None, call.group)]

    def calls(self, op: str | None = None, group: str | None = None) -> int:
        return len(self.chosen(op, group))

    def nbytes(self, op: str | None = None, group: str | None = None) -> int:
        return sum(call.nbytes for call in self.chosen(op, group))

    def by_group(self) -> dict[str, int]:
        """Bytes sent, by the name of a group."""
        return {group: self.nbytes(group=group) for group in {call.group for call in self.log}}


_recorders: list[Traffic] = []


@contextlib.contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Records the calls of this process in the block; see [Note: counting]."""
    traffic = Traffic()
    _recorders.append(traffic)
    try:
        yield traffic
    finally:
        _recorders.remove(traffic)


def record(op: str, group: Group, nbytes: int) -> None:
    for traffic in _recorders:
        traffic.log.append(Call(op, group.name, int(nbytes)))


class Done:
    """The work of an operation that had nothing to do."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def nbytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def process_group(group: Group) -> dist.ProcessGroup | None:
    """torch's group of a Group: here none is of a Communicator, as pycomm.fused takes it."""
    return cast("dist.ProcessGroup | None", group.pg)


@overload
def all_reduce(
    tensor: torch.Tensor, group: Group, op: ReduceOp = ..., *, async_op: Literal[True]
) -> Work: ...
@overload
def all_reduce(
    tensor: torch.Tensor, group: Group, op: ReduceOp = ..., async_op: Literal[False] = False
) -> None: ...
def all_reduce(
    tensor: torch.Tensor, group: Group, op: ReduceOp = dist.ReduceOp.SUM, async_op: bool = False
) -> Work | None:
    """In place. tensor: contiguous."""
    if group.size == 1:
        return Done() if async_op else None
    record("all_reduce", group, 2 * (group.size - 1) * nbytes_of(tensor) // group.size)
    return dist.all_reduce(tensor, op=op, group=process_group(group), async_op=async_op)


@overload
def reduce_scatter(
    output: torch.Tensor, tensor: torch.Tensor, group: Group, *, async_op: Literal[True]
) -> Work: ...
@overload
def reduce_scatter(
    output: torch.Tensor, tensor: torch.Tensor, group: Group, async_op: Literal[False] = False
) -> None: ...
def reduce_scatter(
    output: torch.Tensor, tensor: torch.Tensor, group: Group, async_op: bool = False
) -> Work | None:
    """output (k elements) = this rank's part of the sum of tensor (size * k elements), both flat. output may
    be that part itself.
    """
    if group.size == 1:
        if output.data_ptr() != tensor.data_ptr():
            output.copy_(tensor)
        return Done() if async_op else None
    record("reduce_scatter", group, nbytes_of(tensor) - nbytes_of(output))
    return reduce_scatter_flat(output, tensor, group=process_group(group), async_op=async_op)


@overload
def all_gather(
    output: torch.Tensor, tensor: torch.Tensor, group: Group, *, async_op: Literal[True]
) -> Work: ...
@overload
def all_gather(
    output: torch.Tensor, tensor: torch.Tensor, group: Group, async_op: Literal[False] = False
) -> None: ...
def all_gather(
    output: torch.Tensor, tensor: torch.Tensor, group: Group, async_op: bool = False
) -> Work | None:
    """output (size * k elements) = tensor (k elements) of every rank, both flat. tensor may be this rank's
    part of output.
    """
    if group.size == 1:
        if output.data_ptr() != tensor.data_ptr():
            output.copy_(tensor)
        return Done() if async_op else None
    record("all_gather", group, nbytes_of(output) - nbytes_of(tensor))
    return all_gather_flat(output, tensor, group=process_group(group), async_op=async_op)


def all_to_all(
    tensor: torch.Tensor, input_sizes: Sequence[int], output_sizes: Sequence[int], group: Group
) -> torch.Tensor:
    """Rows for every rank in, rows from every rank out: input_sizes[r] rows (dim 0) of `tensor` go to rank r,
    output_sizes[r] come from it.

    Returns the rows received, in order of rank.
    """
    tensor = tensor.contiguous()
    output = tensor.new_empty((sum(output_sizes), *tensor.shape[1:]))
    if group.size == 1:
        output.copy_(tensor)
        return output
    row = nbytes_of(tensor) // tensor.shape[0] if tensor.shape[0] else 0
    record("all_to_all", group, row * (sum(input_sizes) - input_sizes[group.rank]))
    dist.all_to_all_single(output, tensor, list(output_sizes), list(input_sizes), group=process_group(group))
    return output


def broadcast(tensor: torch.Tensor, src: int, group: Group) -> None:
    """In place, from rank `src` of the group."""
    if group.size > 1:
        record("broadcast", group, nbytes_of(tensor) if group.rank == src else 0)
        dist.broadcast(tensor, group_src=src, group=process_group(group))


def broadcast_values(tensors: Iterable[torch.Tensor], group: Group) -> None:
    """In place: parameters and buffers take the values of rank 0, by one broadcast per dtype."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in dict.fromkeys(tensors):
        # .data hides the change from autograd: a BatchNorm that has run before must still be able to run
        # backward.
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.data)
    for some in kinds.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in some])
        broadcast(flat, 0, group)
        if group.rank:
            for tensor, values in zip(some, flat.split([tensor.numel() for tensor in some]), strict=True):
                tensor.copy_(values.view(tensor.shape))


def gather(tensor: torch.Tensor, dst: int, group: Group) -> list[torch.Tensor] | None:
    """The tensors of all ranks on rank `dst` of the group, None on the others. Equal shapes."""
    if group.size == 1:
        return [tensor]
    record("gather", group, nbytes_of(tensor) if group.rank != dst else 0)
    parts = [torch.empty_like(tensor) for _ in range(group.size)] if group.rank == dst else None
    dist.gather(tensor, parts, group_dst=dst, group=process_group(group))
    return parts


def isend(tensor: torch.Tensor, dst: int, group: Group, tag: int = 0) -> Work:
    """Starts to send to rank `dst` of the group. The tensor must be contiguous and left alone until
    work.wait().
    """
    record("send", group, nbytes_of(tensor))
    work = dist.isend(tensor, group_dst=dst, group=process_group(group), tag=tag)
    return cast(Work, work)  # None is for ranks outside of the group


def irecv(tensor: torch.Tensor, src: int, group: Group, tag: int = 0) -> Work:
    """Starts to receive into `tensor` from rank `src` of the group."""
    return cast(Work, dist.irecv(tensor, group_src=src, group=process_group(group), tag=tag))


def empty(count: int, dtype: torch.dtype, group: Group, device: torch.device | str = "cpu") -> torch.Tensor:
    """A flat tensor of zeros for collectives of `group`: memory that its backend has registered where it can
    do that, else ordinary memory.

    Collective on the group. torch's name for it is `allocate_tensor`; pycomm's collectives then skip the copy
    into staging memory. Where one rank cannot register (no descriptor, no memory), pycomm raises a plain
    CommError on all of them: then all take ordinary memory, and say so. Other errors are the caller's.
    """
    device, pg = torch.device(device), process_group(group)
    if pg is not None and group.size > 1 and count:
        backend = pg._get_backend(device)
        if backend.supports_tensor_alloc(device):
            try:
                return backend.allocate_tensor(count, dtype=dtype, device=device).zero_()
            except CommError as error:
                if type(error) is not CommError:
                    raise
                warnings.warn(
                    f"group {group.name!r}: {count} elements could not be registered, so ordinary memory is "
                    f"used, which is slower: {error}",
                    stacklevel=2,
                )
    return torch.zeros(count, dtype=dtype, device=device)


def split_dim(tensor: torch.Tensor, dim: int, sizes: Sequence[int], group: Group) -> torch.Tensor:
    """This rank's piece along `dim`, when it is cut into `sizes`."""
    return tensor.narrow(dim, sum(sizes[: group.rank]), sizes[group.rank])


def all_gather_dim(tensor: torch.Tensor, dim: int, sizes: Sequence[int], group: Group) -> torch.Tensor:
    """The tensors of all ranks joined along `dim`, where rank r's is sizes[r] long."""
    if group.size == 1:
        return tensor
    longest = max(sizes)
    front = tensor.movedim(dim, 0)
    if longest == min(sizes):
        out = front.new_empty((longest * group.size, *front.shape[1:]))
        all_gather(out, front.contiguous(), group)
        return out.movedim(0, dim)
    out = front.new_empty((group.size * longest, *front.shape[1:]))
    all_gather(out, pad_pieces([front], longest), group)
    return torch.cat(unpad_pieces(out, sizes)).movedim(0, dim)


def reduce_scatter_dim(tensor: torch.Tensor, dim: int, sizes: Sequence[int], group: Group) -> torch.Tensor:
    """This rank's piece along `dim` of the sum over all ranks, when it is cut into `sizes`."""
    if group.size == 1:
        return tensor
    longest = max(sizes)
    front = tensor.movedim(dim, 0)
    source = front.contiguous() if longest == min(sizes) else pad_pieces(front.split(sizes), longest)
    out = front.new_empty((longest, *front.shape[1:]))
    reduce_scatter(out, source, group)
    return out[: sizes[group.rank]].movedim(0, dim)
