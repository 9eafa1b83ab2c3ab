"""Parallel training strategies, composed by one plan.

    import pycomm.parallel as par
    model, opt = par.parallelize(model, opt, par.Plan(dp=2, tp=2, pp=2, zero=1))
    loss = par.step(model, opt, batch, loss_fn, microbatches=8, clip=1.0)
    par.save(model, opt, "ckpt"); par.load(model, opt, "ckpt")

What each strategy does, sends and holds: docs/strategies.md. A strategy alone is a class or function with torch's conventions, from here
or from its folder: data/, zero/, tensor/, sequence/, pipeline/, expert/.
"""

from pycomm.parallel.api import evaluate, grad_norm, sampler, step
from pycomm.parallel.build import parallelize
from pycomm.parallel.checkpoint import full_gradients, full_state_dict, load, save
from pycomm.parallel.comm import count_traffic
from pycomm.parallel.data.ddp import DistributedDataParallel
from pycomm.parallel.data.naive import NaiveDataParallel
from pycomm.parallel.expert.moe import MoE
from pycomm.parallel.model_parallel import ModelParallel
from pycomm.parallel.pipeline import make_schedule
from pycomm.parallel.plan import Plan
from pycomm.parallel.sequence import ring_attention, ring_ulysses_attention, ulysses_attention
from pycomm.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "ModelParallel",
    "MoE",
    "NaiveDataParallel",
    "Plan",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "count_traffic",
    "cross_entropy",
    "evaluate",
    "full_gradients",
    "full_state_dict",
    "grad_norm",
    "load",
    "make_schedule",
    "parallelize",
    "ring_attention",
    "ring_ulysses_attention",
    "sampler",
    "save",
    "step",
    "ulysses_attention",
]
