"""Where the ranks of the tests of messages are, for tests in this folder."""

import pytest

from pycomm.testing import run_ranks

# name -> (the host of each of n ranks, microseconds that messages may be late, mode)
PLACES = {
    "apart": (lambda n: range(n), 0, "threads"),
    "two hosts": (lambda n: [2 * r // n for r in range(n)], 0, "threads"),
    "late": (lambda n: [r % 2 for r in range(n)], 1500, "threads"),
    "gloo": (lambda n: [r % 2 for r in range(n)], 0, "processes"),
}
THREADS = [name for name, (_, _, mode) in PLACES.items() if mode == "threads"]


def over_hosts(place, hosts=None):
    """run_ranks with the ranks on several hosts: those of `place`, or else these."""
    hosts_of, delay_us, mode = PLACES[place]

    def run(n, body, *args, **options):
        return run_ranks(
            n,
            body,
            *args,
            **{**options, "hosts": hosts or list(hosts_of(n)), "mode": mode, "wire_delay_us": delay_us},
        )

    return run


def raises(kind, call, *words):
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    for word in words:
        assert word in text, text
    return True
