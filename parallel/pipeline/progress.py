"""How far the forward of a stage has come, and the calls that are out of order.

    place      IDLE | BEFORE                 | INSIDE                       | AFTER            | IDLE
    stage 1         embeddings, blocks 0, 1    blocks 2, 3, what is between   (last stage: head)

A stage runs all of its blocks once each, in the order in which they are registered. Modules outside the
blocks are registered on the side of the blocks on which they are called (models/trunk.py, Side).

What can go wrong: a model that is registered in another order than it runs in, runs blocks twice or leaves
some out, or is called by the user between passes. All of this raises here, in every pass.
"""

import contextlib
import enum
from collections.abc import Iterator

import torch

from pycomm.parallel.models.trunk import Side
from pycomm.parallel.pipeline.placement import Stages

__all__ = ["Place", "Progress", "in_backward"]


class Place(enum.Enum):
    """Where in the model its forward is."""

    IDLE = "not running"
    BEFORE = "before the blocks of this stage"
    INSIDE = "in a block of this stage"
    AFTER = "behind the last block of this stage"


class Progress:
    """The pass of one stage. name: of the trunk, for errors."""

    def __init__(self, stages: Stages, name: str) -> None:
        self.stages, self.name = stages, name
        self.stage = 0  # the one that runs
        self.place = Place.IDLE
        self.at: int | None = None  # index of the block that ran last in this pass
        self.in_block = False  # whether it has not returned

    def begin(self, stage: int) -> None:
        self.stage, self.place, self.at, self.in_block = stage, Place.BEFORE, None, False

    def end(self) -> None:
        self.place = Place.IDLE

    def enter_block(self, index: int) -> None:
        self.at, self.place = index, Place.INSIDE

    @contextlib.contextmanager
    def running_block(self) -> Iterator[None]:
        """Around the forward of a block. An error of the block leaves `in_block` true."""
        self.in_block = True
        yield
        self.in_block = False

    def leave_blocks(self) -> None:
        """The last block of the model has returned."""
        self.place = Place.AFTER

    def is_behind(self, stage: int) -> bool:
        """Whether the stage that runs comes after this one."""
        return self.stage > stage

    @property
    def bounds(self) -> tuple[int, int]:
        """The first block of the stage that runs, and the one after its last."""
        return self.stages.bounds[self.stage]

    def check_running(self) -> None:
        if self.place is Place.IDLE and in_backward():
            raise ValueError(
                "a checkpoint in the model's own code runs blocks again in backward, where the plan cannot "
                "cut them: take it out, and use Plan(checkpoint=True)"
            )
        if self.place is Place.IDLE:
            raise ValueError(
                "this model is cut into pipeline stages or along the sequence, and a part of it is called by "
                "itself: call it through parallel.step or parallel.evaluate"
            )

    def check_order(self, index: int) -> None:
        """A stage runs all of its blocks, if any, and leaves at the one that follows."""
        first, end = self.bounds
        expected = first if self.at is None else self.at + 1
        if index == expected or self.at is not None and self.at < index < end:
            return
        raise ValueError(
            f"block {index} of {self.name!r} runs "
            f"{'first' if self.at is None else f'after block {self.at}'}: pipeline stages "
            "and a split sequence need the blocks to run once each, in the order in which they are "
            "registered"
        )

    def check_side(self, module: str, side: Side) -> None:
        """Of a module outside the blocks that is called now."""
        (owner,) = self.stages.of(side)
        if self.place is Place.AFTER and side in (Side.BEFORE, Side.BETWEEN):
            raise ValueError(
                f"{module!r} is registered {side.value} the blocks of {self.name!r} but called after "
                "them: register it after them"
            )
        if side is Side.AFTER and self.place is Place.BEFORE:
            raise ValueError(
                f"{module!r} is registered after the blocks of {self.name!r} but called before them: "
                "register it before them"
            )
        if self.stage < owner:
            what, called = (
                ("after", "between them") if side is Side.AFTER else ("between", "before the second")
            )
            raise ValueError(
                f"{module!r} is registered {what} the blocks of {self.name!r} but called {called}: "
                "move it into a block, or register it where it is called"
            )


def in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0
