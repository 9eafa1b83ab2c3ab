"""parallelize(): from a model of one process to this rank's part of it under a plan. The order of the steps:
parallelize.py.
"""

from pycomm.parallel.building.parallelize import parallelize

__all__ = ["parallelize"]
