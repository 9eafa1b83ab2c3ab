"""python -m pycomm.plan calibrate, on small products and buffers: its file is one that the planner reads."""

import os

import pytest
import torch

from pycomm.parallel import Plan
from pycomm.parallel.planning import calibrate, collectives, load_machine, named
from pycomm.parallel.planning.job import PYCOMM, Job
from pycomm.parallel.planning.machine import from_toml, tomllib
from pycomm.parallel.planning.time import step_time

SMALL = {
    "SIZES": (16, 32, 64),
    "LARGE": 1 << 16,
    "TURNS": 2,
    "ATTENTION": (1, 2, 16, 8),
    "ELEMENTS": (32, 16),
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_its_file_is_a_machine(ranks, monkeypatch, tmp_path, capsys):
    threads = torch.get_num_threads()
    for name, value in SMALL.items():
        monkeypatch.setattr(calibrate, name, value)
    monkeypatch.setattr(calibrate, "_seconds", quick(calibrate._seconds))
    try:
        assert calibrate.main(["--ranks", str(ranks), "--out", str(tmp_path / "m.toml")]) == 0
    finally:
        torch.set_num_threads(threads)
    assert "written" in capsys.readouterr().out
    machine = load_machine(tmp_path / "m.toml")
    reached = machine.reached
    assert 0 < reached.attention <= 1 and 0 < reached.memory <= 1 and 0 <= reached.overlap <= 1
    assert ranks > 1 or reached.overlap == 1
    seconds = step_time(Job(named("gpt3-1.3b"), machine, Plan(dp=ranks), 8, 2, "none", PYCOMM)).total
    assert 0 < seconds < 1e6


def quick(function):
    return lambda call, least=0.0: function(call, 0.0)


def known_machine():
    """Of which what is measured is computed by the closed forms."""
    machine = load_machine("cpu-2core")
    link = machine.links[0]._replace(latency=3e-5, bandwidth=2e9, one_way=0.4, ranks=0)
    reached = machine.reached._replace(product=1.0, product_half=64.0, memory=0.5, launch=4e-6, overlap=0.3)
    reached = reached._replace(attention=0.25)
    return machine._replace(peak=8e10, bandwidth=9e9, host=9e9, links=(link,), reached=reached, reserved=0.0)


def measured_by(machine, ranks):
    """What each of these ranks would measure on it."""
    where, large = collectives.span(machine, ranks, 1), calibrate.LARGE
    bytes_of = {"small": 0, "large": large}
    found = calibrate.Measured(
        products={n: machine.peak / (1 + 3 * 64 / n) for n in calibrate.SIZES},
        memory=machine.bandwidth,
        elements=machine.bandwidth * machine.reached.memory,
        attention=calibrate._expected_attention(machine),
        launch=machine.reached.launch,
    )
    if ranks == 1:
        return found
    sums = {name: 2 * where.inner.latency + collectives.all_reduce(where, n) for name, n in bytes_of.items()}
    sums["large"] -= 2 * where.inner.latency
    gathered = collectives.all_gather(where, large)
    return found._replace(**sums, one_way=gathered, overlap=machine.reached.overlap)


def read(text):
    return from_toml(tomllib.loads(text))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_machine_that_is_measured_is_found_again(ranks, monkeypatch):
    """Each number of its file, from what the formulas say of a machine that is known."""
    machine = known_machine()
    each = measured_by(machine, ranks)
    monkeypatch.setattr(calibrate, "run_ranks", lambda n, *_, **__: [each] * n)
    found = read(calibrate.calibrate(ranks))
    assert (found.bandwidth, found.host) == pytest.approx((9e9, 9e9), rel=1e-3) and found.reserved == 0
    # the best product that is measured counts as the peak, of which smaller ones reach less
    peak = max(each.products.values())
    assert found.peak == pytest.approx(peak, rel=1e-3) and found.reached.product == 1
    for n, rate in each.products.items():
        assert found.peak / (1 + 3 * found.reached.product_half / n) == pytest.approx(rate, rel=0.2), n
    assert found.reached.memory == pytest.approx(0.5, rel=1e-2)
    assert found.reached.launch == pytest.approx(4e-6, rel=1e-3)
    assert found.name.endswith(f"{ranks} ranks") and found.links[0].ranks == 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    assert found.memory == pytest.approx(memory, rel=1e-3)
    if ranks > 1:
        link = found.links[0]
        assert (link.latency, link.bandwidth) == pytest.approx((3e-5, 2e9), rel=1e-3)
        assert link.one_way == pytest.approx(0.4, rel=0.01) and found.reached.overlap == 0.3
    # the attention takes as long as it was measured
    assert calibrate._expected_attention(found) == pytest.approx(each.attention, rel=0.1)


def test_shares_are_one_at_most(monkeypatch):
    """What is faster than its bound: elements from a cache, an all_gather, an attention."""
    machine = known_machine()
    fast = measured_by(machine, 2)._replace(elements=1e12, one_way=1e-7, attention=1e-9, overlap=1.0)
    monkeypatch.setattr(calibrate, "run_ranks", lambda n, *_, **__: [fast] * n)
    found = read(calibrate.calibrate(2))
    assert (found.reached.memory, found.reached.attention, found.links[0].one_way) == (1, 1, 1)
    same = fast._replace(large=fast.small)  # noise: a larger size is not slower
    monkeypatch.setattr(calibrate, "run_ranks", lambda n, *_, **__: [same] * n)
    assert read(calibrate.calibrate(2)).links[0].bandwidth > 1e12


def test_medians_over_the_ranks(monkeypatch):
    """Of every number: one rank that others disturb changes nothing, the first or the last."""
    usual = measured_by(known_machine(), 3)
    slow = usual._replace(
        **{name: 7 * getattr(usual, name) for name in usual._fields[1:]},
        products={size: 9 * rate for size, rate in usual.products.items()},
    )
    texts = []
    for found in ([usual] * 3, [slow, usual, usual], [usual, usual, slow], [usual, slow, usual]):
        monkeypatch.setattr(calibrate, "run_ranks", lambda n, *_, found=found, **__: found)
        texts.append(calibrate.calibrate(3))
    assert len(set(texts)) == 1


@pytest.mark.parametrize("half", [1, 8, 32, 100, 700])
def test_the_half_size_that_fits(half):
    sizes = (32, 64, 128, 256, 512, 1024)
    products = {n: 5e9 / (1 + 3 * half / n) for n in sizes}
    assert calibrate._fitted(products, 5e9) == pytest.approx(half, rel=0.1)


def test_a_median_of_turns_of_as_many_calls(monkeypatch):
    """Seconds of one call, by a clock that stands still between calls."""
    now, calls = [0.0], []

    def call():
        calls.append(1)
        now[0] += 0.5 if len(calls) == 7 else 0.001  # one is disturbed

    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: now[0])
    assert calibrate._seconds(call, 0.004) == pytest.approx(0.001)
    assert len(calls) == 2 + 4 * calibrate.TURNS
    assert calibrate._seconds(call, 0.0) == pytest.approx(0.001) and len(calls) == 2 + 4 * 5 + 2 + 5


class Clock:
    """Time that passes in products and sums only, of which `hidden` is beside products."""

    def __init__(self, hidden):
        self.now, self.hidden, self.products, self.told = 0.0, hidden, 0, 0

    def __matmul__(self, other):
        self.now, self.products = self.now + 0.01, self.products + 1

    def all_reduce(self, tensor, async_op=False):
        if async_op:
            self.until = self.now + 0.05
            return self
        self.now += 0.05

    def wait(self):
        self.now = max(self.now, self.until) + (1 - self.hidden) * 0.05

    def broadcast(self, tensor, src):
        assert src == 0
        self.told += 1

    def barrier(self):
        pass

    def is_initialized(self):
        return True


@pytest.mark.parametrize("hidden", [0.0, 0.3, 1.0])
def test_overlap_of_a_sum_and_products_that_take_as_long(hidden, monkeypatch):
    clock = Clock(hidden)
    monkeypatch.setattr(calibrate, "dist", clock)
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(calibrate, "_seconds", quick(calibrate._seconds))
    found = calibrate._overlap(torch.ones(1), clock, clock)
    assert found == pytest.approx(hidden, abs=1e-6)
    assert clock.told == 3  # how often a sum, a product, and products beside a sum: alike on all ranks
    assert clock.products == 2 + calibrate.TURNS + 2 * 5 * 3 * calibrate.TURNS  # five take as long as a sum
