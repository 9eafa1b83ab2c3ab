"""What is noted of a model: answers to assumptions, averages, traffic."""

import logging

import pytest

from pycomm.groups import Group
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.answers import RECENT, Answer, Answers, Asked, State
from pycomm.parallel.ground.averages import Average, Averages


def asked(number):
    return Asked((number,), None, (), (0.0, float(number)), ())


def test_one_warning_on_rank_0_for_each_assumption(caplog):
    answers = Answers()
    with caplog.at_level(logging.WARNING, "pycomm.parallel"):
        for name in ("rows", "loss", "rows"):
            answers.note(name, State.NOT_TRIED, "no block", advice="Name them")
            answers.note(name, State.NOT_TRIED, "no block", rank=1)
        answers.note("positions", State.NOT_TRIED, "no block", rank=1)
        answers.note("means", State.HELD)
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} was not tried: no block. Name them" for name in ("rows", "loss")
    ]
    assert answers.of["means"] == Answer(State.HELD) and str(answers.of["means"]) == "held"
    assert str(answers.of["rows"]) == "not tried: no block"
    caplog.clear()
    other = Answers()
    other.take_over(answers)
    other.note("rows", State.NOT_TRIED, "no block")
    assert not caplog.records and other.of == answers.of and other.of is not answers.of


def test_the_last_of_what_was_asked_is_known():
    answers, key = Answers(), (True, None)
    for number in range(RECENT + 3):
        answers.note_asked(key, asked(number), None)
    assert answers.asked[key] == [asked(number) for number in range(RECENT + 2, 2, -1)]
    before = answers.asked[key][3]
    answers.note_asked(key, asked(99), before)
    assert answers.asked[key][0] == asked(99) and before not in answers.asked[key]
    assert len(answers.asked[key]) == RECENT and (False, None) not in answers.asked
    answers.gathers, other = True, Answers()
    other.take_over(answers)
    answers.note_asked(key, asked(100), None)
    assert other.gathers and other.asked[key][0] == asked(99)


def test_averages_that_were_loaded():
    averages = Averages()
    for name in ("one", "two"):
        averages.all[name] = Average(name, None, frozenset())
        averages.all[name].updates, averages.all[name].decays = 9, 4.5
    averages.refuse_applied("step")
    averages.note_loaded({"one": 3, "two": 0, "three": 5}, "run")
    assert [(each.updates, each.decays) for each in averages.all.values()] == [(3, 0.0), (0, 0.0)]
    assert averages.unread == {"three": "run"}
    averages.note_loaded({"one": 4, "two": 1}, "later")
    assert averages.unread == {}
    averages.applied += averages.all.values()
    with pytest.raises(ValueError, match=r"^step: .*average 'two'"):
        averages.refuse_applied("step")


def test_traffic_is_chosen_by_operation_and_group():
    one, two = Group("dp", 3, 0, None), Group("tp", 2, 1, None)
    with comm.count_traffic() as outer:
        comm.record("send", one, 7)
        with comm.count_traffic() as inner:
            comm.record("gather", one, 10)
            comm.record("gather", two, 100)
        comm.record("send", two, 1000)
    comm.record("send", two, 5)
    assert [call.nbytes for call in outer.log] == [7, 10, 100, 1000]
    assert [call.nbytes for call in inner.log] == [10, 100]
    assert outer.calls() == 4 and outer.calls("send") == 2 and outer.calls(group="dp") == 2
    assert outer.nbytes("gather") == 110 and outer.nbytes("send", "tp") == 1000 and outer.nbytes("x") == 0
    assert outer.by_group() == {"dp": 17, "tp": 1100}
