"""all_to_all over hosts where some ranks pass sizes and others pass none: as on one host
(test_all_to_all_forms.py). What differs raises on every rank, writes nothing, and the group goes on.
"""

import pytest
import torch
from test_all_to_all_forms import LIMIT, check_torch, exchange, mixes
from tiers import tier
from torch_ranks import spawn

from pycomm import MismatchError
from pycomm.testing import run_ranks
from pycomm.testing.groups import hosts_of

PLACEMENTS = {"1+1": 2, "1+2": 3, "2+2": 4, "0101": 4, "2+1+1": 4}
UNTOUCHED = -1.0
SIZES = [0, 2, 300, 20_000]  # elements


@tier(quick=1 / 3)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("mode", "delay"), [("threads", 0), ("threads", 300), ("processes", 0)])
def test_right_values(placement, mode, delay):
    """Processes: over Gloo, which ends them over a message of another size than its receive."""
    n, rounds = PLACEMENTS[placement], 12 if delay else 30
    how = {"mode": mode, "hosts": placement, "timeout": LIMIT}
    if delay:
        how["wire_delay_us"] = delay
    found = sum(run_ranks(n, mixes, 31 * n + delay, rounds, **how), [])
    assert not found, "\n".join(found[:5])


# --- sizes that differ --------------------


def wrong_calls(n, odd, size):
    """What the ranks send and expect, by sender and receiver, and the ranks that pass no sizes."""

    def table(row=0, column=0, one=0):
        rows = [[size + row * (p == odd) + column * (q == odd) for q in range(n)] for p in range(n)]
        rows[odd][odd] = size + bool(row or column)
        rows[odd][odd - 1] += one
        return rows

    others, everyone = set(range(n)) - {odd}, table()
    yield "it sends one more", table(one=1), everyone, others
    yield "others expect one more", everyone, table(one=1), others - {(odd - 1) % n}
    yield "it has another count", table(row=1), table(column=1), {odd}
    yield "there are two counts", table(row=1), table(column=1), set(range(n)) - {(odd - 1) % n}


def differences(sent, expected, hosts):
    """Sentence -> the two ranks."""
    name = lambda rank: f"rank {rank} (host{hosts[rank]})"  # noqa: E731
    pairs = [(p, q) for p in range(len(sent)) for q in range(len(sent))]
    return {
        f"{name(p)} sends {sent[p][q]} elements to {name(q)}, which expects {expected[p][q]}.": (p, q)
        for p, q in pairs
        if sent[p][q] != expected[p][q]
    }


def raise_and_go_on(comm, hosts):
    n, r, found = comm.world_size, comm.rank, []
    cases = [(odd, size, *case) for odd in {0, n - 1} for size in SIZES for case in wrong_calls(n, odd, size)]
    for i, (odd, size, name, sent, expected, plain) in enumerate(cases):
        ins, outs = sent[r], [expected[p][r] for p in range(n)]
        splits = {} if r in plain else {"in_splits": ins, "out_splits": outs}
        x, y, what = torch.ones(sum(ins)), torch.full((sum(outs),), UNTOUCHED), (odd, size, name)
        try:
            work = comm.all_to_all(x, y, **splits, async_op=i % 2 == 1)
            if work is not None and i % 2:
                work.wait(LIMIT)
            found.append((*what, "no error"))
        except MismatchError as error:
            text = str(error)
            named = [pair for words, pair in differences(sent, expected, hosts).items() if words in text]
            if not (
                len(named) == 1
                and error.peer in named[0]
                and error.peer != r
                and error.rank == r
                and text.startswith(f"[rank {r}/{n}] all_to_all #")
            ):
                found.append((*what, text, error.peer))
        if not y.eq(UNTOUCHED).all():
            found.append((*what, "the output was written"))
        right = [exchange(comm, [[3 * size] * n] * n, others, {}) for others in (plain, range(n), [])]
        if not all(right) or comm.all_reduce(torch.ones(5)).tolist() != [n] * 5:
            found.append((*what, "after it", right))
    return found


@tier(quick=1 / 2)
@pytest.mark.parametrize("mode", ["threads", "processes"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sizes_that_differ(placement, mode):
    n = PLACEMENTS[placement]
    hosts = hosts_of(placement, n)
    found = sum(run_ranks(n, raise_and_go_on, hosts, hosts=hosts, mode=mode, timeout=LIMIT), [])
    assert not found, f"{len(found)}: {found[:5]}"


def test_torch():
    spawn(3, check_torch, hosts=[0, 1, 0])
