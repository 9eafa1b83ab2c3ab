"""What is asked of a model before it is trained, and what is needed to ask.

positions.py    pieces of a sequence give what the whole gives; asked by run/prove_positions.py
kept.py         what a model holds, kept from the runs of a check

The other checks lie where they were written: rows in run/prove_rows.py, losses in run/prove_loss.py. What was
found is in Parallelized.checks: held, or not tried and why; what is broken is raised.
"""

from pycomm.parallel.parts import Answers

__all__ = ["Answers"]
