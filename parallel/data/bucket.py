"""A bucket: gradients of several parameters in one flat buffer, summed over their ranks by one collective.

There are three kinds of buckets, one per file. They differ in where gradients lie, in when they are summed,
and in what of the sum a rank keeps (P = bytes of the gradients, n = ranks):

    kind         file                gradients lie in       summed after         by              bytes sent
    replicated   data/replicated.py  one buffer, kept       last microbatch      all_reduce      2(n-1)/n P
    flat         zero/flat.py        one buffer, kept       last microbatch      reduce_scatter  (n-1)/n P
    streamed     zero/streamed.py    a buffer per backward  every microbatch     reduce_scatter  (n-1)/n P

`Bucket` has what they share: who sums what, where each gradient lies, and the gradient norm. reducer.py
decides when a bucket starts. zero/kinds.py says which kind a plan takes.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from pycomm.parallel.data.flat import FlatSpec, Piece
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.elsewhere import plain
from pycomm.parallel.ground.layout import Layout

__all__ = ["Bucket", "BufferedBucket", "ParamInfo", "cut_into_buckets"]


@dataclasses.dataclass(eq=False)
class ParamInfo:
    """One parameter of this rank."""

    name: str  # as in the original model
    param: torch.nn.Parameter
    layout: Layout  # what of the original parameter is here
    group: comm.Group  # ranks over which the gradient is summed first; where it is sharded, those that share
    # ranks over which the shards of that sum are summed then, since they hold the same ones (HSDP)
    replicas: comm.Group = comm.ALONE
    holders: comm.Group = comm.ALONE  # ranks that hold just what is here, in the same stage
    overlap: comm.Group | None = None  # the tp group, where the layout says overlap
    option: int | None = None  # index of its parameter group in the optimizer; None: the optimizer has it not
    number: int = 0  # place among the names of the model
    tied: bool = False  # another pipeline stage holds it too
    counted: bool = True  # False: a second copy of a tied one, left out of the norm and the checkpoint

    def __post_init__(self) -> None:
        # Of the local parameter. Noted here, as `param` is empty while ZeRO-3 has freed its values.
        self.shape = tuple(self.param.shape)
        self.numel = self.param.numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.param.element_size()

    @property
    def ranks(self) -> tuple[str, str]:
        """Names of the groups that sum the gradient: equal on all ranks of them."""
        return self.group.name, self.replicas.name

    def key(self) -> Hashable:
        """What the parameters of one bucket have in common."""
        return (
            self.param.dtype,
            self.param.device,
            self.ranks,
            self.option,
            self.name if self.tied else None,
            self.param.requires_grad,
        )

    def is_counted_here(self) -> bool:
        """Whether this rank counts any of what it holds of the parameter, see Layout."""
        # Of a partial gradient the group has the ranks of tp in it, and its chunks count each element once.
        layout = self.layout
        return self.counted and (layout.dim is not None or layout.partial or bool(layout.counted))


def cut_into_buckets(infos: Sequence[ParamInfo], limit: float, least: int = 1) -> list[list[ParamInfo]]:
    """Infos that share a key, of at most `limit` bytes each (one parameter may be larger), in the order of
    `infos`.

    least: each group's gradients are cut into about this many buckets or more. Sizes are counted by group,
    as only they are equal on all its ranks: ranks of ep may hold different numbers of experts.
    """
    totals: dict[tuple[str, str], int] = {}
    for info in infos:
        totals[info.ranks] = totals.get(info.ranks, 0) + info.nbytes
    done: list[list[ParamInfo]] = []
    open_ones: dict[Hashable, list[ParamInfo]] = {}
    sizes: dict[Hashable, int] = {}  # of the open ones
    for info in infos:
        key = info.key()
        if key not in open_ones or sizes[key] + info.nbytes > min(limit, totals[info.ranks] / least):
            open_ones[key], sizes[key] = [], 0
            done.append(open_ones[key])
        open_ones[key].append(info)
        sizes[key] += info.nbytes
    return done


class SumUnderWay(NamedTuple):
    """One that keeps a buffer of its own alive until wait()."""

    work: comm.Work
    chunk: torch.Tensor  # of this rank
    buffer: torch.Tensor


class Bucket:
    """Gradients of `infos`, which have one key(). Its life in a step:

    zero_grad() -> per microbatch: collect() or accumulate() of each gradient, then launch() where it is
    summed now -> after the last one launch_across() -> wait() -> gradient(), norm_squared().

    whole: no parameter is cut between ranks (FlatSpec).
    """

    is_sharded = False  # the sum of a gradient is split over the ranks: each owns one chunk of the buffer
    sums_each_microbatch = False  # else after the last one of a step

    def __init__(self, infos: Sequence[ParamInfo], whole: bool = False) -> None:
        self.infos = infos  # in the order in which they lie in the buffer
        self.group = infos[0].group  # ranks over which the gradients are summed
        self.replicas = infos[0].replicas  # ranks that then sum what they own: they own the same
        self.dtype, self.device = infos[0].param.dtype, infos[0].param.device
        self.spec = FlatSpec([info.shape for info in infos], self.group.size, whole)  # places in the buffer
        self.index = {id(info.param): i for i, info in enumerate(infos)}  # id of a parameter -> its place
        self.flat: torch.Tensor | None = None  # the buffer: this rank's gradients, (spec.numel,)
        self.views: list[torch.Tensor] | None = None  # `flat` as one view per parameter
        self.in_flight: list[SumUnderWay] = []
        self.aside: torch.Tensor | None = None  # see put_aside()

    # What each kind answers.

    def zero_grad(self) -> None:
        raise NotImplementedError

    def collect(self, param: torch.nn.Parameter) -> None:
        """Autograd has put a gradient of this microbatch into param.grad."""

    def accumulate(self, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """Adds a gradient that autograd does not accumulate itself; collect() follows."""
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.add_(grad)

    def launch(self) -> None:
        """Starts the sum over the group."""
        raise NotImplementedError

    def launch_across(self) -> None:
        """After the last launch() of a step: waits for it, and starts the sum over the replicas of what this
        rank owns; nothing where it has none.
        """

    def wait(self) -> None:
        """Afterwards gradient() is the sum."""

    def gradient(self) -> torch.Tensor:
        """The summed gradients that this rank owns, flat, see own()."""
        raise NotImplementedError

    # In a loop of the user's own, where a gradient stays until it is cleared (run/own_loop.py).

    def put_aside(self) -> None:
        """Before a backward: what earlier ones have left waits for the sum of this one. A parameter whose
        .grad is None has left nothing.
        """
        raise NotImplementedError

    def take_mean(self, ranks: int) -> None:
        """After wait(): gradient() is the sum over `ranks` divided by their number, and what was put aside
        is added.
        """
        raise NotImplementedError

    def scale(self, factor: torch.Tensor) -> None:
        """Multiplies the summed gradients by a 0-dim tensor."""
        gradient = self.gradient()
        gradient.mul_(factor.to(gradient.device, gradient.dtype))

    def clear(self) -> None:
        """The summed gradients are zeros."""
        self.gradient().zero_()

    # What this rank owns: the whole buffer, or its chunk of it where the kind is sharded.

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of those that own the same."""
        return (self.is_sharded or self.group.rank == 0) and self.replicas.rank == 0

    @property
    def start(self) -> int:
        """Index in the flat buffer of the first element that this rank owns."""
        return self.group.rank * self.spec.chunk if self.is_sharded else 0

    @property
    def owned(self) -> list[Piece]:
        """The Pieces that this rank owns, and of which its optimizer keeps the state."""
        return self.spec.pieces(self.group.rank if self.is_sharded else None)

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """The elements of a flat buffer of this bucket that this rank owns: a view."""
        return flat[self.start : self.start + self.spec.chunk] if self.is_sharded else flat

    def elements(self, piece: Piece, own: torch.Tensor) -> torch.Tensor:
        """Those of one Piece among the elements that own() gives: a flat view."""
        first = piece.offset - self.start
        return own[first : first + piece.stop - piece.start]

    # For the kinds.

    def _sum_overlaps(self, views: Sequence[torch.Tensor]) -> None:
        """Sums over tp the gradients of kv heads that several of its ranks hold, blocking."""
        for info, view in zip(self.infos, views, strict=True):
            if info.overlap is not None:
                full = view.new_zeros(info.layout.full_shape)
                info.layout.put(full, view)
                comm.all_reduce(full, info.overlap)
                view.copy_(info.layout.take(full))

    def _norm_parts(self) -> list[tuple[Piece, torch.Tensor]]:
        """The gradients of all that this rank stands for in the norm. Among those that own the same,
        parameters are dealt by number.
        """
        own, others = self.gradient(), self.replicas
        return [
            (piece, self.elements(piece, own))
            for piece in self.owned
            if self.infos[piece.index].number % others.size == others.rank
        ]

    def not_finite(self) -> torch.Tensor:
        """How many gradients of what this rank counts have an inf or nan: a 0-dim int64 tensor."""
        parts = [part for _, part in self._norm_parts() if part.numel()]
        if not parts:
            return torch.zeros((), dtype=torch.int64, device=self.device)
        return torch.stack([~part.isfinite().all() for part in parts]).sum()

    def norm_squared(self) -> torch.Tensor:
        """Sum of squares, as a 0-dim float64 tensor, of what this rank counts: each element of the model is
        counted by one rank.

        The norm of a piece is taken in fp32 (fp64 for fp64) and squared in fp64, where that is exact, so that
        the sum hardly depends on how parameters lie in buckets.
        """
        values = []
        for piece, part in self._norm_parts():
            info = self.infos[piece.index]
            if not info.is_counted_here() or not part.numel():
                continue
            mask = None
            if info.layout.dim is not None:  # 1 where this rank counts an element of the local parameter
                ones = torch.ones(info.shape, dtype=self.dtype, device=self.device)
                mask = info.layout.counted_mask(ones)
            if mask is not None:
                part = part.reshape(-1) * mask.view(-1)[piece.start : piece.stop]
            values.append(part)
        if not values:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        dtype = torch.float32 if self.dtype in (torch.bfloat16, torch.float16) else self.dtype
        return torch.stack(torch._foreach_norm(values, 2, dtype=dtype)).double().square().sum()


class BufferedBucket(Bucket):
    """A bucket whose buffer lives as long as the model. Every param.grad is a view of it, from the first
    gradient of a step on.

    Nothing is cleared before a step: autograd makes the first gradient of a parameter in memory of its own,
    and it is copied into the buffer; later ones autograd adds there. launch() clears the places of parameters
    that got none.
    """

    flat: torch.Tensor
    views: list[torch.Tensor]

    def __init__(self, infos: Sequence[ParamInfo], whole: bool = False) -> None:
        super().__init__(infos, whole)
        self.flat = comm.empty(self.spec.numel, self.dtype, self.group, self.device)
        self.views = self.spec.views(self.flat)
        self.work: comm.Work | None = None  # the collective under way

    def zero_grad(self) -> None:
        self.wait()  # only a step that raised leaves anything under way
        for info in self.infos:
            info.param.grad = None

    def collect(self, param: torch.nn.Parameter) -> None:
        """The first gradient of a step, or one that someone has set anew, goes into the buffer."""
        view, grad = self.views[self.index[id(param)]], param.grad
        if grad is not None and grad is not view and grad.data_ptr() != view.data_ptr():
            view.copy_(grad)
            param.grad = view

    def _clear_gaps(self) -> None:
        """Before the sum: a parameter that got no gradient on this rank counts as zero."""
        for info, view in zip(self.infos, self.views, strict=True):
            if info.param.grad is None:
                info.param.grad = view.zero_()

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None

    def restore(self) -> list[ParamInfo]:
        """A param.grad that someone has set anew is in the buffer, and a view of it, again. Returns those
        that were.
        """
        replaced = []
        for info, view in zip(self.infos, self.views, strict=True):
            grad = info.param.grad
            if grad is not None and plain(grad).data_ptr() != view.data_ptr() and info.numel:
                info.param.grad = plain(grad)
                self.collect(info.param)
                replaced.append(info)
        return replaced

    def put_aside(self) -> None:
        self.aside = None
        self.restore()
        if all(info.param.grad is None for info in self.infos):
            return
        self._clear_gaps()
        self.aside = self.flat.clone()
        for info in self.infos:
            info.param.grad = None

    def take_mean(self, ranks: int) -> None:
        self.flat.div_(ranks)
        if self.aside is not None:
            self.flat.add_(self.aside)
            self.aside = None

    def scale(self, factor: torch.Tensor) -> None:
        self.flat.mul_(factor.to(self.device, self.dtype))

    def clear(self) -> None:
        self.flat.zero_()
