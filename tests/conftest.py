"""Settings for all tests; the limit of time per test is in pyproject.toml."""

import os
import random

import pytest

# Many ranks share few cores: torch must not start one compute thread per core in each of them. Read when
# torch is imported, so set first; ranks in processes of their own inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
# What was measured on this machine must not decide what is tested (test_tuned.py sets its own).
os.environ["PYCOMM_TUNED"] = "0"

from tiers import *  # noqa: E402, F403  (hooks of pytest)
from touched import *  # noqa: E402, F403
from workers import *  # noqa: E402, F403


@pytest.fixture(autouse=True)
def environment():
    """What a test, or pycomm in it (LOCAL_RANK of a launcher), sets in the environment ends with the test."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


@pytest.fixture(scope="session")
def deep(request):
    return request.config.getoption("--deep")


@pytest.fixture(scope="session")
def some(deep):
    """some(cases): a third of them, the same in every run; all with --deep."""

    def chosen(cases):
        cases = list(cases)
        if deep:
            return cases
        kept = sorted(random.Random(1).sample(range(len(cases)), -(-len(cases) // 3)))
        return [cases[number] for number in kept]

    return chosen
