"""What a snapshot has, who writes what of it, and how it is read under another plan.

It is a checkpoint in memory: the keys and boxes of checkpoint/ (its __init__.py has the table), so whatever
plan wrote it, any plan reads it. What several ranks hold alike is written by one of them, dealt so that each
writes about as many bytes:

    dp=2, zero=1    rank 0 holds          rank 1 holds          written by 0        written by 1
                    model/a  model/b      model/a  model/b      model/a             model/b
                    optim/a[0:5]          optim/a[5:9]          optim/a[0:5]        optim/a[5:9]

Who writes what is agreed upon when the list of pieces changes: at first, and after the step that makes the
optimizer's state. Cost per snapshot and host: the bytes of one checkpoint, in all; two such in memory.

Beside it each rank keeps what is its own: the states of its random streams, and of its program (program.py).
"""

import io
import warnings
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType

from pycomm.parallel.checkpoint.agree import exchange
from pycomm.parallel.checkpoint.boxes import Boxes, Loading
from pycomm.parallel.checkpoint.saving import about_of, to_save
from pycomm.parallel.checkpoint.state import whole_model
from pycomm.parallel.ground.plan import AXES
from pycomm.parallel.parts import Parallelized
from pycomm.parallel.recovery.program import ProgramState

__all__ = ["Dealer", "Own", "Piece", "Source", "own_at", "own_of", "set_streams"]

LEAP = 1_000_003  # between seeds of new streams: more than there are ranks


class Piece(NamedTuple):
    """A box of a tensor, or an object. Two ranks that have equal ones hold the same."""

    key: str
    offsets: tuple[int, ...] | None  # None: an object
    sizes: tuple[int, ...]
    full_shape: tuple[int, ...]
    dtype: torch.dtype | None


class Own(NamedTuple):
    """What belongs to one rank."""

    coordinates: dict  # axis -> this rank's place
    streams: dict  # the states of RandomStreams
    program: ProgramState | None  # None: before the first step


class Dealer:
    """Deals what is to be written. parts: Parallelized."""

    def __init__(self, parts):
        self.parts, self.known, self.mine, self.members = parts, None, (), {}

    def pieces(self):
        """{Piece: its value, a view or an object}, and whether they must be dealt anew."""
        found = {}
        for key, value in to_save(self.parts, self.parts.opt).items():
            if isinstance(value, Boxes):
                shape = tuple(value.full_shape)
                for box in value.boxes:
                    piece = Piece(key, tuple(box.offsets), tuple(box.sizes), shape, box.values.dtype)
                    found[piece] = box.values
            elif isinstance(value, torch.Tensor):
                shape = tuple(value.shape)
                found[Piece(key, (0,) * value.dim(), shape, shape, value.dtype)] = value
            else:
                found[Piece(key, None, (), (), None)] = value
        return found, self.known != list(found)

    def deal(self, pieces):
        """Collective over all ranks."""
        self.known = list(pieces)
        self.members = whole_model(self.parts)[0] if self.parts.opt is not None else {}
        told = exchange(self.parts, self.known)
        holders = {}
        for rank, held in enumerate(told):
            for piece in held:
                holders.setdefault(piece, []).append(rank)
        load, writer = [0] * len(told), {}
        for piece in sorted(holders, key=lambda piece: (-_nbytes(piece), repr(piece))):
            rank = min(holders[piece], key=lambda rank: (load[rank], rank))
            load[rank] += _nbytes(piece)
            writer[piece] = rank
        self.mine = [piece for piece in self.known if writer[piece] == self.parts.mesh.world.rank]

    def to_write(self, pieces):
        """[((Piece, bytes), tensor or bytes)] of this rank. Tensors are views that change with the next
        update, but for buffers, which a forward changes, and for what comes from a device.
        """
        items = []
        for piece in self.mine:
            value = pieces[piece]
            if piece.offsets is None:
                value = _pickled(value)
            elif value.device.type != "cpu" or _is_buffer(self.parts, piece.key):
                value = value.to("cpu", copy=True)
            items.append((piece, value))
        if self.parts.mesh.world.rank == 0:
            about = about_of(self.parts, self.parts.opt, self.members)
            items += [
                (Piece(key, None, (), (), None), _pickled(value))
                for key, value in (("about", about), ("extra", None))
            ]
        return [((piece, _size(value)), value) for piece, value in items]


def _is_buffer(parts, key):
    return key.startswith("model/") and key[len("model/") :] not in parts.original.shapes


def _nbytes(piece):
    return torch.Size(piece.sizes).numel() * piece.dtype.itemsize if piece.dtype is not None else 1


def _size(value):
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else len(value)


def _pickled(value):
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


class Source(dcp.StorageReader):
    """A snapshot as what checkpoint/loading.py and torch.distributed.checkpoint read from. memories: of all
    ranks that wrote it. No communication: every rank reads what it needs.
    """

    def __init__(self, memories, number):
        self.number, self.owns, self.places, self.catalog = number, [], {}, {}
        for memory in memories:
            own, written = memory.catalog(number)
            self.owns.append(own)
            for (piece, nbytes), place in written:
                self._add(memory, piece, nbytes, place)

    def _add(self, memory, piece, nbytes, place):
        self.places[piece.key, piece.offsets] = memory, place, nbytes, piece
        if piece.offsets is None:
            self.catalog[piece.key] = BytesStorageMetadata()
            return
        if piece.key not in self.catalog:
            properties = TensorProperties(dtype=piece.dtype)
            self.catalog[piece.key] = TensorStorageMetadata(properties, torch.Size(piece.full_shape), [])
        chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
        self.catalog[piece.key].chunks.append(chunk)

    def __str__(self):
        return f"the snapshot after step {self.number}"

    def read(self, state):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is not needed
            dcp.load(state, storage_reader=self, planner=Loading(), no_dist=True)

    def read_metadata(self):
        return Metadata(state_dict_metadata=self.catalog)

    def read_data(self, plan, planner):
        for item in plan.items:
            index = item.storage_index
            offsets = None if item.type == LoadItemType.BYTE_IO else tuple(index.offset)
            memory, place, nbytes, piece = self.places[index.fqn, offsets]
            if offsets is None:
                planner.load_bytes(item, io.BytesIO(memory.bytes_at(place, nbytes)))
                continue
            values = memory.tensor_at(place, piece.sizes, piece.dtype)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                values = values.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(values)
            planner.commit_tensor(item, target)
        done = torch.futures.Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id=None):
        """Part of the interface."""

    def set_up_storage_reader(self, metadata, is_coordinator, *args, **kwargs):
        """Part of the interface."""

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans):
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True


def own_of(parts: Parallelized, program: ProgramState | None) -> Own:
    """The Own of this rank, now."""
    coordinates = {axis: parts.mesh.coordinate(axis) for axis in AXES}
    return Own(coordinates, dict(parts.streams.states), program)


def own_at(parts: Parallelized, source: "Source") -> Own:
    """Of the rank that had this rank's place; where there was none, of one that had the same part of the
    model, or the first.
    """
    here = {axis: parts.mesh.coordinate(axis) for axis in AXES}
    for place in (here, here | {"dp": 0}):
        found = [own for own in source.owns if own.coordinates == place]
        if found:
            return found[0]
    return source.owns[0]


def set_streams(parts, source):
    """The model's random streams go on where those of the rank at this place were. Under a plan with places
    that the former one had not, all get new ones, so that the ranks of a tp group still share theirs.
    """
    here = {axis: parts.mesh.coordinate(axis) for axis in AXES}
    had = {axis: 1 + max(own.coordinates[axis] for own in source.owns) for axis in AXES}
    if all(getattr(parts.plan, axis) <= had[axis] for axis in AXES):
        own = next(own for own in source.owns if own.coordinates == here)
        parts.streams.states.update(own.streams)
        return
    for stream, (state, on_device) in parts.streams.states.items():
        first = torch.Generator()
        first.set_state(state)
        seed = (first.initial_seed() + LEAP * (source.number + 1)) % (1 << 62)
        on_cpu = torch.Generator().manual_seed(seed).get_state()
        if on_device is not None:
            on_device = torch.Generator(parts.device).manual_seed(seed).get_state()
        parts.streams.states[stream] = on_cpu, on_device
