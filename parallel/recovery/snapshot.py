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

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

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

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

    from pycomm.parallel.checkpoint.boxes import State
    from pycomm.parallel.checkpoint.files import Catalog
    from pycomm.parallel.ground.plan import Axis
    from pycomm.parallel.ground.streams import Stream, StreamState
    from pycomm.parallel.recovery.memory import Memory

__all__ = ["Dealer", "Own", "Piece", "Source", "own_at", "own_of", "part_of", "set_streams"]

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

    coordinates: dict[Axis, int]  # axis -> this rank's place
    streams: dict[Stream, StreamState]  # of RandomStreams
    program: ProgramState | None  # None: before the first step


# What a memory is given: what it is, its bytes, and its value.
Item: TypeAlias = "tuple[tuple[Piece, int], torch.Tensor | bytes]"


class Dealer:
    """Deals what is to be written."""

    def __init__(self, parts: Parallelized) -> None:
        self.parts = parts
        self.known: list[Piece] | None = None
        self.mine: list[Piece] = []
        self.members: Mapping[str, int] = {}

    def pieces(self) -> tuple[dict[Piece, object], bool]:
        """{Piece: its value, a view or an object}, and whether they must be dealt anew."""
        found: dict[Piece, object] = {}
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

    def deal(self, pieces: Iterable[Piece]) -> None:
        """Collective over all ranks."""
        self.known = list(pieces)
        self.members = whole_model(self.parts).members if self.parts.opt is not None else {}
        told = exchange(self.parts, self.known)
        holders: dict[Piece, list[int]] = {}
        for rank, held in enumerate(told):
            for piece in held:
                holders.setdefault(piece, []).append(rank)
        load, writer = [0] * len(told), {}
        for piece in sorted(holders, key=lambda piece: (-_nbytes(piece), repr(piece))):
            rank = min(holders[piece], key=lambda rank: (load[rank], rank))
            load[rank] += _nbytes(piece)
            writer[piece] = rank
        self.mine = [piece for piece in self.known if writer[piece] == self.parts.mesh.world.rank]

    def to_write(self, pieces: Mapping[Piece, object]) -> list[Item]:
        """The Items of this rank. Tensors are views that change with the next
        update, but for buffers, which a forward changes, and for what comes from a device.
        """
        items: list[tuple[Piece, torch.Tensor | bytes]] = []
        for piece in self.mine:
            value = pieces[piece]
            if not isinstance(value, torch.Tensor):
                items.append((piece, _pickled(value)))
            elif value.device.type != "cpu" or _is_buffer(self.parts, piece.key):
                items.append((piece, value.to("cpu", copy=True)))
            else:
                items.append((piece, value))
        if self.parts.mesh.world.rank == 0:
            about = about_of(self.parts, self.parts.opt, self.members)
            items += [
                (Piece(key, None, (), (), None), _pickled(value))
                for key, value in (("about", about), ("extra", None))
            ]
        return [((piece, _size(value)), value) for piece, value in items]


def _is_buffer(parts: Parallelized, key: str) -> bool:
    return key.startswith("model/") and key[len("model/") :] not in parts.original.shapes


def _nbytes(piece: Piece) -> int:
    return torch.Size(piece.sizes).numel() * piece.dtype.itemsize if piece.dtype is not None else 1


def _size(value: torch.Tensor | bytes) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else len(value)


def _pickled(value: object) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


class _Place(NamedTuple):
    """Where a piece lies."""

    memory: Memory
    place: int
    nbytes: int
    piece: Piece


class Source(dcp.StorageReader):
    """A snapshot as what checkpoint/loading.py and torch.distributed.checkpoint read from. memories: of all
    ranks that wrote it. No communication: every rank reads what it needs.
    """

    def __init__(self, memories: Sequence[Memory], number: int) -> None:
        self.number = number
        self.owns: list[Own] = []  # of the ranks that wrote it
        self.places: dict[tuple[str, tuple[int, ...] | None], _Place] = {}  # by key and offsets
        self.catalog: Catalog = {}
        for memory in memories:
            own, written = memory.catalog(number)
            self.owns.append(own)
            for (piece, nbytes), place in written:
                self._add(memory, piece, nbytes, place)

    def _add(self, memory: Memory, piece: Piece, nbytes: int, place: int) -> None:
        self.places[piece.key, piece.offsets] = _Place(memory, place, nbytes, piece)
        if piece.offsets is None or piece.dtype is None:
            self.catalog[piece.key] = BytesStorageMetadata()
            return
        known = self.catalog.get(piece.key)
        if not isinstance(known, TensorStorageMetadata):
            properties = TensorProperties(dtype=piece.dtype)
            known = TensorStorageMetadata(properties, torch.Size(piece.full_shape), [])
            self.catalog[piece.key] = known
        known.chunks.append(ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)))

    def __str__(self) -> str:
        return f"the snapshot after step {self.number}"

    def read(self, state: State) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is not needed
            dcp.load(state, storage_reader=self, planner=Loading(), no_dist=True)

    def read_metadata(self) -> Metadata:
        return Metadata(state_dict_metadata=self.catalog)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        for item in plan.items:
            index = item.storage_index
            offsets = None if item.type == LoadItemType.BYTE_IO else tuple(index.offset or ())
            memory, place, nbytes, piece = self.places[index.fqn, offsets]
            if offsets is None or piece.dtype is None:
                planner.load_bytes(item, io.BytesIO(memory.bytes_at(place, nbytes)))
                continue
            values = memory.tensor_at(place, piece.sizes, piece.dtype)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                values = values.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(values)
            planner.commit_tensor(item, target)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Part of the interface."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object
    ) -> None:
        """Part of the interface."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def own_of(parts: Parallelized, program: ProgramState | None) -> Own:
    """The Own of this rank, now."""
    coordinates = {axis: parts.mesh.coordinate(axis) for axis in AXES}
    return Own(coordinates, dict(parts.streams.states), program)


def part_of(parts: Parallelized) -> tuple[int, ...]:
    """Which part of the model this rank has."""
    return tuple(parts.mesh.coordinate(axis) for axis in AXES if axis != "dp")


def own_at(parts: Parallelized, source: Source) -> Own:
    """Of the rank that had this rank's place; where there was none, of one that had the same part of the
    model, or the first.
    """
    here = {axis: parts.mesh.coordinate(axis) for axis in AXES}
    for place in (here, here | {"dp": 0}):
        found = [own for own in source.owns if own.coordinates == place]
        if found:
            return found[0]
    return source.owns[0]


def set_streams(parts: Parallelized, source: Source) -> None:
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
