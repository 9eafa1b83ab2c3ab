"""The averages of ema.py, as the checkpoint and the model see them.

    averaged        which parameters, as they are cut on this rank
    shadows_of      copies of their values
    aligned         the same after parameters have begun to be trained
    gather_shadows  before zero=3 cuts parameters anew for that
    swap            averages and values of the model change places
    to_save, ...    keys and boxes in a checkpoint

An average is cut like the values that the optimizer updates, so updates are local, and a swap ends
with what ends a step of the optimizer: new values go to where the model computes with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from pycomm.parallel.checkpoint.agree import exchange
from pycomm.parallel.checkpoint.holdings import Holding, holdings, persistent_buffers
from pycomm.parallel.checkpoint.state import add_boxes
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.averages import Shadow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from pycomm.parallel.checkpoint.boxes import State
    from pycomm.parallel.checkpoint.files import Catalog
    from pycomm.parallel.ground.averages import Average, Averages
    from pycomm.parallel.parts import Parallelized
    from pycomm.parallel.zero.shards import Shards

__all__ = [
    "add_to_load",
    "add_to_save",
    "agree_on_updates",
    "aligned",
    "averaged",
    "check_saved",
    "gather_shadows",
    "publish",
    "shadows_of",
    "swap",
    "values_of_buffers",
]


def shadows_of(held: Sequence[Holding]) -> list[Shadow]:
    """Copies of the values of now."""
    return [Shadow(h.info.name, h.start, h.stop, h.values.clone()) for h in held]


def values_of_buffers(parts: Parallelized) -> dict[str, torch.Tensor]:
    """The buffers that are on this rank, by name; one that two modules share under its first name."""
    return {name: buffer.detach() for name, buffer in parts.model.named_buffers() if not buffer.is_meta}


def averaged(parts: Parallelized, average: Average) -> list[Holding]:
    """What this rank holds of the parameters that are averaged."""
    trained = [i.name for i in parts.infos if i.name in average.left_out and i.param.requires_grad]
    if trained:
        raise ValueError(
            f"ema: {trained[0]!r} was frozen when the average {average.name!r} was made with frozen=False, "
            "and is trained now: remove() it, and make another with par.ema, which begins with the values of "
            "now"
        )
    return [each for each in holdings(parts) if each.info.name not in average.left_out]


def aligned(parts: Parallelized, average: Average) -> list[Holding]:
    """What this rank holds, in the order of average.shadows, which are cut alike afterwards.

    A parameter that begins to be trained comes into a bucket, of which this rank may own a part alone. It had
    all of it before, so the average of the part is here.
    """
    held = averaged(parts, average)
    if list(map(_kind_of, held)) != list(map(_kind, average.shadows)):
        known = {_kind(shadow): shadow for shadow in average.shadows}
        average.shadows = [
            known.pop(_kind_of(each)) if _kind_of(each) in known else _cut(average, each) for each in held
        ]
    return held


@torch.no_grad()
def gather_shadows(averages: Averages, shards: Shards) -> None:
    """The averages of these parameters become whole on each rank, until aligned() takes the parts. Collective
    over the ranks of their bucket, which is about to be cut anew.
    """
    bucket = shards.bucket
    assert shards.master is not None  # ZeRO-3
    for average in averages.all.values():
        own = torch.zeros_like(shards.master, device=bucket.device)
        for info, piece, part in shards.owned:
            if info.name not in average.left_out:
                held = Holding(info, piece.start, piece.stop, part.detach(), part, False)
                bucket.elements(piece, own).copy_(_cut(average, held).values.reshape(-1))
        full = own.new_empty(bucket.spec.numel)
        comm.all_gather(full, own, bucket.group)
        names = {info.name for info in bucket.infos} - average.left_out
        views = zip(bucket.infos, bucket.spec.views(full), strict=True)
        average.shadows = [
            *(shadow for shadow in average.shadows if shadow.name not in names),
            *(Shadow(i.name, 0, i.numel, view) for i, view in views if i.name in names),
        ]


def _kind_of(holding: Holding) -> tuple[object, ...]:
    return _kind(Shadow(holding.info.name, holding.start, holding.stop, holding.values))


def _kind(shadow: Shadow) -> tuple[object, ...]:
    return *shadow[:3], shadow.values.dtype, shadow.values.device


def _cut(average: Average, holding: Holding) -> Shadow:
    name, start, stop = holding.info.name, holding.start, holding.stop
    for shadow in average.shadows:
        if shadow.name == name and shadow.start <= start and stop <= shadow.stop:
            values = torch.empty_like(holding.values)
            values.copy_(
                shadow.values.reshape(-1)[start - shadow.start : stop - shadow.start].view(values.shape)
            )
            return Shadow(name, start, stop, values)
    raise ValueError(
        f"ema: this rank holds elements {start} to {stop} of {name!r}, and the average {average.name!r} has "
        "them on another rank: the parameters were cut again. Make the average anew, with par.ema"
    )


def swap(held: Sequence[Holding], average: Average) -> None:
    """Values of the model and their averages change places, bit for bit; publish() follows."""
    for holding, shadow in zip(held, average.shadows, strict=True):
        kept = holding.values.clone()
        holding.values.copy_(shadow.values)
        shadow.values.copy_(kept)


def publish(parts: Parallelized) -> None:
    """Collective under zero 1 and 2: one all_gather for each bucket."""
    for shard in parts.all_shards:
        shard.publish()
    for shard in parts.all_shards:
        shard.wait()


def agree_on_updates(parts: Parallelized) -> None:
    """Before averages are used on all ranks. Collective over these. Raises ValueError on all of them where
    they have not updated the averages alike.
    """
    if not parts.averages.all:
        return
    told = exchange(parts, {name: (a.updates, a.decays) for name, a in parts.averages.all.items()})
    for rank, other in enumerate(told):
        if other != told[0]:
            raise ValueError(
                "ema: (number of updates, sum of their decays) of each average is "
                f"{told[0]} on rank 0 and {other} on rank {rank}: call ema.update() on every rank, with the "
                "same decay"
            )


def _keys(parts: Parallelized, average: Average) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(key, average, used) of each persistent buffer that is averaged here; see persistent_buffers."""
    for name, (_, used) in persistent_buffers(parts).items():
        if average.buffers is not None and name in average.buffers:
            yield f"ema/{average.name}/{name}", average.buffers[name], used


def add_to_save(parts: Parallelized, state: State) -> None:
    """Views of what this rank counts; nothing while an average is applied."""
    for average in parts.averages.all.values() if not parts.averages.applied else ():
        for holding, shadow in zip(aligned(parts, average), average.shadows, strict=True):
            add_boxes(state, f"ema/{average.name}/{shadow.name}", holding, shadow.values, True)
        state.update({key: values for key, values, used in _keys(parts, average) if used})


def add_to_load(
    parts: Parallelized,
    state: State,
    check_cast: Callable[[str, torch.dtype, torch.dtype], None],
    catalog: Catalog,
) -> None:
    """The places of the averages, to be filled. check_cast(name, saved, here)."""
    for average in parts.averages.all.values():
        for holding, shadow in zip(aligned(parts, average), average.shadows, strict=True):
            key = f"ema/{average.name}/{shadow.name}"
            saved = cast("TensorStorageMetadata", catalog[key])
            check_cast(shadow.name, saved.properties.dtype, shadow.values.dtype)
            add_boxes(state, key, holding, shadow.values, False)
        state.update({key: values for key, values, _ in _keys(parts, average)})


def check_saved(parts: Parallelized, path: object, catalog: Catalog, buffers: set[str]) -> None:
    """Raises ValueError, alike on every rank, where a checkpoint has not the averages of this model. buffers:
    of all ranks, the persistent ones.
    """
    for average in parts.averages.all.values():
        head = f"ema/{average.name}/"
        saved = {key[len(head) :] for key in catalog if key.startswith(head)}
        if not saved:
            raise ValueError(
                f"load: {path} has no average {average.name!r}: call par.ema after par.load, so that it "
                "begins with the values that are loaded"
            )
        names = set(parts.original.names)
        missing = sorted(names - average.left_out - saved)
        if missing:
            raise ValueError(
                f"load: the average {average.name!r} of {path} was made with frozen=False, and has no "
                f"{missing[0]!r}: give par.ema frozen=False, with the same parameters frozen"
            )
        has, wanted = bool(saved - names), average.buffers is not None and bool(buffers)
        if has != wanted:
            raise ValueError(
                f"load: the average {average.name!r} of {path} has "
                f"{'buffers' if has else 'no buffers'}, and the one here "
                f"{'has them' if wanted else 'has none'}: give par.ema buffers={has}"
            )
