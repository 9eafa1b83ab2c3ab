"""PipeDream's weight stashing: a microbatch goes backward through the very weights that it went forward
through.

PipeDream runs 1F1B without a flush and updates a stage after every backward, so the weights change while
microbatches are under way:

    rank 0 of 2     F0 F1 B0 U0 F2 B1 U1 F3 ...     F2 uses the weights after U0, F3 those after U1
    versions        v0 v0 v0    v1 v0    v2         B1 must use v0, though v1 is the latest; its gradient
                                                    changes v1 into v2

    w(t+1) = w(t) - lr * gradient of f at the version that the microbatch's forward used on this stage

A version is the storage of the parameters. saving(i) around the forward notes the storage in use. Before an
optimizer writes, detach_from_stash() moves the parameters to fresh storage if the old one is noted: one copy
per update, none per microbatch. using(i) around the backward makes the noted storage that of the parameters.
drop(i) comes before the update: the storage is then written in place where no other microbatch needs it, as
on the last rank always.

[Note: what backward reads] layer_norm and matmul save the parameter itself, and so does activation
checkpointing, which recomputes from it: for them using() exchanges its data. F.linear and x @ w.t() save the
view w.t(), which keeps the old storage by itself; F.embedding saves nothing of it. In each case autograd
would compare version counts, and the optimizer's in-place update counts as a change although it went to other
storage. What passes through saved-tensor hooks is not compared, so saving() installs hooks that do nothing
else. The price: an operation of the model that overwrites an activation which its backward needs is no longer
noticed.

Cost: versions held at once, the latest included: at most pp - rank, as many as 1F1B has microbatches under
way; one copy of the parameters per update. The parameters must not be views of a flat buffer that others
write, since they leave it at the first update. Optimizer state is not stashed (Narayanan et al. 2019, section
3.3).
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

__all__ = ["WeightStash"]


class _Version(NamedTuple):
    number: int
    tensors: tuple[torch.Tensor, ...]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class WeightStash:
    """The versions of `params` (of one stage) that microbatches under way still need. Tied parameters may be
    given twice.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        self.params = list(dict.fromkeys(params))
        self.number = 0  # of the version that the parameters hold
        self.stashed: dict[int, _Version] = {}  # of each microbatch

    @property
    def versions(self) -> int:
        """How many versions are held in memory, the latest included."""
        return len({version.number for version in self.stashed.values()} | {self.number})

    @contextlib.contextmanager
    def saving(self, microbatch: int) -> Iterator[None]:
        """Around the forward of a microbatch: notes the version in use, and makes what autograd saves of it
        outlive updates.
        """
        if microbatch in self.stashed:
            raise ValueError(
                f"microbatch {microbatch} is stashed already; drop({microbatch}) it after its backward, or "
                "number it otherwise"
            )
        self.stashed[microbatch] = _Version(self.number, tuple(param.data for param in self.params))
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
            yield

    @contextlib.contextmanager
    def using(self, microbatch: int) -> Iterator[None]:
        """Around the backward of a microbatch: the parameters hold the version of its forward, and afterwards
        the latest again.
        """
        if microbatch not in self.stashed:
            raise ValueError(
                f"microbatch {microbatch} is not stashed, only {sorted(self.stashed)}; run its forward "
                f"inside saving({microbatch})"
            )
        latest = [param.data for param in self.params]
        for param, tensor in zip(self.params, self.stashed[microbatch].tensors, strict=True):
            param.data = tensor
        try:
            yield
        finally:
            for param, tensor in zip(self.params, latest, strict=True):
                param.data = tensor

    def detach_from_stash(self) -> None:
        """Before the optimizer writes: moves the parameters to fresh storage if a microbatch still needs what
        they hold.
        """
        if any(version.number == self.number for version in self.stashed.values()):
            self.number += 1
            for param in self.params:
                param.data = param.data.clone()

    def drop(self, microbatch: int) -> None:
        """After the backward of a microbatch: its version may go."""
        del self.stashed[microbatch]
