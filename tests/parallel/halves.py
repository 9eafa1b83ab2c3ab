"""Which cases of a table run in `make test`; the others run in `make test-slow`."""

import pytest

__all__ = ["quick"]


def quick(cases, *chosen):
    """Parameters of a test."""
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.slow) for case in cases]
