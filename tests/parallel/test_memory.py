"""Peak memory per rank against the closed forms of ZeRO, by the program that docs/strategies.md shows the
picture of.
"""

import pytest
from tiers import tier

from pycomm.benchmarks import zero_memory


@tier(quick=1 / 4)
@pytest.mark.parametrize(
    "ranks, zero",
    [
        (1, 0),
        (2, 1),
        (2, 3),
        (4, 2),
        *(pytest.param(*c, marks=pytest.mark.deep) for c in ((2, 2), (4, 1), (4, 3))),
    ],
)
def test_within_five_percent(ranks, zero):
    measured, expected = zero_memory.measure(ranks, zero)
    assert expected * 0.99 < measured < expected * 1.05


def test_closed_forms():
    """The table of the paper for 7.5e9 parameters, GB per rank."""
    published = {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
    }
    for ranks, values in published.items():
        for zero, value in enumerate(values, 1):
            assert 7.5 * zero_memory.closed_form(zero, ranks) == pytest.approx(value, rel=0.01)


@tier(slow=1)
def test_the_picture(tmp_path):
    zero_memory.main(
        [
            "--ranks",
            "1,2",
            "--layers",
            "8",
            "--dim",
            "16",
            "--out",
            str(tmp_path / "memory.png"),
            "--json",
            str(tmp_path / "memory.json"),
        ]
    )
    assert (tmp_path / "memory.png").stat().st_size > 10_000 and (tmp_path / "memory.json").exists()
