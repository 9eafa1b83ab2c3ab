"""Pipeline parallelism: schedules as data, their timelines, the executor, the split backward, and PipeDream's
weight stashing.
"""

from pycomm.parallel.ground.split_backward import DeferWeights, WeightStore, accumulate_grad
from pycomm.parallel.pipeline.executor import StageOps, run
from pycomm.parallel.pipeline.model_parallel import ModelParallel
from pycomm.parallel.pipeline.pipedream import WeightStash
from pycomm.parallel.pipeline.schedules import (
    NAMES,
    Action,
    Schedule,
    make_schedule,
    peak_activations,
    validate,
)
from pycomm.parallel.pipeline.timeline import Timeline, simulate

__all__ = [
    "NAMES",
    "Action",
    "DeferWeights",
    "ModelParallel",
    "Schedule",
    "StageOps",
    "Timeline",
    "WeightStash",
    "WeightStore",
    "accumulate_grad",
    "make_schedule",
    "peak_activations",
    "run",
    "simulate",
    "validate",
]
