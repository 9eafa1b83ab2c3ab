"""What each rank must hold after a collective: pieces of the inputs of the ranks, or of their reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from pycomm.benchmarks.common.data import DtypeName


class Case(Protocol):
    """What is called. count: elements of one chunk."""

    @property
    def op(self) -> str: ...

    @property
    def count(self) -> int: ...

    @property
    def dtype(self) -> DtypeName: ...

    @property
    def redop(self) -> str: ...

    @property
    def root(self) -> int: ...


class Piece(NamedTuple):
    """result[start : start+length] must be source[offset : offset+length]; source is a rank, or None for the
    reduction of all ranks. In elements.
    """

    start: int
    length: int
    source: int | None
    offset: int


def expected(case: Case, rank: int, n: int) -> list[Piece]:
    """What `rank` of n must hold; nothing where it gets nothing."""
    k, root = case.count, case.root
    everyone = [Piece(source * k, k, source, 0) for source in range(n)]
    match case.op:
        case "all_reduce":
            return [Piece(0, k, None, 0)]
        case "reduce":
            return [Piece(0, k, None, 0)] if rank == root else []
        case "reduce_scatter":
            return [Piece(0, k, None, rank * k)]
        case "all_gather":
            return everyone
        case "gather":
            return everyone if rank == root else []
        case "all_to_all":
            return [piece._replace(offset=rank * k) for piece in everyone]
        case "scatter":
            return [Piece(0, k, root, rank * k)]
        case "broadcast":
            return [Piece(0, k, root, 0)]
        case "send_recv":
            return [Piece(0, k, (rank - 1) % n, 0)]
        case "pingpong":
            return [Piece(0, k, rank ^ 1, 0)]
        case "barrier":
            return []
    raise AssertionError(case.op)
