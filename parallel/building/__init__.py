"""parallelize(): from a model of one process to this rank's part of it under a plan.

parallelize.py    the order of the steps
alike.py          whether all ranks were given the same
describe.py       what there is to know of parameters, before and after the cuts
cut.py            stages and pieces of the sequence, tensors and experts, and the cast to bf16
filling.py        a model on meta becomes this rank's part of it
initial.py        first values of a model on meta, module by module
recompute.py      recomputation of activations, block by block
notice.py         what notices changes that the user makes between calls
wrap.py           the wrappers around forwards
report.py         what a plan has made of a model, for people
over_hosts.py     which axes cross hosts, and what goes over the link
"""

from pycomm.parallel.building.alike import Given
from pycomm.parallel.building.parallelize import parallelize, parallelize_again, parallelize_on
from pycomm.parallel.building.report import Description, describe

__all__ = [
    "Description",
    "Given",
    "describe",
    "parallelize",
    "parallelize_again",
    "parallelize_on",
]
