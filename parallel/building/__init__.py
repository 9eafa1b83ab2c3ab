"""parallelize(): from a model of one process to this rank's part of it under a plan. The order of the steps:
parallelize.py. What came of it, for people: report.py.
"""

from pycomm.parallel.building.alike import Given
from pycomm.parallel.building.checks import check
from pycomm.parallel.building.parallelize import parallelize, parallelize_again, parallelize_on
from pycomm.parallel.building.report import Description, describe

__all__ = [
    "Description",
    "Given",
    "check",
    "describe",
    "parallelize",
    "parallelize_again",
    "parallelize_on",
]
