"""Parallel training strategies, composed by one plan.

    import pycomm.parallel as par
    model, opt = par.parallelize(model, opt, par.Plan(dp=2, tp=2, pp=2, zero=1))
    loss = par.step(model, opt, batch, loss_fn, microbatches=8, clip=1.0)
    par.save(model, opt, "ckpt"); par.load(model, opt, "ckpt")

What each strategy does, sends and holds: docs/strategies.md. A strategy alone is a class or function with torch's conventions, below.
"""

from pycomm.parallel.api import evaluate, sampler, step
from pycomm.parallel.build import parallelize
from pycomm.parallel.comm import count_traffic
from pycomm.parallel.expert.moe import MoE
from pycomm.parallel.plan import Plan
from pycomm.parallel.tensor import cross_entropy

__all__ = ["MoE", "Plan", "count_traffic", "cross_entropy", "evaluate", "parallelize", "sampler", "step"]
