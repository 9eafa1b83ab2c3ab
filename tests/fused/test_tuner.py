"""The tuner with forms whose times are given: which one it takes, what all ranks agree on, what it writes and
reads.
"""

import collections
import fcntl
import itertools
import json
import os
import time

import pytest
import torch

from pycomm.errors import CommError
from pycomm.fused import choice, config, ranks, tuner
from pycomm.fused.machine import Machine
from pycomm.fused.problem import OPS, Problem
from pycomm.testing import run_ranks

HERE = Machine(90, 1, 132, "")
CPU = torch.device("cpu")
FALLBACK = choice.Choice("plain", 1, None, "the table")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PYCOMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuner, "ROUND_SECONDS", 0.0)  # one call of a form per round
    monkeypatch.setattr(tuner, "_memory", {})
    return tmp_path / "cache" / "fused.json"


def problem(op="matmul_all_reduce", m=512, n=256, k=64, **options):
    dtype = options.pop("dtype", torch.bfloat16)
    return Problem(op, m, n, k, dtype, options.pop("world_size", 1), options.pop("rank", 0), **options)


def forms(seconds, slow_rank=None, rank=0):
    """run(form) that takes so long: by "plain", "one-shot", "other"; on the slow rank 20 ms for one-shot."""

    def run(form):
        name = form.name if form.config is None else "one-shot" if form.config.one_shot else "other"
        run.calls.append(name)
        time.sleep(0.02 if rank == slow_rank and name == "one-shot" else seconds[name])

    run.calls = []
    return run


@pytest.mark.parametrize(
    ("seconds", "form", "one_shot"),
    [
        ({"plain": 0.01, "one-shot": 0.001, "other": 0.004}, "fused", True),
        ({"plain": 0.01, "one-shot": 0.004, "other": 0.001}, "fused", False),
        ({"plain": 0.001, "one-shot": 0.004, "other": 0.004}, "plain", None),
    ],
)
def test_takes_the_fastest(seconds, form, one_shot, cache):
    run, alone = forms(seconds), ranks.ALONE._replace(cache=ranks.Cache())
    found = tuner.decide(problem(), alone, CPU, HERE, FALLBACK, run)
    assert found.name == form and (found.config and found.config.one_shot) == one_shot
    assert "measured on this machine: plain" in found.reason and "best kernel" in found.reason
    entries = next(iter(json.loads(cache.read_text()).values()))
    assert (
        list(entries) == ["matmul_all_reduce 512 256 64 bfloat16 1 none no_bias"]
        and entries.popitem()[1]["form"] == form
    )
    called = len(run.calls)
    assert tuner.decide(problem(m=510), alone, CPU, HERE, FALLBACK, run) is found  # rounded to the same m
    tuner._memory.clear()  # as in a new process
    again = tuner.decide(problem(), alone._replace(cache=ranks.Cache()), CPU, HERE, FALLBACK, run)
    assert again == found and len(run.calls) == called


def test_a_kernel_must_win_clearly(monkeypatch):
    monkeypatch.setattr(tuner, "MARGIN", 50.0)
    run = forms({"plain": 0.005, "one-shot": 0.001, "other": 0.001})
    assert (
        tuner.decide(problem(), ranks.ALONE._replace(cache=ranks.Cache()), CPU, HERE, FALLBACK, run).name
        == "plain"
    )


def test_forms_that_do_not_compile_are_left_out():
    def run(form):
        if form.config is not None and not form.config.one_shot:
            raise tuner.triton.OutOfResources(300_000, 232_448, "shared memory")
        time.sleep(0.004 if form.config is None else 0.001)

    found = tuner.decide(problem(), ranks.ALONE._replace(cache=ranks.Cache()), CPU, HERE, FALLBACK, run)
    assert found.name == "fused" and found.config.one_shot


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("PassManager::run failed"),
        CommError("rank 1: cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (out of memory)"),
    ],
)
def test_forms_that_fail_are_left_out(error):
    def run(form):
        if form.config is not None:
            raise error
        time.sleep(0.001)

    found = tuner.decide(problem(), ranks.ALONE._replace(cache=ranks.Cache()), CPU, HERE, FALLBACK, run)
    assert found.name == "plain" and "no kernel compiles" in found.reason


def test_other_errors_of_a_form_are_raised():
    def run(form):
        if form.config is not None:
            raise CommError("a peer died")

    with pytest.raises(CommError, match="a peer died"):
        tuner.decide(problem(), ranks.ALONE._replace(cache=ranks.Cache()), CPU, HERE, FALLBACK, run)


@pytest.mark.parametrize(
    ("m", "world_size", "tried"), [(512, 4, True), (1 << 17, 4, False), (1 << 17, 2, True)]
)
def test_one_shot_is_for_small_results(m, world_size, tried):
    run = forms({"plain": 0.0, "one-shot": 0.0, "other": 0.0})
    tuner.decide(
        problem(m=m, world_size=world_size),
        ranks.ALONE._replace(cache=ranks.Cache()),
        CPU,
        HERE,
        FALLBACK,
        run,
    )
    assert ("one-shot" in run.calls) == tried and "other" in run.calls


def test_what_comes_to_the_same_is_measured_once():
    """Rows that do not begin at multiples of 16 bytes: several candidates get the same tile."""
    ragged, measured = problem(k=65), collections.Counter()
    shipped = config.candidates(ragged.op, ragged.dtype, HERE.arch)
    different = {config.fitting(ragged, candidate) for candidate in shipped}
    assert len(different) < len(shipped)
    tuner.decide(
        ragged,
        ranks.ALONE._replace(cache=ranks.Cache()),
        CPU,
        HERE,
        FALLBACK,
        lambda form: measured.update([form.config]),
    )
    assert measured == dict.fromkeys([None, *different], 2 + tuner.ROUNDS)


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("op", OPS)
def test_a_fitted_configuration_fits(op, arch):
    """launch.py fits again what the tuner has fitted and remembered, in a call that may save a
    preactivation.
    """
    for dtype, activation, k in itertools.product(
        (torch.float32, torch.bfloat16), (None, "gelu", "silu", "swiglu"), (64, 65)
    ):
        one = problem(op, k=k, dtype=dtype, activation=activation)
        for shipped, save in itertools.product(
            config.candidates(op, dtype, arch, one.panels, activation), (False, True)
        ):
            once = config.fitting(one, shipped, save)
            assert (
                once
                == config.fitting(one, once, save)
                == config.fitting(one, config.fitting(one, shipped), save)
            )


@pytest.mark.parametrize("text", ["", "[]", "{not json", '{"a place": 5}', "[" * 200_000, "\ufeff{}"])
def test_a_broken_cache_is_none(text, cache):
    cache.parent.mkdir()
    cache.write_text(text)
    assert tuner.lookup(problem(), CPU) is None
    run = forms({"plain": 0.001, "one-shot": 0.004, "other": 0.004})
    assert (
        tuner.decide(problem(), ranks.ALONE._replace(cache=ranks.Cache()), CPU, HERE, FALLBACK, run).name
        == "plain"
    )
    assert "plain" in cache.read_text()


def test_a_foreign_entry_is_none(cache):
    cache.parent.mkdir()
    cache.write_text(
        json.dumps({tuner.place(CPU): {tuner.key_of(problem()): {"form": "fused", "config": [1, 2]}}})
    )
    assert tuner.lookup(problem(), CPU) is None


GOOD = list(config.Config(64, 64, 32))


@pytest.mark.parametrize(
    "entry",
    [
        {"form": "fused", "config": ["64", *GOOD[1:]], "reason": ""},
        {"form": "fused", "config": [-64, *GOOD[1:]], "reason": ""},
        {"form": "fused", "config": [1e3, *GOOD[1:]], "reason": ""},
        {"form": "fused", "config": None, "reason": ""},
        {"form": "magic", "config": GOOD, "reason": ""},
        {"form": "plain", "config": None, "reason": 5},
    ],
)
def test_a_damaged_entry_is_none(entry, cache):
    cache.parent.mkdir()
    text = {tuner.place(CPU): {tuner.key_of(problem()): entry}}
    cache.write_text(json.dumps(text))
    assert tuner.lookup(problem(), CPU) is None
    sound = {**entry, "form": "fused", "config": GOOD, "reason": ""}
    cache.write_text(json.dumps({tuner.place(CPU): {tuner.key_of(problem()): sound}}))
    tuner._memory.clear()
    assert tuner.lookup(problem(), CPU).config == config.Config(*GOOD)


def test_pipes_in_place_of_the_cache(cache, monkeypatch, caplog):
    """Neither the file nor its lock is waited for; nor is a lock that is not given back."""
    run = forms({"plain": 0.001, "one-shot": 0.004, "other": 0.004})
    cache.parent.mkdir()
    os.mkfifo(cache)
    os.mkfifo(cache.with_suffix(".lock"))
    assert tuner.lookup(problem(), CPU) is None
    assert (
        tuner.decide(problem(), ranks.ALONE._replace(cache=ranks.Cache()), CPU, HERE, FALLBACK, run).name
        == "plain"
    )
    assert "plain" in cache.read_text() and not caplog.text
    monkeypatch.setattr(tuner, "LOCK_SECONDS", 0.05)
    with open(cache.with_suffix(".lock"), "r+b", buffering=0) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        tuner._write("a place", "a key", {})
    assert "cannot be cached" in caplog.text and "has held" in caplog.text


def test_no_place_for_a_cache(cache, monkeypatch, caplog):
    cache.parent.write_text("a file where the folder should be")
    run = forms({"plain": 0.001, "one-shot": 0.004, "other": 0.004})
    assert (
        tuner.decide(problem(), ranks.ALONE._replace(cache=ranks.Cache()), CPU, HERE, FALLBACK, run).name
        == "plain"
    )
    assert "cannot be cached" in caplog.text


def slowest_rank_counts(comm):
    run = forms({"plain": 0.008, "one-shot": 0.0005, "other": 0.002}, slow_rank=1, rank=comm.rank)
    group = ranks.of(comm)
    found = tuner.decide(problem(world_size=2, rank=comm.rank), group, CPU, HERE, FALLBACK, run)
    return found.name, found.config.one_shot, len(run.calls)


def test_slowest_rank_counts():
    first, second = run_ranks(2, slowest_rank_counts)
    assert first == second and first[:2] == ("fused", False)


def one_has_a_cache(comm):
    """Rank 0 finds an entry, rank 1 none: both measure, and agree."""
    run = forms({"plain": 0.001, "one-shot": 0.03, "other": 0.03})
    mine = problem(world_size=2, rank=comm.rank)
    kept = tuner.lookup
    tuner.lookup = lambda *args: choice.Choice("fused", 1, None, "old") if args[0].rank == 0 else None
    try:
        comm.barrier()
        return tuner.decide(mine, ranks.of(comm), CPU, HERE, FALLBACK, run).name, bool(run.calls)
    finally:
        comm.barrier()
        tuner.lookup = kept


def test_caches_that_differ():
    assert run_ranks(2, one_has_a_cache, mode="processes") == [("plain", True)] * 2


def test_what_was_measured_before_stays(cache):
    """Of other problems and other places; of the same one the last counts."""
    first, second = choice.Choice("plain", 1, None, "one"), choice.Choice("fused", 1, config.FP32, "two")
    other, here = "another machine", tuner.place(CPU)
    keys = [tuner.key_of(problem()), tuner.key_of(problem(k=65))]
    for where, key, found in (
        (here, keys[0], second), (other, keys[0], first), (here, keys[1], second), (here, keys[0], first),
    ):  # fmt: skip
        tuner._write(where, key, tuner._entry(found))
    known = {
        where: {key: entry["reason"] for key, entry in of.items()} for where, of in tuner._read().items()
    }
    assert known == {other: {keys[0]: "one"}, here: {keys[0]: "one", keys[1]: "two"}}
    assert [tuner.lookup(problem(), CPU), tuner.lookup(problem(k=65), CPU)] == [first, second]
    assert sorted(path.name for path in cache.parent.iterdir()) == ["fused.json", "fused.lock"]


@pytest.mark.parametrize(
    ("entries", "alike"),
    [
        (["plain", "plain"], True),
        (["fused", "fused"], True),
        (["plain", "fused"], False),
        (["fused", "wider"], False),
        (["fused", "fused", "wider"], False),
        ([None, "plain"], False),
        (["plain", "plain", None], False),
        ([None, None], False),
    ],
)
def test_ranks_agree_where_form_and_tiles_are_the_same(entries, alike):
    """What each measured may differ."""
    known = {
        "plain": choice.Choice("plain", 1, None, "a"),
        "fused": choice.Choice("fused", 1, config.FP32, "b"),
    }
    known["wider"] = known["fused"]._replace(config=config.FP32._replace(movers=8))
    found = [
        name and tuner._entry(known[name]._replace(reason=str(rank))) for rank, name in enumerate(entries)
    ]
    assert tuner._alike(found) is alike


@pytest.mark.parametrize(
    "change",
    [{"m": 1024}, {"n": 257}, {"k": 65}, {"dtype": torch.float16}, {"world_size": 2}, {"activation": "relu"},
     {"bias": True}, {"op": "matmul"}],
)  # fmt: skip
def test_another_problem_has_another_entry(change):
    assert tuner.key_of(problem(**change)) != tuner.key_of(problem())


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("op", OPS)
def test_only_what_needs_registers_takes_a_smaller_tile(op, arch):
    """Rows at multiples of 16 bytes and nothing to save: what is shipped. Others: 64 at most in 16 bits."""
    for shipped in config.candidates(op, torch.bfloat16, arch):
        assert config.fitting(problem(op), shipped, save=True) == shipped
        for ragged in (problem(op, n=257), problem(op, k=65)):
            found = config.fitting(ragged, shipped)
            assert max(found[:3]) <= 64 and not (found.flatten or found.specialize)
            assert found.tma == shipped.tma and found.movers == shipped.movers


def test_what_is_tuned_is_used_from_then_on(monkeypatch):
    """By later calls of the group, without measuring again."""
    best = choice.Choice("plain", 1, None, "tuned")
    monkeypatch.setattr(tuner, "measure", lambda *arguments: best)
    group = ranks.ALONE._replace(cache=ranks.Cache())
    assert tuner.tune(problem(), torch.zeros(1), torch.zeros(1), None, group) is best
    monkeypatch.setattr(tuner, "measure", None)
    assert tuner.decide(problem(), group, CPU, HERE, FALLBACK, None) is best


def test_uneven_shards_share_an_entry():
    keys = {
        tuner.key_of(
            problem("all_gather_matmul", n=n, world_size=2, rank=rank, sizes=(256, 256), shards=(8, 7))
        )
        for rank, n in ((0, 8), (1, 7))
    }
    assert len(keys) == 1


def test_rounded():
    assert [tuner.rounded(m) for m in (0, 1, 2, 3, 4, 5, 7, 8, 9, 13, 4096, 4097)] == [
        0,
        1,
        2,
        3,
        4,
        6,
        8,
        8,
        12,
        16,
        4096,
        6144,
    ]
