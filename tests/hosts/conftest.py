"""Fixtures: run_ranks with the ranks in other places."""

import pytest
from places import PLACES, THREADS, over_hosts


@pytest.fixture(params=PLACES)
def run(request):
    return over_hosts(request.param)


@pytest.fixture(params=THREADS)
def run_threads(request):
    return over_hosts(request.param)
