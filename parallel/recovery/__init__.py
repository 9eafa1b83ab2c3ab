"""Trainings that lose ranks and go on; docs/recovery.md. training.py has the picture."""

from pycomm.parallel.recovery.training import Resilient, resilient

__all__ = ["Resilient", "resilient"]
