"""Pipeline parallelism: schedules as data, their timelines, the executor, the split backward, and PipeDream's
weight stashing.

apply.py             the pipeline of a plan: stages, and weight gradients that wait
schedules.py         the order in which each rank runs its passes
timeline.py          when each pass would run: the bubble, and pictures
executor.py          runs this rank's part of a schedule
placement.py         which blocks make up a stage, and which rank holds it
stage.py             a model's own forward, run for a part of its blocks
progress.py          how far that forward has come, and calls that are out of order
pieces.py            blocks of a stage where the sequence is cut
absent_modules.py    which modules other stages have, and what this rank has instead of them
absent.py            what a stage has instead of values that other stages compute
templates.py         the shapes of what absent modules return
handover.py          what a stage hands on to the next one
assumptions.py       what later stages take for granted of a block, compared with its result
outer_state.py       what the model's own forward writes outside of its blocks
refused.py           torch.autograd.grad, whose graph other stages have
ties.py              weights that several stages hold
updates.py           PipeDream's updates, after every microbatch
pipedream.py         PipeDream's versions of weights
model_parallel.py    layers on each rank, one rank at work: the baseline
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
