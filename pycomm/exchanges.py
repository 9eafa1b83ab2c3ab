"""The collectives of a Communicator in which every rank gives to every other: all_gather, all_to_all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from pycomm.arrays import A, L, as_tensor, like
from pycomm.member import Member

if TYPE_CHECKING:
    from pycomm.communicator import Work
    from pycomm.options import Algorithm

__all__ = ["Exchanges"]


class Exchanges(Member):
    """The part of a Communicator that moves data among all ranks.

    What all operations have in common: pycomm.Communicator.
    """

    @overload
    def all_gather(
        self,
        x: A,
        out: A | None = None,
        *,
        async_op: Literal[False] = False,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A: ...
    @overload
    def all_gather(
        self,
        x: A,
        out: A | None = None,
        *,
        async_op: Literal[True],
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> Work[A]: ...
    @overload
    def all_gather(
        self,
        x: A,
        out: A | None = None,
        *,
        async_op: bool,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A | Work[A]: ...
    @overload
    def all_gather(
        self,
        x: A,
        out: L,
        *,
        async_op: Literal[False] = False,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> L: ...
    @overload
    def all_gather(
        self,
        x: A,
        out: L,
        *,
        async_op: Literal[True],
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> Work[L]: ...
    @overload
    def all_gather(
        self,
        x: A,
        out: L,
        *,
        async_op: bool,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> L | Work[L]: ...
    def all_gather(
        self,
        x: A,
        out: A | L | None = None,
        *,
        async_op: bool = False,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A | L | Work[A | L]:
        """Every rank gets every rank's x.

        out: an array of world_size * x.size elements, or a list of world_size arrays, whose sizes may differ
            (each as the x of its rank). None: a new array of shape (world_size, *x.shape).
        """
        if isinstance(out, (list, tuple)):
            return self._comm.all_gather(x, out, out, async_op, algorithm, timeout)
        if out is None:
            out = self._of_all(x)
        return self._comm.all_gather_flat(x, out, out, async_op, algorithm, timeout)

    @overload
    def all_to_all(
        self,
        x: A,
        out: A | None = None,
        *,
        in_splits: Sequence[int] | None = None,
        out_splits: Sequence[int] | None = None,
        async_op: Literal[False] = False,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A: ...
    @overload
    def all_to_all(
        self,
        x: A,
        out: A | None = None,
        *,
        in_splits: Sequence[int] | None = None,
        out_splits: Sequence[int] | None = None,
        async_op: Literal[True],
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> Work[A]: ...
    @overload
    def all_to_all(
        self,
        x: A,
        out: A | None = None,
        *,
        in_splits: Sequence[int] | None = None,
        out_splits: Sequence[int] | None = None,
        async_op: bool,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A | Work[A]: ...
    @overload
    def all_to_all(
        self,
        x: list[A] | tuple[A, ...],
        out: L,
        *,
        async_op: Literal[False] = False,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> L: ...
    @overload
    def all_to_all(
        self,
        x: list[A] | tuple[A, ...],
        out: L,
        *,
        async_op: Literal[True],
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> Work[L]: ...
    @overload
    def all_to_all(
        self,
        x: list[A] | tuple[A, ...],
        out: L,
        *,
        async_op: bool,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> L | Work[L]: ...
    def all_to_all(
        self,
        x: A | list[A] | tuple[A, ...],
        out: A | L | None = None,
        *,
        in_splits: Sequence[int] | None = None,
        out_splits: Sequence[int] | None = None,
        async_op: bool = False,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
    ) -> A | L | Work[A | L]:
        """Rank r gets part r of every rank's x, in order of rank.

        x, out: two arrays, cut along the first dimension by the splits (rows per rank; None: evenly), or two
            lists of world_size arrays, whose sizes may differ pairwise. out=None with even splits: a new
            array like x.
        """
        # The extension raises TypeError where one is a list and the other is none.
        if isinstance(x, (list, tuple)):
            if out is None:
                raise self._wrong("all_to_all", "with a list of inputs pass a list of outputs")
            lists: Any = out
            return self._comm.all_to_all(x, lists, out, async_op, algorithm, timeout)
        if out is None:
            tensor = as_tensor(x)
            rows = sum(out_splits) if out_splits is not None else None
            shape = tensor.shape if rows is None else (rows, *tensor.shape[1:])
            out = like(tensor.new_empty(shape), x)
        flat: Any = out
        return self._comm.all_to_all_flat(x, flat, in_splits, out_splits, out, async_op, algorithm, timeout)
