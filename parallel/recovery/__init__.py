"""Trainings that lose ranks and go on; docs/recovery.md. resilient.py has the picture."""

from pycomm.parallel.recovery.resilient import Resilient, resilient

__all__ = ["Resilient", "resilient"]
