"""CUDA tensors of groups that span hosts go to NCCL, with pycomm's names, checks and limits. Without a GPU
and without NCCL: on the device of tests/fake_cuda.py, with a c10d backend over Gloo in NCCL's place, which
can fail, refuse and hang. Hosts are simulated.
"""

import pytest
import torch
from fake_cuda import Server
from tiers import tier

pytestmark = [
    pytest.mark.timeout(300),  # of which most is for compilers on a busy machine
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has a CUDA device of its own"),
]

SHARED = ["every_operation", "coalescing", "host_runs_ahead", "block_current_stream"]
SHARED += ["both_devices", "new_groups", "data_parallel", "under_way"]


@pytest.fixture(scope="module")
def server():
    with Server() as server:
        yield server


@pytest.mark.parametrize("name", SHARED)
def test_as_on_one_host(server, name):
    server.run("cuda_hosts_cases.same_as_on_one_host", name, [0, 1, 0], None)


@pytest.mark.parametrize("checks", ["before", "off"])
def test_every_operation_with_other_checks(server, checks):
    server.run("cuda_hosts_cases.same_as_on_one_host", "every_operation", [0, 1], checks)


def test_native_operations(server):
    server.run("cuda_hosts_cases.native_operations", [0, 1])


@pytest.mark.parametrize(
    ("name", "hosts"),
    [("dtypes", [0, 1]), ("many", [0, 1]), ("grouped", [0, 1]), ("messages", [0, 1, 0])],
)
def test_cases(server, name, hosts):
    server.run("cuda_hosts_cases.case", name, hosts)


@pytest.mark.parametrize("checks", ["before", "beside", "off"])
def test_sizes_on_some_ranks(server, checks):
    server.run("cuda_hosts_cases.sizes_on_some_ranks", [0, 1, 0], checks)


def test_not_compared(server):
    server.run("cuda_hosts_cases.not_compared", [0, 1])


@pytest.mark.parametrize(
    ("kind", "checks"),
    [("count", "beside"), ("operation", "beside"), ("device", "beside"), ("splits", "beside")]
    + [("count", "before"), ("splits", "before"), ("splits on one rank", "before")],
)
def test_mismatches(server, kind, checks):
    server.run("cuda_hosts_cases.mismatch", kind, checks)


@pytest.mark.parametrize(
    "what",
    ["engine_fails", "engine_refuses", "engine_hangs", "does_not_come", "messages_cross", "aborted"],
)
def test_failures(server, what):
    server.run(f"cuda_hosts_cases.{what}")


@tier(quick=1 / 3)
@pytest.mark.parametrize(
    ("what", "settings"),
    [("device_goes_on", [False]), ("device_goes_on", [True]), ("call_does_not_return", ["death"])]
    + [("call_does_not_return", ["limit"]), ("abort_hangs", []), ("dies_while_others_leave", [])]
    + [("closed_by_another_thread", []), ("batch_refused", []), ("device_fails", [])]
    + [("exits_while_broken", [True]), ("exits_while_broken", [False])],
)
def test_ends(server, what, settings):
    server.run(f"cuda_hosts_ends.{what}", *settings)


@tier(quick=1 / 2)
@pytest.mark.parametrize("what", ["without_nccl", "dies_while_it_is_made"])
def test_making_it(server, what):
    server.run(f"cuda_hosts_cases.{what}")


@tier(slow=1)
@pytest.mark.parametrize("victim", [1, 2])
def test_deaths(server, victim):
    server.run("cuda_hosts_cases.killed", victim)


@tier(slow=1 / 6)
@pytest.mark.parametrize("seed", range(6))
def test_random_deaths(server, seed):
    server.run("cuda_hosts_ends.random_death", seed)
