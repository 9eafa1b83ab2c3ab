"""The facts of all ranks on rank 0. They travel through the launcher's store, not through pycomm, which may
be what is broken.

    every rank   facts -> store            waits for the verdict
    rank 0       reads all facts           verdict: may all ranks make a group?
    every rank   makes the group and measures, if the verdict is yes; the result -> store
    rank 0       reads all results
"""

import dataclasses
import datetime
import json

from pycomm import env
from pycomm.doctor import facts

ANSWER = datetime.timedelta(seconds=120)  # torch may take long to be imported on a busy machine


def ask_all():
    """Collective over the ranks that the launcher started. Returns, on rank 0, (facts in order of rank, ranks
    that did not answer), elsewhere (None, None).
    """
    import torch.distributed as dist  # heavy; a single process may do without

    launch = env.set_launch()
    store, rank, world_size = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=ANSWER))
    store = dist.PrefixStore("pycomm.doctor", store)
    mine = facts.gather(rank)
    _tell(store, f"facts/{rank}", dataclasses.asdict(mine))
    if rank == 0:
        found = {peer: _hear(store, f"facts/{peer}") for peer in range(world_size)}
        _tell(store, "verdict", _can_make_a_group(found.values()))
    if not _hear(store, "verdict"):
        return _result(rank, found if rank == 0 else {})
    _tell(store, f"group/{rank}", dataclasses.asdict(facts.try_ranks(store, rank, world_size)))
    if rank == 0:
        for peer in range(world_size):
            found[peer]["group"] = _hear(store, f"group/{peer}")
        return _result(rank, found)
    return None, None


def from_json(found):
    """Facts from what dataclasses.asdict made of them."""
    return facts.Facts(
        **found
        | {
            "extension": facts.Extension(**found["extension"]),
            "gpus": facts.Gpus(**found["gpus"]),
            "group": found["group"] and facts.Group(**found["group"]),
        }
    )


def _can_make_a_group(found):
    return all(
        one and one["extension"]["problem"] is None and one["settings_problem"] is None for one in found
    )


def _result(rank, found):
    if rank != 0:
        return None, None
    answers = [from_json(one) for one in found.values() if one]
    return answers, [peer for peer, one in found.items() if not one]


def _tell(store, key, value):
    store.set(key, json.dumps(value))


def _hear(store, key):
    """None when it does not come in time."""
    try:
        store.wait([key], ANSWER)
    except RuntimeError:  # torch's DistStoreError is one
        return None
    return json.loads(store.get(key))
