"""One plan of each axis for every family that can be made here; docs/models.md says what comes out."""

import pytest
from compare import AXES, MORE, outcomes
from families import FAMILIES, families
from table import documented
from tiers import tier


def test_the_page_has_them_all():
    rows = documented()
    assert rows.keys() == FAMILIES.keys(), "run make test-models"
    for name, row in rows.items():
        assert row.keys() == {text for text in AXES + MORE if FAMILIES[name].takes(text)}, name


@tier(slow=1 / 18)
@pytest.mark.parametrize("name", families())
def test_family(name):
    found = outcomes(name, AXES)
    bad = {text: outcome for text, outcome in found.items() if outcome.kind in ("wrong", "crash")}
    assert not bad
    expected = documented()[name]
    assert {text: outcome.kind == "equal" for text, outcome in found.items()} == {
        text: expected[text] for text in AXES if text in expected
    }, found
