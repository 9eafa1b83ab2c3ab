"""Runs the tests of one file of PyTorch's folder test/distributed, each in a process of its own; started by
files.py.

    python files_worker.py gloo|pycomm FILE SECONDS [--gpus]

First answers with a line of JSON: the names of the tests, as Class.test. Then reads names, one per line, and
answers each with a line of JSON: test, outcome (passed, failed, skipped), reason, seconds. With "+words"
behind the name, an error that the test expects with certain words may have others, and may be a ValueError.

The file is imported once and this process never runs a test itself: it forks one process per test, and the
ranks of a test are forked from that. A process that needs longer than SECONDS is killed with its ranks.

With pycomm, files.py sets PYCOMM_REPLACE=gloo, so groups made by name are pycomm's. A test that makes an
object of the class torch.distributed.ProcessGroupGloo gets a backend of pycomm as well (InPlaceOfGloo). With
--gpus, tests that ask for GPUs run on the CPU, see cuda_on_cpu.py.
"""

import contextlib
import importlib
import itertools
import json
import multiprocessing
import os
import select
import signal
import sys
import time
import types
import unittest
from datetime import timedelta
from pathlib import Path

import cuda_on_cpu
import torch
from worker import readable

_groups = itertools.count()


class InPlaceOfGloo:
    """What torch.distributed.ProcessGroupGloo is for the tests: makes a backend of pycomm, with the time
    limit of the options; devices and threads are Gloo's own matter.
    """

    def __new__(cls, store, rank, size, options=None, timeout=None):
        from pycomm import torch_backend

        timeout = timeout or getattr(options, "_timeout", options) or timedelta(seconds=1800)
        settings = types.SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=size,
            timeout=timeout,
            group_id=f"class_{next(_groups)}",
            global_ranks_in_group=[],
        )
        return torch_backend.create(settings, None)


def show_four_devices(common_fsdp):
    """What FSDP's tests ask for the number of ranks."""
    torch.cpu.device_count = lambda: 4
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cpu")
    common_fsdp.DEVICE_COUNT = 4


def prepare(backend, seconds, with_gpus):
    """Before the file is imported, since its decorators look at these things."""
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(int(seconds))
    try:
        import expecttest  # noqa: F401
    except ImportError:  # tests that call what is not in here fail, on Gloo too
        sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False)
    import torch.distributed as dist
    from torch.testing._internal import common_distributed, common_utils

    common_distributed.TIMEOUT_OVERRIDE.clear()
    common_distributed.DistTestCases.backend_feature["plugin"].add("pycomm")
    fork = multiprocessing.get_context("fork")
    common_distributed.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(
        fork.Process
    )
    common_utils.parse_cmd_line_args()
    if with_gpus:
        cuda_on_cpu.install(common_distributed)
        from torch.testing._internal import common_fsdp

        show_four_devices(common_fsdp)
    if backend == "pycomm":
        from pycomm import _C

        gloo = dist.ProcessGroupGloo
        for name in ("create_device", "create_default_device"):  # tests call them on groups, in vain
            setattr(InPlaceOfGloo, name, staticmethod(getattr(gloo, name)))
            setattr(_C.Backend, name, staticmethod(getattr(gloo, name)))
        InPlaceOfGloo._Options = gloo._Options
        dist.ProcessGroupGloo = InPlaceOfGloo


def load(path):
    """The tests of the file by name, as `python FILE` would find them."""
    sys.path.insert(0, str(path.parent))
    try:
        module = importlib.import_module(path.stem)
    except (SystemExit, unittest.SkipTest):  # the file's way to say that nothing of it can run here
        return {}
    tests, suites = {}, [unittest.defaultTestLoader.loadTestsFromModule(module)]
    while suites:
        for test in suites.pop():
            if isinstance(test, unittest.TestSuite):
                suites.append(test)
            else:
                tests[f"{type(test).__name__}.{test._testMethodName}"] = test
    return tests


def accept_other_words():
    def any_words(self, kinds, words, *call, **named):
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        return self.assertRaises((*kinds, ValueError), *call, **named)

    unittest.TestCase.assertRaisesRegex = any_words


def run(test, with_gpus):
    result = unittest.TestResult()
    with cuda_on_cpu.CpuDevice() if with_gpus else contextlib.nullcontext():
        unittest.TestSuite([test]).run(result)  # a suite also calls setUpClass
    if result.failures or result.errors:
        return "failed", readable((result.failures + result.errors)[0][1])
    if result.unexpectedSuccesses:
        return "failed", "it passes, and is marked as expected to fail"
    return ("skipped", result.skipped[0][1]) if result.skipped else ("passed", "")


def run_apart(test, seconds, with_gpus, other_words):
    """run() in a forked process, which leads a session, so that nothing of it is left."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if other_words:
            accept_other_words()
        try:
            outcome = run(test, with_gpus)
        except BaseException as error:
            outcome = "failed", f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps(outcome).encode() + b"\n")
        os._exit(0)
    os.close(writer)
    outcome, reason = "failed", f"not finished within {seconds:g} s"
    if select.select([reader], [], [], seconds)[0]:
        with os.fdopen(reader) as lines:
            line = lines.readline()
        outcome, reason = json.loads(line) if line else ("failed", "its process died")
    else:
        os.close(reader)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:  # ended before it could lead a session
        pass
    os.waitpid(child, 0)
    return outcome, reason


def main():
    backend, path, seconds = sys.argv[1], Path(sys.argv[2]).resolve(), float(sys.argv[3])
    with_gpus = "--gpus" in sys.argv
    sys.argv = [str(path)]  # torch's test utilities read it
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what tests print goes to the log
    prepare(backend, seconds, with_gpus)
    tests = load(path)
    print(json.dumps(sorted(tests)), file=answers)
    for line in sys.stdin:
        name, _, words = line.strip().partition("+")
        print(f"=== {name}", file=sys.stderr, flush=True)
        start = time.monotonic()
        outcome, reason = run_apart(tests[name], seconds, with_gpus, words == "words")
        result = {
            "test": name,
            "outcome": outcome,
            "reason": reason,
            "seconds": round(time.monotonic() - start, 2),
        }
        print(json.dumps(result), file=answers)


if __name__ == "__main__":
    main()
