"""PyTorch's own suite for distributed backends on pycomm: each test that Gloo passes, see
docs/torch_suite.md.

`make test-slow` runs some, `make test-deep` all that are not marked torch_suite, `make test-torch` all.
"""

import pytest
from tiers import tier
from torch_suite.run import HOSTS, Case, Workers, read_passes

ONCE_FAILED = {
    "test_sparse_all_reduce_sum",
    "test_sparse_all_reduce_sum_cuda",
    "test_ddp_logging_data_cpu",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_subgroup",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_monitored_barrier_failure_order",
    "test_monitored_barrier_wait_all_ranks",
}
SLOW = {
    "test_barrier_timeout_group",
    "test_ddp_compile_static_graph",
}  # 5 s, and a compilation; only in `make test-torch`

# The suite checks the profiler's events of the backends it knows. Here pycomm is asked for the same; apart,
# so that the above checks data.
PROFILED = [
    "test_all_reduce_sum",
    "test_all_reduce_sum_async",
    "test_all_gather_coalesced_simple",
    "test_all_reduce_coalesced_sum",
]
PROFILED += ["test_send_recv_torch_profiler", "test_send_recv_any_source_autograd_profiler"]


@pytest.fixture(scope="module")
def workers():
    workers = Workers("pycomm")
    yield workers
    workers.close()


def cases():
    """Every twentieth test, and those that once failed, in `make test-slow`; all in `make test-deep`."""
    for number, case in enumerate(read_passes()):
        slow = (number % 20 == 0 or case.name in ONCE_FAILED) and case.name not in SLOW
        marks = [] if slow else [pytest.mark.deep]
        if case.name in SLOW:
            marks.append(pytest.mark.torch_suite)
        yield pytest.param(case, id=f"{case.name}-{case.conditions}-{case.world_size}", marks=marks)


@tier(slow=1)
@pytest.mark.timeout(300)  # the worker limits each test to 100 s
@pytest.mark.parametrize("case", list(cases()))
def test_torch_suite(workers, case):
    result = workers.run(case)
    assert result["outcome"] == "passed", f"{result['outcome']}: {result['reason']}"


@tier(slow=1 / 3)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case", [case for case in read_passes() if case.name in PROFILED], ids=lambda case: case.name
)
def test_profiler_events(workers, case):
    result = workers.run(case, profiler=True)
    assert result["outcome"] == "passed", f"{result['outcome']}: {result['reason']}"


@tier(slow=1 / 16)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case", [case for case in read_passes() if case.conditions == "gloo"], ids=lambda case: case.name
)
def test_over_hosts(workers, case):
    """The same on two simulated hosts of two ranks. Tests that want another number of ranks are skipped by
    the suite itself.
    """
    result = workers.run(Case(*HOSTS, case.name))
    assert result["outcome"] in ("passed", "skipped"), result["reason"]
