"""Which cases of a table run in `make test`, and which in `make test-deep` alone; the others run in
`make test-slow`.
"""

import pytest

__all__ = ["quick"]


def quick(cases, *chosen, deep=()):
    """Parameters of a test: `chosen` may be quick, `deep` are deep."""
    marks = {case: pytest.mark.deep if case in deep else pytest.mark.slow for case in cases}
    return [case if case in chosen else pytest.param(case, marks=marks[case]) for case in cases]
