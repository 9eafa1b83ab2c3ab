"""Runs tests of PyTorch's own distributed suite, each in freshly forked ranks; started by run.py.

The suite (torch.testing._internal.distributed.distributed_test) starts a new interpreter for every rank of
every test, which costs seconds of `import torch`. This process imports it once and forks the ranks.
Everything else is the suite's: init_process_group and destroy_process_group per test, the time limits of
groups, the comparison of exit codes.

    BACKEND=gloo WORLD_SIZE=3 python worker.py pycomm [--gpus | --rpc | --hosts]

Reads names of tests, one per line, with "+profiler" behind those that shall also check what torch's profiler
shows. Answers each with a line of JSON: test, outcome (passed, failed, skipped), reason, seconds. BACKEND and
WORLD_SIZE are what the suite's decorators look at when they decide which tests there are; --gpus: see
cuda_on_cpu.py; --hosts: two ranks on each simulated host; --rpc: instead of the suite, DDP under distributed
autograd.
"""

import contextlib
import json
import multiprocessing
import os
import re
import sys
import time
import types
import unittest

import cuda_on_cpu

from pycomm import env

TIME_LIMIT = 100  # seconds per test; the longest on a free machine takes 20
NAME_TESTS = {
    "test_get_backend",
    "test_Backend_enum_class",
}  # these compare BACKEND with what torch says, which is "pycomm"


def import_suite(with_gpus):
    os.environ.update(
        INIT_METHOD="file://per-test",  # replaced in setUp; decorators ask for this scheme
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TIME_LIMIT),
        MASTER_PORT=os.environ.get("MASTER_PORT", "0"),
    )
    try:
        import expecttest  # noqa: F401
    except ImportError:  # torch's test utilities want a base class from it; this suite uses nothing of it
        sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False)
    from torch.testing._internal import common_distributed

    common_distributed.DistTestCases.backend_feature["plugin"].add(
        "pycomm"
    )  # what "gloo" means under PYCOMM_REPLACE
    if with_gpus:
        cuda_on_cpu.install(common_distributed)
    from torch.testing._internal.distributed import distributed_test

    common_distributed.TIMEOUT_OVERRIDE.clear()
    return distributed_test


def make_suite(suite, backend, with_gpus):
    class Suite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            suite.INIT_METHOD = os.environ["INIT_METHOD"]
            suite.BACKEND = backend if self._testMethodName in NAME_TESTS else "gloo"
            self._start_processes(multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank, *args, **kwargs):
            if "--hosts" in sys.argv:
                env.simulate_host(f"host{rank // 2}")
            with cuda_on_cpu.CpuDevice() if with_gpus else contextlib.nullcontext():
                super()._run(rank, *args, **kwargs)

        def _check_return_codes(self, fn, elapsed_time):
            super()._check_return_codes(fn, elapsed_time)
            codes = [process.exitcode for process in self.processes]
            # The suite looks at the first rank alone. We want all ranks to end well.
            if fn not in self.skip_return_code_checks and any(codes):
                raise RuntimeError(f"the ranks ended with exit codes {codes}")

    return Suite


def make_rpc_suites(common_distributed):
    """DDP whose backward pass goes through RPC; the ranks' groups are ours, RPC itself has no backend."""
    from torch.testing._internal.distributed import ddp_under_dist_autograd_test as tests
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
        TensorPipeRpcAgentTestFixture,
    )

    class Forked(TensorPipeRpcAgentTestFixture, common_distributed.MultiProcessTestCase):
        def setUp(self):
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    class UnderAutograd(tests.DdpUnderDistAutogradTest, Forked):
        pass

    class Comparison(tests.DdpComparisonTest, Forked):
        pass

    return [UnderAutograd, Comparison]


def names_of(suite_class):
    return sorted(name for name in dir(suite_class) if name.startswith("test_"))


def run(suite, suite_class, line):
    name, _, profiler = line.partition("+")
    for backends in (suite.PROFILING_SUPPORTED_BACKENDS, suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
        backends[:] = [backend for backend in backends if backend != "pycomm"] + ["pycomm"] * bool(profiler)
    result = unittest.TestResult()
    start = time.monotonic()
    suite_class(name).run(result)
    seconds = round(time.monotonic() - start, 2)
    if result.failures or result.errors:
        return {
            "test": name,
            "outcome": "failed",
            "reason": readable((result.failures + result.errors)[0][1]),
            "seconds": seconds,
        }
    if result.skipped:
        return {"test": name, "outcome": "skipped", "reason": result.skipped[0][1], "seconds": seconds}
    return {"test": name, "outcome": "passed", "reason": "", "seconds": seconds}


def readable(text):
    """A traceback without the frames of the C++ runtime and the interpreter."""
    return re.sub(r"\n(?:frame )?#\d+:? [^\n]*", "", text)[-6000:]


def main():
    backend = sys.argv[1]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what tests print goes to the log
    with_gpus = "--gpus" in sys.argv
    suite = import_suite(with_gpus)
    if backend == "pycomm":
        import pycomm  # noqa: F401
    if "--rpc" in sys.argv:
        from torch.testing._internal import common_distributed

        suites = make_rpc_suites(common_distributed)
    else:
        suites = [make_suite(suite, backend, with_gpus)]
    home = {name: suite_class for suite_class in suites for name in names_of(suite_class)}
    for suite_class in suites:
        suite_class.setUpClass()
    print(json.dumps(sorted(home)), file=answers)
    for line in sys.stdin:
        print(f"=== {line.strip()}", file=sys.stderr, flush=True)
        name = line.strip().partition("+")[0]
        print(json.dumps(run(suite, home[name], line.strip())), file=answers)


if __name__ == "__main__":
    main()
