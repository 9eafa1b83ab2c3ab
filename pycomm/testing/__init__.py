"""Ranks on this machine, for tests, benchmarks, examples and trying things out.

    results = pycomm.testing.run_ranks(4, lambda comm: comm.all_reduce(torch.ones(3)))

                run_ranks(world_size, fn, *args)        run.py        one call on every rank
                 |              |            |
       where:  threads    RankProcesses      |          processes.py  processes with a pipe to each: to be
                          forked, or in      |                        told things, questioned, killed
                          new interpreters   |
                                             |
       in which group:  Communicator, or a group of     groups.py
                        torch.distributed

Threads start in a millisecond and share the process. Forked processes have torch imported already; they are
what faults need, since a rank may be killed. A process that has used CUDA must not fork: its ranks are
threads or run in new interpreters ("spawn"), which import everything again and take seconds.

Every wait has a limit. A process that does not finish is killed, by its own id; one that is left alone,
because the process that started it was killed, ends itself. Ranks that mpiexec or torchrun starts are not
started here. emulated.py has hosts for them, of which the machine is but one.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pycomm.testing.processes import RankProcesses
    from pycomm.testing.run import RankFailure, run_ranks

__all__ = ["RankFailure", "RankProcesses", "run_ranks"]

_HOME = {"RankFailure": "run", "RankProcesses": "processes", "run_ranks": "run"}


def __getattr__(name: str) -> object:
    if name not in _HOME:  # the rest need not wait for torch to be imported
        raise AttributeError(f"module 'pycomm.testing' has no attribute '{name}'")
    return getattr(importlib.import_module(f"pycomm.testing.{_HOME[name]}"), name)
