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
      last_words             what ranks have raised, for those that wait for them              ground/
      checks                 what was found of each assumption                                 ground/
      hyperparameters        those of the optimizer, as compared by the ranks                  ground/

It is frozen: after parallelize() nobody exchanges a part. The parts have state of their own (gradients,
random streams).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn

from pycomm.parallel.data.bucket import ParamInfo
from pycomm.parallel.data.reducer import Reducer
from pycomm.parallel.expert.moe import MoE
from pycomm.parallel.ground.answers import Answers
from pycomm.parallel.ground.background import Background
from pycomm.parallel.ground.hyperparameters import Hyperparameters
from pycomm.parallel.ground.last_words import LastWords
from pycomm.parallel.ground.mesh import Mesh
from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.ground.split_backward import WeightStore
from pycomm.parallel.ground.streams import RandomStreams
from pycomm.parallel.ground.window import Window
from pycomm.parallel.pipeline.placement import Stages
from pycomm.parallel.pipeline.stage import StageModel
from pycomm.parallel.pipeline.ties import Tie
from pycomm.parallel.sequence.sequence_split import SequenceSplit
from pycomm.parallel.tensor import TensorParallel
from pycomm.parallel.tensor.reads import Reads
from pycomm.parallel.zero.shards import Shards
from pycomm.parallel.zero.units import Units

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
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


class LastStep:
    """What the last step found; grad_norm() and describe() ask for it."""

    def __init__(self) -> None:
        self.norm: torch.Tensor | None = None  # of the whole gradient; None: that step did not clip
        # {name of a group: bytes that this rank sent}; None: not counted, on one host
        self.sent: Mapping[str, int] | None = None
        self.updates = 0  # how many steps have updated the parameters

    def note(self, norm: torch.Tensor | None, sent: Mapping[str, int] | None = None) -> None:
        self.norm, self.sent = norm, sent


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
    ties: tuple[Tie, ...]  # weights that two stages hold
    last_words: LastWords  # what ranks have raised
    hyperparameters: Hyperparameters  # of the optimizer, which the ranks compare in every step
    last_step: LastStep = dataclasses.field(default_factory=LastStep)
    window: Window = dataclasses.field(default_factory=Window)  # calls whose gradients wait for an update
    saves: Saves = dataclasses.field(default_factory=Saves)
    checks: Answers = dataclasses.field(default_factory=Answers)

    @property
    def all_shards(self) -> list[Shards]:
        return [shard for shards in self.shards.values() for shard in shards]


def attach(model: nn.Module, parts: Parallelized) -> None:
    """Makes parts_of(model) find its Parallelized. It is no submodule: the model's tree stays the user's."""
    model.__dict__["_parallel"] = parts
    model.__dict__["__deepcopy__"] = model.__dict__["__reduce_ex__"] = functools.partial(_refuse_copy, model)


def _refuse_copy(model: nn.Module, *_: object) -> NoReturn:
    """For copy.deepcopy and pickle."""
    raise ValueError(
        f"this {type(model).__name__} is one rank's part of a model under Plan({parts_of(model).plan}), and "
        "shares the plan's groups and buffers: it cannot be copied or pickled. Copy the model before "
        "parallelize; save it with parallel.save, or parallel.full_state_dict; for an average of its values "
        "(EMA, AveragedModel) average what the optimizer of each rank holds (docs/strategies.md, Around the "
        "step)"
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
