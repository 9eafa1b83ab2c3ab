"""Why a request has no plan, and what would make it possible. What is named was tried: it does."""

import math
from collections.abc import Sequence

from pycomm.parallel.ground.plan import AXES
from pycomm.parallel.planning.asked import MOST, unfit
from pycomm.parallel.planning.job import Job, Recompute
from pycomm.parallel.planning.memory import Memory, worst_rank
from pycomm.parallel.planning.quantities import MeanBytes
from pycomm.parallel.planning.space import (
    Request,
    Shape,
    divisors,
    fits,
    jobs_of,
    microbatches_of,
    plans_of,
    shapes_of,
)

__all__ = ["NoPlan", "why_no_job", "why_no_shape"]

GIB = 2**30
NEAR = 64  # how many smaller numbers of ranks are tried


class NoPlan(ValueError):
    """No plan is possible; the text says which constraint is in the way, and what would relieve it."""


def why_no_shape(request: Request) -> str:
    """Of a request whose ranks cannot be dealt to the axes."""
    model, world, fixed = request.model, request.world, request.fixed
    where = f"{model.name} on {world} ranks with batches of {request.rows} rows"
    axes: dict[str, int] = {axis: fixed[axis] for axis in AXES if axis in fixed}
    why = unfit(model, axes)
    if why:
        return f"{where}: {why}"
    for axis, size in axes.items():
        if world % size:
            near = min(divisors(world), key=lambda d: abs(d - size))
            return f"{where}: {axis}={size} does not divide {world} ranks; {axis}={near} does"
    product = math.prod(axes.values())
    if world % product:
        return f"{where}: the fixed axes take {product} ranks, which does not divide {world}"
    enough = request._replace(rows=max(world, request.rows))
    least = min((shape.dp * shape.ep for shape in shapes_of(enough)), default=None)
    if least is None:
        names = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        return f"{where}: the axes that are not fixed cannot take the other ranks beside {names or 'them'}"
    text = f"{where}: the fewest data ranks that the other axes leave are {least}, each of which needs a row"
    enough = request._replace(rows=least)
    extra = _extra_memory(enough)
    if extra is None:
        return f"{text}; and with {least} rows {_why_none(enough, list(shapes_of(enough)))}"
    return f"{text}. What would do: batches of {least} rows{extra}{_fewer_ranks(request)}"


def _extra_memory(request: Request) -> str | None:
    """What must be said behind a request that would do: nothing, or the memory that it needs; None where no
    memory would do.
    """
    if fits(request):
        return ""
    found = _leanest(request, list(shapes_of(request)))
    return None if found is None else f", with {_rounded_up(found[0].peak)} GiB per rank"


def _fewer_ranks(request: Request) -> str:
    """The next smaller number whose axes can take these rows, where a plan of them fits."""
    for world in range(request.world - 1, max(request.world - NEAR, 0), -1):
        fewer = request._replace(world=world)
        if next(shapes_of(fewer), None):
            return f"; or {world} ranks" if fits(fewer) else ""
    return ""


def _leanest(request: Request, shapes: Sequence[Shape]) -> tuple[Memory, Job] | None:
    """Of the plan with the smallest peak; None where there is no plan."""
    free = request._replace(memory=math.inf)
    found = (job for shape in shapes for job in jobs_of(free, shape, lean=True))
    pairs = ((worst_rank(job), job) for job in found)
    return min(pairs, key=lambda pair: pair[0].peak, default=None)


def why_no_job(request: Request, shapes: Sequence[Shape]) -> str:
    """Of a request whose ranks can be dealt (`shapes`), but no plan of them is possible, or fits."""
    leanest = _leanest(request, shapes)
    where = f"{request.model.name} on {request.world} ranks"
    if leanest is None:
        return f"{where}: {_why_none(request, shapes)}"
    memory, job = leanest
    digits = 1 if memory.peak >= GIB else 6
    parts = ", ".join(f"{name} {size / GIB:.{digits}f}" for name, size in memory.parts().items())
    need = f"{_rounded_up(memory.peak)} GiB"
    limit = f"{request.limit / GIB:.1f}" if request.limit >= GIB else f"{request.limit / GIB:.4g}"
    text = (
        f"{where}: no plan fits into {limit} GiB per rank. The leanest, Plan({job.plan}) "
        f"with {job.microbatches} microbatches, needs {need} ({parts}). What would do: {need} per rank"
    )
    text += _more_ranks(request)
    for key, value in request.fixed.items():
        rest = {name: other for name, other in request.fixed.items() if name != key}
        if fits(request._replace(fixed=rest)):
            text += f"; or leave {key}={value} open"
    return text


def _rounded_up(nbytes: MeanBytes) -> str:
    """GiB as text that is no less when it is read again."""
    digits = 1 if nbytes >= GIB else 6
    return f"{math.ceil(nbytes / GIB * 10**digits) / 10**digits:.{digits}f}"


def _why_none(request: Request, shapes: Sequence[Shape]) -> str:
    """Memory is not what is in the way."""
    rows, refused = request.rows, list[ValueError]()
    data = {shape.dp * shape.ep for shape in shapes}
    if not any(microbatches_of(request, ranks) for ranks in data):
        ranks = min(data, key=lambda n: -(-rows // n))
        least = min(-(-rows // (n * (rows // n))) for n in data)
        more = -(-rows // ranks) * ranks
        text = (
            f"{rows} rows cannot be cut into microbatches of {request.microbatch} rows at most with a row "
            "for each data rank in every one"
        )
        named = {
            f"microbatch={least}": request._replace(microbatch=least),
            f"batches of {more} rows": request._replace(rows=more),
        }
        extra = {name: _extra_memory(other) for name, other in named.items()}
        would = [name + memory for name, memory in extra.items() if memory is not None]
        return f"{text}. What would do: {', or '.join(would)}" if would else text
    recomputations: tuple[Recompute, ...] = ("none", "full")
    for shape in shapes:
        chunks = request.fixed.get("chunks")
        name = request.fixed.get("schedule", "interleaved" if chunks else "1f1b")
        for recompute in recomputations:
            list(plans_of(request, shape, name, chunks, recompute, refused))
    if refused:
        return f"every plan is refused: {refused[0]}"
    name = ",".join(f"{key}={request.fixed[key]}" for key in ("schedule", "chunks") if key in request.fixed)
    return f"{name} needs more stages than the model has blocks ({request.model.layers}), or has other chunks"


def _more_ranks(request: Request) -> str:
    """The first of 2, 4, ... 1024 times as many ranks that does, with these rows or as many times more."""
    for factor in (2**i for i in range(1, 11)):
        world, rows = request.world * factor, request.rows * factor
        if max(world, rows) > MOST:
            break
        if fits(request._replace(world=world)):
            return f"; or {world} ranks"
        if fits(request._replace(world=world, rows=rows)):
            return f"; or {world} ranks with batches of {rows} rows"
    return ""
