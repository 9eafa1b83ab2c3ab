"""Statistics and metrics as users see them: of several groups, sizes, operations, ranks and processes."""

import logging
import os
import socket
import types

import pytest
import torch

import pycomm
from pycomm import _C, counters, metrics, trace
from pycomm.testing import run_ranks

MS = 1_000_000


def test_cells_of_one_operation_and_size_are_added():
    """Messages inside a host and between hosts are counted apart; tensors of a device have their own name."""
    here = [("send", 0, 2, 10, 1, 3 * MS, 5 * MS), ("all_reduce", 6, 1, 1 << 40, 0, 0, 0)]
    found = counters.statistics_of(
        (
            [*here, ("send", 0, 5, 100, 4, 1000 * MS, 0), ("send", 5, 1, 7, 0, 0, 0)],
            [("send", 0, 9, 9, 0, 0, 0)],
        )
    )
    names = "operations bytes measured waiting_s moving_s".split()
    cells = {
        (operation, size): [cell[name] for name in names]
        for operation, sizes in found.items()
        for size, cell in sizes.items()
    }
    assert cells == {
        ("send", "64 B"): [7, 110, 5, pytest.approx(1.003), pytest.approx(0.005)],
        ("send", "64 MiB"): [1, 7, 0, 0, 0],
        ("all_reduce", "more"): [1, 1 << 40, 0, 0, 0],
        ("cuda send", "64 B"): [9, 9, 0, 0, 0],
    }
    assert counters.statistics_of(([], [])) == {}


def test_an_error_inside_a_trace_ends_it(tmp_path):
    def body(comm):
        with pytest.raises(KeyError, match="in the middle"), comm.trace(tmp_path / "a") as inside:
            assert inside is comm and trace.folder() == str(tmp_path / "a")
            raise KeyError("in the middle")
        assert trace.folder() is None
        with comm.trace(tmp_path / "b"):  # another folder: nothing of the first is left
            comm.barrier()

    run_ranks(1, body)
    assert len(list(tmp_path.glob("*/*.pytrace"))) == 2 and trace.folder() is None


# --- metrics --------------------


@pytest.fixture
def fresh(monkeypatch):
    """A process that has not looked at PYCOMM_METRICS_PORT yet; what was measured, and which ports served."""
    pytest.importorskip("prometheus_client")
    seen = types.SimpleNamespace(measured=[], served=[])
    monkeypatch.setattr(metrics, "_served", {})
    monkeypatch.setattr(metrics, "_groups", [])
    monkeypatch.setattr(_C, "measure", seen.measured.append)
    monkeypatch.setattr(
        "prometheus_client.start_http_server", lambda port, **options: seen.served.append((port, options))
    )
    monkeypatch.delenv("PYCOMM_METRICS_PORT", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return seen


def test_nothing_is_served_unasked(fresh):
    metrics.serve_if_asked()
    assert metrics._served == {os.getpid(): False} and not fresh.served and not fresh.measured


def test_a_process_serves_once_on_localhost_alone(fresh, monkeypatch):
    monkeypatch.setenv("PYCOMM_METRICS_PORT", "9400")
    monkeypatch.setenv("LOCAL_RANK", "3")
    for _ in range(2):
        metrics.serve_if_asked()
    ((port, options),) = fresh.served
    assert port == 9403 and options["addr"] == "127.0.0.1" and fresh.measured == [True]


def test_a_forked_child_asks_for_itself(fresh, monkeypatch):
    """The groups of its parent, and what they had done, are not its own."""
    monkeypatch.setenv("PYCOMM_METRICS_PORT", "9400")
    metrics.serve_if_asked()
    parent = os.getpid()
    metrics._groups.append("a group of the parent's")
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    metrics.serve_if_asked()
    assert metrics._groups == [] and metrics._served == {parent: True, parent + 1: True}
    assert len(fresh.served) == 2


def test_a_port_that_is_taken_is_a_warning(fresh, monkeypatch, caplog):
    def refuse(port, **options):
        raise OSError(98, "Address already in use")

    monkeypatch.setattr("prometheus_client.start_http_server", refuse)
    with socket.socket() as taken, caplog.at_level(logging.WARNING, "pycomm"):
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setenv("PYCOMM_METRICS_PORT", str(port))
        run_ranks(1, lambda comm: comm.barrier())
        run_ranks(1, lambda comm: comm.barrier())
    (record,) = caplog.records
    assert f"port {port}: [Errno 98] Address already in use; no metrics are served" in record.getMessage()
    assert not metrics._groups and not fresh.measured


def samples():
    """{(name, labels): value} as Prometheus has them."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in metrics._Collector().collect()
        for sample in family.samples
    }


def test_every_group_and_rank_has_its_own_samples(fresh):
    """Two ranks in a shared group and one private group each, closed one after the other."""
    metrics._served[os.getpid()] = True

    def body(comm):
        with pycomm.Communicator(_C.LocalStore(), 0, 1, name=f"alone {comm.rank}") as alone:
            for _ in range(comm.rank + 2):
                alone.all_reduce(torch.ones(3))
            comm.all_gather(torch.ones(500))
            comm.barrier()
            found = samples()
            comm.barrier()
        del alone  # until then it is counted
        comm.barrier()
        left = {labels[1] for labels in samples()}
        comm.barrier()
        return found, left

    for found, left in run_ranks(2, body, name="both"):
        for rank in range(2):
            assert found["pycomm_operations_total", "both", str(rank), "all_gather", "16 KiB"] == 1
            of_one = {name: value for (name, *place), value in found.items() if place[0] == f"alone {rank}"}
            assert of_one["pycomm_operations_total"] == rank + 2
            assert of_one["pycomm_bytes_total"] == 12 * (rank + 2)
            assert of_one["pycomm_waiting_seconds_total"] >= 0 and of_one["pycomm_moving_seconds_total"] >= 0
        assert left == {"both"}


def test_a_group_that_ends_while_two_look(fresh):
    """Two scrapes at once find it ended; neither fails, and groups that live are shown."""

    class Ended:
        def get(self):
            metrics._groups.remove(ended)  # the other one is faster

    class Lives:
        def get(self):
            return [("send", 0, 1, 2, 0, 0, 0)], []

    ended, lives = metrics.Watched("ended", 0, Ended()), metrics.Watched("lives", 1, Lives())
    metrics._groups += [ended, lives]
    found = {field: rows for field, _, rows in metrics.collect()}
    assert metrics._groups == [lives] and found["bytes"] == [(("lives", "1", "send", "64 B"), 2)]
