"""Plans that choose themselves: what a plan takes in time and memory is predicted, and the best is searched.

planner.py         auto, explain, simulate
asked.py           checks of what is asked of the planner
model.py           parameters, products and activations of a model, module by module
named.py           models by name, and from a config of transformers
traced.py          the Model of a torch module, from one forward on fake tensors
recorded.py        that forward, and what is recorded of it
even_experts.py    mixtures of experts without values: tokens are dealt evenly
quantities.py      seconds, bytes, elements and FLOPs, as types
machine.py         devices and links, from TOML files
calibrate.py       measures this machine and writes its TOML file
job.py             a model under a plan on a machine, and the program that runs it
compute.py         seconds of a block
collectives.py     seconds of a collective
costs.py           bytes and messages of each strategy
events.py          the pipeline, by the runtime's own schedules
time.py            seconds of a step
memory.py          bytes of a rank, and where their peak is
space.py           all plans of so many ranks that are possible
search.py          the best of them that fit into memory
refusal.py         why there is no plan, and what would make one possible
report.py          tables of plans, why the first is first and others lose
dry_run.py         calls, bytes and memory of a rank exactly, by the runtime's own code
trace.py           a step for chrome://tracing
plot.py            pictures of a search
__main__.py        the command `python -m pycomm.plan`

How near all of it is: docs/planning.md.
"""

from pycomm.parallel.planning.dry_run import dry_run
from pycomm.parallel.planning.machine import load_machine
from pycomm.parallel.planning.named import named
from pycomm.parallel.planning.planner import auto, explain, simulate
from pycomm.parallel.planning.search import NoPlan
from pycomm.parallel.planning.traced import trace_model

__all__ = ["NoPlan", "auto", "dry_run", "explain", "load_machine", "named", "simulate", "trace_model"]
