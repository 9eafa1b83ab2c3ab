"""Weights that two pipeline stages hold, such as an embedding that is also the head.

    stage 0            gradient a  --\\   /-->  a + b          both stages then take the same step, so the two
    last stage         gradient b  --/   \\-->  a + b          copies of the weight stay equal to the bit

Each stage sums its own gradient over the data ranks first. Then the two exchange their sums and add them in
one order, that of the stages. Two stages of one rank add theirs in memory. Cost: the weight's gradient once
in each direction, per step.
"""

from typing import Any, NamedTuple

import torch

from pycomm.parallel.ground import comm

__all__ = ["Tie", "exchange_ties", "make_ties"]


class Tie(NamedTuple):
    """One stage's side of a tied weight. The other side is at rank `peer` of pp, or `here`."""

    bucket: Any  # data.Bucket; it holds this weight alone
    first: bool  # bucket is the earlier stage's
    peer: int | None  # None: the other stage is on this rank too
    here: Any | None  # the other stage's bucket, where it is on this rank


def make_ties(reducers, stages_of, placement):
    """The Ties of this rank, in an order that both sides share.

    reducers: stage -> Reducer. stages_of: name of a parameter -> the stages that use it. placement: stage ->
    rank of pp.
    """
    where = {}  # (name, stage) -> bucket
    for stage, reducer in reducers.items():
        for bucket in reducer.buckets:
            if bucket.infos[0].tied:
                where[bucket.infos[0].name, stage] = bucket
    ties = []
    for (name, stage), bucket in sorted(where.items()):
        first, second = stages_of[name]
        other = second if stage == first else first
        here = where.get((name, other))
        ties.append(Tie(bucket, stage == first, None if here is not None else placement[other], here))
    return tuple(ties)


def exchange_ties(ties, group):
    """Gives each side of a tie the sum of both gradients. group: pp."""
    messages = []  # (tie, own gradient, the other's, recv, send)
    for tag, tie in enumerate(ties):
        if tie.here is None:
            own = tie.bucket.gradient().contiguous()
            other = torch.empty_like(own)
            received = comm.irecv(other, tie.peer, group, tag)
            messages.append((tie, own, other, received, comm.isend(own, tie.peer, group, tag)))
    for tie, own, other, received, sent in messages:
        received.wait()
        sent.wait()
        tie.bucket.gradient().copy_(own + other if tie.first else other + own)
    for tie in ties:
        if tie.here is not None and tie.first:
            total = tie.bucket.gradient() + tie.here.gradient()
            tie.bucket.gradient().copy_(total)
            tie.here.gradient().copy_(total)
