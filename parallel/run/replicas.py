"""Plan(compare_every=N): before the passes of every N-th update, the values that several ranks hold are
compared to the bit, so that ranks which have drifted apart end with an error and not with another model.

    plan             held by several ranks, and compared                            over
    dp, zero 0 to 2  the parameters that the model computes with                    data
    tp               the same; those that are not cut, over tp as well              data, tp
    pp               the same, within a stage; tied weights, over their stages      data, tp, pp
    ep               experts by the ranks that have the same ones                   data without ep
    zero=3           nothing by itself; with tp, ties or zero_group="host" whole
                     values, which are gathered unit by unit                        data, tp, pp

Each rank makes a mark of each parameter (same_batch.py), and the marks are summed: two float64 for each
parameter over the ranks that hold it, and one number over all ranks, since all must raise. Only where marks
differ they are exchanged, to name the first parameter and the ranks. What is not compared: parts of key and
value projections that two ranks of tp hold, buffers, and the optimizer's state.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from pycomm.parallel.checkpoint.agree import exchange
from pycomm.parallel.data.bucket import ParamInfo
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.same_batch import differ, mark_of, powers
from pycomm.parallel.parts import Parallelized
from pycomm.parallel.zero.kinds import kind_of
from pycomm.parallel.zero.streamed import StreamedShards

__all__ = ["compare_replicas"]

CHUNK = 1 << 22  # elements of which a mark is made at a time: it takes 24 bytes for each
Marks = dict[ParamInfo, int]


class _Told(NamedTuple):
    """What a rank tells of a parameter."""

    number: int
    name: str
    part: tuple[int | None, object]  # dim and ranges of its layout
    mark: int


def compare_replicas(parts: Parallelized) -> None:
    """Raises ValueError, on all ranks, where a parameter differs between ranks that hold the same of it.
    Collective over all ranks.
    """
    tied = _tied_names(parts)
    if parts.mesh.world.size == 1 or not _is_held_twice(parts, tied):
        return
    with torch.no_grad():
        marks = _marks_of(parts)
    numbers = torch.zeros(1 + 3 * len(tied) * parts.plan.tp, dtype=torch.float64)
    numbers[0] = _differs_in_groups(parts, marks)
    numbers[1:] = _numbers_of_ties(parts, marks, tied)
    numbers = numbers.to(parts.device)
    comm.all_reduce(numbers, parts.mesh.world)
    found, *ties = numbers.tolist()
    of_ties = zip(ties[0::3], ties[1::3], ties[2::3], strict=True)
    if found or any(differ(total, squares, int(count)) for count, total, squares in of_ties):
        _refuse(parts, marks)


def _tied_names(parts: Parallelized) -> list[str]:
    """Of weights that may lie on several stages, alike on all ranks."""
    first_name = parts.original.first_name
    found = {first for name, first in first_name.items() if name != first and parts.plan.pp > 1}
    return sorted(found)


def _is_held_twice(parts: Parallelized, tied: list[str]) -> bool:
    """Whether the plan leaves any values on more than one rank."""
    plan = parts.plan
    return not kind_of(plan).by_unit or plan.tp > 1 or plan.zero_group != "all" or bool(tied)


def _marks_of(parts: Parallelized) -> Marks:
    """Of the values that the model computes with; of zero=3 while they exist. Collective in its groups."""
    marks: Marks = {}
    if kind_of(parts.plan).by_unit:
        for shards in parts.all_shards:
            assert isinstance(shards, StreamedShards)  # by unit
            shards.start_gather()
            shards.finish_gather()
            try:
                marks.update({info: _mark(info.param) for info in shards.bucket.infos})
            finally:
                shards.free()
    return marks | {info: _mark(info.param) for info in parts.infos if info not in marks}


def _mark(values: torch.Tensor) -> int:
    return mark_of(list(values.detach().reshape(-1).split(CHUNK))) if values.numel() else 0


def _differs_in_groups(parts: Parallelized, marks: Marks) -> bool:
    """Whether a parameter differs among the ranks that hold it, those of other stages aside."""
    by_group: dict[str, tuple[comm.Group, list[ParamInfo]]] = {}
    for info in parts.infos:
        by_group.setdefault(info.holders.name, (info.holders, []))[1].append(info)
    found = False
    for _, (group, infos) in sorted(by_group.items(), key=lambda item: item[0]):
        numbers = torch.tensor([powers(marks[info]) for info in infos], dtype=torch.float64).to(parts.device)
        comm.all_reduce(numbers, group)
        found |= any(differ(total, squares, group.size) for total, squares in numbers.tolist())
    return found


def _numbers_of_ties(parts: Parallelized, marks: Marks, tied: list[str]) -> torch.Tensor:
    """For each tied weight and each part of it that a rank of tp holds: copies, and the powers of marks."""
    numbers = torch.zeros(len(tied), parts.plan.tp, 3, dtype=torch.float64)
    for info in parts.infos:
        if info.name in tied:
            place = 0 if info.layout.dim is None else parts.mesh.coordinate("tp")
            copy = torch.tensor([1.0, *powers(marks[info])], dtype=torch.float64)
            numbers[tied.index(info.name), place] += copy
    return numbers.flatten()


def _refuse(parts: Parallelized, marks: Marks) -> None:
    own = [
        _Told(info.number, info.name, (info.layout.dim, info.layout.ranges), marks[info])
        for info in parts.infos
    ]
    name, ranks = next(_differing(exchange(parts, own)), ("one of the parameters", {}))
    sides = " and another on ".join(_show(some) for some in ranks.values())
    raise ValueError(
        f"[rank {parts.mesh.world.rank}] step: the ranks that hold {name!r} do not have the same values: "
        f"there is one on {sides} (compare_every={parts.plan.compare_every}). Something has changed it on "
        "some ranks only: code under `if rank == 0`, a kernel that adds in another order each time, broken "
        "memory. Go back to the last checkpoint, par.load; no parameter was changed in this step"
    )


def _differing(told: Sequence[Sequence[_Told]]) -> Iterator[tuple[str, dict[int, list[int]]]]:
    """(name, {mark: ranks}) of the parameters that differ, in the order of the model."""
    found: dict[tuple[int, str, str], dict[int, list[int]]] = {}
    for rank, own in enumerate(told):
        for number, name, part, mark in own:
            ranks = found.setdefault((number, name, repr(part)), {}).setdefault(mark, [])
            if rank not in ranks:
                ranks.append(rank)
    for (_, name, _), by_mark in sorted(found.items(), key=lambda item: item[0]):
        if len(by_mark) > 1:
            yield name, by_mark


def _show(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
