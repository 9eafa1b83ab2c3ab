"""Which query and key/value heads each rank holds, for any number of heads.

Query head i reads kv head i // g, where g = q_heads // kv_heads (grouped queries; g = 1 is ordinary
attention). A rank must hold the kv head of each of its query heads, and every rank must hold at least one
query head.

    kv_heads >= ranks: kv heads are dealt unevenly, each with all its query heads; q 6, kv 3, 2 ranks

        rank 0   kv 0 1   q 0 1 2 3
        rank 1   kv 2     q 4 5

    kv_heads < ranks: ranks are dealt to kv heads; q 8, kv 2, 3 ranks

        rank 0   kv 0     q 0 1        counts kv 0
        rank 1   kv 0     q 2 3
        rank 2   kv 1     q 4 5 6 7    counts kv 1

In the second case a kv head's weights are held by several ranks, each with the part of the gradient that its
own query heads give (Layout.overlap); the first of them counts it. Cost: ranks wait for the one with most
heads. Grouped queries: Ainslie et al., 2023.
"""

from collections.abc import Iterable
from typing import NamedTuple

from pycomm.parallel.ground import comm

__all__ = ["RankHeads", "split_heads"]


Span = tuple[int, int]  # [start, stop)


class RankHeads(NamedTuple):
    """Heads [start, stop) of one rank. counts_kv: this rank stands for its kv heads; shares_kv: some rank of
    the group shares kv heads.
    """

    q: Span
    kv: Span
    counts_kv: bool = True
    shares_kv: bool = False

    @property
    def q_count(self) -> int:
        return self.q[1] - self.q[0]

    @property
    def kv_count(self) -> int:
        return self.kv[1] - self.kv[0]


def split_heads(q_heads: int, kv_heads: int, parts: int, where: str = "attention") -> list[RankHeads]:
    """The heads of each of `parts` ranks.

    Raises ValueError when there are fewer query heads than ranks, or when kv heads do not divide the query
    heads; `where` names the module.
    """
    if kv_heads < 1 or q_heads % kv_heads:
        raise ValueError(f"{where}: {q_heads} query heads are not a multiple of {kv_heads} kv heads")
    if q_heads < parts:
        raise ValueError(
            f"{where}: {q_heads} query heads cannot be split over {parts} ranks of tp. Use tp <= {q_heads}, "
            f"or rules={{{where!r}: 'replicate'}}"
        )
    per_kv = q_heads // kv_heads
    if kv_heads >= parts:
        return [
            RankHeads((start * per_kv, stop * per_kv), (start, stop))
            for start, stop in spans(comm.even_sizes(kv_heads, parts))
        ]
    ranks = []
    for kv, sharers in enumerate(comm.even_sizes(parts, kv_heads)):
        for index, (start, stop) in enumerate(spans(comm.even_sizes(per_kv, sharers))):
            ranks.append(RankHeads((kv * per_kv + start, kv * per_kv + stop), (kv, kv + 1), index == 0, True))
    return ranks


def spans(sizes: Iterable[int]) -> list[Span]:
    """Of consecutive pieces."""
    start, out = 0, []
    for size in sizes:
        out.append((start, start + size))
        start += size
    return out
