"""Time of a collective: the best of the algorithms, by bytes and steps on each level.

n ranks of which k share a node (N = n / k nodes), B bytes of the whole buffer, a: latency, w: bandwidth of
a rank's link on that level.

    algorithm         all_reduce                             all_gather, reduce_scatter
    ring              2(n-1) a + 2(n-1)/n B/w                (n-1) a + (n-1)/n B/w
    two-shot          2 a + 2(n-1)/n B/w   (in a node)       a + (n-1)/n B/w
    tree              2 log2(n) a + 2 B/w                    -
    hierarchical      reduce_scatter inside, all_reduce of B/k across, all_gather inside

A ring over several nodes has k of its n links inside, and a node's k ranks send through k adapters at once:
NCCL makes as many rings as adapters. So its time is that of the slower level with B/k per adapter.
Hierarchical collectives send as many bytes and pay fewer steps of the outer latency, but do not overlap
their levels.

Sources: Thakur et al. 2005; Patarasuk and Yuan 2009; NCCL's own tuning model has the same terms.
"""

import functools
import math
from typing import NamedTuple

from pycomm.parallel.planning.machine import Link, Machine
from pycomm.parallel.planning.quantities import ByteRate, MeanBytes, Seconds

__all__ = ["Span", "all_gather", "all_reduce", "all_to_all", "message", "span"]


class Span(NamedTuple):
    """A group of `ranks`, `inside` of them on each node. inner, outer: links; outer None in one node."""

    ranks: int
    inside: int
    inner: Link
    outer: Link | None

    @property
    def nodes(self) -> int:
        return self.ranks // self.inside


@functools.lru_cache(maxsize=65536)
def span(machine: Machine, ranks: int, stride: int) -> Span:
    """The Span of an axis: its neighbours are `stride` ranks apart (the product of the axes inside of it)."""
    node = machine.node
    if len(machine.links) == 1 or node % (ranks * stride) == 0:
        return Span(ranks, ranks, machine.links[0], None)
    # A group whose ranks do not divide a node lies across two.
    inside = math.gcd(ranks, int(node // stride)) if node % stride == 0 else 1
    return Span(ranks, inside, machine.links[0], machine.links[1])


def all_reduce(where: Span, nbytes: MeanBytes) -> Seconds:
    """nbytes: of the whole buffer."""
    n = where.ranks
    if n == 1 or not nbytes:
        return Seconds(0.0)
    if where.outer is None:
        return _all_reduce_flat(where.inner, n, nbytes, in_node=True)
    k, nodes = where.inside, where.nodes
    if k == 1:
        return _all_reduce_flat(where.outer, n, nbytes, in_node=False)
    ring = 2 * (n - nodes) * where.inner.latency + 2 * nodes * where.outer.latency
    ring += max(
        2 * (n - 1) / n * nbytes / where.inner.bandwidth, 2 * (n - 1) / n * nbytes / k / where.outer.bandwidth
    )
    across = _all_reduce_flat(where.outer, nodes, MeanBytes(nbytes / k), False)
    return Seconds(min(ring, 2 * _half(where.inner, k, nbytes, True) + across))


def _all_reduce_flat(link: Link, n: int, nbytes: MeanBytes, in_node: bool) -> Seconds:
    ring = 2 * (n - 1) * link.latency + 2 * (n - 1) / n * nbytes / link.bandwidth
    tree = 2 * math.ceil(math.log2(n)) * link.latency + 2 * nbytes / link.bandwidth
    best = min(ring, tree)
    if in_node:
        best = min(best, 2 * link.latency + 2 * (n - 1) / n * nbytes / link.bandwidth)
    return Seconds(best)


def _half(link: Link, n: int, nbytes: MeanBytes, in_node: bool) -> Seconds:
    steps = 1 if in_node else n - 1
    return Seconds(steps * link.latency + (n - 1) / n * nbytes / _one_way(link))


def _one_way(link: Link) -> ByteRate:
    """Of a collective of one direction."""
    return ByteRate(link.bandwidth * link.one_way)


def all_gather(where: Span, nbytes: MeanBytes) -> Seconds:
    """Of a reduce_scatter as well. nbytes: of the whole buffer."""
    n = where.ranks
    if n == 1 or not nbytes:
        return Seconds(0.0)
    if where.outer is None:
        return _half(where.inner, n, nbytes, True)
    k, nodes = where.inside, where.nodes
    if k == 1:
        return _half(where.outer, n, nbytes, False)
    ring = (n - nodes) * where.inner.latency + nodes * where.outer.latency
    ring += max(
        (n - 1) / n * nbytes / _one_way(where.inner), (n - 1) / n * nbytes / k / _one_way(where.outer)
    )
    across = _half(where.outer, nodes, MeanBytes(nbytes / k), False)
    return Seconds(min(ring, _half(where.inner, k, nbytes, True) + across))


def all_to_all(where: Span, nbytes: MeanBytes) -> Seconds:
    """nbytes: of one rank's buffer, of which each rank gets an equal part."""
    n, k = where.ranks, where.inside
    if n == 1 or not nbytes:
        return Seconds(0.0)
    inside = (k - 1) / n * nbytes / _one_way(where.inner) + where.inner.latency
    if where.outer is None:
        return Seconds(inside)
    return Seconds(max(inside, (n - k) / n * nbytes / _one_way(where.outer) + where.outer.latency))


def message(where: Span, nbytes: MeanBytes) -> Seconds:
    """Of one message from a rank to the next of the group."""
    if where.ranks == 1:
        return Seconds(0.0)
    link = where.outer if where.outer is not None and where.inside == 1 else where.inner
    if where.outer is not None:  # the slowest boundary decides
        link = where.outer
    return Seconds(link.latency + nbytes / link.bandwidth)
