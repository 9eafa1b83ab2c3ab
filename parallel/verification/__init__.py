"""par.verify: one step under a plan and by one process on the same ranks, compared module by module.

verify.py     the order of things
alone.py      the copies of the model, and what one process computes with one of them
watch.py      what the modules compute under the plan, compared as they run
pieces.py     the part of an output of one process that a rank has of it
report.py     what all ranks have found, as one result
"""

from pycomm.parallel.verification.report import Difference, Verification
from pycomm.parallel.verification.verify import verify

__all__ = ["Difference", "Verification", "verify"]
