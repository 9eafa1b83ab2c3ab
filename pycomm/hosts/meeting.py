"""Ranks that agree through a store, none of them waiting for what cannot come.

    tell(key, value), hear(key)      what a rank has published, by key and rank
    all_here(key), arrive(key)       counters: who has come so far
    pause()                          a moment of sleep; raises what any other rank has failed with

A rank that fails writes why. All others see it at their next pause() and raise the same words. No call waits
inside the store: a client of torch's TCPStore that waits keeps all other callers of the process out, and
Ctrl-C as well.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch.distributed as dist

# Why no group comes of it, and the rank that this is about or -1; None: nothing is known.
Look: TypeAlias = "Callable[[], tuple[str, int] | None]"

SHORTEST_S, LONGEST_S = 0.001, 0.05  # between two looks into the store
STAY_S = 1.0  # after a failure, so that the others hear of it


class LostRankError(RuntimeError):
    """A rank has died or failed: the extension raises PeerError with lost_rank."""

    def __init__(self, text: str, lost_rank: int) -> None:
        super().__init__(text)
        self.lost_rank = lost_rank


KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (LostRankError, ValueError, RuntimeError, TimeoutError)
}


class Meeting:
    """What the ranks of a group that is being made say to each other.

    Attributes: rank, world_size; hosts: the number of each rank's host; labels: the name of each host; watch:
    called at each pause(), may raise. timeout: seconds for all of it.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        hosts: Iterable[int],
        labels: Iterable[str],
        timeout: float,
        look: Look | None = None,
    ) -> None:
        self.store, self.rank, self.hosts, self.labels = store, rank, list(hosts), list(labels)
        self.world_size, self.timeout = len(self.hosts), timeout
        self.deadline = time.monotonic() + timeout
        self.watch: Callable[[], object] | None = None
        self._look, self._next_look = look, 0.0
        self._written: list[str] = []
        self._sleep = SHORTEST_S

    def label(self, rank: int) -> str:
        return self.labels[self.hosts[rank]]

    # --- what is said --------------------

    def tell(self, key: str, value: object) -> None:
        self.set(f"{key}/{self.rank}", json.dumps(value))
        self.arrive(key)

    def hear(self, key: str, ranks: Iterable[int]) -> dict[int, Any]:
        """What each rank told, as JSON has it. Waits until all have told; raises TimeoutError, in which they
        are named.
        """
        ranks = list(ranks)
        while not self.all_here(key, len(ranks)):
            if time.monotonic() >= self.deadline:
                raise TimeoutError(f"{self.missing(key, ranks)} did not come within {self.timeout:g} s.")
            self.pause()
        names = [f"{key}/{rank}" for rank in ranks]
        at_once = self.store.has_extended_api()  # type: ignore[attr-defined]  # torch's stub lacks it
        values = self.store.multi_get(names) if at_once else map(self.store.get, names)
        return {rank: json.loads(value) for rank, value in zip(ranks, values, strict=True)}

    def missing(self, key: str, ranks: Iterable[int]) -> str:
        """For messages, those that have not told yet: "Rank 1 (node-a), ranks 4, 5 (node-b)"."""
        missing = [rank for rank in ranks if not self.store.check([f"{key}/{rank}"])]
        by_host: dict[str, list[int]] = {}
        for rank in missing:
            by_host.setdefault(self.label(rank), []).append(rank)
        names = ", ".join(
            f"rank{'s' * (len(some) > 1)} {', '.join(map(str, some))} ({label})"
            for label, some in by_host.items()
        )
        return names[:1].upper() + names[1:]

    def set(self, key: str, value: str | bytes) -> None:
        self._written.append(key)
        self.store.set(key, value)  # type: ignore[arg-type]  # torch's stub knows of text only

    def arrive(self, key: str) -> int:
        return self.store.add(f"count/{key}", 1)

    def all_here(self, key: str, number: int) -> bool:
        return self.store.add(f"count/{key}", 0) >= number

    def wait_for_all(self, key: str, number: int, what: str) -> None:
        """Until so many have arrived; what: for the TimeoutError."""
        while not self.all_here(key, number):
            if time.monotonic() >= self.deadline:
                raise TimeoutError(f"{what} within {self.timeout:g} s.")
            self.pause()
        self.raise_failure()  # of one that had arrived before it failed

    # --- failures --------------------

    def pause(self) -> None:
        """Sleeps for a moment, longer from time to time. Raises what another rank has failed with."""
        self.check()
        if self.watch is not None:
            self.watch()
        time.sleep(self._sleep)
        self._sleep = min(LONGEST_S, self._sleep * 1.2)

    def listen(self) -> None:
        """After a failure that may be that of another rank: its words come, or a death is seen, soon."""
        end = time.monotonic() + STAY_S
        while time.monotonic() < end:
            self.pause()

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def hurry(self) -> None:
        """What follows is expected to take no time: the next pauses are short."""
        self._sleep = SHORTEST_S

    def check(self) -> None:
        """Raises what another rank has failed with, or what is known of one outside of the meeting."""
        self.raise_failure()
        if self._look is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LONGEST_S
        if (found := self._look()) is not None:
            text, rank = found
            raise RuntimeError(text) if rank < 0 else LostRankError(text, rank)

    def raise_failure(self) -> None:
        """Raises what another rank has failed with, if one has."""
        if self.store.check(["failure"]):
            failure = json.loads(self.store.get("failure"))
            if failure["rank"] != self.rank:
                lost = [] if failure["lost"] is None else [failure["lost"]]
                raise KINDS[failure["kind"]](f"{failure['text']} (seen by rank {failure['rank']})", *lost)

    def fail(self, error: BaseException) -> BaseException:
        """Tells the others why this rank gives up; the first failure of all counts. Returns the exception to
        raise here.
        """
        kind = next((name for name, one in KINDS.items() if isinstance(error, one)), "RuntimeError")
        text = str(error) if isinstance(error, Exception) else f"Interrupted by {type(error).__name__}."
        failure = {"rank": self.rank, "kind": kind, "text": text or type(error).__name__}
        written = json.dumps({**failure, "lost": getattr(error, "lost_rank", None)})
        with contextlib.suppress(RuntimeError):  # the store has gone
            if self.store.add("count/failures", 1) == 1:
                self.store.set("failure", written)
            elif (first := self._first_failure()) is not None:
                error = first
            self._stay()
        return error

    def _first_failure(self) -> Exception | None:
        """What another rank has failed with; it may be about to write it."""
        end = time.monotonic() + STAY_S
        while time.monotonic() < end:
            try:
                self.raise_failure()
            except tuple(KINDS.values()) as first:
                return first
            time.sleep(SHORTEST_S)
        return None

    def _stay(self) -> None:
        """Until all who have come know of the failure: the store may be in this process, and end with it."""
        self.arrive("know")
        end = time.monotonic() + STAY_S
        while time.monotonic() < end and not self.all_here("know", self.store.add("count/came", 0)):
            time.sleep(SHORTEST_S)

    # --- the end --------------------

    def leave(self, counters: Sequence[str]) -> None:
        """After success: the last rank to come here removes the counters, each rank what it has written."""
        with contextlib.suppress(RuntimeError, NotImplementedError):  # a store that cannot delete
            for key in self._written:
                self.store.delete_key(key)
            if self.arrive("left") == self.world_size:
                for key in (*counters, "left"):
                    self.store.delete_key(f"count/{key}")
