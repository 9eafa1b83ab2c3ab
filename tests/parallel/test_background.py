"""Work beside the program: one piece at a time, and an error is raised once."""

import atexit
import threading

import pytest

from pycomm.parallel.ground.background import Background

LIMIT = 20.0


def test_one_piece_at_a_time_in_a_thread_of_its_own(monkeypatch):
    registered = []
    monkeypatch.setattr(atexit, "register", registered.append)
    background, go, seen = Background("saves"), threading.Event(), []
    assert background.done()
    background.wait()  # nothing is under way

    def work(number):
        assert go.wait(LIMIT)
        seen.append((number, threading.current_thread().name))

    background.start(lambda: work(0))
    assert not background.done() and seen == []
    threading.Timer(0.05, go.set).start()
    background.start(lambda: work(1))  # waits for the first
    assert seen[0] == (0, "saves")
    background.wait()
    assert seen == [(0, "saves"), (1, "saves")] and background.done()
    assert registered == [background.wait]


@pytest.mark.parametrize("ask", ["wait", "start"])
def test_an_error_is_raised_once_and_by_whoever_asks_first(ask):
    background, after = Background("saves"), []
    for kind in (ValueError, KeyboardInterrupt):  # a second one after the first

        def fail(kind=kind):
            raise kind("no room")

        background.start(fail)
        with pytest.raises(kind, match="no room"):
            background.wait() if ask == "wait" else background.start(lambda: after.append("never"))
        assert background.done()
        background.wait()
        background.start(lambda: after.append(1))
        background.wait()
    assert after == [1, 1]
