"""Settings for all tests; the limit of time per test is in pyproject.toml."""

import os

# Many ranks share few cores: torch must not start one compute thread per core in each of them. Read when torch is imported, so set first;
# ranks in processes of their own inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
