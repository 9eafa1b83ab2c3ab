"""The ranks that are left agree on who they are, and on whether they have a new group: see the head of the
package, [Note: rounds].
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeGuard, TypeVar, cast

from pycomm import env
from pycomm.errors import AbortedError, CommError, CommTimeoutError, MismatchError, PeerError
from pycomm.options import DEFAULT_HOST_TIMEOUT
from pycomm.survivors.points import Here, Point
from pycomm.survivors.slots import Answer, Failed, Members, Question, Word, has_quorum
from pycomm.survivors.survey import Seen, Survey

__all__ = ["Agreement", "Verdict"]

GRACE_S = 1.0  # after the time limit, for a word that others decide; and with who should propose
ANSWER_S = 0.5  # for the answers of a quorum
TURN_S = 0.2  # with a member that should propose the outcome
STALE_S = 0.3  # what was seen of a member before the verdict counts no longer
BACK_S = 0.02  # after a proposal that another has crossed, at most
Error = TypeVar("Error", bound=CommError)
KINDS: dict[str, type[CommError]] = {
    kind.__name__: kind for kind in (PeerError, CommTimeoutError, MismatchError, AbortedError)
}
CERTAIN = (Seen.GONE, Seen.LEFT)
MAY_LIVE = (Seen.STOPPED, Seen.SILENT)


class Verdict(NamedTuple):
    """Who makes the new group. store: the rank in whose point they meet. round: from 1."""

    members: list[int]
    store: int
    round: int


class Agreement:
    """One call of shrink() of this rank.

    point: its Point. exclude: ranks to leave out; all pass the same. exactly: nobody else may be missing.
    """

    def __init__(self, point: Point, exclude: Sequence[int], exactly: bool, timeout: float) -> None:
        self.point, self.exclude, self.exactly = point, sorted(exclude), exactly
        self.timeout, self.deadline = timeout, time.monotonic() + timeout
        self.size, self.rank = len(point.places), point.rank
        limit = env.settings().host_timeout or DEFAULT_HOST_TIMEOUT
        self.survey = Survey(point, limit)
        self.begin = -1  # words before this one were decided before this call
        self.known = len(point.slots.words)  # at least so many
        self.slot = -1  # of the verdict whose group is being made
        self.members: list[int] = []
        self._since_verdict = 0.0
        self._alone_since: float | None = None
        self._cut_off_since: float | None = None
        self._next_proposal = 0.0

    def __enter__(self) -> Agreement:
        with self.point.lock:
            self.point.here = Here(self.exclude, self.exactly)
        return self

    def __exit__(self, *error: object) -> None:
        with self.point.lock:
            self.point.here = None
        self.survey.close()

    def seconds_left(self) -> float:
        return max(0.05, self.deadline - time.monotonic())

    # --- who is left --------------------

    def agree(self) -> Verdict:
        """The Verdict, with this rank. Raises CommTimeoutError with who did not come, MismatchError,
        AbortedError where this rank was left out, PeerError where it may not go on.
        """
        while True:
            self._look()
            words = self.point.slots.words
            if self.begin < 0:
                self._look_at_failure(words)
                if not self._has_heard():
                    continue
                self.begin = len(words) - bool(words and _is_members(words[-1]))
                self._tell(begin=self.begin)
            if (verdict := self._outcome(words)) is not None:
                return verdict
            if not (words and _is_members(words[-1])):
                self._decide(len(words))
            if time.monotonic() > self.deadline + 2 * GRACE_S:
                raise self._error(CommTimeoutError, f"{self._silence()} within {self._limit()}")

    def _has_heard(self) -> bool:
        """All that can say what was decided have, or it takes too long."""
        return not self._those(self.survey.seen(), Seen.UNKNOWN) or time.monotonic() > self.deadline

    def _look_at_failure(self, words: list[Word]) -> None:
        """Raises what was decided while this rank still listens to those that are silent."""
        last = words[-1] if words else "over"
        if len(words) > self.known and _is_failed(last) and self.rank in last["to"]:
            self._raise_failure(last)

    def _look(self) -> None:
        self.survey.look()
        self._tell(stopped=self.survey.stopped(), certain=self._certain(self.survey.seen()))

    def _tell(self, **facts: object) -> None:
        """The others see it from now on: fields of Here."""
        with self.point.lock:
            if self.point.here is not None:
                self.point.here = self.point.here._replace(**cast(dict[str, Any], facts))

    def _outcome(self, words: list[Word]) -> Verdict | None:
        """The Verdict, if this rank has a part in the last one. Raises what was decided against it."""
        last: Word = words[-1] if words else "over"
        if last == "formed":
            members = cast(Members, words[-2])["members"]
            text = "this group has been shrunk already"
            if self.rank not in members:
                text = f"this rank was left out of the group that {_listed(members)} have made without it"
            raise self._error(AbortedError, text)
        if _is_failed(last) and len(words) > self.begin:
            self._raise_failure(last)
        if not _is_members(last) or self.rank not in last["members"] or self.slot == len(words) - 1:
            return None  # who is no member waits: if one dies, there is another round
        self.slot, self.members, self._since_verdict = len(words) - 1, last["members"], time.monotonic()
        self._alone_since = None
        return Verdict(self.members, last["store"], sum(map(_is_members, words)))

    def _decide(self, slot: int) -> None:
        """Proposes a verdict, if nothing keeps it from being one and this rank is the one to do it."""
        seen, late = self.survey.seen(), time.monotonic() >= self.deadline
        self._look_at_sides(seen, late)
        waiting = self._those(seen, Seen.ABSENT, Seen.UNKNOWN)
        if waiting and not late:
            self._alone_since = None
            return
        here = self._those(seen, Seen.HERE)
        if here[0] != self.rank and self._alone_for() < GRACE_S:
            return  # the first of them does it
        self._propose(slot, self._verdict(seen, here, waiting))

    def _those(self, seen: Mapping[int, Seen], *kinds: Seen) -> list[int]:
        return [rank for rank in sorted(seen) if seen[rank] in kinds and rank not in self.exclude]

    def _begins(self, rank: int) -> bool:
        """Whether a rank is in shrink(), and has not heard yet what was decided before."""
        here = self.survey.here(rank)
        return here is not None and here.begin < 0

    def _alone_for(self) -> float:
        """Seconds for which there is something to propose that the first of the ranks has not proposed."""
        self._alone_since = self._alone_since or time.monotonic()
        return time.monotonic() - self._alone_since

    def _look_at_sides(self, seen: Mapping[int, Seen], late: bool) -> None:
        """Raises PeerError where this side cannot have a quorum any more: see [Note: two sides]."""
        answered = self._those(seen, Seen.HERE, Seen.ABSENT, *([] if late else [Seen.UNKNOWN]))
        if has_quorum(answered, self.size, self._certain(seen), self.exclude):
            self._cut_off_since = None
            return
        lost = self._those(seen, *MAY_LIVE, Seen.UNKNOWN)
        now = time.monotonic()
        self._cut_off_since = self._cut_off_since or now
        patient = any(self.survey.silence(rank) < self.survey.patience for rank in lost)
        if not late and (patient or now - self._cut_off_since < GRACE_S):
            return
        was, here = "were" if len(lost) > 1 else "was", len(self._those(seen, Seen.HERE))
        text = (
            f"{self.point.names(lost)} {was} not heard for {self.survey.patience:g} s, may live and go on "
            f"without these {here} of {self.size} ranks, which are neither more than half nor half with the "
            f"lowest. If you know that they have ended, pass exclude={lost}"
        )
        raise self._error(PeerError, text, lost[0])

    def _verdict(self, seen: Mapping[int, Seen], here: list[int], waiting: list[int]) -> Members | Failed:
        if waiting:
            living = [rank for rank in waiting if seen[rank] == Seen.ABSENT and not self._begins(rank)]
            what = "lives and did not come" if living else "was not heard"
            named = living or self._those(seen, Seen.UNKNOWN, *MAY_LIVE) or waiting
            if len(named) > 1:
                what = what.replace("lives", "live").replace("was", "were")
            text = f"{self.point.names(named)} {what} within {self._limit()}"
            text += ". Call shrink() again, with `exclude` to go on without"
            return _failed(CommTimeoutError, named[0], text, [*here, *filter(self._begins, waiting)])
        for rank in here:
            other = self.survey.here(rank) if rank != self.rank else self.point.here
            if other is not None and (list(other.exclude), other.exactly) != (self.exclude, self.exactly):
                text = (
                    f"rank {self.rank} leaves out {_listed(self.exclude)}, rank {rank} "
                    f"{_listed(other.exclude)}. All survivors must pass equal ranks"
                )
                return _failed(MismatchError, rank, text)
        lost = [rank for rank in range(self.size) if rank not in here and rank not in self.exclude]
        if self.exactly and lost:
            are = "is" if len(lost) == 1 else "are"
            text = f"{self.point.names(lost)} {are} lost, too. Pass all ranks that are to be left out"
            return _failed(PeerError, lost[0], text)
        return {"members": here, "store": self.rank}

    # --- whether the group was made --------------------

    def form(self, made: bool) -> bool:
        """made: this rank has the new group. Returns whether all have; if not, agree() again."""
        if made:
            self._tell(made=self.slot)
        while True:
            self._look()
            words, slot = self.point.slots.words, self.slot + 1
            if len(words) > slot:
                word = words[slot]
                if _is_failed(word):
                    self._raise_failure(word)
                return word == "formed"
            lost = self.lost_member() is not None or not made
            others = [rank for rank in self.members if rank != self.rank]
            if all(self._has_made(rank) for rank in others) and made:
                self._propose_in_turn(slot, "formed")
            elif lost:
                self._propose_in_turn(slot, "over")
            if time.monotonic() > self.deadline + GRACE_S:
                self.give_up(f"not all others had the new group within {self._limit()}")

    def _propose_in_turn(self, slot: int, word: Word) -> None:
        """The first member that lives does it; the others where it takes long."""
        seen = self.survey.seen()
        first = min(rank for rank in self.members if seen[rank] == Seen.HERE)
        if first == self.rank or self._alone_for() > TURN_S:
            self._propose(slot, word)

    def _has_made(self, rank: int) -> bool:
        here = self.survey.here(rank)
        return here is not None and here.made >= self.slot

    def lost_member(self) -> int | None:
        """A member that will not make the group with this one any more, or None."""
        seen, fresh = self.survey.seen(), time.monotonic() - self._since_verdict > STALE_S
        fine = (Seen.HERE, Seen.UNKNOWN) if fresh else (Seen.HERE, Seen.UNKNOWN, Seen.ABSENT)
        return next((r for r in self.members if r != self.rank and seen[r] not in fine), None)

    def watch(self) -> None:
        """While the group is made. Raises PeerError where that is in vain."""
        self.survey.look(0)
        words = self.point.slots.words
        if len(words) > self.slot + 1 and words[self.slot + 1] != "formed":
            raise self._error(PeerError, "another rank was lost, and the group was not made")
        if (rank := self.lost_member()) is not None:
            raise self._error(PeerError, f"{self.point.name(rank)} was lost while the group was made", rank)

    def give_up(self, why: str) -> NoReturn:
        """This rank cannot go on, for a reason that is its own: all raise it."""
        failed = _failed(PeerError, self.rank, f"{self.point.name(self.rank)} gave up: {why}")
        end = max(self.deadline, time.monotonic()) + GRACE_S
        while time.monotonic() < end:
            words = self.point.slots.words
            last = words[-1] if words else "over"
            if last == "formed" or (_is_failed(last) and len(words) > self.begin):
                break
            self._propose(len(words), failed)  # if the round is over, in the next one
            self._look()
        raise self._error(PeerError, failed["failed"][2], self.rank)

    # --- words --------------------

    def _propose(self, slot: int, word: Word) -> Word | None:
        """Lets a quorum take the word, or what was taken before. Returns what is decided, or None."""
        if time.monotonic() < self._next_proposal:
            return None
        self.point.slots.number += 1
        ballot = (self.point.slots.number, self.rank)
        answers = self._ask({"ask": "propose", "slot": slot, "ballot": ballot}, "promised")
        if (decided := self._decided(answers)) is not None:
            return decided
        promises = [answer for answer in answers.values() if "promised" in answer]
        taken = [answer["promised"] for answer in promises if answer["promised"] is not None]
        if not self._is_quorum(answers, "promised"):
            self._cross(answers)
            return None
        value: Word = max(taken, key=lambda one: tuple(one[0]))[1] if taken else word
        question = {"ask": "take", "slot": slot, "ballot": ballot, "value": value}
        answers = self._ask(question, "taken")
        if (decided := self._decided(answers)) is not None:
            return decided
        if not self._is_quorum(answers, "taken"):
            self._cross(answers)
            return None
        with self.point.lock:
            words = [*self.point.slots.words[:slot], value]
        self.survey.tell({"ask": "know", "words": words})
        return value

    def _ask(self, question: Question, wanted: str) -> dict[int, Answer]:
        """Until a quorum has done what is wanted, or somebody objects."""

        def enough(answers: dict[int, Answer]) -> bool:
            objected = any(wanted not in answer for answer in answers.values())
            return objected or self._is_quorum(answers, wanted)

        return self.survey.ask(question, enough, ANSWER_S)

    def _is_quorum(self, answers: Mapping[int, Answer], wanted: str) -> bool:
        answered = [rank for rank, answer in list(answers.items()) if wanted in answer]
        return has_quorum(answered, self.size, self._certain(self.survey.seen()), self.exclude)

    def _certain(self, seen: Mapping[int, Seen]) -> list[int]:
        return [rank for rank, one in seen.items() if one in CERTAIN]

    def _decided(self, answers: Mapping[int, Answer]) -> Word | None:
        return next((cast(Word, one["decided"]) for one in answers.values() if "decided" in one), None)

    def _cross(self, answers: Mapping[int, Answer]) -> None:
        """Another has proposed with a higher ballot, or a quorum did not answer."""
        refused = [answer["refused"][0] for answer in answers.values() if "refused" in answer]
        self.point.slots.number = max([self.point.slots.number, *refused])
        self._next_proposal = time.monotonic() + random.uniform(0, BACK_S)

    # --- errors --------------------

    def _limit(self) -> str:
        return f"the timeout of {self.timeout:g} s"

    def _silence(self) -> str:
        seen = self.survey.seen()
        silent = [rank for rank, one in sorted(seen.items()) if one in (*MAY_LIVE, Seen.UNKNOWN)]
        named = f"; {self.point.names(silent)} did not answer" if silent else ""
        return f"the others came to no verdict{named}"

    def _raise_failure(self, word: Failed) -> NoReturn:
        kind, peer, text = word["failed"]
        raise self._error(KINDS[kind], text, peer)

    def _error(self, kind: type[Error], text: str, peer: int | None = None) -> Error:
        where = f"[rank {self.rank}/{self.size}] shrink: "
        return kind(where + text, rank=self.rank, world_size=self.size, op="shrink", peer=peer)


def _is_members(word: Word) -> TypeGuard[Members]:
    return isinstance(word, dict) and "members" in word


def _is_failed(word: Word) -> TypeGuard[Failed]:
    return isinstance(word, dict) and "failed" in word


def _failed(kind: type[CommError], peer: int, text: str, to: Sequence[int] = ()) -> Failed:
    return {"failed": (kind.__name__, peer, text), "to": list(to)}


def _listed(ranks: Sequence[int]) -> str:
    if not ranks:
        return "nobody"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
