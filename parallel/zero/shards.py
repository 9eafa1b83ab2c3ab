"""Shards: the part of a bucket's parameters that this rank owns, which its optimizer updates.

    n = 3 ranks, P parameters, mixed precision (2-byte values, fp32 master copies, Adam), bytes per rank

    zero   values                         master + 2 moments    gradients    sum
    0      P in the parameters            P                     P            16 P
    1      one flat buffer of P           P/n  (own chunk)      P            4 P + 12 P/n
    2      one flat buffer of P           P/n                   P/n          2 P + 14 P/n
    3      P/n, whole only while used     P/n                   P/n          16 P/n
                                                                (Rajbhandari et al. 2020, figure 1)

There are three kinds, one for each way in which new values come to where the model computes with them:
replicated (here: every rank owns everything), flat.py (gathered after each step), streamed.py (gathered while
in use).

The optimizer is the user's own object. In the place of the model's parameters its parameter groups get what
this rank owns (a parameter that lies in two chunks gives one shard to each of two ranks), so that schedulers
and hooks made for it keep working; see optimizer.py. Without mixed precision a shard is a view of the values
themselves, and zero=0 leaves the model's parameters in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from pycomm.parallel.data.bucket import Bucket, ParamInfo
from pycomm.parallel.data.flat import Piece

if TYPE_CHECKING:
    from pycomm.parallel.data.replicated import LocalBucket, ReplicatedBucket

__all__ = ["MasterOptions", "Originals", "ReplicatedShards", "Shard", "Shards"]

# the values of parameters before they were cast to the compute dtype
Originals: TypeAlias = Mapping[torch.nn.Parameter, torch.Tensor]


class Shard(NamedTuple):
    """What this rank owns of one parameter."""

    info: ParamInfo
    piece: Piece  # which of its elements
    param: torch.nn.Parameter  # what the optimizer updates; the model's own where nothing is cut or copied


@dataclasses.dataclass(frozen=True)
class MasterOptions:
    """Where the copies lie that the optimizer updates, and in which precision."""

    dtype: torch.dtype | None = None  # of master copies; None: that of the values
    on_host: bool = False  # master copies, and with them the optimizer's state, in host memory
    values_on_host: bool = False  # with values that are streamed: this rank's chunk of them too


class Shards:
    """The shards of one bucket.

    originals: the parameters themselves without mixed precision; of parameters that are filled later nothing.

    A kind has _keep_values() and publish(), and wait() where publish() only starts the work.
    """

    def __init__(
        self, bucket: Bucket, originals: Originals, options: MasterOptions = MasterOptions()
    ) -> None:
        self.bucket = bucket
        # As long as the bucket is there, whatever of it is frozen meanwhile (trained.py).
        self.is_trained = bucket.infos[0].param.requires_grad
        # Flat, in the compute dtype: the values that this rank owns. None: they are in the parameters.
        self.values_here = self._keep_values(originals, options.values_on_host)
        device = torch.device("cpu") if options.on_host else bucket.device
        # Flat: what the optimizer updates. None: the model's parameters.
        self.master = self.values_here
        if options.dtype is not None or device != bucket.device:
            full = self._fill(self._zeros(options.dtype or bucket.dtype, device, originals), originals)
            own = bucket.own(full) if full.numel() == bucket.spec.numel else full
            self.master = own if own is full else own.clone()  # a clone keeps the other chunks from living on
        self.owned = [self._shard(piece) for piece in bucket.owned]

    def _is_known(self, originals: Originals) -> bool:
        """Whether there is anything to fill a buffer with; else all of it is filled later."""
        return any(info.param in originals for info in self.bucket.infos)

    def _zeros(self, dtype: torch.dtype, device: torch.device, originals: Originals) -> torch.Tensor:
        """Room for all values, or, where they are filled later, for those that this rank owns."""
        bucket = self.bucket
        part = bucket.is_sharded and not self._is_known(originals)
        return torch.zeros(bucket.spec.chunk if part else bucket.spec.numel, dtype=dtype, device=device)

    def _fill(self, flat: torch.Tensor, originals: Originals) -> torch.Tensor:
        if self._is_known(originals):
            for info, view in zip(self.bucket.infos, self.bucket.spec.views(flat), strict=True):
                if info.param in originals:
                    view.copy_(originals[info.param])
        return flat

    def _shard(self, piece: Piece) -> Shard:
        info = self.bucket.infos[piece.index]
        if self.master is None:
            return Shard(info, piece, info.param)
        values = self.bucket.elements(piece, self.master)
        if values.numel() == info.numel:
            values = values.view(info.shape)
        return Shard(info, piece, torch.nn.Parameter(values, requires_grad=info.param.requires_grad))

    def _keep_values(self, originals: Originals, on_host: bool) -> torch.Tensor | None:
        """Puts the values where the model computes with them; returns `values_here`."""
        raise NotImplementedError

    @property
    def is_updated(self) -> bool:
        """Whether the optimizer has any of these parameters, on some rank: alike on all of the bucket."""
        return self.is_trained and any(info.option is not None for info in self.bucket.infos)

    @property
    def updated(self) -> list[Shard]:
        """What the optimizer has of them here."""
        return [each for each in self.owned if each.info.option is not None] if self.is_trained else []

    def note_trained(self) -> None:
        """Some of the model's parameters may be frozen now, others no longer: so are their shards."""
        for info, _, param in self.owned:
            if param.requires_grad != info.param.requires_grad:
                param.requires_grad_(info.param.requires_grad)

    @property
    def casts_gradients(self) -> bool:
        return self.master is not None and self.master.dtype != self.bucket.dtype

    def attach_gradients(self, scale: torch.Tensor | None = None, unused: Container[str] = ()) -> None:
        """Sets .grad of the shards from the bucket's summed gradient, times `scale` (0-dim); None for
        parameters named in `unused`.
        """
        assert self.master is not None  # else there is nothing but the parameters: ReplicatedShards
        flat = self.bucket.gradient().to(self.master.device, self.master.dtype)
        if scale is not None:
            flat.mul_(scale.to(flat.device, flat.dtype))
        for info, piece, param in self.updated:
            if info.name not in unused:
                param.grad = self.bucket.elements(piece, flat).view(param.shape)

    def detach_gradients(self) -> None:
        for shard in self.owned:
            shard.param.grad = None

    def publish(self) -> None:
        """After the optimizer: starts to bring the new values to where the model computes with them."""
        raise NotImplementedError

    def wait(self) -> None:
        """Ends publish()."""

    def _copy_master(self) -> None:
        values, master = self.values_here, self.master
        if values is not None and master is not None and master is not values:
            values.copy_(master)


class ReplicatedShards(Shards):
    """ZeRO 0: this rank owns whole parameters; they are the model's own where no master copies are asked
    for.
    """

    bucket: ReplicatedBucket | LocalBucket

    def _keep_values(self, originals: Originals, on_host: bool) -> None:
        return None

    def attach_gradients(self, scale: torch.Tensor | None = None, unused: Container[str] = ()) -> None:
        if self.master is not None:
            super().attach_gradients(scale, unused)
            return
        if scale is not None:
            self.bucket.scale(scale)
        for info in self.bucket.infos:  # gradients are where they belong already
            if info.name in unused:
                info.param.grad = None

    def detach_gradients(self) -> None:
        if self.master is not None:
            super().detach_gradients()

    def publish(self) -> None:
        if self.master is not None:
            views = self.bucket.spec.views(self.master)
            with torch._C.DisableTorchFunctionSubclass():  # no write of the user's, see sharded.py
                for info, view in zip(self.bucket.infos, views, strict=True):
                    info.param.data.copy_(view)
