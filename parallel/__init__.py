"""Parallel training strategies, composed by one plan.

    import pycomm.parallel as par
    plan = par.auto(model, opt, batch=batch, world=8)                          # or write one yourself
    par.verify(model, batch, "dp=2,tp=2,pp=2,zero=1", loss_fn)                 # equal to one process?
    model, opt = par.parallelize(model, opt, "dp=2,tp=2,pp=2,zero=1")
    loss = par.step(model, opt, batch, loss_fn, microbatches=8, clip=1.0)
    par.save(model, opt, "ckpt"); par.load(model, opt, "ckpt")

What each strategy does, sends and holds: docs/strategies.md. A strategy alone is a class or function with
torch's conventions, from its folder:

    par.data        DistributedDataParallel, NaiveDataParallel
    par.tensor      ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, parallelize_tensor
    par.sequence    ulysses_attention, ring_attention, ring_ulysses_attention
    par.pipeline    make_schedule, simulate, ModelParallel
    par.expert      MoE
    par.planning    auto, explain, simulate, dry_run
    par.recovery    resilient: a training that goes on when ranks die
"""

from pycomm.parallel import data, expert, pipeline, planning, recovery, sequence, tensor
from pycomm.parallel.api import evaluate, grad_norm, predict, sampler, step
from pycomm.parallel.building import describe, parallelize
from pycomm.parallel.checkpoint import full_gradients, full_state_dict, load, save
from pycomm.parallel.expert import MoE
from pycomm.parallel.ground.comm import count_traffic
from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.planning import auto, explain
from pycomm.parallel.tensor import cross_entropy
from pycomm.parallel.verification import verify

__all__ = [
    "MoE",
    "Plan",
    "auto",
    "count_traffic",
    "cross_entropy",
    "describe",
    "evaluate",
    "explain",
    "full_gradients",
    "full_state_dict",
    "grad_norm",
    "load",
    "parallelize",
    "predict",
    "sampler",
    "save",
    "step",
    "verify",
]

_FOLDERS = (data, expert, pipeline, planning, recovery, sequence, tensor)

# Names that live in a folder and are found here, too: most were here before they had one.
_MOVED = {
    "ColumnParallelLinear": tensor,
    "DistributedDataParallel": data,
    "ModelParallel": pipeline,
    "NaiveDataParallel": data,
    "RowParallelLinear": tensor,
    "VocabParallelEmbedding": tensor,
    "make_schedule": pipeline,
    "resilient": recovery,
    "ring_attention": sequence,
    "ring_ulysses_attention": sequence,
    "simulate": planning,
    "ulysses_attention": sequence,
}


def __getattr__(name):
    if name in _MOVED:
        return getattr(_MOVED[name], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*__all__, *(folder.__name__.rpartition(".")[2] for folder in _FOLDERS)])
