"""Pipeline schedules as data: complete, in order, free of deadlock; published orders and bubbles; broken ones
are refused.
"""

import pytest

from pycomm.parallel.pipeline import NAMES, Action, make_schedule, peak_activations, simulate, validate


def all_schedules(pps, microbatches, chunks=(2, 3)):
    for name in NAMES:
        for pp in pps:
            for m in microbatches:
                for v in chunks if name == "interleaved" else (None,):
                    yield make_schedule(name, pp, m, v)


def test_every_schedule_is_complete_in_order_and_free_of_deadlock():
    for schedule in all_schedules((1, 2, 3, 4, 5, 8), (*range(1, 10), 13, 16, 21), (2, 3, 4)):
        validate(schedule)
        for rank, row in enumerate(schedule.actions):
            for stage in range(schedule.num_stages):
                for kind in "FBW":
                    got = [a.microbatch for a in row if a[:2] == (kind, stage)]
                    assert got == (
                        list(range(schedule.microbatches)) if schedule.placement[stage] == rank else []
                    )


def test_placement():
    assert make_schedule("interleaved", 3, 4, 2).placement == (0, 1, 2, 0, 1, 2)
    assert make_schedule("zbv", 3, 4).placement == (0, 1, 2, 2, 1, 0)
    assert make_schedule("zbv", 3, 4).stages_of(0) == [0, 5]


GRIDS = {
    ("gpipe", 2, 3): """
rank 0  F0 F1 F2 .  .  .  B0 W0 B1 W1 B2 W2
rank 1  .  F0 F1 F2 B0 W0 B1 W1 B2 W2""",
    ("1f1b", 4, 8): """
rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 .  B5 W5 .  B6 W6 .  B7 W7
rank 1  .  F0 F1 F2 .  .  .  .  B0 W0 F3 B1 W1 F4 B2 W2 F5 B3 W3 F6 B4 W4 F7 B5 W5 .  B6 W6 .  B7 W7
rank 2  .  .  F0 F1 .  .  B0 W0 F2 B1 W1 F3 B2 W2 F4 B3 W3 F5 B4 W4 F6 B5 W5 F7 B6 W6 .  B7 W7
rank 3  .  .  .  F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3 F4 B4 W4 F5 B5 W5 F6 B6 W6 F7 B7 W7""",
    ("zb-h1", 4, 8): """
rank 0  F0 F1 F2 F3 .  .  .  B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7
rank 1  .  F0 F1 F2 .  .  B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7
rank 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 F6 B5 W3 F7 B6 W4 B7 W5 W6 W7
rank 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7""",
    ("pipedream", 2, 3): """
rank 0  F0 F1 .  .  B0 W0 U0 F2 B1 W1 U1 .  B2 W2 U2
rank 1  .  F0 B0 W0 U0 F1 B1 W1 U1 F2 B2 W2 U2""",
    ("zbv", 2, 3): """
rank 0  F0.0 F1.0 F2.0 F0.1 B0.1 W0.1 F1.1 B1.1 W1.1 B0.0 W0.0 F2.1 B2.1 W2.1 B1.0 W1.0 B2.0 W2.0
rank 1  .    F0.0 F0.1 F1.0 F1.1 B0.1 W0.1 F2.0 B0.0 W0.0 F2.1 B1.1 W1.1 B1.0 B2.1 B2.0 W1.0 W2.1 W2.0""",
}


def test_text_and_published_orders():
    for (name, pp, m), grid in GRIDS.items():
        header, _, body = make_schedule(name, pp, m).text().partition("\n")
        assert body == grid.strip("\n"), f"{name}\n{body}"
        assert header.startswith(f"{name}: pp {pp}")


def unit_bubble(name, pp, m, chunks=None):
    return simulate(make_schedule(name, pp, m, chunks), 1, 1, 1).bubble


def test_bubbles_at_unit_cost():
    for p in (1, 2, 3, 4, 8):
        for m in (p, p + 1, 2 * p - 1, 2 * p + 1, 3 * p + 2):
            assert unit_bubble("gpipe", p, m) == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
            assert unit_bubble("1f1b", p, m) == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
            assert unit_bubble("zb-h1", p, m) == pytest.approx((p - 1) / (3 * m + p - 1), abs=1e-12)
            assert unit_bubble("zbv", p, m) == 0 or m < 2 * p - 1
            for v in (2, 4):
                assert unit_bubble("interleaved", p, m, v) == pytest.approx(
                    (p - 1) / (v * m + p - 1), abs=1e-12
                )


def test_live_activations():
    for p in (1, 2, 3, 4, 8):
        for m in (1, 2, p, 2 * p + 3):
            peaks = {name: peak_activations(make_schedule(name, p, m)) for name in NAMES}
            assert peaks["gpipe"] == [m] * p
            assert peaks["1f1b"] == peaks["pipedream"] == [min(m, p - rank) for rank in range(p)]
            assert peaks["zb-h1"] == [min(m, p)] * p
            assert max(peaks["zbv"]) <= min(2 * m, 2 * p)
            if m % p == 0:
                assert peaks["interleaved"] == [min(2 * m, 2 * (p - rank - 1) + p + 1) for rank in range(p)]


# Qi et al. 2024, tables 9 and 5: pp, microbatches, ms for F, B, W and a message; bubble rates of 1F1B and
# ZB-H1.
PUBLISHED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594),
]


def test_published_bubble_rates():
    for pp, m, *times, one_forward, zero_bubble in PUBLISHED:
        for name, rate in (("1f1b", one_forward), ("zb-h1", zero_bubble)):
            assert round(simulate(make_schedule(name, pp, m), *times).bubble, 4) == rate, (name, pp, m)


def test_timeline_spans_and_picture(tmp_path):
    timeline = simulate(make_schedule("1f1b", 2, 2), 1.0, 2.0, 0.5, comm=0.25)
    assert [(s.action, s.start, s.end) for s in timeline.spans[1]][:3] == [
        (Action("F", 1, 0), 1.25, 2.25),
        (Action("B", 1, 0), 2.25, 4.25),
        (Action("W", 1, 0), 4.25, 4.75),
    ]
    assert (
        timeline.spans[0][2].start == 5.0
    )  # the whole backward of rank 1 and a message later: this schedule does not split
    assert simulate(make_schedule("zb-h1", 2, 2), 1.0, 2.0, 0.5, comm=0.25).spans[0][2].start == 4.5
    pytest.importorskip("matplotlib")
    for name in ("pipedream", "zbv"):
        simulate(make_schedule(name, 3, 5), 1.0, 1.1, 0.9, comm=0.1).plot(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


BAD_ARGUMENTS = [
    (("1f2b", 2, 2), "not known"),
    (("1f1b", 0, 2), "pp=0"),
    (("1f1b", 2, 0), "microbatches=0"),
    (("interleaved", 2, 2, 1), "chunks=1"),
    (("zbv", 2, 2, 3), "chunks=3"),
    (("1f1b", 2, 2, 2), "chunks=2"),
]


def test_bad_arguments():
    for arguments, message in BAD_ARGUMENTS:
        with pytest.raises(ValueError, match=message):
            make_schedule(*arguments)
    with pytest.raises(ValueError, match="above 0"):
        simulate(make_schedule("1f1b", 2, 2), 1.0, 0.0, 1.0)


def broken(name, rank, edit):
    schedule = make_schedule(name, 2, 2)
    row = list(schedule.actions[rank])
    edit(row)
    rows = [tuple(row) if r == rank else actions for r, actions in enumerate(schedule.actions)]
    return schedule._replace(actions=tuple(rows))


def swap(i, j):
    def edit(row):
        row[i], row[j] = row[j], row[i]

    return edit


BROKEN = [
    (broken("1f1b", 0, lambda row: row.pop(0)), "each once"),
    (broken("1f1b", 0, lambda row: row.append(row[0])), "each once"),
    (broken("1f1b", 0, swap(0, 1)), "in order"),
    (broken("zb-h1", 1, lambda row: row.append(Action("F", 0, 0))), "its stages"),
    (broken("zb-h1", 1, lambda row: row.append(Action("U", 1, 0))), "kinds are"),
    (broken("gpipe", 1, swap(3, 4)), "W must follow"),
    (broken("zb-h1", 1, swap(0, 1)), "contradict each other"),  # B0 before F0
    (broken("zb-h1", 0, swap(1, 2)), None),  # F0 B0 F1 B1: legal, if slow
    (make_schedule("1f1b", 2, 2)._replace(placement=(0, 0)), "ranks hold"),
]


def test_broken_schedules_are_refused():
    for schedule, message in BROKEN:
        if message is None:
            validate(schedule)
            continue
        with pytest.raises(ValueError, match=message):
            validate(schedule)
