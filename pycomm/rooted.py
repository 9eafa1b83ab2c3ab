"""The collectives of a Communicator that move data from one rank or to it: broadcast, gather, scatter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch

from pycomm.arrays import A, L, as_tensor, as_tensors
from pycomm.member import Member

if TYPE_CHECKING:
    from pycomm.communicator import Work
    from pycomm.options import Algorithm

__all__ = ["Rooted"]


class Rooted(Member):
    """The part of a Communicator that moves data from one rank or to it.

    What all operations have in common: pycomm.Communicator.
    """

    @overload
    def broadcast(
        self,
        x: A,
        root: int = 0,
        *,
        async_op: Literal[False] = False,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A: ...
    @overload
    def broadcast(
        self,
        x: A,
        root: int = 0,
        *,
        async_op: Literal[True],
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> Work[A]: ...
    @overload
    def broadcast(
        self,
        x: A,
        root: int = 0,
        *,
        async_op: bool,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A | Work[A]: ...
    def broadcast(
        self,
        x: A,
        root: int = 0,
        *,
        async_op: bool = False,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A | Work[A]:
        """x of every rank becomes the root's x."""
        return self._comm.broadcast(x, root, x, async_op, algorithm, timeout)

    @overload
    def gather(
        self,
        x: A,
        out: A | None = None,
        root: int = 0,
        *,
        async_op: Literal[False] = False,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A | None: ...
    @overload
    def gather(
        self,
        x: A,
        out: A | None = None,
        root: int = 0,
        *,
        async_op: Literal[True],
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> Work[A | None]: ...
    @overload
    def gather(
        self,
        x: A,
        out: A | None = None,
        root: int = 0,
        *,
        async_op: bool,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A | None | Work[A | None]: ...
    @overload
    def gather(
        self,
        x: A,
        out: L,
        root: int = 0,
        *,
        async_op: Literal[False] = False,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> L | None: ...
    @overload
    def gather(
        self,
        x: A,
        out: L,
        root: int = 0,
        *,
        async_op: Literal[True],
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> Work[L | None]: ...
    @overload
    def gather(
        self,
        x: A,
        out: L,
        root: int = 0,
        *,
        async_op: bool,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> L | None | Work[L | None]: ...
    def gather(
        self,
        x: A,
        out: A | L | None = None,
        root: int = 0,
        *,
        async_op: bool = False,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A | L | Work[A | L | None] | None:
        """The root gets every rank's x: in `out` (a list or an array of world_size * x.size elements) or a
        new array; None elsewhere.
        """
        parts, result = [], None
        if self.rank == root:
            result = self._of_all(x) if out is None else out
            parts = self._parts("gather", result, as_tensor(x).numel())
        return self._comm.gather(x, parts, root, result, async_op, algorithm, timeout)

    @overload
    def scatter(
        self,
        x: A | list[A] | tuple[A, ...] | None,
        out: A,
        root: int = 0,
        *,
        async_op: Literal[False] = False,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A: ...
    @overload
    def scatter(
        self,
        x: A | list[A] | tuple[A, ...] | None,
        out: A,
        root: int = 0,
        *,
        async_op: Literal[True],
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> Work[A]: ...
    @overload
    def scatter(
        self,
        x: A | list[A] | tuple[A, ...] | None,
        out: A,
        root: int = 0,
        *,
        async_op: bool,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A | Work[A]: ...
    def scatter(
        self,
        x: A | list[A] | tuple[A, ...] | None,
        out: A,
        root: int = 0,
        *,
        async_op: bool = False,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A | Work[A]:
        """`out` of rank r becomes part r of the root's x (a list, or an array of world_size * out.size
        elements; ignored on the others).
        """
        parts = self._parts("scatter", x, as_tensor(out).numel()) if self.rank == root else []
        return self._comm.scatter(out, parts, root, out, async_op, algorithm, timeout)

    def _parts(self, op: str, arrays: A | list[A] | tuple[A, ...] | None, numel: int) -> list[torch.Tensor]:
        """The tensors of a list of arrays, or of a contiguous array the parts of numel elements each."""
        if isinstance(arrays, (list, tuple)):
            return as_tensors(arrays)
        flat = as_tensor(arrays)  # type: ignore[arg-type]  # raises TypeError for None
        if flat.numel() != numel * self.world_size:
            raise self._wrong(
                op, f"the array of all parts has {flat.numel()} elements, expected world_size * {numel}"
            )
        if not flat.is_contiguous():
            raise self._wrong(op, "the array of all parts must be contiguous; or pass a list of arrays")
        return list(flat.view(-1).chunk(self.world_size)) if numel else [flat.view(-1)] * self.world_size
