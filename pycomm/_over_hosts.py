"""What pycomm.explain says of a group over hosts: its steps, and the bytes on the links between hosts."""

from pycomm import _C
from pycomm.groups import show_hosts
from pycomm.quantities import Bytes

__all__ = ["explain_over_hosts"]

# docs/hosts.md has the pictures.
_STEPS = {
    "all_reduce": "each host adds up in shared memory, the slices of its sum are exchanged with those of the "
    "other hosts and added in the order of hosts, and each host gathers the slices",
    "reduce": "each host adds up in shared memory, its slices go to the root's host, which adds them in the "
    "order of hosts and gathers them at the root",
    "broadcast": "the root's host shares segments in shared memory, its ranks send a slice each to every "
    "other host, and there the slices are gathered",
    "all_gather": "every block goes once to each other host, and is shared there in shared memory",
    "reduce_scatter": "each host adds up the blocks of another host's ranks in shared memory and sends the "
    "sums there, which are added in the order of hosts",
    "all_to_all": "blocks for the same host go through shared memory, every other one straight to its rank",
    "gather": "blocks of the root's host go through shared memory, every other one straight to the root",
    "scatter": "blocks for the root's host go through shared memory, every other one straight to its rank",
    "barrier": "each host meets in shared memory, and its leader exchanges a message with the others",
}
_SMALL = "the payload goes with the headers: each host meets in shared memory, leaders exchange one message"


def explain_over_hosts(op: str, size: Bytes, hosts: list[int]) -> str:
    """One line. size: as explain() takes it. hosts: for each rank the number of its host, several."""
    sizes = [hosts.count(host) for host in sorted(set(hosts))]
    what = f"{op} of {size} bytes on {len(hosts)} ranks, two levels: {show_hosts(hosts)}"
    if _fits_a_card(op, size, sizes):
        return f"{what}: {_SMALL} of about {_C.card_payload} bytes."
    return (
        f"{what}: {_STEPS[op]}. Over the busiest link, in one direction: {_on_link(op, size, sizes)} bytes."
    )


def _fits_a_card(op: str, size: Bytes, sizes: list[int]) -> bool:
    if op in ("all_reduce", "reduce", "broadcast"):
        return size <= _C.card_payload
    return op == "barrier" or (op == "all_gather" and size * max(sizes) <= _C.card_payload)


def _on_link(op: str, size: Bytes, sizes: list[int]) -> int:
    """Bytes out of or into a host, where that is most; of reduce, broadcast, gather and scatter for the root
    that has most.
    """
    ranks, hosts = sum(sizes), len(sizes)
    if op == "all_reduce":
        return 2 * (hosts - 1) * size // hosts
    if op in ("reduce", "broadcast"):
        return (hosts - 1) * size
    if op == "all_to_all":
        return max(own * (ranks - own) for own in sizes) * size
    if op in ("gather", "scatter"):
        return (ranks - min(sizes)) * size
    return max(max(own * (hosts - 1), ranks - own) for own in sizes) * size
