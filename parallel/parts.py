"""What a parallelized model is made of on one rank: what building/ makes and run/ and checkpoint/ use.

    Parallelized
      plan, mesh             how many ranks; the groups of this one
      model, opt             the user's objects, changed in place
      original               names and shapes of the model before it was cut
      stages, stage_model    which blocks are here, and the forward of a part of them          pipeline/
      split                  which positions of a sequence are here                            sequence/
      tensor                 what tensor parallelism cut                                       tensor/
      reads                  parameters that are read in their own layers only                 tensor/
      moes                   layers whose experts were dealt                                   expert/
      infos                  the parameters of this rank
      reducers               stage -> its buckets: gradients of those parameters               data/
      shards                 stage -> values and master copies of the buckets' parameters      zero/
      units                  which shards are whole while which module runs                    zero/
      ties                   buckets whose gradient another stage has too                      pipeline/
      passes                 what this rank does with its model; the user's own loop            run/
      last_words             what ranks have raised, for those that wait for them              ground/
      trained                what requires_grad_() has changed                               zero/
      checks                 what was found of each assumption                                 ground/
      hyperparameters        those of the optimizer, as compared by the ranks                  ground/
      averages               of its values, with par.ema                                       ground/
      writes                 what the user writes to parameters between calls                  zero/

It is frozen: after parallelize() nobody exchanges a part. The parts have state of their own (gradients,
random streams).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn

from pycomm.parallel.data.bucket import ParamInfo
from pycomm.parallel.data.reducer import Reducer
from pycomm.parallel.expert.moe import MoE
from pycomm.parallel.ground.answers import Answers
from pycomm.parallel.ground.averages import Averages
from pycomm.parallel.ground.background import Background
from pycomm.parallel.ground.hyperparameters import Hyperparameters
from pycomm.parallel.ground.last_words import LastWords
from pycomm.parallel.ground.mesh import Mesh
from pycomm.parallel.ground.outside_reads import OutsideReads
from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.ground.split_backward import WeightStore
from pycomm.parallel.ground.streams import RandomStreams
from pycomm.parallel.ground.window import Window
from pycomm.parallel.pipeline.absent import is_absent
from pycomm.parallel.pipeline.placement import Stages
from pycomm.parallel.pipeline.stage import StageModel
from pycomm.parallel.pipeline.ties import Tie
from pycomm.parallel.sequence.sequence_split import SequenceSplit
from pycomm.parallel.tensor import TensorParallel
from pycomm.parallel.tensor.reads import Reads
from pycomm.parallel.zero.shards import Shards
from pycomm.parallel.zero.trained import Trained
from pycomm.parallel.zero.units import Units
from pycomm.parallel.zero.writes import Writes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from pycomm.parallel.ground.comm import Group

__all__ = ["LastStep", "Original", "Parallelized", "attach", "parts_of"]


@dataclasses.dataclass(frozen=True)
class Original:
    """The model as the user gave it, before parameters were cut or left."""

    names: tuple[str, ...]  # of all parameters in order, a tied one under its first name only
    first_name: dict[str, str]  # every name -> the first name of the same parameter
    shapes: dict[str, tuple[int, ...]]  # name, of `names` -> shape
    trained: frozenset[str]  # those of `names` that require a gradient
    option: dict[str, int]  # name -> index of its parameter group in the optimizer, where that has it
    moe_names: tuple[str, ...]  # of the MoE layers
    stacked_names: tuple[str, ...]  # of experts stacked in parameters that ep deals
    # every module -> its children; parameters of modules that the cuts have taken out are None
    children: dict[nn.Module, dict[str, nn.Module | None]]


class LastStep:
    """What the last step found; grad_norm() and describe() ask for it."""

    def __init__(self) -> None:
        self.norm: torch.Tensor | None = None  # of the whole gradient; None: that step did not clip
        # {name of a group: bytes that this rank sent}; None: not counted, on one host
        self.sent: Mapping[str, int] | None = None
        self.updates = 0  # how many steps have updated the parameters

    def note(self, norm: torch.Tensor | None, sent: Mapping[str, int] | None = None) -> None:
        self.norm, self.sent = norm, sent


class Passes:
    """What this rank is doing with its model; run/own_loop.py asks for it."""

    def __init__(self) -> None:
        self.running = 0  # forwards that the plan has begun, one inside of the other
        self.in_step = False  # parallel.step works
        self.left = False  # gradients of the last parallel.step are still there
        self.own = False  # gradients of the user's own loop wait for opt.step()
        self.drop: Callable[[], None] = lambda: None  # drops what the user's own loop has left
        self.outside = OutsideReads(())  # parameters that this loop must not read

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward that the plan has begun."""
        self.running += 1
        self.outside.allow()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self.outside.refuse()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around parallel.step, which begins without gradients."""
        self.drop()
        self.in_step, self.left, self.own = True, True, False
        self.outside.is_used = False
        try:
            yield
        finally:
            self.in_step = False


class Saves(Background):
    """The save that is written beside the training, if there is one."""

    def __init__(self) -> None:
        super().__init__("pycomm save")
        self._group: Group | None = None
        self.last: Path | None = None  # the last checkpoint that was saved or loaded

    def group_of(self, make: Callable[[], Group]) -> Group:
        """The group of these saves; the first time it is make(), collective over all ranks."""
        self._group = self._group or make()
        return self._group


@dataclasses.dataclass(frozen=True, eq=False)
class Parallelized:
    """See the head of the file."""

    plan: Plan
    mesh: Mesh
    model: nn.Module
    opt: torch.optim.Optimizer | None
    device: torch.device
    original: Original
    streams: RandomStreams  # the model's random numbers
    stages: Stages  # one stage without a pipeline
    stage_model: StageModel | None  # None: the model's forward runs whole, on whole sequences
    split: SequenceSplit | None  # None: whole sequences
    tensor: TensorParallel  # layouts of all parameters, and the head where it is cut
    reads: Reads | None  # of parameters that are cut; None: the plan has nothing that must not be read
    moes: tuple[MoE, ...]
    compute_dtype: torch.dtype | None  # None: the model's own
    infos: tuple[ParamInfo, ...]  # of every parameter of this rank, frozen ones included
    reducers: dict[int, Reducer]  # stage of this rank -> buckets of its trained parameters
    shards: dict[int, tuple[Shards, ...]]  # the same stages; with ZeRO-3 also those of frozen parameters
    deferred: WeightStore | None  # weight gradients for later; None: the schedule does not split the backward
    units: Units | None  # ZeRO-3 only
    ties: list[Tie]  # weights that two stages hold
    trained: Trained  # which parameters are, from step to step
    last_words: LastWords  # what ranks have raised
    hyperparameters: Hyperparameters  # of the optimizer, which the ranks compare in every step
    writes: Writes  # of the user, to the parameters
    last_step: LastStep = dataclasses.field(default_factory=LastStep)
    window: Window = dataclasses.field(default_factory=Window)  # calls whose gradients wait for an update
    passes: Passes = dataclasses.field(default_factory=Passes)
    saves: Saves = dataclasses.field(default_factory=Saves)
    checks: Answers = dataclasses.field(default_factory=Answers)
    averages: Averages = dataclasses.field(default_factory=Averages)

    @property
    def all_shards(self) -> list[Shards]:
        return [shard for shards in self.shards.values() for shard in shards]


def attach(model: nn.Module, parts: Parallelized) -> None:
    """Makes parts_of(model) find its Parallelized. It is no submodule: the model's tree stays the user's."""
    model.__dict__["_parallel"] = parts
    model.__dict__["_apply"] = functools.partial(_refuse_conversion, model)
    model.__dict__["__deepcopy__"] = model.__dict__["__reduce_ex__"] = functools.partial(_refuse_copy, model)


def _refuse_conversion(
    model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """In the place of _apply, through which to(), half(), cuda() and such work: what would change nothing
    goes, and the rest is refused.
    """
    tensors = [*model.parameters(), *model.buffers()]
    for dtype, device in {(tensor.dtype, tensor.device) for tensor in tensors if not is_absent(tensor)}:
        probe = torch.empty(1, dtype=dtype, device=device)
        other = convert(probe)
        if other is not probe or probe.is_shared() and device.type == "cpu":
            raise ValueError(
                f"this {type(model).__name__} is one rank's part of a model under "
                f"Plan({parts_of(model).plan}), in {dtype} on {device}, with buffers of the plan, and an "
                "optimizer, that were made for these: to(), "
                "half(), double(), cuda() and such come before parallelize. To compute in bfloat16 use "
                'precision="bf16" in the plan, or torch.autocast in the model'
            )
    return model


def _refuse_copy(model: nn.Module, *_: object) -> NoReturn:
    """For copy.deepcopy and pickle."""
    raise ValueError(
        f"this {type(model).__name__} is one rank's part of a model under Plan({parts_of(model).plan}), and "
        "shares the plan's groups and buffers: it cannot be copied or pickled. Copy the model before "
        "parallelize; save it with parallel.save, or parallel.full_state_dict; for an average of its values "
        "(EMA, AveragedModel) call parallel.ema(model, decay)"
    )


def parts_of(model: nn.Module, opt: torch.optim.Optimizer | None = None) -> Parallelized:
    """The Parallelized of a model. Raises ValueError for another model, or another optimizer than it was
    parallelized with.
    """
    parts = model.__dict__.get("_parallel") if isinstance(model, nn.Module) else None
    if parts is None:
        raise ValueError("this model has not been through parallelize()")
    if opt is not None and opt is not parts.opt:
        raise ValueError("this optimizer is not the one that the model was parallelized with")
    return parts
