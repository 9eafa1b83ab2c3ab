"""Where the ranks of the tests of messages are, for tests in this folder."""

import pytest

from pycomm import _C
from pycomm.testing import run_ranks

# name -> (the host of each of n ranks, microseconds that messages may be late, mode)
PLACES = {
    "apart": (lambda n: range(n), 0, "threads"),
    "two hosts": (lambda n: [2 * r // n for r in range(n)], 0, "threads"),
    "late": (lambda n: [r % 2 for r in range(n)], 1500, "threads"),
    "gloo": (lambda n: [r % 2 for r in range(n)], 0, "processes"),
}
THREADS = [name for name, (_, _, mode) in PLACES.items() if mode == "threads"]


def over_hosts(place, monkeypatch, hosts=None):
    """run_ranks with the ranks on several hosts: those of `place`, or else these."""
    hosts_of, delay_us, mode = PLACES[place]
    store = _C.LocalStore
    monkeypatch.setattr(_C, "LocalStore", lambda: store(delay_us))

    def run(n, body, *args, **options):
        return run_ranks(n, body, *args, **{**options, "hosts": hosts or list(hosts_of(n)), "mode": mode})

    return run


def raises(kind, call, *words):
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    for word in words:
        assert word in text, text
    return True
