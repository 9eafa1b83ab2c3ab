"""The ranks as a torch DeviceMesh, and the groups that the strategies use.

Only axes with more than one rank are dimensions of the mesh. Joined axes (the ranks over which a parameter is
replicated) have groups of their own. All are made on all ranks in the same order, and all have the time limit
of torch's default group:

    group       axes                          what is summed over it
    data        dp ep ring ulysses            gradients of dense parameters
    expert      dp ring ulysses               gradients of expert parameters
    *_tp        the same and tp               gradients of which each rank of tp has a part
    world       all                           gradient norm and loss

Ranks take their places so that inner axes stay inside hosts (hosts.py). Under Plan(zero_group="host") each of
the first three has two parts:

    4 ranks of data, 2 on each host        inside   (0 1) (2 3)    own shards of one copy of the model
    0 1 | 2 3                              across   (0 2) (1 3)    own the same shards
"""

import math
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pycomm import trace
from pycomm.groups import host_mark, numbered, show_hosts
from pycomm.parallel.ground import comm, hosts
from pycomm.parallel.ground.comm import ALONE, Group, as_group, process_group
from pycomm.parallel.ground.plan import AXES, Axis, Plan
from pycomm.quantities import GlobalRank

__all__ = ["Mesh"]

DATA: tuple[Axis, ...] = ("dp", "ep", "ring", "ulysses")
EXPERT: tuple[Axis, ...] = ("dp", "ring", "ulysses")


class Mesh:
    """Groups of a plan. Collective over all ranks when made. device: that the ranks' tensors are on.

    Sets up torch.distributed (backend "pycomm", from the environment that torchrun gives) where the plan has
    several ranks and it is not set up. own: all groups are made for this plan, so that close() leaves none,
    and whatever happens in them does not touch torch's default group, which else serves for all ranks. Raises
    ValueError when the plan's ranks are not the ranks that exist, or do not lie on hosts as it needs it.
    """

    def __init__(self, plan: Plan, device: torch.device | str = "cpu", own: bool = False) -> None:
        self.plan, device = plan, torch.device(device)
        self.hosts = [0]  # the number of each rank's host
        self.counts_rows = True  # False while rows run that stand in for none, see ground/batch.py
        self._divided: dict[str, tuple[Group, Group]] = {}  # name of a group -> (inside, across)
        self._made: list[dist.ProcessGroup] = []  # this plan's alone
        self.device_mesh: DeviceMesh | None = None  # None for one rank
        self.limit: timedelta | None = None  # of the groups
        self.world = ALONE  # all ranks
        self.store: dist.Store | None = None  # of the default group, where nobody else keeps it
        if plan.world_size > 1 and not dist.is_initialized():
            dist.init_process_group("pycomm")
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if plan.world_size != world_size:
            sizes = (
                " x ".join(f"{axis}={getattr(plan, axis)}" for axis in AXES if getattr(plan, axis) > 1)
                or "all axes 1"
            )
            raise ValueError(f"the plan is for {plan.world_size} ranks ({sizes}), but there are {world_size}")
        self.names = tuple(axis for axis in AXES if getattr(plan, axis) > 1)
        default = dist.group.WORLD if self.names else None
        if default is not None:
            options = getattr(default._get_backend(device), "options", None)
            self.limit = getattr(options, "_timeout", None)  # not every backend has one, as torch's fake
            self.hosts = _hosts_of(as_group(None, "world"), device)
            self.world = as_group(self._make() if own else None, "world")
            _name_in_trace(self.world)
            self.places = self._place(device.type)
        # by the names of axes with several ranks, in order
        self._groups: dict[tuple[Axis, ...], Group] = {(): ALONE}
        groups = [pg for axis in self.names if (pg := process_group(self.group(axis))) is not None]
        if groups:
            self.device_mesh = dist.device_mesh.DeviceMesh.from_group(
                groups, device.type, self.places, mesh_dim_names=self.names
            )
        self.data, self.data_tp = self.group(*DATA), self.group(*DATA, "tp")
        self.expert, self.expert_tp = self.group(*EXPERT), self.group(*EXPERT, "tp")
        if plan.zero_group == "host":
            for axes in (DATA, (*DATA, "tp"), EXPERT, (*EXPERT, "tp")):
                self._divide(self._names_of(axes))

    def _place(self, device_type: str) -> torch.Tensor:
        """The ranks at their places: a tensor of the sizes of the axes."""
        sizes = [getattr(self.plan, axis) for axis in self.names]
        together = (DATA, (*DATA, "tp"), EXPERT, (*EXPERT, "tp"))
        joined = [[self.names.index(axis) for axis in self._names_of(axes)] for axes in together]
        if device_type != "cpu":  # it chooses this rank's device where nobody has
            dist.device_mesh.init_device_mesh(device_type, (len(self.hosts),))
        return hosts.arrange(self.hosts, sizes, joined)

    def _names_of(self, axes: Sequence[Axis]) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.names if axis in axes)

    def group(self, *axes: Axis) -> Group:
        """The ranks that differ from this one along `axes` only. Joined axes are collective over all ranks at
        their first use.
        """
        names = self._names_of(axes)
        if names not in self._groups:
            ranks = self._lines(names)
            pg = process_group(self.world) if len(ranks) == 1 else self._own_of(ranks)
            self._groups[names] = as_group(pg, "+".join(names))
            _name_in_trace(self._groups[names])
        return self._groups[names]

    def _lines(self, names: tuple[Axis, ...]) -> list[list[GlobalRank]]:
        """The groups of ranks that differ along these axes only."""
        return hosts.lines(self.places, [self.names.index(axis) for axis in names]).tolist()

    def shards_of(self, group: Group) -> tuple[Group, Group]:
        """(ranks among which zero divides what `group` would hold several times, ranks that then hold the
        same): the group and no others, or its parts inside and across hosts. group: of gradients, see the
        head of the file.
        """
        return self._divided.get(group.name, (group, ALONE))

    def _divide(self, names: tuple[Axis, ...]) -> None:
        whole = self.group(*names)
        if whole.name in self._divided or whole.size == 1:
            return
        found = hosts.divide(self.places, [self.names.index(axis) for axis in names], self.hosts)
        if found is None:
            raise ValueError(
                f"Plan({self.plan}): zero_group='host' needs as many ranks of {whole.name} on each host, and "
                f"alike in every group; the ranks are on {show_hosts(self.hosts)} (rank by rank: "
                f"{' '.join(map(str, self.hosts))}). Use other sizes of the axes, or zero_group='all'"
            )
        if len(found[0][0]) == 1:  # one host: all of it is inside
            return
        if len(found[0][1]) == 1:
            self._divided[whole.name] = Group(f"{whole.name} inside hosts", 1, 0, None), whole
            return
        inside = self._own_of([ranks for parts, _ in found for ranks in parts])
        across = self._own_of([ranks for _, parts in found for ranks in parts])
        self._divided[whole.name] = (
            as_group(inside, f"{whole.name} inside hosts"),
            as_group(across, f"{whole.name} across hosts"),
        )

    def _own_of(self, groups: Iterable[Sequence[GlobalRank]]) -> dist.ProcessGroup:
        """Makes a process group of each of these lists of ranks; returns that of this rank."""
        for ranks in groups:
            made = self._make(ranks)
            if self.world.rank in ranks:
                mine = made
        return mine

    @property
    def spans_hosts(self) -> bool:
        return len(set(self.hosts)) > 1

    def crossings(self, axis: Axis) -> tuple[int, int]:
        """(groups of this axis with ranks on several hosts, groups of this axis)"""
        axes = [self.names.index(axis)]
        return hosts.crossings(self.places, axes, self.hosts), len(self.hosts) // getattr(self.plan, axis)

    def _make(self, ranks: Sequence[GlobalRank] | None = None) -> dist.ProcessGroup:
        """A process group of these ranks, all if None; on other ranks nothing of use."""
        pg = dist.new_group(ranks, timeout=self.limit)
        if isinstance(pg, dist.ProcessGroup):
            self._made.append(pg)
        return pg

    def ranks_of(self, name: str) -> list[GlobalRank] | None:
        """The ranks of a process group of this rank, by its name; None where it is not the plan's."""
        for pg in (process_group(self.world), *self._made):
            if pg is not None and pg.group_name == name:
                return [GlobalRank(rank) for rank in dist.get_process_group_ranks(pg)]
        return None

    def apart(self, *axes: Axis) -> Group:
        """A group of the same ranks as group(*axes), for operations whose order among that group's is not the
        same on all ranks. Collective over all ranks.
        """
        group = self.group(*axes)
        if group.size == 1:
            return group
        mine = self._own_of(self._lines(self._names_of(axes)))
        return as_group(mine, f"{group.name} (apart)")

    def close(self) -> None:
        """Closes the groups that were made for this plan, of which nothing can be used afterwards. No
        communication: a rank that waits for this one in one of them is told that it is closed.
        """
        for pg in self._made:
            dist.destroy_process_group(pg)
        self._made = []

    def coordinate(self, axis: Axis) -> int:
        """This rank's place along an axis."""
        return self.group(axis).rank

    @property
    def rows(self) -> tuple[int, int]:
        """(number of parts into which the rows of a batch are dealt, this rank's part): dp and ep."""
        plan = self.plan
        return plan.dp * plan.ep, self.coordinate("dp") * plan.ep + self.coordinate("ep")

    def __str__(self) -> str:
        if self.device_mesh is None:
            return "one rank"
        places = ", ".join(
            f"{axis} {self.coordinate(axis)}/{getattr(self.plan, axis)}"
            for axis in AXES
            if getattr(self.plan, axis) > 1
        )
        return f"rank {self.world.rank}/{math.prod(self.device_mesh.shape)}: {places}"


def _name_in_trace(group: Group) -> None:
    pg = process_group(group)
    if pg is not None:
        trace.name_axis(pg.group_name, group.name)


def _hosts_of(world: Group, device: torch.device) -> list[int]:
    """The number of each rank's host. Collective, 16 bytes from each rank."""
    mark = torch.frombuffer(bytearray(host_mark()), dtype=torch.uint8).to(device)
    marks = mark.new_empty(world.size * mark.numel())
    comm.all_gather(marks, mark, world)
    return numbered(bytes(each.tolist()) for each in marks.cpu().split(mark.numel()))


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of a model's first parameter that holds data; torch's default one where all are on meta; of
    its first buffer where there are none.
    """
    parameters = list(model.parameters())
    for tensor in [*parameters, *(() if parameters else model.buffers())]:
        if not tensor.is_meta:
            return tensor.device
    return torch.get_default_device()
