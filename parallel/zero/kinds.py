"""The one place where the number of Plan(zero=) becomes classes.

    zero   gradients     values        buckets
    0      replicated    replicated    of bucket_mb
    1      flat          flat          of bucket_mb
    2      streamed      flat          of bucket_mb, 8 at least: one under way is memory that the shards save
    3      streamed      streamed      one per unit (units.py)

Tables of who holds what and what is sent: data/replicated.py, flat.py, streamed.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pycomm.parallel.data.bucket import Bucket, ParamInfo, cut_into_buckets
from pycomm.parallel.data.replicated import LocalBucket, MakeSum, ReplicatedBucket
from pycomm.parallel.ground.plan import Plan, Zero
from pycomm.parallel.zero.flat import FlatBucket, FlatShards
from pycomm.parallel.zero.shards import ReplicatedShards, Shards
from pycomm.parallel.zero.streamed import StreamedBucket, StreamedShards

__all__ = ["Kind", "kind_of"]


class Kind(NamedTuple):
    """How gradients and values of a plan are held. See the table at the top."""

    bucket: type[Bucket]
    shards: type[Shards]
    least_buckets: int = 1
    by_unit: bool = False  # values are gathered and freed by unit; frozen parameters are in buckets too
    divided: str = ""  # what a rank has a part of, for people
    over_link: str = "gradients are summed over the link"  # where data ranks lie on several hosts, for people

    def cut(self, infos: Sequence[ParamInfo], limit: float) -> list[list[ParamInfo]]:
        """The infos of each bucket; infos: of one unit, where the kind is by_unit."""
        return cut_into_buckets(infos, float("inf") if self.by_unit else limit, self.least_buckets)

    def make_bucket(
        self, infos: Sequence[ParamInfo], whole: bool = False, make_sum: MakeSum | None = None
    ) -> Bucket:
        """whole: no parameter is cut between ranks; make_sum: see ReplicatedBucket."""
        if self.bucket is not ReplicatedBucket:
            return self.bucket(infos, whole)
        return (
            LocalBucket(infos, whole) if LocalBucket.fits(infos) else ReplicatedBucket(infos, whole, make_sum)
        )


KINDS: dict[Zero, Kind] = {
    0: Kind(ReplicatedBucket, ReplicatedShards),
    1: Kind(
        FlatBucket,
        FlatShards,
        divided="the optimizer's state",
        over_link="gradients are summed over the link, and new values gathered",
    ),
    2: Kind(
        StreamedBucket,
        FlatShards,
        least_buckets=8,
        divided="the optimizer's state and gradients",
        over_link="gradients are summed over the link in every microbatch, and new values gathered",
    ),
    3: Kind(
        StreamedBucket,
        StreamedShards,
        by_unit=True,
        divided="the optimizer's state, gradients and values",
        over_link="values are gathered over the link, and gradients summed, in every microbatch",
    ),
}


def kind_of(plan: Plan) -> Kind:
    return KINDS[plan.zero]
