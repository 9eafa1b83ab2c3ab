"""The facts of all ranks on rank 0. They travel through the launcher's store, not through pycomm, which may
be what is broken.

    every rank   facts -> store            waits for the verdict
    rank 0       reads all facts           verdict: may all ranks make a group?
    every rank   makes the group and measures, if the verdict is yes; the result -> store
    rank 0       reads all results
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from typing import TYPE_CHECKING, Any, TypeAlias

from pycomm import env
from pycomm.doctor import facts

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch.distributed as dist

Record: TypeAlias = dict[str, Any]  # a dataclass of facts.py or checks.py as JSON
ANSWER = datetime.timedelta(seconds=120)  # torch may take long to be imported on a busy machine


def ask_all() -> tuple[list[facts.Facts], list[int]] | None:
    """Collective over the ranks that the launcher started. Returns, on rank 0, facts in order of rank and the
    ranks that did not answer; elsewhere None.
    """
    import torch.distributed as dist  # heavy; a single process may do without

    launch = env.set_launch()
    store, rank, world_size = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=ANSWER))
    store = dist.PrefixStore("pycomm.doctor", store)
    mine = facts.gather(rank)
    _tell(store, f"facts/{rank}", dataclasses.asdict(mine))
    found: dict[int, Record | None] = {}  # on rank 0, of all; None: no answer
    if rank == 0:
        found = {peer: _hear(store, f"facts/{peer}") for peer in range(world_size)}
        _tell(store, "verdict", _can_make_a_group(found.values()))
    if _hear(store, "verdict"):
        _tell(store, f"group/{rank}", dataclasses.asdict(facts.try_ranks(store, rank, world_size)))
        for peer, one in found.items():
            if one is not None:
                one["group"] = _hear(store, f"group/{peer}")
    return _result(found) if rank == 0 else None


def from_json(found: Record) -> facts.Facts:
    """Facts from what dataclasses.asdict made of them."""
    return facts.Facts(
        **found
        | {
            "extension": facts.Extension(**found["extension"]),
            "gpus": facts.Gpus(**found["gpus"]),
            "group": found["group"] and facts.Group(**found["group"]),
        }
    )


def _can_make_a_group(found: Iterable[Record | None]) -> bool:
    return all(
        one and one["extension"]["problem"] is None and one["settings_problem"] is None for one in found
    )


def _result(found: dict[int, Record | None]) -> tuple[list[facts.Facts], list[int]]:
    answers = [from_json(one) for one in found.values() if one]
    return answers, [peer for peer, one in found.items() if not one]


def _tell(store: dist.Store, key: str, value: Record | bool) -> None:
    store.set(key, json.dumps(value))


def _hear(store: dist.Store, key: str) -> Any:
    """None when it does not come in time."""
    try:
        store.wait([key], ANSWER)
    except RuntimeError:  # torch's DistStoreError is one
        return None
    return json.loads(store.get(key))
