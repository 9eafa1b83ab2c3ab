"""The checkpoint that a run goes back to where its snapshots cannot bring back what was lost."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn

__all__ = ["Checkpoints"]

LOG = logging.getLogger("pycomm.parallel")


class Checkpoints:
    def __init__(self) -> None:
        self.last: Path | None = None  # that parallel.save has written or parallel.load has read

    def note(self, model: nn.Module) -> Checkpoints:
        """Before the model is built anew: a save that is under way ends, with an error where its group has
        lost a rank. Returns this object.
        """
        parts = model.__dict__.get("_parallel")
        if parts is not None:
            try:
                parts.saves.wait()
            except Exception as error:
                LOG.warning(
                    "the save that was under way failed; the checkpoint before it is whole: %s", error
                )
            self.last = parts.saves.last or self.last
        return self

    def __str__(self) -> str:
        if self.last is None:
            return "There is no checkpoint to go back to: no parallel.save of this run has ended"
        return f"Go back to the last checkpoint: parallel.load(model, opt, {str(self.last)!r})"

    @contextlib.contextmanager
    def after(self, step: int, leave: Callable[[], None]) -> Iterator[None]:
        """Around a recovery. An error that is not the loss of a further rank, which begins it anew, ends the
        run of this rank: leave() tells the others.
        """
        try:
            yield
        except dist.DistError:
            raise
        except Exception as error:
            leave()
            raise RuntimeError(
                f"resilient: what was lost at step {step} cannot be recovered: {error}. {self}"
            ) from error
