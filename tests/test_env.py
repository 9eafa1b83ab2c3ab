"""Environment variables: a table of values and what they become; every wrong one is refused with its name and
value.
"""

import logging
import os
import re

import pytest

from pycomm import env

LAUNCH = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "LOCAL_RANK": "0",
}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in [*LAUNCH, *re.findall(r"PYCOMM_[A-Z_]+(?=  )", env.__doc__)]:
        monkeypatch.delenv(name, raising=False)


def test_nothing_is_set():
    assert env.settings() == env.Settings(None, {}, *[None] * 8)
    assert env.replaced_backends() == ()
    assert env.is_first_rank()


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("PYCOMM_TIMEOUT", "2.5", "timeout", 2.5),
        ("PYCOMM_TIMEOUT", "", "timeout", None),
        (
            "PYCOMM_ALGORITHM",
            "all_reduce=ring, broadcast = direct",
            "algorithm",
            {"all_reduce": "ring", "broadcast": "direct"},
        ),
        ("PYCOMM_HOST_ID", "node-a", "host_id", "node-a"),
        ("PYCOMM_HOST_TIMEOUT", "2.5", "host_timeout", 2.5),
        ("PYCOMM_THREADS", "4", "threads", 4),
        ("PYCOMM_STAGING_BYTES", "4096", "staging_bytes", 4096),
        ("PYCOMM_STAGING_BYTES", "8m", "staging_bytes", 8 << 20),
        ("PYCOMM_CMA", "0", "cma", False),
        ("PYCOMM_CMA", "1", "cma", True),
        ("PYCOMM_CUDA_PROTOCOL", "stream_ordered", "cuda_protocol", "stream_ordered"),
        ("PYCOMM_CUDA_STAGING_BYTES", "32M", "cuda_staging_bytes", 32 << 20),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", "cuda_connections", 32),
    ],
)
def test_settings(monkeypatch, name, value, field, expected):
    monkeypatch.setenv(name, value)
    assert getattr(env.settings(), field) == expected


WRONG = {
    "PYCOMM_CUDA_PROTOCOL": ["spin", "Resident"],
    "PYCOMM_CUDA_STAGING_BYTES": ["0", "-1", "much"],
    "CUDA_DEVICE_MAX_CONNECTIONS": ["0", "many"],
    "PYCOMM_TIMEOUT": ["0", "-1", "nan", "inf", "soon"],
    "PYCOMM_HOST_TIMEOUT": ["0", "nan", "long"],
    "PYCOMM_ALGORITHM": ["ring", "all_redcue=ring", "all_reduce=", "all_reduce=ring,all_reduce=ring", ","],
    "PYCOMM_THREADS": ["0", "-1", "two", "1.5", "100000"],
    "PYCOMM_STAGING_BYTES": ["0", "8MB", "-1", "1.5M"],
    "PYCOMM_CMA": ["yes", "2"],
}


@pytest.mark.parametrize("form", ["auto", "plain", "chunked", "fused", ""])
def test_fused(monkeypatch, form):
    assert env.fused() == "auto"
    monkeypatch.setenv("PYCOMM_FUSED", form)
    assert env.fused() == (form or "auto")


@pytest.mark.parametrize("form", ["Plain", "1", "fused,plain"])
def test_wrong_fused(monkeypatch, form):
    monkeypatch.setenv("PYCOMM_FUSED", form)
    with pytest.raises(
        ValueError,
        match=re.escape(f"PYCOMM_FUSED={form!r} in the environment: must be auto, plain, chunked, fused"),
    ):
        env.fused()


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert env.cache_folder() == "/home/me/.cache/pycomm"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert env.cache_folder() == "/caches/pycomm"
    monkeypatch.setenv("PYCOMM_CACHE", "/mine")
    assert env.cache_folder() == "/mine"


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, False), ("", False), ("0", False), ("1", True), ("True", True), ("on", True)],
)
def test_triton_interpret(monkeypatch, value, expected):
    if value is None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert env.triton_interpret() is expected


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_wrong_settings(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} in the environment: must be")):
        env.settings()


def test_launch(monkeypatch):
    for name, value in LAUNCH.items():
        monkeypatch.setenv(name, value)
    assert env.launch() == env.Launch(
        rank=1, world_size=2, local_rank=0, master_addr="localhost", master_port=29500
    )
    assert not env.is_first_rank()
    monkeypatch.delenv("LOCAL_RANK")
    assert env.launch().local_rank == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "2"), ("RANK", "-1"), ("WORLD_SIZE", "0"), ("MASTER_PORT", "65536"), ("LOCAL_RANK", "x")],
)
def test_wrong_launch(monkeypatch, name, value):
    for variable, right in {**LAUNCH, name: value}.items():
        monkeypatch.setenv(variable, right)
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        env.launch()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_missing_launch(monkeypatch, name):
    for variable, right in LAUNCH.items():
        monkeypatch.setenv(variable, right)
    monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=f"{name} is not set"):
        env.launch()


def test_log_level(monkeypatch):
    level, handlers = logging.getLogger("pycomm").level, list(logging.getLogger("pycomm").handlers)
    try:
        env.logger.cache_clear()
        monkeypatch.setenv("PYCOMM_LOG", "debug")
        assert env.logger().level == logging.DEBUG
        env.logger.cache_clear()
        monkeypatch.setenv("PYCOMM_LOG", "loud")
        with pytest.raises(ValueError, match="PYCOMM_LOG='loud'"):
            env.logger()
    finally:
        env.logger.cache_clear()
        logging.getLogger("pycomm").setLevel(level)
        logging.getLogger("pycomm").handlers[:] = handlers


def test_for_child(monkeypatch):
    monkeypatch.setenv("PYCOMM_LOG", "debug")
    child = env.for_child(PYCOMM_LOG=None, RANK=3)
    assert "PYCOMM_LOG" not in child and child["RANK"] == "3" and "PATH" in child


def test_nccl_spares_the_process(monkeypatch):
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT")
    monkeypatch.setenv(names[0], "3")
    monkeypatch.delenv(names[1], raising=False)
    with env.nccl_spares_the_process():
        assert [os.environ[name] for name in names] == ["0", "0"]
    assert [os.environ.get(name) for name in names] == ["3", None]


def test_threads_of_ranks(monkeypatch):
    """Together they have the cores that this process may use; what the user says counts."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert [env.threads_of_ranks(ranks)["OMP_NUM_THREADS"] for ranks in (1, 2, 4, 8)] == [6, 3, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert env.threads_of_ranks(2) == {}


# Of a variable that one function reads: value -> what it becomes; a word of the error where it is refused.
READ = {
    ("PYCOMM_WIRE", env.wire): {None: "gloo", "": "gloo", " ucx ": "ucx", "tcp": "gloo or ucx"},
    ("PYCOMM_NCCL_CHECKS", env.nccl_checks): {
        None: "beside", "before": "before", "off": "off", "0": "beside, before, off",
    },
    ("PYCOMM_STATISTICS", env.statistics): {None: False, "0": False, "1": True, "2": "0 or 1", "": False},
    ("PYCOMM_TRACE_BYTES", env.trace_bytes): {
        None: 16 << 20, "1": 1, "64k": 64 << 10, "3G": 3 << 30, "0": "above 0", "1T": "K, M or G",
    },
    ("PYCOMM_TRACE", env.trace_folder): {None: None, "": None, " a b ": "a b"},
    ("PYCOMM_TUNED", env.tuned_file): {None: None, "": None, "0": "0", "x.json": "x.json"},
    ("PYCOMM_REPLACEMENT", env.replacement): {None: None, "0": 0, "300": 300, "-1": "0 or more"},
    ("PYCOMM_METRICS_PORT", env.metrics_port): {
        None: None, "1": 1, "65535": 65535, "0": "from 1 to 65535", "65536": "from 1 to 65535",
    },
    ("PYCOMM_PORT_RANGE", env.port_range): {
        None: None, "1-65535": (1, 65535), "7-7": (7, 7), "7-6": "the lower first", "0-6": "from 1 to 65535",
    },
    ("PYCOMM_REPLACE", env.replaced_backends): {
        None: (), "gloo": ("gloo",), "NCCL, gloo": ("nccl", "gloo"), "mpi": "gloo, nccl", "gloo,": "both",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "read", "value", "expected"),
    [(*which, value, expected) for which, values in READ.items() for value, expected in values.items()],
)
def test_what_is_read(name, read, value, expected, monkeypatch):
    if value is not None:
        monkeypatch.setenv(name, value)
    try:
        assert read() == expected and type(read()) is type(expected)
    except ValueError as error:
        assert str(error).startswith(f"{name}={value!r} in the environment: must be ") and expected in str(
            error
        )


def test_each_rank_of_a_host_has_its_own_port(monkeypatch):
    monkeypatch.setenv("PYCOMM_METRICS_PORT", "9400")
    found = [env.metrics_port()]
    for local_rank in ("0", "1", "300"):
        monkeypatch.setenv("RANK", "7")  # of all hosts
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        found.append(env.metrics_port())
    assert found == [9400, 9400, 9401, 9700]
    monkeypatch.setenv("LOCAL_RANK", "x")
    with pytest.raises(ValueError, match="LOCAL_RANK='x'"):
        env.metrics_port()


def test_variables_that_are_set(monkeypatch):
    """All variables of pycomm that are not empty, known or not, and no others."""
    for name, value in {"PYCOMM_ZZ": "1", "PYCOMM_CMA": "0", "PYCOMM_LOG": " ", "XPYCOMM_A": "2"}.items():
        monkeypatch.setenv(name, value)
    assert list(env.set_variables().items()) == [("PYCOMM_CMA", "0"), ("PYCOMM_ZZ", "1")]


def test_a_place_for_libraries_that_read_it(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OTHER"):
        monkeypatch.setenv(name, "before")
    env.set_place(2, 5, OTHER="word", CROSS_RANK="0")
    monkeypatch.delenv("CROSS_RANK")
    found = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OTHER")]
    assert found == ["2", "2", "5", "word"] and env.launched()


def test_ucx_is_told_what_the_user_has_not_said(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert env.ucx_settings(TLS="all", NET_DEVICES="eth0") == [("NET_DEVICES", "eth0")]
    env.prepare_ucx({"UCX_TLS": "all", "UCX_NET_DEVICES": "eth1"})
    assert [os.environ[name] for name in ("UCX_TLS", "UCX_NET_DEVICES")] == ["tcp", "eth1"]
    monkeypatch.delenv("UCX_NET_DEVICES")
