"""Parallel training strategies, composed by one plan.

    import pycomm.parallel as par
    plan = par.auto(model, opt, batch=batch, world=8)                          # or write one yourself
    par.verify(model, batch, "dp=2,tp=2,pp=2,zero=1", loss_fn)                 # equal to one process?
    model, opt = par.parallelize(model, opt, "dp=2,tp=2,pp=2,zero=1")
    loss = par.step(model, opt, batch, loss_fn, microbatches=8, clip=1.0)
    par.save(model, opt, "ckpt"); par.load(model, opt, "ckpt")
    run = par.resilient(model, opt, "dp=4,zero=1")                             # goes on when ranks die

What each strategy does, sends and holds: docs/strategies.md. A strategy alone is a class or function with
torch's conventions, from its folder:

    par.data        DistributedDataParallel, NaiveDataParallel
    par.tensor      ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, parallelize_tensor
    par.sequence    ulysses_attention, ring_attention, ring_ulysses_attention
    par.pipeline    make_schedule, simulate, ModelParallel
    par.expert      MoE
    par.planning    simulate, dry_run, load_machine, trace_model
"""

from typing import TYPE_CHECKING, NoReturn

from pycomm.parallel import data, expert, pipeline, planning, recovery, sequence, tensor
from pycomm.parallel.api import evaluate, grad_norm, predict, sampler, step
from pycomm.parallel.building import describe, parallelize
from pycomm.parallel.checkpoint import (
    ema,
    full_gradients,
    full_state_dict,
    gathered,
    load,
    load_state_dict,
    num_parameters,
    save,
    state_dict,
)
from pycomm.parallel.data import gather_rows
from pycomm.parallel.expert import MoE
from pycomm.parallel.ground.comm import count_traffic
from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.planning import auto, explain
from pycomm.parallel.recovery import resilient
from pycomm.parallel.run.own_loop import clip_grad_norm_
from pycomm.parallel.tensor import cross_entropy
from pycomm.parallel.verification import verify

__all__ = [
    "MoE",
    "Plan",
    "auto",
    "clip_grad_norm_",
    "count_traffic",
    "cross_entropy",
    "describe",
    "ema",
    "evaluate",
    "explain",
    "full_gradients",
    "full_state_dict",
    "gather_rows",
    "gathered",
    "grad_norm",
    "load",
    "load_state_dict",
    "num_parameters",
    "parallelize",
    "predict",
    "resilient",
    "sampler",
    "save",
    "state_dict",
    "step",
    "verify",
]

_FOLDERS = (data, expert, pipeline, planning, recovery, sequence, tensor)


if not TYPE_CHECKING:  # for which a module with this function has every name

    def __getattr__(name: str) -> NoReturn:
        """Names of the folders are found in the folders only; the error says where."""
        homes = [folder.__name__ for folder in _FOLDERS if name in folder.__all__]
        hint = f": write {' or '.join(f'{home}.{name}' for home in homes)}" if homes else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(folder.__name__.rpartition(".")[2] for folder in _FOLDERS)])
