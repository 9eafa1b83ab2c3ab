"""Makes pycomm.benchmarks importable where the tree is built but not installed, as `make gpu-check` leaves it."""

import importlib.util
from pathlib import Path

import pycomm

if importlib.util.find_spec("pycomm.benchmarks") is None:
    pycomm.__path__.append(str(Path(__file__).parents[2]))
