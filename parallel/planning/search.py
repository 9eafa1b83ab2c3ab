"""The search: the best plans by time among those that fit into memory.

What there is, space.py says; what cannot fit or cannot be faster than the WIDE best so far is left out early.
The rest is ranked by time.closed_form, and the best WIDE of that are timed by events. On one core 1,024 ranks
take some seconds, and so do 100,000.
"""

import heapq
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.planning.asked import check_request, whole
from pycomm.parallel.planning.job import Job
from pycomm.parallel.planning.memory import Memory, worst_rank
from pycomm.parallel.planning.quantities import Seconds
from pycomm.parallel.planning.refusal import NoPlan, why_no_job, why_no_shape
from pycomm.parallel.planning.space import Request, divisors, ideal_time, jobs_of, shapes_of
from pycomm.parallel.planning.time import StepTime, step_time

__all__ = ["NoPlan", "Prediction", "Request", "divisors", "predict", "search"]

WIDE = 40  # plans that are timed by events


class Prediction(NamedTuple):
    """What a plan is predicted to do. memory: of the rank with the largest peak."""

    job: Job
    time: StepTime
    memory: Memory

    @property
    def plan(self) -> Plan:
        return self.job.plan

    @property
    def seconds(self) -> Seconds:
        return self.time.total

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: without recomputation, of the machine's peak."""
        job = self.job
        flops = job.model.flops(job.rows * job.model.sequence)
        return flops / (job.plan.world_size * job.machine.peak * self.seconds)

    @property
    def tokens(self) -> float:
        """Per second and rank."""
        return self.job.rows * self.job.model.sequence / self.seconds / self.job.plan.world_size


def predict(job: Job, exact: bool = True) -> Prediction:
    return Prediction(job, step_time(job, exact), worst_rank(job))


def search(
    request: Request, count: int = 10, progress: Callable[[int, int], None] | None = None
) -> list[Prediction]:
    """The best `count`, best first. progress(done, of_all): called meanwhile. Raises NoPlan, and
    ValueError for a request that has no meaning.
    """
    check_request(request)
    whole("count", count)
    shapes = list(shapes_of(request))
    if not shapes:
        raise NoPlan(why_no_shape(request))
    best, ideal = _Best(), ideal_time(request)
    for number, shape in enumerate(shapes):
        for job in jobs_of(request, shape, ideal, best.worst):
            best.add(step_time(job, exact=False).total, job)
        if progress:
            progress(number + 1, len(shapes))
    if not best.jobs:
        raise NoPlan(why_no_job(request, shapes))
    timed = sorted((predict(job) for job in best.sorted()), key=lambda found: found.seconds)
    return timed[:count]


class _Best:
    """The WIDE jobs with the least time so far."""

    def __init__(self) -> None:
        self.jobs: list[tuple[float, int, Job]] = []
        self.order = itertools.count()

    def add(self, seconds: Seconds, job: Job) -> None:
        item = (-seconds, next(self.order), job)
        if len(self.jobs) < WIDE:
            heapq.heappush(self.jobs, item)
        else:
            heapq.heappushpop(self.jobs, item)

    def worst(self) -> Seconds:
        return Seconds(-self.jobs[0][0] if len(self.jobs) == WIDE else math.inf)

    def sorted(self) -> list[Job]:
        return [job for _, _, job in sorted(self.jobs, key=lambda item: -item[0])]
