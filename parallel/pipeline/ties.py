"""Weights that several pipeline stages hold, such as an embedding that is also the head, or that an encoder
and a decoder share.

    stage 0            gradient a  --\\   /-->  a + b + c      the stages then take the same step, so the
    stage 2            gradient b  ---+-+--->  a + b + c      copies of the weight stay equal to the bit
    last stage         gradient c  --/   \\-->  a + b + c

Each stage sums its own gradient over the data ranks first. Then the stages exchange their sums, each sends
its own to every other rank that holds the weight, and add them in one order, that of the stages. Stages of
one rank add theirs in memory. Cost: the weight's gradient once to each other rank, per step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pycomm.parallel.ground import comm

if TYPE_CHECKING:
    from pycomm.parallel.data.bucket import Bucket
    from pycomm.parallel.data.reducer import Reducer

__all__ = ["Tie", "exchange_ties", "make_ties"]


class Tie(NamedTuple):
    """A tied weight of which this rank holds a part of the copies."""

    number: int  # among all tied weights, alike on all ranks
    buckets: dict[int, Bucket]  # stage of this rank -> its bucket, which holds this weight alone
    ranks: dict[int, int]  # every stage that uses it, in rising order -> its rank of pp


def make_ties(
    reducers: Mapping[int, Reducer], stages_of: Mapping[str, Collection[int]], placement: Sequence[int]
) -> tuple[Tie, ...]:
    """The Ties of this rank, in an order that all ranks share.

    reducers: stage -> Reducer. stages_of: name of a parameter -> the stages that use it. placement: stage ->
    rank of pp.
    """
    held: dict[str, dict[int, Bucket]] = {}  # name -> {stage: bucket}
    for stage, reducer in sorted(reducers.items()):
        for bucket in reducer.buckets:
            if bucket.infos[0].tied:
                held.setdefault(bucket.infos[0].name, {})[stage] = bucket
    tied = sorted(name for name, stages in stages_of.items() if len(stages) > 1)
    return tuple(
        Tie(number, held[name], {stage: placement[stage] for stage in sorted(stages_of[name])})
        for number, name in enumerate(tied)
        if name in held
    )


def exchange_ties(ties: Sequence[Tie], group: comm.Group) -> None:
    """Gives each copy of a tie the sum of all gradients. group: pp."""
    found: list[dict[int, torch.Tensor]] = []
    works: list[comm.Work] = []
    for tie in ties:
        gradients: dict[int, torch.Tensor] = {}
        for stage, rank in tie.ranks.items():
            tag = (tie.number << 10) + stage
            if rank != group.rank:
                gradients[stage] = torch.empty_like(next(iter(tie.buckets.values())).gradient())
                works.append(comm.irecv(gradients[stage], rank, group, tag))
                continue
            gradients[stage] = tie.buckets[stage].gradient().contiguous()
            for other in sorted(set(tie.ranks.values()) - {rank}):
                works.append(comm.isend(gradients[stage], other, group, tag))
        found.append(gradients)
    for work in works:
        work.wait()
    for tie, gradients in zip(ties, found, strict=True):
        first, *others = gradients.values()
        total = first.clone()
        for gradient in others:
            total += gradient
        for bucket in tie.buckets.values():
            bucket.gradient().copy_(total)
