"""How the tests are dealt to the workers of pytest-xdist: whole files, those that take longest first.

A file is not split, so that what it builds for all of its tests is built once; but for one whose tests share
nothing and take minutes each.

[Note: time limit] A test at its limit may wait in C++, where no signal handler of Python runs, and may hold
the interpreter's lock, so that no thread of Python runs either. faulthandler's watchdog is a thread of C: it
prints all stacks and ends the process. That is a worker: the test is reported as failed, and another worker
goes on behind it (pytest-xdist 3.8 by itself would run the hanging test again and again). Without workers, as
`pytest` runs by default, the whole run ends.
"""

import contextlib
import ctypes
import faulthandler
import gc
import os

import pytest

try:
    from xdist.scheduler import LoadFileScheduling
except ImportError:  # a machine without it can still run a few tests
    LoadFileScheduling = object

# What takes a minute or more on two cores. A file that begins late would be waited for by an idle worker.
LONG = [
    "fused/test_aot.py",
    "test_torch_suite.py",
    "test_sanitizers.py",
    "test_wheel.py",
    "hosts/test_split_brain.py",
    "test_cuda_kernels.py",
    "test_cuda_mutants.py",
    "test_cuda_host_mutants.py",
    "parallel/test_equality.py",
    "fused/test_kernels.py",
    "model_families/test_model_families.py",
    "test_cuda_python.py",
    "test_cuda_group.py",
    "test_examples.py",
    "test_mismatch.py",
    "test_faults.py",
    "test_random_programs.py",
    "test_gpu_check.py",
    "parallel/test_strategy_examples.py",
    "hosts/test_shrink_hosts.py",
    "hosts/test_two_levels.py",
    "parallel/test_recovery_hosts.py",
    "test_torch_versions.py",
    "test_nvcc.py",
]
SPLIT = "fused/test_aot.py"


class FilesOnce(LoadFileScheduling):
    def _split_scope(self, nodeid):
        return nodeid if SPLIT in nodeid else super()._split_scope(nodeid)

    def _assign_work_unit(self, node):
        for name in reversed(LONG):
            for scope in self.workqueue:
                if scope.split("::")[0].endswith(name):
                    self.workqueue.move_to_end(scope, last=False)
                    break
        super()._assign_work_unit(node)

    def _reschedule(self, node):
        """A worker is given a file when it has one test left, not two as in xdist: the file could wait behind
        minutes, while other workers have nothing. The last test does not begin before the worker has more.
        """
        if not self.workqueue or self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)

    def remove_node(self, node):
        """Returns the test during which the worker ended, or None."""
        for unit in self.assigned_work[node].values():
            for test, finished in unit.items():
                if not finished:
                    unit[test] = True  # it had its turn
                    super().remove_node(node)
                    return test
        return super().remove_node(node)


@pytest.fixture(scope="module", autouse=True)
def memory_is_given_back():
    """Each thread that was a rank leaves a heap to the allocator, a gigabyte in all, and to fork a process
    takes as long as its memory is large.
    """
    yield
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return FilesOnce(config, log)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """All files are imported here, a million objects that stay: looking whether some are garbage took a
    third of the time, and each collection of a test looked at them again.
    """
    gc.disable()
    yield
    gc.enable()
    gc.freeze()


_stderr = pytest.StashKey[int]()


def pytest_configure(config):
    config.stash[_stderr] = os.dup(2)  # that of the run; during a test 2 is the file that captures its output


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item, settings):
    faulthandler.dump_traceback_later(settings.timeout, exit=True, file=item.config.stash[_stderr])
    return True


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_cancel_timer(item):
    faulthandler.cancel_dump_traceback_later()
    return True
