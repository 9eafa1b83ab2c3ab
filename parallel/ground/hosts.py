"""Which rank takes which place of a mesh, so that the axes which talk most stay inside hosts.

    4 ranks on 2 hosts, dp=2 x tp=2        tp groups of ranks       placement of ranks

    0 0 1 1   ranks of a host follow each other     (0 1) (2 3)     the mesh is 0 1 2 3, as without hosts
    0 1 0 1   dealt to the hosts in turn            (0 2) (1 3)     the mesh is 0 2 1 3: tp is inside again

Groups of the innermost axis are filled from one host at a time; what is left over on several hosts is joined.
The next axis joins these groups in the same way, and so on outwards. Several ways are tried, and the one with
the fewest groups across hosts is taken, the innermost axis counting first; of equals the one nearest to the
order of ranks, which it always is on one host.

What a way must keep: torch sorts the ranks of a process group, and a rank's number in the group of an axis is
its coordinate. So ranks must rise along every axis, and those of joined axes (data) must be sorted alike in
all groups, since stages that share a weight exchange equal chunks of it. Placements such as 0 1 1 0 have no
such way but the order of ranks; then describe() says which axis crosses hosts.

Pure functions: every rank comes to the same mesh.
"""

import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

import torch

from pycomm.quantities import GlobalRank

__all__ = ["arrange", "crossings", "divide", "lines"]

Ranks: TypeAlias = list[GlobalRank]
Hosts: TypeAlias = Sequence[int]  # the number of each rank's host
Axes: TypeAlias = Sequence[int]  # indices of dimensions of a mesh


def arrange(hosts: Hosts, sizes: Sequence[int], joined: Sequence[Axes] = ()) -> torch.Tensor:
    """A mesh of ranks: a tensor of these sizes, outer axis first. joined: axes whose ranks form one group."""
    plain = torch.arange(len(hosts)).view(sizes)
    if len(set(hosts)) == 1:
        return plain
    by_host = sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank))
    ways = [plain, torch.tensor(by_host).view(sizes), torch.tensor(_filled(hosts, sizes)).view(sizes)]
    inner_first = range(len(sizes) - 1, -1, -1)
    return min(
        (way for way in ways if _is_sorted(way, joined)),
        key=lambda way: [crossings(way, (axis,), hosts) for axis in inner_first],
    )


def _filled(hosts: Hosts, sizes: Sequence[int]) -> Ranks:
    """The ranks in the order of their places: groups of the inner axes are filled host by host."""
    # (host, or None for several; ranks)
    groups: list[tuple[int | None, Ranks]] = [(host, [GlobalRank(rank)]) for rank, host in enumerate(hosts)]
    for size in reversed(sizes):
        of_host: dict[int | None, list[tuple[int | None, Ranks]]] = {}
        for group in groups:
            of_host.setdefault(group[0], []).append(group)
        left: list[tuple[int | None, Ranks]] = []
        found: list[tuple[int | None, list[tuple[int | None, Ranks]]]] = []
        for host, some in of_host.items():
            whole = len(some) // size * size if host is not None else 0
            found += [(host, some[i : i + size]) for i in range(0, whole, size)]
            left += some[whole:]
        found += [(None, left[i : i + size]) for i in range(0, len(left), size)]
        groups = []
        for host, some in found:
            inner = sorted((ranks for _, ranks in some), key=min)
            groups.append((host, list(itertools.chain(*inner))))
        groups.sort(key=lambda group: min(group[1]))
    return groups[0][1]


def _is_sorted(mesh: torch.Tensor, joined: Sequence[Axes]) -> bool:
    """Whether ranks rise along every axis, and are sorted alike in all groups of each of the joined axes."""
    rising = all((lines(mesh, (axis,)).diff(dim=1) > 0).all() for axis in range(mesh.dim()))
    orders = [lines(mesh, axes).argsort(dim=1) for axes in joined if axes]
    return rising and all((order == order[0]).all() for order in orders)


def lines(mesh: torch.Tensor, axes: Axes) -> torch.Tensor:
    """The groups of ranks that differ along these axes only: (groups, ranks of one)."""
    rest = [axis for axis in range(mesh.dim()) if axis not in axes]
    return mesh.permute(*rest, *axes).reshape(-1, math.prod(mesh.shape[axis] for axis in axes))


def crossings(mesh: torch.Tensor, axes: Axes, hosts: Hosts) -> int:
    """How many of these groups have ranks on several hosts."""
    return sum(len({hosts[rank] for rank in line}) > 1 for line in lines(mesh, axes).tolist())


def divide(mesh: torch.Tensor, axes: Axes, hosts: Hosts) -> list[tuple[list[Ranks], list[Ranks]]] | None:
    """Each group of these axes as two: the ranks on each host, and the ranks with the same place on each
    host, in rising order.

    None where that is not possible: groups that have unequal numbers on their hosts, or lie on hosts in
    different ways.
    """
    found, patterns = [], set()
    for line in lines(mesh, axes).tolist():
        by_host: dict[int, Ranks] = {}
        for rank in sorted(line):
            by_host.setdefault(hosts[rank], []).append(rank)
        inside = list(by_host.values())
        patterns.add(tuple(list(by_host).index(hosts[rank]) for rank in line))
        if len({len(ranks) for ranks in inside}) > 1:
            return None
        found.append((inside, [list(ranks) for ranks in zip(*inside, strict=True)]))
    return found if len(patterns) == 1 else None
