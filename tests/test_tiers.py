"""The table of tests/tiers.py names tests that exist, and draws the same cases each time."""

import re

import pytest
import tiers


@pytest.mark.parametrize("table", [tiers.QUICK, tiers.SLOW], ids=["quick", "slow"])
def test_names_are_tests(table):
    names = [name for group in table.values() for name in group]
    assert len(set(names)) == len(names)
    for name in names:
        file, _, function = name.partition("::")
        assert re.search(rf"^def {function}\(", (tiers.HERE / file).read_text(), re.M), name


@pytest.mark.parametrize("share, count", [(0, 0), (1, 7), (2, 4), (3, 3), (30, 1)])
def test_draw(share, count):
    cases = list("abcdefg")
    drawn, others = tiers.draw(cases, share, "test")
    assert len(drawn) == count and sorted(drawn + others) == cases
    assert (drawn, others) == tiers.draw(cases, share, "test")


def test_one_case_alone_is_quick():
    assert tiers.draw(["a"], 30, "test") == (["a"], [])
