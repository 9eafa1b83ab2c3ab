"""Fixtures: run_ranks with the ranks in other places."""

import pytest
from places import PLACES, THREADS, over_hosts


@pytest.fixture(params=PLACES)
def run(request, monkeypatch):
    return over_hosts(request.param, monkeypatch)


@pytest.fixture(params=THREADS)
def run_threads(request, monkeypatch):
    return over_hosts(request.param, monkeypatch)
