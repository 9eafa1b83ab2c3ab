"""Functions around groups without ranks: placements, pieces, limits, names of backends, ports, what is said
of a group over hosts, torch's trace.
"""

import datetime
import itertools
import os
import re
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

import pycomm
from pycomm import _C, _autoload, _over_hosts, _replace, _shrink_group, env, groups, ports, torch_backend

# --- placements, pieces, limits --------------------


@pytest.mark.parametrize(
    ("given", "hosts", "shown"),
    [
        ("2x3", [0, 0, 0, 1, 1, 1], "2 hosts x 3"),
        ("3x1", [0, 1, 2], "3 hosts x 1"),
        ("1x2", [0, 0], "1 host x 2"),
        ("3+1", [0, 0, 0, 1], "hosts of 3 + 1"),
        ("1+12", [0] + [1] * 12, "hosts of 1 + 12"),
        ("0101", [0, 1, 0, 1], "2 hosts x 2"),
        ("0", [0], "1 host x 1"),
        ([0, 1, 1], [0, 1, 1], "hosts of 1 + 2"),
        ((0, 0), [0, 0], "1 host x 2"),
    ],
)
def test_hosts(given, hosts, shown):
    assert groups.hosts_of(given, len(hosts)) == hosts and groups.show_hosts(hosts) == shown
    with pytest.raises(ValueError) as caught:
        groups.hosts_of(given, len(hosts) + 1)
    assert str(caught.value) == f"hosts={given!r} has {len(hosts)} ranks, the group {len(hosts) + 1}"


@pytest.mark.parametrize("given", ["2x", "x3", "2x2x2", "3+", "ab", "0-1", ["a"]])
def test_wrong_hosts(given):
    with pytest.raises(ValueError, match=re.escape(f"hosts={given!r}: expected a form like '2x3'")):
        groups.hosts_of(given, 2)


def test_hosts_are_numbered_by_their_lowest_ranks():
    assert groups.numbered("baabca") == [0, 1, 1, 0, 2, 1]
    assert groups.numbered([]) == []


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_pieces_are_those_of_torch_and_come_back(parts):
    for length in (0, 1, parts - 1, parts, 5 * parts + 2):
        whole = torch.arange(length * 3, dtype=torch.int16).reshape(length, 3)
        pieces = list(whole.tensor_split(parts))
        sizes = groups.even_sizes(length, parts)
        assert sizes == [len(piece) for piece in pieces]
        longest = max(sizes) + length % 2
        padded = groups.pad_pieces(pieces, longest)
        assert padded.shape == (parts * longest, 3) and padded.dtype == whole.dtype
        assert padded.sum() == whole.sum()  # the rest is 0
        back = groups.unpad_pieces(padded, sizes)
        assert all(torch.equal(one, other) for one, other in zip(back, pieces, strict=True))


@pytest.mark.parametrize(
    ("timeout", "own", "over", "expected"),
    [
        (None, None, False, 300.0),
        (None, None, True, 310.0),
        (None, 20.0, False, 20.0),
        (None, 20.0, True, 30.0),
        (5.0, 20.0, False, 5.0),
        (5.0, 20.0, True, 15.0),
        (50.0, 20.0, False, 20.0),
        (50.0, 20.0, True, 30.0),
        (400.0, None, True, 310.0),
    ],
)
def test_the_limit_of_a_shrink(monkeypatch, timeout, own, over, expected):
    monkeypatch.setenv("PYCOMM_HOST_TIMEOUT", "")
    monkeypatch.setenv("PYCOMM_TIMEOUT", "" if own is None else str(own))
    assert groups.shrink_limit(timeout, over) == expected
    monkeypatch.setenv("PYCOMM_HOST_TIMEOUT", "2.5")
    assert groups.shrink_limit(timeout, over) == expected - 7.5 * over


def test_host_marks(monkeypatch):
    monkeypatch.setenv("PYCOMM_HOST_ID", "")
    mine = groups.host_mark()
    assert len(mine) == 16 and groups.host_mark() == mine
    marks = {mine}
    for name in ("a", "b", " a ", "c"):
        monkeypatch.setenv("PYCOMM_HOST_ID", name)
        marks.add(groups.host_mark())
    assert len(marks) == 4


def test_what_is_a_group():
    alone = groups.as_group(None)
    assert alone is groups.ALONE and alone[1:] == (1, 0, None)
    assert groups.as_group(alone) is alone
    with pycomm.Communicator(dist.HashStore(), 0, 1, name="mine") as comm:
        assert groups.as_group(comm, native=True) == ("mine", 1, 0, comm)
        assert groups.as_group(comm, "other", native=True).name == "other"
        with pytest.raises(TypeError, match="must be a torch ProcessGroup or None, not Communicator"):
            groups.as_group(comm)
    with pytest.raises(TypeError, match="ProcessGroup, a pycomm.Communicator or None, not int"):
        groups.as_group(3, native=True)


@pytest.mark.parametrize("number", [None, 0, 2])
def test_who_takes_the_place_of_a_dead_one(monkeypatch, number):
    """Until the others have taken it in; `python -m pycomm.run` sees that in its store."""
    monkeypatch.setattr(groups, "_joined", threading.Event())
    monkeypatch.setenv("PYCOMM_REPLACEMENT", "" if number is None else str(number))
    own = ports.make_store("127.0.0.1")
    for name, value in dict(RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=own.port).items():
        monkeypatch.setenv(name, str(value))
    assert groups.waits_to_join() is (number == 2)
    new, store = groups.replacement_store()
    assert new is (number == 2) and (store is None) is (number is None)
    if store is not None:
        assert not groups.has_joined(own, number)
        groups.note_joined(store)
        store.num_keys()  # a set() waits for no answer: behind this one it has arrived
        assert groups.has_joined(own, number) and not groups.has_joined(own, number + 1)
    assert groups.waits_to_join() is False


# --- ports --------------------


@pytest.mark.parametrize("free", [20, 23, 27, None])
def test_every_port_of_the_range_is_tried(monkeypatch, free):
    """Whichever is first."""
    monkeypatch.setenv("PYCOMM_PORT_RANGE", "20-27")
    for first in range(20, 28):
        tried = []
        monkeypatch.setattr(ports.random, "randint", lambda low, high, first=first: first)
        monkeypatch.setattr(
            ports, "_listen_at", lambda ip, port, tried=tried: tried.append(port) or (port == free or None)
        )
        if free is None:
            with pytest.raises(RuntimeError, match=r"Cannot listen on ::1: all ports of .*=20-27 are in use"):
                ports.listen("::1")
            assert tried == [*range(first, 28), *range(20, first)]
        else:
            assert ports.listen("::1") is True and tried[0] == first and tried[-1] == free
            assert len(set(tried)) == len(tried)


def test_a_port_is_of_one_address(monkeypatch):
    monkeypatch.setenv("PYCOMM_PORT_RANGE", "")
    with pytest.raises(RuntimeError, match=r"Cannot listen on 192\.0\.2\.1: .*assign requested address"):
        ports.listen("192.0.2.1")
    with ports.listen("127.0.0.1") as one:
        ip, port = one.getsockname()
        assert ip == "127.0.0.1" and not one.getblocking()
        assert ports._listen_at("127.0.0.1", port) is None  # in use
        with pytest.raises(RuntimeError, match=rf"Cannot listen on 192\.0\.2\.1 at port {port}: "):
            ports._listen_at("192.0.2.1", port)


def test_the_store_of_a_group_that_was_shrunk(monkeypatch):
    """It waits for later groups as torch's stores do, not as briefly as while it was sought."""
    monkeypatch.setenv("PYCOMM_PORT_RANGE", "")
    own = ports.make_store("127.0.0.1")
    assert own.host == "127.0.0.1"
    for one in (own, None):
        stores = _shrink_group._connect(one, "127.0.0.1", own.port, threading.Event())
        assert stores.store is one or one is None
        for store in stores:
            assert store.timeout == datetime.timedelta(seconds=300)
        stores.store.set("key", "value")
        assert stores.clone.get("key") == b"value"


# --- names of backends --------------------


@pytest.mark.parametrize(
    ("replaced", "name", "meaning"),
    [
        ([], "gloo", "gloo"),
        ([], "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ([], "cpu:pycomm", "pycomm"),
        ([], "cpu:pycomm,cuda:pycomm", "pycomm"),
        ([], "cpu:pycomm,cuda:nccl", "cpu:pycomm,cuda:nccl"),
        ([], "cpu:pycomm,xpu:pycomm", "cpu:pycomm,xpu:pycomm"),  # a device that pycomm does not serve
        (["gloo"], "gloo", "pycomm"),
        (["gloo"], "nccl", "nccl"),
        (["gloo"], "cpu:gloo", "pycomm"),
        (["gloo"], "cpu:gloo,cuda:nccl", "cpu:pycomm,cuda:nccl"),
        (["gloo"], "cuda:nccl,cpu:gloo", "cuda:nccl,cpu:pycomm"),
        (["gloo"], "xpu:gloo", "xpu:pycomm"),
        (["nccl"], "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:pycomm"),
        (["gloo", "nccl"], "cpu:gloo,cuda:nccl", "pycomm"),
        (["gloo", "nccl"], "cpu:gloo,cuda:nccl,xpu:ccl", "cpu:pycomm,cuda:pycomm,xpu:ccl"),
        (["gloo"], "undefined", "undefined"),
        (["gloo"], "mpi", "mpi"),
    ],
)
def test_names_of_backends(monkeypatch, replaced, name, meaning):
    monkeypatch.setattr(_replace, "_replaced", set(replaced))
    monkeypatch.setattr(_replace, "_default_device", lambda: "xpu")
    assert _replace._resolve(name, "pycomm", ["cpu", "cuda"]) == meaning


def test_a_replaced_name_is_told_once_by_rank_0(monkeypatch, caplog):
    monkeypatch.setattr(_replace, "_replaced", {"gloo", "nccl"})
    for first, told in ((False, []), (True, ["gloo", "nccl"])):
        monkeypatch.setattr(_replace, "_announced", set())
        monkeypatch.setattr(env, "is_first_rank", lambda first=first: first)
        said = []
        monkeypatch.setattr(
            env, "logger", lambda said=said: SimpleNamespace(warning=lambda text, *of: said.append(of))
        )
        for name in ("gloo", "cpu:gloo", "nccl", "gloo", "mpi"):
            _replace._resolve(name, "pycomm", ["cpu"])
        assert [one[0] for one in said] == told


# --- what is said of a group over hosts --------------------


def most_on_a_link(op, size, hosts):
    """Bytes of the busiest direction of a host, from who sends to whom; for the root that has most."""
    ranks, number = range(len(hosts)), max(hosts) + 1

    def busiest(flows):  # (from host, to host, bytes)
        out, into = [0] * number, [0] * number
        for a, b, nbytes in flows:
            if a != b:
                out[a] += nbytes
                into[b] += nbytes
        return max(*out, *into)

    if op == "all_to_all":
        return busiest((hosts[a], hosts[b], size) for a in ranks for b in ranks)
    if op == "gather":
        return max(busiest((hosts[a], hosts[root], size) for a in ranks) for root in ranks)
    if op == "scatter":
        return max(busiest((hosts[root], hosts[b], size) for b in ranks) for root in ranks)
    if op == "all_gather":
        return busiest((hosts[a], b, size) for a in ranks for b in range(number))
    if op == "reduce_scatter":  # the sum of a host for each rank of the others
        return busiest((a, hosts[b], size) for a in range(number) for b in ranks)
    return max(busiest((host, hosts[root], size) for host in range(number)) for root in ranks)


@pytest.mark.parametrize("hosts", ["01", "0011", "0001", "0111", "00112", "000012", "0122"])
def test_bytes_on_a_link(hosts):
    placement = [int(host) for host in hosts]
    sizes = [placement.count(host) for host in range(max(placement) + 1)]
    for op in ("all_to_all", "gather", "scatter", "all_gather", "reduce_scatter", "reduce", "broadcast"):
        expected = most_on_a_link(op, 1 << 20, placement)
        assert _over_hosts._on_link(op, 1 << 20, sizes) == expected, op
        text = pycomm.explain(op, 1 << 20, len(hosts), hosts=hosts)
        assert text.endswith(f" in one direction: {expected} bytes.") and groups.show_hosts(placement) in text
    for op, own, most in itertools.product(("all_reduce", "all_gather", "barrier"), (1, 1 << 30), (1,)):
        small = "the payload goes with the headers" in pycomm.explain(op, own, len(hosts), hosts=hosts)
        assert small is (op == "barrier" or own == most)


@pytest.mark.parametrize("algorithm", [None, "ring", "two_shot", "direct"])
def test_a_table_is_named_where_it_has_decided(algorithm):
    text = pycomm.explain("all_reduce", 1 << 20, 4, algorithm=algorithm)
    assert ("Table:" in text) is (algorithm is None) and (algorithm or "") in text
    assert "Table:" not in pycomm.explain("all_reduce", 8, 4)


@pytest.mark.parametrize(
    ("found", "algorithm", "words"),
    [
        ((31.4, False), "two_shot", "A line passes in 31 ns between cores: shared memory copies faster."),
        ((212.0, True), "direct", "A line passes in 212 ns between cores: the kernel copies faster."),
        ((None, True), "direct", "Unknown how fast a line passes between cores: the kernel copies faster."),
    ],
)
def test_explain_tells_what_the_route_depends_on(found, algorithm, words, monkeypatch):
    monkeypatch.setattr(_C, "hand_off", lambda: found)
    text = pycomm.explain("all_reduce", 1 << 20, 2, cores=2)
    assert f" ranks: {algorithm} (" in text and text.endswith(f" {words}")
    for same in ({"mapped": True}, {"algorithm": "ring"}, {"kernel_reads": False}):
        assert "A line" not in pycomm.explain("all_reduce", 1 << 20, 2, cores=2, **same)
    assert "A line" not in pycomm.explain("all_reduce", 8, 2)


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
def test_explain_counts_the_cores_of_this_process(cores, monkeypatch):
    """Not those of the machine."""
    monkeypatch.setattr(_C, "hand_off", lambda: (30.0, False))
    questions = [("all_reduce", 1 << 20, 3), ("all_to_all", 1 << 20, 2), ("all_gather", 4 << 20, 2)]
    expected = [pycomm.explain(*question, cores=cores) for question in questions]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert [pycomm.explain(*question) for question in questions] == expected
    few, many = (pycomm.explain(*questions[0], cores=number) for number in (1, 64))
    assert few != many


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (("all_redcue", 8, 2), {}, "unknown op 'all_redcue'; expected one of all_reduce, "),
        (("send", 8, 2), {}, "unknown op 'send'"),
        (("all_reduce", 8, 2), {"device": "xpu"}, "device='xpu': must be 'cpu' or 'cuda'"),
        (
            ("all_reduce", 8, 2),
            {"algorithm": "tree"},
            "unknown algorithm 'tree'; expected one of automatic, ",
        ),
        (("all_reduce", (8, 8, 8), 2), {}, r"size=\(8, 8, 8\): all_reduce takes a number of bytes"),
        (("all_reduce", 8, 2), {"hosts": "012"}, "hosts='012' has 3 ranks, the group 2"),
        (("all_reduce", 8, 2), {"hosts": "01", "device": "cuda"}, "hosts='01': groups over hosts do "),
        (("all_gather_matmul", (8, 8, 8), 2), {"hosts": "01"}, "hosts='01': groups over hosts do "),
        (("all_gather_matmul", 8, 2), {}, r"size=8: all_gather_matmul takes \(M, N, K\)"),
        (("all_gather_matmul", (8, 8), 2), {}, r"size=\(8, 8\): all_gather_matmul takes \(M, N, K\)"),
        (("all_gather_matmul", (8, 8, 8), 2), {"dtype": "int8"}, "dtype='int8': must be one of float32, "),
        (("all_gather_matmul", (8, 8, 8), 2), {"activation": "tanh"}, "activation='tanh': must be None or "),
    ],
)
def test_what_cannot_be_explained(arguments, options, text):
    with pytest.raises(ValueError, match=f"^{text}"):
        pycomm.explain(*arguments, **options)


# --- torch's trace --------------------


def flight_record(number, **fields):
    record = {
        "id": number, "group_id": 1, "group_name": "0", "group_desc": "default_pg", "global_ranks": [0, 1],
        "is_p2p": False, "sequence": number, "name": "pycomm:all_reduce", "created_ns": 1000 - number,
        "completed_ns": None, "input_sizes": [[3]], "input_dtypes": ["Float"], "output_sizes": [[3]],
        "output_dtypes": ["Float"], "timeout_ms": 5, "failed": False, "rank": 0, "peer": 1,
    }  # fmt: skip
    return record | fields


def test_a_trace_has_what_is_asked_for(monkeypatch):
    records = [
        flight_record(1),
        flight_record(2, completed_ns=2_001_000),
        flight_record(3, name="pycomm:send", is_p2p=True),
        flight_record(4, name="pycomm:recv", is_p2p=True, completed_ns=3000, failed=True),
        flight_record(5, failed=True, group_name="other"),
    ]
    monkeypatch.setattr(torch_backend._C, "flight_records", lambda: records)

    def entries(collectives=True, active=False):
        trace = {"pg_config": {"0": "torch's"}, "entries": [{"time_created_ns": 997, "op_id": 0}]}
        found = torch_backend._with_ours(trace, collectives, active)
        assert found["pg_config"]["0"] == "torch's" and found["pg_config"]["other"]["ranks"] == "[0, 1]"
        return {one["op_id"]: one for one in found["entries"]}

    every = entries()
    assert list(every) == [5, 4, 3, 0, 2, 1] or list(every) == [5, 4, 0, 3, 2, 1]  # by time
    assert sorted(entries(active=True)) == [0, 1, 3, 5] and list(entries(collectives=False)) == [0]
    assert "duration_ms" not in every[1] and every[2]["duration_ms"] == pytest.approx(2.000002)
    assert [every[n]["state"] for n in (1, 2, 3, 4)] == ["started", "completed"] * 2
    assert [every[n]["retired"] for n in (1, 2, 3, 4, 5)] == [False, True, False, True, True]
    assert every[3]["profiling_name"] == "gloo:send 0->1" and every[4]["profiling_name"] == "gloo:recv 0<-1"
    assert (every[2]["collective_seq_id"], every[2]["p2p_seq_id"]) == (2, 0)
    assert every[3]["collective_seq_id"] == 0 and every[3]["p2p_seq_id"] > 1 << 31


# --- torch's older functions --------------------


class _C10d:
    """What of torch.distributed is wrapped. backend: of the group."""

    def __init__(self, backend):
        self.calls, self.backend = [], backend
        self.default_pg_timeout = default_pg_timeout
        self.group = SimpleNamespace(
            monitored_barrier=lambda timeout, wait_all_ranks: self.calls.append((timeout, wait_all_ranks)),
            _device_types=["cpu", "cuda"],
            _get_backend=lambda device: SimpleNamespace(
                _set_default_timeout=lambda timeout: self.calls.append((device, timeout))
            ),
        )

    def is_initialized(self):
        return True

    def _rank_not_in_group(self, group):
        return False

    def get_backend(self, group):
        return self.backend

    def _get_default_group(self):
        return self.group

    def monitored_barrier(self, *args):
        self.calls.append(("torch's", *args))

    def _set_pg_timeout(self, *args):
        self.calls.append(("torch's", *args))


SECONDS = datetime.timedelta(seconds=2.5)


@pytest.mark.parametrize(
    ("given", "limit"), [(None, default_pg_timeout), (2.5, SECONDS), (SECONDS, SECONDS), (3, 1.2 * SECONDS)]
)
def test_monitored_barrier_of_older_torch(given, limit):
    for backend, expected in (("pycomm", (limit, True)), ("gloo", ("torch's", None, given, True))):
        c10d, module = _C10d(backend), SimpleNamespace()
        _autoload._allow_monitored_barrier(c10d, module)
        assert module.monitored_barrier is c10d.monitored_barrier
        c10d.monitored_barrier(timeout=given, wait_all_ranks=True)
        module.monitored_barrier(None, given, True)
        assert c10d.calls == [expected] * 2


def test_set_pg_timeout_of_older_torch():
    for backend in ("pycomm", "gloo"):
        c10d = _C10d(backend)
        _autoload._allow_pg_timeout(c10d)
        c10d._set_pg_timeout(SECONDS)
        if backend == "pycomm":
            assert c10d.calls == [("cpu", SECONDS), ("cuda", SECONDS)]
        else:
            assert c10d.calls == [("torch's", SECONDS, c10d.group)]


def test_limits_of_torchs_groups():
    for limit in (1e-3, 2.5, 1e8):
        assert torch_backend._seconds(limit) == limit
    assert torch_backend._seconds(1.1e8) == torch_backend._seconds(float("inf")) == 1e8
    for wrong in (0.0, -0.0, -2.5, float("nan"), -float("inf")):
        with pytest.raises(ValueError, match=f"timeout of {wrong:g} s is not above 0"):
            torch_backend._seconds(wrong)
