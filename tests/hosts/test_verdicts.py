"""What ranks in shrink() decide from what they see of each other, who proposes it, and what the words mean
for a rank: pycomm/survivors/agreement.py without ranks. That none decide differently: test_survivors.py.
"""

import contextlib
import re
import time
from types import SimpleNamespace

import pytest
from test_survey import LONG, points_of

from pycomm.errors import AbortedError, CommTimeoutError, MismatchError, PeerError
from pycomm.survivors import agreement
from pycomm.survivors.points import Here
from pycomm.survivors.survey import Seen

pytestmark = pytest.mark.timeout(60)


# --- what is decided --------------------


class _Told:
    """A survey in which others have said this of themselves. patience: of Survey."""

    def __init__(self, here, seen, patience=2.0):
        self._here, self._seen, self.patience = here, seen, patience

    def here(self, rank):
        return self._here.get(rank)

    def look(self, wait=0.0):
        pass

    def seen(self):
        return self._seen

    def silence(self, rank):
        return LONG if self._seen[rank] == Seen.SILENT else 0.0


@contextlib.contextmanager
def agreement_of(seen, here=None, exclude=(), exactly=False, rank=0):
    """seen: of all ranks by rank. here: of others; all that are here say what this rank does, else."""
    hosts = [r // 2 for r in range(len(seen))]
    with points_of(hosts) as points:
        one = agreement.Agreement(points[rank], exclude, exactly, 5.0)
        one.survey.close()
        mine = Here(list(exclude), exactly, 0)
        said = {r: mine for r, what in enumerate(seen) if what == Seen.HERE} | (here or {})
        one.survey = _Told(said, dict(enumerate(seen)))
        points[rank].here = mine
        yield one


def verdict_of(one):
    seen = one.survey.seen()
    return one._verdict(seen, one._those(seen, Seen.HERE), one._those(seen, Seen.ABSENT, Seen.UNKNOWN))


HERE, GONE, ABSENT, UNKNOWN, SILENT = Seen.HERE, Seen.GONE, Seen.ABSENT, Seen.UNKNOWN, Seen.SILENT


@pytest.mark.parametrize(
    ("seen", "options", "members"),
    [
        ([HERE] * 4, {}, [0, 1, 2, 3]),
        ([HERE, GONE, HERE, HERE], {}, [0, 2, 3]),
        ([HERE, HERE, HERE, Seen.LEFT], {}, [0, 1, 2]),
        ([HERE, HERE, HERE, ABSENT], {"exclude": [3]}, [0, 1, 2]),  # excluded: not waited for
        ([HERE, HERE, GONE, HERE], {"exclude": [2], "exactly": True}, [0, 1, 3]),
    ],
)
def test_verdicts(seen, options, members):
    with agreement_of(seen, **options) as one:
        assert verdict_of(one) == {"members": members, "store": 0}


@pytest.mark.parametrize(
    ("seen", "options", "kind", "peer", "text"),
    [
        (
            [HERE, HERE, HERE, ABSENT],
            {},
            "CommTimeoutError",
            3,
            r"rank 3 \(node-b\) lives and did not come within the timeout of 5 s\. Call shrink\(\) again",
        ),
        (
            [HERE, ABSENT, HERE, ABSENT],
            {},
            "CommTimeoutError",
            1,
            r"ranks 1 \(node-a\), 3 \(node-b\) live and did not come within the timeout of 5 s\.",
        ),
        (
            [HERE, HERE, UNKNOWN, UNKNOWN],
            {},
            "CommTimeoutError",
            2,
            r"ranks 2, 3 \(node-b\) were not heard within",
        ),
        ([HERE, HERE, UNKNOWN, ABSENT], {}, "CommTimeoutError", 3, r"rank 3 \(node-b\) lives and did not"),
        (
            [HERE, HERE, HERE, GONE],
            {"exclude": [3], "here": {2: Here([], False, 0)}},
            "MismatchError",
            2,
            "rank 0 leaves out rank 3, rank 2 nobody. All survivors must pass equal ranks",
        ),
        (
            [HERE, HERE, GONE, GONE],
            {"exclude": [2, 3], "here": {1: Here([3], False, 0)}},
            "MismatchError",
            1,
            "rank 0 leaves out ranks 2, 3, rank 1 rank 3",
        ),
        (
            [HERE, HERE, HERE, GONE],
            {"exclude": [3], "exactly": True, "here": {1: Here([3], False, 0)}},
            "MismatchError",
            1,
            "All survivors must pass",
        ),
        (
            [HERE, GONE, HERE, GONE],
            {"exclude": [3], "exactly": True},
            "PeerError",
            1,
            r"rank 1 \(node-a\) is lost, too\. Pass all ranks that are to be left out",
        ),
        (
            [GONE, HERE, HERE, GONE],
            {"exclude": [3], "exactly": True, "rank": 1},
            "PeerError",
            0,
            r"rank 0 \(node-a\) is lost, too",
        ),
        (
            [GONE, HERE, HERE, GONE],
            {"exclude": [0], "exactly": True, "rank": 2},
            "PeerError",
            3,
            r"rank 3 \(node-b\) is lost, too",
        ),
        (
            [ABSENT, HERE, HERE, HERE],
            {"rank": 1},
            "CommTimeoutError",
            0,
            r"rank 0 \(node-a\) lives and did not come",
        ),
        (
            [HERE, GONE, HERE, HERE],
            {"exclude": [1], "rank": 2, "here": {0: Here([], False, 0)}},
            "MismatchError",
            0,
            "rank 2 leaves out rank 1, rank 0 nobody",
        ),
        (
            [HERE, GONE, GONE, GONE],
            {"exclude": [3], "exactly": True},
            "PeerError",
            1,
            r"ranks 1 \(node-a\), 2 \(node-b\) are lost, too",
        ),
    ],
)
def test_verdicts_that_all_raise(seen, options, kind, peer, text):
    with agreement_of(seen, **options) as one:
        name, who, said = verdict_of(one)["failed"]
        assert (name, who) == (kind, peer) and re.search(text, said), (name, who, said)


def test_a_side_without_a_quorum_is_told_what_to_pass():
    with agreement_of([SILENT, SILENT, HERE, HERE], rank=2) as one:
        one._cut_off_since = time.monotonic() - LONG
        with pytest.raises(PeerError) as caught:
            one._look_at_sides(one.survey.seen(), False)
    text = str(caught.value)
    assert text.startswith(
        "[rank 2/4] shrink: ranks 0, 1 (node-a) were not heard for 2 s, may live and go on"
    )
    assert "these 2 of 4 ranks, which are neither more than half nor half with the lowest" in text
    assert text.endswith("If you know that they have ended, pass exclude=[0, 1]") and caught.value.peer == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_side_without_a_quorum_waits_until_its_limit(late):
    """For ranks that have been silent for a short while, or just now."""
    with agreement_of([Seen.STOPPED, SILENT, HERE, HERE], rank=2) as one:
        with pytest.raises(PeerError) if late else contextlib.nullcontext():
            one._look_at_sides(one.survey.seen(), late)
        assert one._cut_off_since is not None


@pytest.mark.parametrize(
    ("seen", "fresh", "lost"),
    [
        ([HERE, HERE, HERE], False, None),
        ([HERE, GONE, HERE], True, 1),
        ([HERE, HERE, Seen.LEFT], False, 2),
        ([HERE, HERE, SILENT], True, 2),
        ([HERE, HERE, Seen.STOPPED], True, 2),
        ([HERE, HERE, UNKNOWN], False, None),
        ([HERE, ABSENT, HERE], True, None),  # it may not have been asked since the verdict
        ([HERE, ABSENT, HERE], False, 1),
    ],
)
def test_a_member_that_is_lost_ends_the_making_of_a_group(seen, fresh, lost):
    with agreement_of([*seen, GONE]) as one:
        one.slot, one.members = 0, [0, 1, 2]
        one.point.slots.know([{"members": [0, 1, 2], "store": 0}])
        one._since_verdict = time.monotonic() - (0.0 if fresh else LONG)
        assert one.lost_member() == lost
        for word, ends in ((None, lost is not None), ("formed", lost is not None), ("over", True)):
            del one.point.slots.words[1:]
            if word is not None:
                one.point.slots.words.append(word)
            if not ends:
                one.watch()
                continue
            with pytest.raises(PeerError) as caught:
                one.watch()
            if word == "over":
                assert "another rank was lost, and the group was not made" in str(caught.value)
            else:
                name = one.point.name(lost)
                assert f"shrink: {name} was lost while the group was made" in str(caught.value)
                assert caught.value.peer == lost


@pytest.mark.parametrize(
    ("seen", "waits"),
    [
        ([SILENT, HERE, HERE, HERE], False),
        ([HERE, HERE, SILENT, SILENT], False),
        ([GONE, GONE, GONE, HERE], False),
    ],
)
def test_a_side_with_a_quorum_goes_on(seen, waits):
    rank = next(rank for rank, one in enumerate(seen) if one == HERE)
    with agreement_of(seen, rank=rank) as one:
        one._cut_off_since = time.monotonic() - LONG
        one._look_at_sides(one.survey.seen(), True)
        assert one._cut_off_since is None


@pytest.mark.parametrize("to", [[0, 1], [1]])
def test_a_failure_is_raised_by_those_it_is_for(to):
    """While this rank still listens to those that are silent."""
    with agreement_of([HERE, HERE, SILENT, HERE]) as one:
        words = [agreement._failed(MismatchError, 1, "they differ", to)]
        if 0 in to:
            with pytest.raises(MismatchError, match=r"\[rank 0/4\] shrink: they differ") as caught:
                one._look_at_failure(words)
            assert (caught.value.peer, caught.value.rank, caught.value.world_size) == (1, 0, 4)
            one.known = 1  # it was there before this call
        one._look_at_failure(words)


# --- who proposes --------------------


def proposed(one):
    """What it proposes from now on: [(slot, word)]."""
    found = []
    one._propose = lambda slot, word: found.append((slot, word))
    return found


@pytest.mark.parametrize("rank", range(4))
def test_the_first_proposes_and_the_others_where_it_does_not(rank):
    with agreement_of([HERE] * 4, rank=rank) as one:
        found, verdict = proposed(one), {"members": [0, 1, 2, 3], "store": rank}
        one._decide(5)
        assert found == [(5, verdict)] * (rank == 0)
        one._alone_since = time.monotonic() - LONG
        one._decide(5)
        assert found == [(5, verdict)] * (1 + (rank == 0))
        one.survey._seen[(rank + 1) % 4] = ABSENT  # is waited for
        one._decide(5)
        assert len(found) == 1 + (rank == 0) and one._alone_since is None
        one.deadline = 0.0
        one._alone_since = time.monotonic() - LONG
        one._decide(5)
        assert found[-1][1]["failed"][:2] == ("CommTimeoutError", (rank + 1) % 4)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("others", ["made", "not yet", "lost"])
def test_what_is_proposed_when_a_group_is_made(monkeypatch, rank, made, others):
    """Formed where all have made it; over where one is lost or this one has failed."""
    seen = [HERE] * 3
    if others == "lost":
        seen[(rank + 1) % 3] = GONE
    with agreement_of(seen, rank=rank) as one:
        found, words = proposed(one), one.point.slots.words
        words += ["over", {"members": [0, 1, 2], "store": 0}]
        one.slot, one.members, one.begin = 1, [0, 1, 2], 1
        for other in {0, 1, 2} - {rank}:
            one.survey._here[other] = Here([], False, 1, 1 if others == "made" else 0)
        looks = []

        def look(wait=0.0):
            looks.append(None)
            if len(looks) == 2:
                one._alone_since = time.monotonic() - LONG  # the first has not proposed for long
            if len(looks) == 3:
                words.append("formed" if len(looks) % 2 else "over")

        one.survey.look = look
        one.survey.stopped = list
        assert one.form(made) is True  # as is decided
        word = "formed" if made and others == "made" else None if made and others == "not yet" else "over"
        first = next(r for r in range(3) if seen[r] == HERE)
        assert found == ([] if word is None else [(2, word)] * (1 + (rank == first)))
        assert (one.point.here.made == 1) is made


def test_the_end_of_a_round():
    """The word that is decided counts, for the ranks that it is for."""
    with agreement_of([HERE] * 4) as one:
        one.survey.stopped = list
        one.slot, one.members, one.begin = 0, [0, 1], 0
        words = one.point.slots.words
        words.append({"members": [0, 1], "store": 0})
        for word, expected in (("over", False), ("formed", True)):
            words[1:] = [word]
            assert one.form(True) is expected and one.form(False) is expected
        words[1:] = [agreement._failed(PeerError, 1, "rank 1 gave up")]
        with pytest.raises(PeerError, match="rank 1 gave up") as caught:
            one.form(True)
        assert caught.value.peer == 1


@pytest.mark.parametrize(
    ("words", "begin", "slot", "expected"),
    [
        ([], 0, -1, None),
        ([{"members": [0, 2], "store": 2}], 0, -1, ([0, 2], 2, 1)),
        ([{"members": [0, 2], "store": 2}], 0, 0, None),  # is being made
        ([{"members": [1, 2], "store": 2}], 0, -1, None),  # without this one: if one dies there is another
        ([{"members": [0, 2], "store": 2}, "over"], 0, 0, None),
        ([{"members": [0, 2], "store": 2}, "over", {"members": [0], "store": 0}], 0, 0, ([0], 0, 2)),
        ([{"members": [0, 2], "store": 2}, "formed"], 0, 0, "this group has been shrunk already"),
        (
            [{"members": [1, 2], "store": 2}, "formed"],
            0,
            -1,
            "this rank was left out of the group that ranks 1, 2 have made without it",
        ),
        ([{"members": [2], "store": 2}, "formed"], 0, -1, "left out of the group that rank 2 have made"),
        ([{"failed": ("PeerError", 2, "why"), "to": []}], 0, -1, "why"),
        ([{"failed": ("PeerError", 2, "why"), "to": []}], 1, -1, None),  # of a call before
    ],
)
def test_what_the_words_mean_for_a_rank(words, begin, slot, expected):
    with agreement_of([HERE] * 3) as one:
        one.begin, one.slot = begin, slot
        if isinstance(expected, str):
            with pytest.raises((AbortedError, PeerError), match=expected):
                one._outcome(words)
        else:
            assert one._outcome(words) == expected
            assert expected is None or (one.slot, one.members) == (len(words) - 1, expected[0])


# --- time --------------------


class _Clock:
    """Seconds that pass with each look at the others."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(agreement, "time", SimpleNamespace(monotonic=lambda: self.now))

    def look(self, wait=0.0):
        self.now += 0.25


@pytest.mark.parametrize("left", [100.0, -100.0], ids=["in time", "too late"])
@pytest.mark.parametrize("decided", [None, "formed", "failed", "over"])
def test_who_gives_up_tells_the_others_as_long_as_there_is_time(monkeypatch, left, decided):
    """Whatever comes of it, it raises its own reason."""
    clock = _Clock(monkeypatch)
    with agreement_of([HERE, GONE, HERE, HERE], rank=2) as one:
        found, words = proposed(one), one.point.slots.words
        one.survey.look, one.survey.stopped = clock.look, list
        one.begin, one.deadline = 0, clock.now + left
        words += ["over", {"members": [0, 2, 3], "store": 0}]
        if decided is not None:
            words.append(agreement._failed(MismatchError, 1, "x") if decided == "failed" else decided)
        with pytest.raises(PeerError, match=r"shrink: rank 2 \(node-b\) gave up: no memory") as caught:
            one.give_up("no memory")
        assert (caught.value.peer, caught.value.rank) == (2, 2)
        took = clock.now - 1000.0
        if decided in ("formed", "failed"):
            assert found == [] and took == 0.0
        else:
            assert took == max(left, 0.0) + agreement.GRACE_S
            failed = agreement._failed(PeerError, 2, "rank 2 (node-b) gave up: no memory")
            assert found == [(len(words), failed)] * len(found) and len(found) == took / 0.25


def test_what_is_left_of_the_limit(monkeypatch):
    clock = _Clock(monkeypatch)
    with agreement_of([HERE, HERE]) as one:
        for passed, left in ((0.0, 5.0), (3.0, 2.0), (7.0, 0.05)):
            clock.now = 1000.0 + passed
            assert one.seconds_left() == pytest.approx(left)


def test_a_round_that_is_not_over_in_time(monkeypatch):
    """A member that has made its group, and does not hear that all others have, gives up."""
    clock = _Clock(monkeypatch)
    with agreement_of([HERE, HERE, HERE]) as one:
        proposed(one)
        one.survey.look, one.survey.stopped = clock.look, list
        one.slot, one.members, one.begin = 0, [0, 1, 2], 0
        one.point.slots.words.append({"members": [0, 1, 2], "store": 0})
        with pytest.raises(PeerError, match="not all others had the new group within the timeout of 5 s"):
            one.form(True)
        assert 5.0 + agreement.GRACE_S < clock.now - 1000.0 < 5.0 + 3 * agreement.GRACE_S


def test_nothing_is_decided_in_time(monkeypatch):
    clock = _Clock(monkeypatch)
    with agreement_of([HERE, HERE, UNKNOWN, SILENT], rank=1) as one:
        found = proposed(one)
        one.survey.look, one.survey.stopped = clock.look, list
        with pytest.raises(CommTimeoutError) as caught:
            one.agree()
        text = "the others came to no verdict; ranks 2, 3 (node-b) did not answer within the timeout of 5 s"
        assert text in str(caught.value) and found
        assert 5.0 + 2 * agreement.GRACE_S < clock.now - 1000.0 < 5.0 + 3 * agreement.GRACE_S
