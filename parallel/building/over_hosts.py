"""Which axes of a plan cross hosts, and what goes over the link between them, in sentences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pycomm.groups import show_hosts
from pycomm.parallel.zero.kinds import kind_of

if TYPE_CHECKING:
    from pycomm.parallel.ground.mesh import Mesh
    from pycomm.parallel.ground.plan import Axis
    from pycomm.parallel.parts import Parallelized

__all__ = ["over_hosts", "warnings_of"]

TALKS_MOST = ("tp", "ulysses", "ring", "ep")  # in every block, not once or twice in a step or microbatch
WHAT: dict[Axis, str] = {
    "pp": "hidden states and their gradients go from stage to stage over the link",
    "ep": "tokens go to their experts over the link and back, in every MoE layer",
    "ring": "keys and values go round over the link, in every block",
    "ulysses": "heads and positions change places over the link, in every block",
    "tp": "every layer that is cut waits for the link, in forward and backward",
}
OF_HOST = "the sums of a host's gradients are added over the link, once a step"


def over_hosts(parts: Parallelized) -> tuple[str | None, list[str]]:
    """(the placement in words, sentences about axes that cross hosts), or (None, []) on one host."""
    mesh = parts.mesh
    if not mesh.spans_hosts:
        return None, []
    within = [axis for axis in mesh.names if not mesh.crossings(axis)[0]]
    place = f"{show_hosts(mesh.hosts)}: {', '.join(within) or 'no axis'} inside"
    return place, [_sentence(parts, axis) for axis in mesh.names if axis not in within]


def warnings_of(mesh: Mesh) -> list[str]:
    """Sentences about axes that should not cross hosts and do, with the way out."""
    axes = [axis for axis in mesh.names if axis in TALKS_MOST and mesh.crossings(axis)[0]]
    return [f"{_crossing(mesh, axis)}: {WHAT[axis]}; {_way_out(mesh, axis)}" for axis in axes]


def _crossing(mesh: Mesh, axis: Axis) -> str:
    some, groups = mesh.crossings(axis)
    return f"{axis} crosses hosts in {some} of {groups} groups"


def _sentence(parts: Parallelized, axis: Axis) -> str:
    what = WHAT.get(axis)
    if what is None:
        what = OF_HOST if parts.plan.zero_group == "host" else kind_of(parts.plan).over_link
    return f"{_crossing(parts.mesh, axis)}: {what}{_cost(parts, axis)}"


def _cost(parts: Parallelized, axis: Axis) -> str:
    sent = parts.last_step.sent
    if sent is None:
        return "; after a step the bytes are known here"
    total = sum(nbytes for group, nbytes in sent.items() if _is_of(group, axis))
    return f"; this rank sent {total:,} bytes so in the last step"


def _is_of(group: str, axis: Axis) -> bool:
    """Whether what is sent in a group goes over the link because of this axis."""
    joined, _, part = group.partition(" ")
    if part == "inside hosts":
        return False
    axes = joined.split("+")
    return axes == [axis] if axis != "dp" else "dp" in axes


def _way_out(mesh: Mesh, axis: Axis) -> str:
    inner = mesh.names[mesh.names.index(axis) :]
    needed = math.prod(getattr(mesh.plan, name) for name in inner)
    product = " x ".join(f"{name}={getattr(mesh.plan, name)}" for name in inner)
    sizes = [mesh.hosts.count(host) for host in sorted(set(mesh.hosts))]
    if any(size % needed for size in sizes):
        return f"it would stay inside if {product} divided the ranks of each host ({show_hosts(mesh.hosts)})"
    return (
        "it would stay inside if the ranks of a host followed each other; they are on hosts "
        f"{' '.join(map(str, mesh.hosts))}"
    )
