"""Options of groups and operations, as the extension takes them: limits, and who decides."""

import math
import os
import types

import pytest

from pycomm import _C, env, options, tuned
from pycomm.options import DEFAULT_HOST_TIMEOUT, PremulSum, reduction, seconds

NOTHING = env.Settings(None, {}, *[None] * 8)
SET = env.Settings(
    timeout=1.0,
    algorithm={},
    host_id="here",
    host_timeout=2.5,
    threads=3,
    staging_bytes=4096,
    cma=False,
    cuda_protocol="resident",
    cuda_staging_bytes=8192,
    cuda_connections=32,
)


@pytest.mark.parametrize(
    ("cores", "threads"),
    [(1, {1: 1, 2: 1, 300: 1}), (8, {0: 4, 1: 4, 2: 4, 3: 2, 4: 2, 5: 1, 8: 1, 9: 1}), (64, {16: 4, 17: 3})],
)
def test_threads_of_a_rank(cores, threads, monkeypatch):
    """All ranks together have the cores that they may use; more than four fill no memory faster."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert {ranks: options.default_threads(ranks) for ranks in threads} == threads


def given(settings, monkeypatch, **arguments):
    """What the extension is given, by name."""
    names = "name timeout staging_bytes host_id cma threads protocol connections device_bytes rows limit"

    def note(*values):
        return dict(zip(names.split(), values, strict=True))

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(tuned, "load", lambda: types.SimpleNamespace(rows="the rows"))
    monkeypatch.setattr(_C, "transport_options", note)
    return options.transport_options(settings, "g", 7.0, 2, **arguments)


def test_the_environment_decides_and_before_it_the_caller(monkeypatch):
    built_in = {"name": "g", "timeout": 7.0, "staging_bytes": 0, "host_id": "", "cma": True, "threads": 3}
    built_in |= {"protocol": "", "connections": 0, "device_bytes": 0, "rows": "the rows"}
    assert given(NOTHING, monkeypatch) == built_in | {"limit": DEFAULT_HOST_TIMEOUT}
    of_environment = {"staging_bytes": 4096, "host_id": "here", "cma": False, "threads": 3, "limit": 2.5}
    of_environment |= {"protocol": "resident", "connections": 32, "device_bytes": 8192}
    assert given(SET, monkeypatch) == built_in | of_environment
    of_caller = {"staging_bytes": 1 << 20, "threads": 1}
    assert given(SET, monkeypatch, **of_caller) == built_in | of_environment | of_caller
    assert given(NOTHING._replace(cma=True), monkeypatch)["cma"]


@pytest.mark.parametrize("limit", [1e8, 5e-324, 1, "2.5", True])
def test_time_limits(limit):
    assert seconds(limit) == float(limit) and seconds(None) == 0.0


@pytest.mark.parametrize("limit", [0, -0.0, -1, math.nan, math.inf, 1e8 + 1, 10**400])
def test_wrong_time_limits(limit):
    with pytest.raises(
        ValueError, match="above 0 and at most 1e8 .*None means for ever and a day.$"
    ) as found:
        seconds(limit, "for ever and a day")
    assert str(found.value).startswith(f"timeout={limit}: ")


def test_what_is_no_time_limit():
    with pytest.raises(TypeError, match=r"timeout=\[\]: expected a number of seconds, or None"):
        seconds([])


def test_reductions_have_the_codes_of_the_extension():
    codes = {name: code for code, name in enumerate(_C.reduce_ops)}
    assert {name: reduction(name) for name in codes if name != "premul_sum"} == {
        name: (code, 1.0) for name, code in codes.items() if name != "premul_sum"
    }
    assert reduction(options.premul_sum(3)) == (codes["premul_sum"], 3.0) == reduction(PremulSum(3.0))
    for wrong in ("premul_sum", "SUM", None, 0):
        with pytest.raises(ValueError, match=f"unknown reduce op {wrong!r}; expected one of sum, avg"):
            reduction(wrong)


def test_algorithms_have_the_codes_of_the_extension():
    assert [options.algorithm_code(name) for name in _C.algorithms] == list(range(len(_C.algorithms)))
    assert options.algorithm_code(None) == options.algorithm_code("automatic") == 0
    with pytest.raises(ValueError, match="unknown algorithm 'tree'; .* one of automatic, one_shot"):
        options.algorithm_code("tree")
