"""Settings for all tests; the limit of time per test is in pyproject.toml."""

import os

# Many ranks share few cores: torch must not start one compute thread per core in each of them. Read when
# torch is imported, so set first; ranks in processes of their own inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
# What was measured on this machine must not decide what is tested (test_tuned.py sets its own).
os.environ["PYCOMM_TUNED"] = "0"

from workers import *  # noqa: E402, F403  (hooks of pytest)
