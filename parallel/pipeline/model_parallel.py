"""Model parallelism as one would first write it: consecutive layers on each rank, activations handed from
rank to rank, one rank at work.

    layers 0..6, balance [3, 2, 2]

    rank 0   [0 1 2] --h-->                                                        <--dh-- [2 1 0]
    rank 1                  [3 4] --h-->                            <--dh-- [4 3]
    rank 2                               [5 6]  out, loss  [6 5]
             ------------------------------------------------------------------------------------> time

Each rank holds its layers' share of parameters, gradients, optimizer state and activations, which is the
point; n - 1 of n ranks wait at any time, which is why pipelines exist (Huang et al. 2019, GPipe; Dean et al.
2012 placed layers on machines). Same results as one process: the same operations in the same order.

Cost per link: the activation once in forward, its gradient once in backward, and 80 bytes for the shape the
first time that inputs of some shape and dtype come. With broadcast_output also the output once per step, from
the last rank to all.

[Note: backward by plain calls] Every rank calls backward() on what forward returned, or on a loss made of it,
and the graph does the rest:

    rank 0     x -> layers -> Send -> (token)         Send.backward waits for dh from rank 1 and gives it to
                                                      the layers
    rank 1     Recv -> layers -> Send -> (token)      Recv.backward sends dh to rank 0
    rank 2     Recv -> layers -> out -> loss

A token is a scalar 0 without meaning. The gradient that comes to a token is ignored: only the last rank's
loss counts. Where gradients flow is decided by what both sides know alike (gradient mode is on, the
activation is floating), not by what happens to need a gradient, so a frozen first layer costs a message but
leaves nobody waiting.

[Note: shape by input] The receiver must know what comes. All ranks are called with an input of the same shape
and dtype (only rank 0's values are used), and the shape of an activation is taken to follow from it: it is
told once per shape and dtype of the input, then remembered by both. A layer whose output shape depends on
values breaks this and is an error on the sender.

What can go wrong: a rank that leaves out the call of forward or backward leaves its neighbours waiting until
the process group's time limit, whose error names the rank. So do ranks in different gradient modes, and
layers that cut the graph (detach) behind the first rank.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import FunctionCtx

from pycomm.parallel.ground import comm
from pycomm.parallel.ground.comm import Group
from pycomm.parallel.ground.differentiable import once

__all__ = ["ModelParallel"]

MAX_DIMS = 8
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


class Shape(NamedTuple):
    """What a message holds."""

    dims: tuple[int, ...]
    dtype: torch.dtype


def pack(shape: Shape, device: torch.device) -> torch.Tensor:
    return torch.tensor(
        [DTYPES.index(shape.dtype), len(shape.dims), *shape.dims] + [0] * (MAX_DIMS - len(shape.dims)),
        device=device,
    )


def unpack(header: torch.Tensor) -> Shape:
    dtype, ndim, *dims = header.tolist()
    return Shape(tuple(dims[:ndim]), DTYPES[dtype])


def empty_header(device: torch.device) -> torch.Tensor:
    return torch.empty(2 + MAX_DIMS, dtype=torch.int64, device=device)


def send(tensor: torch.Tensor, dst: int, group: Group) -> None:
    comm.isend(tensor.contiguous(), dst, group).wait()


def recv(tensor: torch.Tensor, src: int, group: Group) -> torch.Tensor:
    comm.irecv(tensor, src, group).wait()
    return tensor


def carries_gradient(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


class _Context(FunctionCtx):
    """What forward leaves to backward."""

    shape: Shape
    device: torch.device
    group: Group
    saved_tensors: tuple[torch.Tensor, ...]


_once = once("ModelParallel", "use parallelize() with a plan that has pp=1")


class _Send(torch.autograd.Function):
    """h -> a token. `start` is a scalar that needs a gradient, so that the token does even where h
    does not.
    """

    @staticmethod
    def forward(ctx: _Context, h: torch.Tensor, start: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.shape, ctx.device, ctx.group = Shape(tuple(h.shape), h.dtype), h.device, group
        send(h.detach(), group.rank + 1, group)
        return torch.zeros_like(start)

    @staticmethod
    @_once
    def backward(ctx: _Context, _: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        shape, group = ctx.shape, ctx.group
        if not carries_gradient(shape.dtype):
            return None, None, None
        grad = torch.empty(shape.dims, dtype=shape.dtype, device=ctx.device)
        return recv(grad, group.rank + 1, group), None, None


class _Recv(torch.autograd.Function):
    """A scalar that needs a gradient -> h of the rank before."""

    @staticmethod
    def forward(ctx: _Context, start: torch.Tensor, shape: Shape, group: Group) -> torch.Tensor:
        ctx.group = group
        h = recv(torch.empty(shape.dims, dtype=shape.dtype, device=start.device), group.rank - 1, group)
        if not carries_gradient(shape.dtype):
            ctx.mark_non_differentiable(h)
        return h

    @staticmethod
    @_once
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[None, None, None]:
        send(grad, ctx.group.rank - 1, ctx.group)
        return None, None, None


class _Show(torch.autograd.Function):
    """A token and values that came from elsewhere -> the values; their gradient is dropped and the token's
    backward is called.
    """

    @staticmethod
    def forward(ctx: _Context, token: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token)
        return values.view_as(values)

    @staticmethod
    @_once
    def backward(ctx: _Context, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        (token,) = ctx.saved_tensors
        return torch.zeros_like(token), None


class ModelParallel(nn.Module):
    """Layers placed on the ranks of a group; one call for all ranks.

    layers: nn.Sequential or a list of modules, each from one tensor to one tensor of at most 8 dimensions,
    the same on every rank.
    group: comm.Group, torch process group, or None for the default one.
    balance: number of layers per rank, 0 allowed; default: as even as it goes, longer runs first.
    broadcast_output: forward returns the output on every rank, else on the last only and a token (a scalar 0)
    on the others.

    This rank keeps its own layers; parameters are named "layers.<name in the original>". Raises ValueError
    for a balance that does not fit and for a parameter shared by layers of two ranks.

        out = model(x)                                      # all ranks, x of one shape; rank 0's values count
        loss = loss_fn(out, y) if model.is_last else out    # with broadcast_output: loss_fn on all ranks
        loss.backward()                                     # all ranks
    """

    def __init__(
        self,
        layers: nn.Sequential | Iterable[nn.Module],
        group: Group | dist.ProcessGroup | None = None,
        *,
        balance: Sequence[int] | None = None,
        broadcast_output: bool = False,
    ) -> None:
        super().__init__()
        self.group = group = comm.as_group(group, "pp")
        named = (
            list(layers.named_children())
            if isinstance(layers, nn.Sequential)
            else [(str(i), layer) for i, layer in enumerate(layers)]
        )
        where = f"[rank {group.rank}/{group.size}] ModelParallel"
        self.balance = comm.even_sizes(len(named), group.size) if balance is None else list(balance)
        if len(self.balance) != group.size or sum(self.balance) != len(named) or min(self.balance) < 0:
            raise ValueError(
                f"{where}: balance={self.balance} for {len(named)} layers on {group.size} ranks; needs one "
                "number >= 0 for each rank, "
                f"{len(named)} in all"
            )
        owners = [rank for rank, count in enumerate(self.balance) for _ in range(count)]
        check_not_shared(named, owners, where)
        self.layers = nn.Sequential()
        for (name, layer), owner in zip(named, owners, strict=True):
            if owner == group.rank:
                self.layers.add_module(name, layer)
        self.broadcast_output = broadcast_output
        self.is_first, self.is_last = group.rank == 0, group.rank == group.size - 1
        # Shape of the input -> Shape of the message
        self._received: dict[Shape, Shape] = {}
        self._sent: dict[Shape, Shape] = {}
        self._shown: dict[Shape, Shape] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: a tensor; its values are used on rank 0, its shape and dtype must be equal on all ranks.
        Collective.
        """
        device = next(
            (tensor.device for tensor in (*self.layers.parameters(), *self.layers.buffers())), x.device
        )
        key = Shape(tuple(x.shape), x.dtype)
        start = torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())
        if not self.is_first:
            if key not in self._received:
                self._received[key] = unpack(recv(empty_header(device), self.group.rank - 1, self.group))
            x = _Recv.apply(start, self._received[key], self.group)
        out = self.layers(x)
        if not self.is_last:
            self._tell(self._sent, key, out, lambda header: send(header, self.group.rank + 1, self.group))
            out = _Send.apply(out, start, self.group)
        return self._show(out, key) if self.broadcast_output else out

    def _tell(
        self,
        known: dict[Shape, Shape],
        key: Shape,
        out: torch.Tensor,
        transmit: Callable[[torch.Tensor], object],
    ) -> None:
        """Transmits the shape of `out` unless the receivers know it."""
        shape = Shape(tuple(out.shape), out.dtype)
        if key not in known:
            if len(shape.dims) > MAX_DIMS or shape.dtype not in DTYPES:
                raise ValueError(
                    f"[rank {self.group.rank}/{self.group.size}] ModelParallel: cannot send {shape}; "
                    f"{MAX_DIMS} dimensions at most, "
                    f"one of {', '.join(map(str, DTYPES))}"
                )
            known[key] = shape
            transmit(pack(shape, out.device))
        elif known[key] != shape:
            raise ValueError(
                f"[rank {self.group.rank}/{self.group.size}] ModelParallel: the layers gave {shape} for an "
                f"input {key}, "
                f"{known[key]} before. The shape between ranks must follow from the shape of the input: pad "
                "it."
            )

    def _show(self, out: torch.Tensor, key: Shape) -> torch.Tensor:
        """The output of the last rank, on every rank."""
        last = self.group.size - 1
        if self.is_last:
            self._tell(self._shown, key, out, lambda header: comm.broadcast(header, last, self.group))
            comm.broadcast(out.detach().contiguous(), last, self.group)
            return out
        if key not in self._shown:
            header = empty_header(out.device)
            comm.broadcast(header, last, self.group)
            self._shown[key] = unpack(header)
        values = torch.empty(self._shown[key].dims, dtype=self._shown[key].dtype, device=out.device)
        comm.broadcast(values, last, self.group)
        return _Show.apply(out, values)

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """loss.backward(gradient), where `loss` may be anything on ranks other than the last: what forward
        returned, or a loss of it.
        """
        loss.backward(gradient if self.is_last else torch.zeros_like(loss))


def check_not_shared(named: Sequence[tuple[str, nn.Module]], owners: Sequence[int], where: str) -> None:
    first_user: dict[int, tuple[str, int]] = {}  # id of a parameter -> name of the layer, its rank
    for (name, layer), owner in zip(named, owners, strict=True):
        for parameter in layer.parameters():
            other, other_owner = first_user.setdefault(id(parameter), (name, owner))
            if other_owner != owner:
                raise ValueError(
                    f"{where}: layers {other!r} (rank {other_owner}) and {name!r} (rank {owner}) share a "
                    "parameter, "
                    "which would become two. Place them on one rank with balance=, or use parallelize() with "
                    "Plan(pp=...), "
                    "which keeps tied weights equal."
                )
