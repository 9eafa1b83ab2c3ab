"""Plans that choose themselves: what a plan takes in time and memory is predicted, and the best is searched.

    model, named, traced    parameters, products and activations, module by module
    machine                 devices and links, from TOML files; calibrate measures this machine
    job                     a model under a plan on a machine, and the program that runs it
    compute, collectives    seconds of a block, and of a collective
    events                  the pipeline, by the runtime's own schedules
    memory, time            bytes of a rank and where their peak is; seconds of a step
    search, report          the best plans, why, and why others lose
    dry_run                 calls, bytes and memory of a rank exactly, by the runtime's own code
    planner                 auto, explain, simulate
    trace, plot             a step for chrome://tracing; pictures

How near all of it is: docs/planning.md.
"""

from pycomm.parallel.planning.dry_run import dry_run
from pycomm.parallel.planning.machine import load_machine
from pycomm.parallel.planning.named import named
from pycomm.parallel.planning.planner import auto, explain, simulate
from pycomm.parallel.planning.search import NoPlan
from pycomm.parallel.planning.traced import trace_model

__all__ = ["NoPlan", "auto", "dry_run", "explain", "load_machine", "named", "simulate", "trace_model"]
