"""The ranks as a torch DeviceMesh, and the groups that the strategies use.

Only axes with more than one rank are dimensions of the mesh. Joined axes (the ranks over which a parameter is
replicated) are flattened dimensions of the same mesh, made on all ranks in the same order:

    group       axes                          what is summed over it
    data        dp ep ring ulysses            gradients of dense parameters
    expert      dp ring ulysses               gradients of expert parameters
    *_tp        the same and tp               gradients of which each rank of tp has a part
    world       all                           gradient norm and loss
"""

import math

import torch
import torch.distributed as dist

from pycomm.parallel.ground.comm import ALONE, as_group
from pycomm.parallel.ground.plan import AXES

__all__ = ["Mesh"]

DATA = ("dp", "ep", "ring", "ulysses")
EXPERT = ("dp", "ring", "ulysses")


class Mesh:
    """Groups of a plan. Collective over all ranks when made.

    Sets up torch.distributed (backend "pycomm", from the environment that torchrun gives) where the plan has
    several ranks and it is not set up. own: all groups are made for this plan, so that close() leaves none,
    and whatever happens in them does not touch torch's default group, which else serves for all ranks. Raises
    ValueError when the plan's ranks are not the ranks that exist.
    """

    def __init__(self, plan, device_type="cpu", own=False):
        self.plan = plan
        self._made = []  # process groups that are this plan's alone
        self.device_mesh = None  # torch's DeviceMesh; None for one rank
        self.world = ALONE  # Group of all ranks
        if plan.world_size > 1 and not dist.is_initialized():
            dist.init_process_group("pycomm")
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if plan.world_size != world_size:
            sizes = (
                " x ".join(f"{axis}={getattr(plan, axis)}" for axis in AXES if getattr(plan, axis) > 1)
                or "all axes 1"
            )
            raise ValueError(f"the plan is for {plan.world_size} ranks ({sizes}), but there are {world_size}")
        names = [axis for axis in AXES if getattr(plan, axis) > 1]
        if names:
            sizes = [getattr(plan, axis) for axis in names]
            self.device_mesh = dist.device_mesh.init_device_mesh(
                device_type, sizes, mesh_dim_names=tuple(names)
            )
            self.world = as_group(self._make() if own else None, "world")
        self._groups = {(): ALONE}  # names of axes with several ranks, in order -> Group
        for axis in AXES:
            self.group(axis)
        self.data, self.data_tp = self.group(*DATA), self.group(*DATA, "tp")
        self.expert, self.expert_tp = self.group(*EXPERT), self.group(*EXPERT, "tp")

    def group(self, *axes):
        """The ranks that differ from this one along `axes` only. Joined axes are collective over all ranks at
        their first use.
        """
        names = tuple(axis for axis in AXES if axis in axes and getattr(self.plan, axis) > 1)
        if names not in self._groups:
            if len(names) == 1:
                mesh = self.device_mesh[names[0]]
            else:
                mesh = self.device_mesh[names]._flatten("_".join(names))
            pg = mesh.get_group()
            if pg is dist.group.WORLD:
                pg = self.world.pg
            elif pg not in self._made:
                self._made.append(pg)
            self._groups[names] = as_group(pg, "+".join(names))
        return self._groups[names]

    def _make(self, ranks=None):
        """A process group of these ranks, all if None; on other ranks nothing of use."""
        pg = dist.new_group(ranks)
        if isinstance(pg, dist.ProcessGroup):
            self._made.append(pg)
        return pg

    def apart(self, *axes):
        """A group of the same ranks as group(*axes), for operations whose order among that group's is not the
        same on all ranks. Collective over all ranks.
        """
        group = self.group(*axes)
        if group.size == 1:
            return group
        names = [axis for axis in self.device_mesh.mesh_dim_names if axis in axes]
        rest = [axis for axis in self.device_mesh.mesh_dim_names if axis not in axes]
        order = [self.device_mesh.mesh_dim_names.index(axis) for axis in rest + names]
        for ranks in self.device_mesh.mesh.permute(order).reshape(-1, group.size).tolist():
            made = self._make(ranks)
            if self.world.rank in ranks:
                mine = made
        return as_group(mine, f"{group.name} (apart)")

    def close(self):
        """Closes the groups that were made for this plan, of which nothing can be used afterwards. No
        communication: a rank that waits for this one in one of them is told that it is closed.
        """
        for pg in self._made:
            dist.destroy_process_group(pg)
        self._made = []

    def coordinate(self, axis):
        """This rank's place along an axis."""
        return self.group(axis).rank

    @property
    def rows(self):
        """(number of parts into which the rows of a batch are dealt, this rank's part): dp and ep."""
        plan = self.plan
        return plan.dp * plan.ep, self.coordinate("dp") * plan.ep + self.coordinate("ep")

    def __str__(self):
        if self.device_mesh is None:
            return "one rank"
        places = ", ".join(
            f"{axis} {self.coordinate(axis)}/{getattr(self.plan, axis)}"
            for axis in AXES
            if getattr(self.plan, axis) > 1
        )
        return f"rank {self.world.rank}/{math.prod(self.device_mesh.shape)}: {places}"


def device_of(model):
    """The device of a model's first parameter that holds data; torch's default one where all are on meta; of
    its first buffer where there are none.
    """
    parameters = list(model.parameters())
    for tensor in [*parameters, *(() if parameters else model.buffers())]:
        if not tensor.is_meta:
            return tensor.device
    return torch.get_default_device()
