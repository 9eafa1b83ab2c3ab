"""What the parts of a Communicator know of it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from pycomm import env, metrics
from pycomm.arrays import A, as_tensor, like
from pycomm.options import seconds

if TYPE_CHECKING:
    import torch.distributed as dist

    from pycomm import _C

__all__ = ["Member"]

DEFAULT_TIMEOUT = 300.0  # seconds


class Member:
    """One rank's part in a group. Attributes:

    rank, world_size: of this process in the group.
    name: of the group, as in errors.
    """

    rank: int
    world_size: int
    name: str
    _comm: _C.Communicator
    _store: dist.Store | _C.LocalStore | _C.PageStore
    _splits: int
    _timeout: float
    _settings: env.Settings

    def _take(
        self,
        comm: _C.Communicator,
        store: dist.Store | _C.LocalStore | _C.PageStore,
        name: str,
        timeout: float,
        settings: env.Settings,
    ) -> None:
        for op, algorithm in settings.algorithm.items():
            comm.set_algorithm(op, algorithm)
        metrics.watch(comm, name)
        self._comm = comm
        self._store = store
        self._splits = 0
        self._timeout = timeout
        self._settings = settings
        self.name = name
        self.rank = comm.rank
        self.world_size = comm.world_size

    def describe(self) -> dict[str, Any]:
        """Facts about the group as a dict: how peers' memory is reached, staging, threads, SIMD level.
        "cuda": None before the first operation on a device, then a dict: protocol and why, blocks per
        operation, access to peers' memory, bytes of staging."""
        return self._comm.describe()

    def abort(self, reason: str = "") -> None:
        """From any thread: every operation under way on any rank, and every later one, raises
        AbortedError.
        """
        self._comm.abort(reason)

    def close(self) -> None:
        """Leaves the group. Peers that still wait for this rank raise PeerError. Closing twice is allowed.

        Warns (RuntimeWarning) about small messages that can no longer be received.

        Raises:
            MismatchError: Small messages that this rank sent did not match their recvs, and no call has
                raised that yet. The group is closed.
        """
        if unreceived := self._comm.close():
            warnings.warn(unreceived, RuntimeWarning, stacklevel=2)

    def _of_all(self, x: A) -> A:
        """A new array for every rank's x."""
        tensor = as_tensor(x)
        return like(tensor.new_empty((self.world_size, *tensor.shape)), x)

    def _wrong(self, op: str, text: str) -> ValueError:
        return ValueError(f"[rank {self.rank}/{self.world_size}] {op}: {text}")

    def _set_timeout(self, timeout: float) -> None:
        self._comm.set_timeout(timeout)
        self._timeout = timeout

    def _limit(self, timeout: float | None) -> float:
        return seconds(timeout, "the group's") or self._timeout

    @staticmethod
    def _own_limit(timeout: float | None, settings: env.Settings | None = None) -> float:
        own = (settings or env.settings()).timeout or DEFAULT_TIMEOUT
        return seconds(timeout, "PYCOMM_TIMEOUT or 300") or own
