"""The tier of each test case: quick (`make test`), slow (`make test-slow`) or deep (`make test-deep`).

A case is quick unless the test says otherwise, in the line above it:

    @tier(quick=1 / 3)              a third of the cases is quick, the others are slow
    @tier(quick=1 / 3, slow=1 / 2)  a third is quick; of the others half is slow, the rest deep
    @tier(quick=1 / 3, slow=0)      a third is quick, the others are deep
    @tier(slow=1)                   all are slow
    @tier(slow=1 / 4)               a quarter is slow, the others are deep
    @tier(deep=1)                   all are deep

    pytestmark = tier(slow=1)                          for all tests of a file without a @tier
    pytest.param(case, marks=pytest.mark.slow)         one case that must not be quick
    pytest.param(case, marks=pytest.mark.deep)         one case that must be deep

The cases are drawn by the name of the test, so they are the same in every run and on every machine. A share
greater than 0 has at least one case. `python -m pytest --cost FILE` measures what a test costs.
"""

import math
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

HERE = Path(__file__).parent
Case = TypeVar("Case")


class Shares(NamedTuple):
    """quick: of all cases; slow: of the cases that are not quick."""

    quick: Fraction = Fraction(1)
    slow: Fraction = Fraction(1)


def tier(
    *, quick: float | None = None, slow: float | None = None, deep: float | None = None
) -> pytest.MarkDecorator:
    """A decorator, or a mark of a file; see the head of this file.

    Args:
        quick: share of the test's cases that is quick, 0 to 1.
        slow: share of the other cases that is slow; what is left is deep. Alone: no case is quick.
        deep: 1, alone: all cases are deep.
    """
    given = (quick, slow, deep)
    if any(share is not None and not 0 <= share <= 1 for share in given) or deep not in (None, 1):
        raise ValueError(f"tier: shares are 0 to 1, and deep is 1; got {quick=}, {slow=}, {deep=}")
    if given == (None, None, None) or (deep and (quick, slow) != (None, None)):
        raise ValueError(f"tier: give quick, slow, both, or deep=1 alone; got {quick=}, {slow=}, {deep=}")
    default = 0 if deep else 1
    return pytest.mark.tier(
        Shares(exact(0 if quick is None else quick), exact(default if slow is None else slow))
    )


def exact(share: float) -> Fraction:
    """1 / 3 is a third: ceil(share * count) must not depend on how it was rounded."""
    return Fraction(share).limit_denominator(1000)


def shares_of(item: pytest.Item) -> Shares:
    mark = item.get_closest_marker("tier")
    return mark.args[0] if mark else Shares()


def name_of(item: pytest.Item) -> str:
    """Of the test function, from tests/ on: parallel/test_steps.py::test_dropout."""
    return f"{os.path.relpath(item.path, HERE)}::{getattr(item, 'originalname', item.name)}"


def draw(cases: Sequence[Case], share: Fraction, name: str) -> tuple[list[Case], list[Case]]:
    """(this share of the cases, the others)"""
    order = random.Random(name).sample(range(len(cases)), len(cases))
    kept = set(order[: math.ceil(len(cases) * share)])
    drawn, others = [], []
    for place, case in enumerate(cases):
        (drawn if place in kept else others).append(case)
    return drawn, others


def deal(items: Sequence[pytest.Item]) -> None:
    """Marks what is slow and what is deep. A deep case is also slow: `make test-deep` is `-m slow --deep`."""
    tests = defaultdict(list)
    for item in items:
        tests[name_of(item)].append(item)
    for name, cases in tests.items():
        shares = shares_of(cases[0])
        marked = [case for case in cases if is_marked(case)]
        _, late = draw([case for case in cases if not is_marked(case)], shares.quick, name)
        _, deep = draw([*marked, *late], shares.slow, name)
        for case in deep:
            case.add_marker(pytest.mark.deep)
        for case in [*late, *(case for case in cases if case.get_closest_marker("deep"))]:
            case.add_marker(pytest.mark.slow)


def is_marked(item: pytest.Item) -> bool:
    """Whether the case itself says that it is not quick."""
    return any(item.get_closest_marker(name) for name in ("slow", "deep"))


# --- hooks of pytest -----------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="also the deep cases: `make test-deep`")
    parser.addoption(
        "--base", metavar="REV", help="all cases of the test files touched since REV: touched.py"
    )
    parser.addoption("--cost", metavar="FILE", help="add a line for each test: name, processor time, time")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deal(items)
    if not config.getoption("--deep"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("deep")])
        items[:] = [item for item in items if not item.get_closest_marker("deep")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before, start = os.times(), time.monotonic()
    result = yield
    path = item.config.getoption("--cost")
    if path:
        used = sum(os.times()[:4]) - sum(before[:4])  # also of processes that have ended
        with open(path, "a") as file:
            file.write(f"{item.nodeid}\t{used:.2f}\t{time.monotonic() - start:.2f}\n")
    return result
