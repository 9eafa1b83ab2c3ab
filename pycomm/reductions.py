"""The collectives of a Communicator that compute: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch

from pycomm.arrays import A, as_tensor, like
from pycomm.member import Member

if TYPE_CHECKING:
    from pycomm.communicator import Work
    from pycomm.options import Algorithm, Reduction

__all__ = ["Reductions"]


class Reductions(Member):
    """The part of a Communicator that reduces. What all operations have in common: pycomm.Communicator."""

    @overload
    def all_reduce(
        self,
        x: A,
        op: Reduction = "sum",
        *,
        out: A | None = None,
        async_op: Literal[False] = False,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A: ...
    @overload
    def all_reduce(
        self,
        x: A,
        op: Reduction = "sum",
        *,
        out: A | None = None,
        async_op: Literal[True],
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> Work[A]: ...
    @overload
    def all_reduce(
        self,
        x: A,
        op: Reduction = "sum",
        *,
        out: A | None = None,
        async_op: bool,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A | Work[A]: ...
    def all_reduce(
        self,
        x: A,
        op: Reduction = "sum",
        *,
        out: A | None = None,
        async_op: bool = False,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A | Work[A]:
        """Every rank gets the reduction of all ranks' x, in place or in `out`. The bits are equal on all
        ranks.
        """
        out = x if out is None else out
        return self._comm.all_reduce(x, out, op, out, async_op, algorithm, timeout)

    @overload
    def reduce(
        self,
        x: A,
        root: int = 0,
        op: Reduction = "sum",
        *,
        out: A | None = None,
        async_op: Literal[False] = False,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A | None: ...
    @overload
    def reduce(
        self,
        x: A,
        root: int = 0,
        op: Reduction = "sum",
        *,
        out: A | None = None,
        async_op: Literal[True],
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> Work[A | None]: ...
    @overload
    def reduce(
        self,
        x: A,
        root: int = 0,
        op: Reduction = "sum",
        *,
        out: A | None = None,
        async_op: bool,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A | None | Work[A | None]: ...
    def reduce(
        self,
        x: A,
        root: int = 0,
        op: Reduction = "sum",
        *,
        out: A | None = None,
        async_op: bool = False,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A | None | Work[A | None]:
        """The root gets the reduction of all ranks' x, in place or in `out`; x of the others is unchanged.
        Returns None on them.
        """
        out = x if out is None else out
        result = out if self.rank == root else None
        return self._comm.reduce(x, out, op, root, result, async_op, algorithm, timeout)

    @overload
    def reduce_scatter(
        self,
        x: A | list[A] | tuple[A, ...],
        out: A | None = None,
        op: Reduction = "sum",
        *,
        async_op: Literal[False] = False,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A: ...
    @overload
    def reduce_scatter(
        self,
        x: A | list[A] | tuple[A, ...],
        out: A | None = None,
        op: Reduction = "sum",
        *,
        async_op: Literal[True],
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> Work[A]: ...
    @overload
    def reduce_scatter(
        self,
        x: A | list[A] | tuple[A, ...],
        out: A | None = None,
        op: Reduction = "sum",
        *,
        async_op: bool,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A | Work[A]: ...
    def reduce_scatter(
        self,
        x: A | list[A] | tuple[A, ...],
        out: A | None = None,
        op: Reduction = "sum",
        *,
        async_op: bool = False,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A | Work[A]:
        """Rank r gets the reduction of part r of all ranks' x.

        x: an array whose first dimension is a multiple of world_size, or a list of world_size arrays, whose
            sizes may differ.
        out: an array of the size of this rank's part; None: a new one.
        """
        if out is None:
            out = self._own_part(x)
        if isinstance(x, (list, tuple)):
            return self._comm.reduce_scatter(x, out, op, out, async_op, algorithm, timeout)
        return self._comm.reduce_scatter_flat(x, out, op, out, async_op, algorithm, timeout)

    def _own_part(self, x: A | list[A] | tuple[A, ...]) -> A:
        """A new array for this rank's part of x."""
        n, mine = self.world_size, self.rank
        if isinstance(x, (list, tuple)):
            if len(x) != n:
                raise self._wrong("reduce_scatter", f"got a list of {len(x)} arrays for {n} ranks")
            part = torch.empty_like(as_tensor(x[mine]), memory_format=torch.contiguous_format)
            return like(part, x[mine])
        source = as_tensor(x)
        if source.dim() == 0 or source.shape[0] % n:
            shape = tuple(source.shape)
            raise self._wrong(
                "reduce_scatter", f"the first dimension of x, shape {shape}, is not a multiple of world_size"
            )
        return like(source.new_empty((source.shape[0] // n, *source.shape[1:])), x)
