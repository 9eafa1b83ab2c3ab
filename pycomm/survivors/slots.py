"""What a rank remembers of what was proposed, so that all decide alike: Lamport's single-decree Paxos, one
instance for each word of the list ([Note: rounds]).

    propose(slot, ballot)           nothing below this ballot is taken any more   -> what was taken last
    take(slot, ballot, word)        taken, unless a higher ballot was promised
    know(slot, word)                it is decided

    rank 0   propose (1, 0)  -> all promise  -> take (1, 0) "members 0 2"  -> a quorum has taken: decided
    rank 2   propose (2, 2)  -> all promise, and say "members 0 2": it proposes that, whatever it wanted

So once a quorum has taken a word, every later proposal that gets a quorum is of this word: two quorums have a
rank in common, or the ranks of one have all ended. Pure; the caller has the lock.
"""

from collections.abc import Collection, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

__all__ = ["Answer", "Ballot", "Failed", "Members", "Question", "Slots", "Word", "has_quorum"]

Ballot: TypeAlias = tuple[int, int]  # (number, rank)
Question: TypeAlias = dict[str, Any]  # a line of JSON
Answer: TypeAlias = dict[str, Any]


class Members(TypedDict):
    """A verdict: who makes the new group, and the rank in whose point they meet."""

    members: list[int]
    store: int


class Failed(TypedDict):
    """What all raise: the name of the error, the other rank, the text. to: who is in shrink() and raises it,
    though some may not know yet where their call begins.
    """

    failed: tuple[str, int, str]
    to: list[int]


Word: TypeAlias = Members | Failed | Literal["formed", "over"]

NOTHING = (0, -1)  # below all ballots


class Slots:
    """Attributes: words: the decided ones, a list without gaps. number: of the ballots of this rank, of which
    none may come twice.
    """

    def __init__(self) -> None:
        self.words: list[Word] = []
        self.number = 0
        self._promised: dict[int, Ballot] = {}
        self._taken: dict[int, tuple[Ballot, Word]] = {}

    def propose(self, slot: int, ballot: Ballot) -> Answer:
        """{"promised": [ballot, word] or None}, or {"decided": word}, or {"refused": ballot}."""
        if slot < len(self.words):
            return {"decided": self.words[slot]}
        if ballot < self._promised.get(slot, NOTHING):
            return {"refused": self._promised[slot]}
        self._promised[slot] = ballot
        return {"promised": self._taken.get(slot)}

    def take(self, slot: int, ballot: Ballot, word: Word) -> Answer:
        """{"taken": True}, or as propose()."""
        if slot < len(self.words):
            return {"decided": self.words[slot]}
        if ballot < self._promised.get(slot, NOTHING):
            return {"refused": self._promised[slot]}
        self._promised[slot], self._taken[slot] = ballot, (ballot, word)
        return {"taken": True}

    def after_failure(self) -> int:
        """The slot after the last word that has failed: calls that began before it are over."""
        failed = [slot for slot, word in enumerate(self.words) if isinstance(word, dict) and "failed" in word]
        return failed[-1] + 1 if failed else 0

    def know(self, words: Sequence[Word]) -> None:
        """words: the first decided ones, as another rank has them."""
        self.words = [*self.words, *words[len(self.words) :]]  # whoever holds the former list goes on with it


def has_quorum(
    answered: Collection[int], world_size: int, certain: Collection[int], excluded: Collection[int]
) -> bool:
    """Whether these ranks may decide. certain: ranks that are gone or have left. See [Note: two sides]."""
    counted = [rank for rank in range(world_size) if rank not in excluded]
    here = [rank for rank in counted if rank in answered]
    if all(rank in answered or rank in certain for rank in counted):
        return bool(here)
    return 2 * len(here) > len(counted) or (2 * len(here) == len(counted) and counted[0] in here)
