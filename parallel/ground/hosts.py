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

import torch

__all__ = ["arrange", "crossings", "divide", "lines"]


def arrange(hosts, sizes, joined=()):
    """A mesh of ranks: a tensor of these sizes, outer axis first.

    hosts: the number of each rank's host. joined: tuples of axes (indices into sizes) whose ranks form one
    group.
    """
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


def _filled(hosts, sizes):
    """The ranks in the order of their places: groups of the inner axes are filled host by host."""
    groups = [(host, [rank]) for rank, host in enumerate(hosts)]  # (host, or None for several; ranks)
    for size in reversed(sizes):
        of_host = {}
        for group in groups:
            of_host.setdefault(group[0], []).append(group)
        left, found = [], []
        for host, some in of_host.items():
            whole = len(some) // size * size if host is not None else 0
            found += [(host, some[i : i + size]) for i in range(0, whole, size)]
            left += some[whole:]
        found += [(None, left[i : i + size]) for i in range(0, len(left), size)]
        groups = []
        for host, some in found:
            some = sorted((ranks for _, ranks in some), key=min)
            groups.append((host, list(itertools.chain(*some))))
        groups.sort(key=lambda group: min(group[1]))
    return groups[0][1]


def _is_sorted(mesh, joined):
    """Whether ranks rise along every axis, and are sorted alike in all groups of each of the joined axes."""
    rising = all((lines(mesh, (axis,)).diff(dim=1) > 0).all() for axis in range(mesh.dim()))
    orders = [lines(mesh, axes).argsort(dim=1) for axes in joined if axes]
    return rising and all((order == order[0]).all() for order in orders)


def lines(mesh, axes):
    """The groups of ranks that differ along these axes only: (groups, ranks of one)."""
    rest = [axis for axis in range(mesh.dim()) if axis not in axes]
    return mesh.permute(*rest, *axes).reshape(-1, math.prod(mesh.shape[axis] for axis in axes))


def crossings(mesh, axes, hosts):
    """How many of these groups have ranks on several hosts."""
    return sum(len({hosts[rank] for rank in line}) > 1 for line in lines(mesh, axes).tolist())


def divide(mesh, axes, hosts):
    """Each group of these axes as two: [(ranks on each host, ranks with the same place on each host)], one
    for each group; both are lists of lists, in rising order.

    None where that is not possible: groups that have unequal numbers on their hosts, or lie on hosts in
    different ways.
    """
    found, patterns = [], set()
    for line in lines(mesh, axes).tolist():
        of_host = {}
        for rank in sorted(line):
            of_host.setdefault(hosts[rank], []).append(rank)
        inside = list(of_host.values())
        patterns.add(tuple(list(of_host).index(hosts[rank]) for rank in line))
        if len({len(ranks) for ranks in inside}) > 1:
            return None
        found.append((inside, [list(ranks) for ranks in zip(*inside, strict=True)]))
    return found if len(patterns) == 1 else None
