"""The checks of gpu-check, one test each; every one runs in a process of its own. Without a GPU each is
skipped, with the reason.
"""

import pytest

from gpu import checks, steps
from pycomm.benchmarks.common import device

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]
NAMES = list(checks.CHECKS)


@pytest.fixture(autouse=True)
def gpu():
    if missing := device.why_no_cuda():
        pytest.skip(f"no GPU: {missing}")


@pytest.mark.parametrize("name", NAMES)
def test_check(name, tmp_path):
    (step,) = steps.choose(only=[name])
    outcome = steps.run_step(step, tmp_path, step.seconds)
    assert outcome.status == "pass", "\n".join([outcome.note, *steps.problems(outcome)])


@pytest.mark.parametrize("name", ["bench_2", "bench_2_graph", "bench_2_processes"])
def test_benchmark(name, tmp_path):
    (step,) = steps.choose(only=[name])
    outcome = steps.run_step(step, tmp_path, step.seconds)
    assert outcome.status == "pass", "\n".join([outcome.note, *steps.problems(outcome)])
    assert outcome.bench["rows"] and all(row["copy_gbps"] > 0 for row in outcome.bench["rows"])


@pytest.mark.parametrize("name", ["bench_fused_matmul", "bench_fused_2"])
def test_benchmark_of_fused(name, tmp_path):
    (step,) = steps.choose(only=[name])
    outcome = steps.run_step(step, tmp_path, step.seconds)
    assert outcome.status == "pass", "\n".join([outcome.note, *steps.problems(outcome)])
    assert any(row["variant"] == "fused" and row["missing"] is None for row in outcome.bench["rows"])
