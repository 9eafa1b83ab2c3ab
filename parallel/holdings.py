"""What a rank holds of the model at full precision, whatever the plan, and the whole model put together from that.

    holdings(engine)      element ranges of local parameters: a whole parameter (zero 0), or a piece of one (zero 1 to 3)
    boxes.boxes_of        where these lie in the parameters of the original model, and what of them this rank counts
    full_state_dict       one all_reduce of zeros into which each rank has put what it counts

Every element is counted by exactly one rank (Layout.counted, ParamInfo.counted, and of ranks that hold the same, the first), so the sum
has one term. It runs over bytes and not over numbers: bits come through, -0.0 and NaN included, for all dtypes in one collective.

Cost: P bytes of memory on every rank, 2(n-1)/n P sent. For models that fit; checkpoint.py gathers nothing.
"""

import pickle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pycomm.parallel import comm
from pycomm.parallel.boxes import boxes_of
from pycomm.parallel.build import engine_of

__all__ = ["Holding", "exchange", "full_gradients", "full_state_dict", "holdings", "persistent_buffers", "together"]

ALIGNMENT = 16  # bytes; a view of another dtype must start at a multiple of its element


class Holding(NamedTuple):
    """Elements start to stop of the flattened local parameter of `info`."""

    info: Any
    start: int
    stop: int
    values: torch.Tensor  # at full precision, detached
    part: torch.nn.Parameter | None  # what the optimizer has for it; None when it is in no bucket (frozen)
    first: bool  # this rank is the first of those that hold just these elements

    def boxes(self, values, counted):
        """boxes_of this range; values: the part, or state of the optimizer that has its shape."""
        if counted and not self.info.counted:
            return []
        return boxes_of(self.info.layout, self.info.shape, self.start, self.stop, values, counted)


def holdings(engine):
    """Holdings of all parameters of this rank, frozen ones included."""
    found, sharded = [], set()
    for shard in engine.shards:
        first = shard.bucket.options.zero > 0 or shard.bucket.group.rank == 0
        for piece, part in shard.parts:
            found.append(Holding(shard.bucket.infos[piece.index], piece.start, piece.stop, part.detach(), part, first))
        sharded.update(id(info) for info in shard.bucket.infos)
    for info in engine.infos:
        if id(info) not in sharded:
            found.append(Holding(info, 0, info.numel, info.param.detach(), None, info.group.rank == 0))
    return found


def persistent_buffers(engine):
    """{name: (buffer, used)}; used: it has data and its module runs on this rank."""
    sides = {name: side for name, _, side in engine.stages.owners} if engine.stages is not None else {}
    found, last = {}, engine.plan.virtual_stages - 1
    for prefix, module in engine.model.named_modules():
        elsewhere = (sides.get(prefix) == "before" and 0 not in engine.mine) or (sides.get(prefix) == "after" and last not in engine.mine)
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                found[f"{prefix}.{key}" if prefix else key] = buffer.detach(), not buffer.is_meta and not elsewhere
    return found


def exchange(engine, value):
    """A small object of every rank, in order of rank. Collective over all ranks."""
    world = engine.mesh.world
    if world.size == 1:
        return [value]
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(engine.device)
    longest = torch.tensor([data.numel()], device=engine.device)
    comm.all_reduce(longest, world, dist.ReduceOp.MAX)
    padded = data.new_zeros(int(longest))
    padded[: data.numel()] = data
    rows = data.new_empty(world.size * padded.numel())
    comm.all_gather(rows, padded, world)
    return [pickle.loads(bytes(row.tolist())) for row in rows.split(padded.numel())]


def together(engine, action):
    """action(), which must not communicate, on every rank. When it raises on some, all raise: their own error or the first other."""
    value = error = None
    try:
        value = action()
    except Exception as caught:
        error = caught
    told = exchange(engine, None if error is None else (type(error).__name__, str(error)))
    if error is not None:
        raise error
    for rank, other in enumerate(told):
        if other is not None:
            kind = {"ValueError": ValueError, "FileNotFoundError": FileNotFoundError}.get(other[0], RuntimeError)
            raise kind(f"[rank {engine.mesh.world.rank}] rank {rank} failed: {other[1]}")
    return value


@torch.no_grad()
def full_state_dict(model):
    """The state_dict of the original model, on every rank. Collective over all ranks.

    Returns {name: tensor}: parameters at full precision (the fp32 master copies under precision="bf16"), persistent buffers, and tied
    parameters under each of their names, on the model's device: `plain_model.load_state_dict(...)` takes it. The tensors share one memory.
    Raises ValueError for a model that has not been through parallelize().
    """
    engine = engine_of(model)
    own = {"aliases": _aliases(engine), "buffers": {}}
    entries = [(h.info.name, h.values.dtype, h.boxes(h.values, True) if h.first else []) for h in holdings(engine)]
    buffers = persistent_buffers(engine)
    own["buffers"] = {name: (buffer.dtype, tuple(buffer.shape)) for name, (buffer, used) in buffers.items() if used}
    told = exchange(engine, {**own, "dtypes": {name: dtype for name, dtype, _ in entries}})
    dtypes = {name: dtype for rank in told for name, dtype in rank["dtypes"].items()}
    kinds = [(name, dtypes[name], engine.shapes[name]) for name in engine.names]
    owner = {name: rank for rank in reversed(range(len(told))) for name in told[rank]["buffers"]}
    kinds += [(name, *told[rank]["buffers"][name]) for name, rank in sorted(owner.items())]
    flat, views = _zeros(kinds, engine.device)
    for name, _, boxes in entries:
        _put(views[name], boxes)
    for name, (buffer, _) in buffers.items():
        if owner.get(name) == engine.mesh.world.rank:
            views[name].copy_(buffer)
    comm.all_reduce(flat, engine.mesh.world)
    for rank in told:
        views.update({alias: views[name] for alias, name in rank["aliases"].items()})
    return views


@torch.no_grad()
def full_gradients(model):
    """Gradients of the original model, on every rank, as the last step left them. Collective over all ranks.

    Returns {name: tensor} of the parameters that are trained, in the dtype that gradients are summed in, a tied parameter under its first
    name. They are after clipping, but before it under precision="bf16" or offload, where the clip factor is applied to a copy. Zeros before
    the first step. Raises ValueError for a model that has not been through parallelize().
    """
    engine, entries = engine_of(model), []
    for reducer in engine.reducers.values():
        for bucket in reducer.buckets:
            zero, flat = bucket.options.zero, bucket.gradient()
            base = bucket.group.rank * bucket.spec.chunk if zero else 0
            entries += [(info.name, flat.dtype, []) for info in bucket.infos]
            for piece in bucket.owned if zero or bucket.group.rank == 0 else []:
                info = bucket.infos[piece.index]
                values = flat[piece.offset - base : piece.offset - base + piece.stop - piece.start]
                holding = Holding(info, piece.start, piece.stop, values, None, True)
                entries.append((info.name, flat.dtype, holding.boxes(values, True)))
    dtypes = {name: dtype for rank in exchange(engine, {name: dtype for name, dtype, _ in entries}) for name, dtype in rank.items()}
    flat, views = _zeros([(name, dtypes[name], engine.shapes[name]) for name in engine.names if name in dtypes], engine.device)
    for name, _, boxes in entries:
        _put(views[name], boxes)
    comm.all_reduce(flat, engine.mesh.world)
    return views


def _aliases(engine):
    """{further name: name} of the tied parameters of this rank."""
    name_of = {id(info.param): info.name for info in engine.infos}
    named = engine.model.named_parameters(remove_duplicate=False)
    return {alias: name_of[id(p)] for alias, p in named if name_of.get(id(p), alias) != alias}


def _zeros(kinds, device):
    """One buffer of bytes, and views into it of these (name, dtype, shape)."""
    places, total = [], 0
    for name, dtype, shape in kinds:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        places.append((name, dtype, shape, total, total + nbytes))
        total += -(-nbytes // ALIGNMENT) * ALIGNMENT
    flat = torch.zeros(total, dtype=torch.uint8, device=device)
    return flat, {name: flat[start:stop].view(dtype).view(shape) for name, dtype, shape, start, stop in places}


def _put(full, boxes):
    for box in boxes:
        place = full
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            place = place.narrow(dim, offset, size)
        place.copy_(box.values)
