"""How the NCCL of a group over hosts ends, in tests/test_cuda_hosts.py: deaths, aborts and hangs at any
moment. FakeNccl says where NCCL's rules are broken (tests/cpp/cuda/fake_nccl.h).
"""

import ctypes
import datetime
import gc
import os
import re
import signal
import threading

import fake_cuda
import torch
import torch.distributed as dist
from cuda_hosts_cases import ended, made, over, use_fake
from cuda_native_cases import raises
from cuda_torch_cases import SIZE, cuda, empty
from torch_ranks import DIED, meeting

import pycomm
from pycomm.testing import run_ranks


def device_goes_on(noncontiguous):
    """After an error and an abort the device still uses the tensors: the error comes without it, and nobody
    gives them back before.
    """

    def allocations():
        gc.collect()
        found = re.search(r"(\d+) allocations", fake_cuda.driver.left_over())
        return int(found[1]) if found else 0

    def body(r, n):
        dist.all_reduce(cuda(r, 4))
        dist.barrier()
        fake_cuda.synchronize()
        before = allocations()
        made[0].lingers = True
        if r == 1:
            made[0].fail_text, made[0].fail_after = "ncclRemoteError: reset", 0
        else:
            made[0].hang_after = 0
        x = cuda(r, 3, SIZE)
        work = dist.all_reduce(x.t() if noncontiguous else x, async_op=True)
        del x
        with raises(pycomm.PeerError, "ncclRemoteError", rank=r):
            ended(work)
        del work
        assert made[0].aborted and allocations() > before
        made[0].lingers = False
        fake_cuda.wait_until(lambda: allocations() == before)

    over([0, 1], body)


def call_does_not_return(how):
    """A thread that NCCL keeps in a call, with nothing else under way, is let go by an abort."""
    together = meeting(2)

    def body(r, n):
        dist.all_reduce(cuda(r, 4))
        dist.barrier()
        together.wait()
        if r == 0:
            made[0].stick_after = 0
        elif how == "death":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            made[0].hang_after = 0
        error, told = {
            "death": (pycomm.PeerError, "rank 1 (host1) died"),
            "limit": (pycomm.CommTimeoutError, "did not"),
        }[how]
        with raises(error, told, rank=r):
            ended(dist.all_reduce(cuda(r, 4), async_op=True))
        fake_cuda.wait_until(lambda: made[0].aborted)

    over([0, 1], body, timeout=1.0 if how == "limit" else 20.0, expect_deaths=[1] if how == "death" else [])


def abort_hangs():
    """The errors come and the group can be left, without NCCL."""
    together = meeting(2)

    def body(r, n):
        dist.all_reduce(cuda(r, 4))
        dist.barrier()
        together.wait()
        made[0].abort_hangs = True
        made[0].hang_after = 0
        with raises(pycomm.AbortedError, "rank 1"):
            work = dist.all_reduce(cuda(r, 4), async_op=True)  # raises it, too, where rank 1 was faster
            if r == 1:
                dist.group.WORLD._get_backend(torch.device("cuda")).abort()
            ended(work)
        dist.destroy_process_group()

    over([0, 1], body)


def dies_while_others_leave():
    """NCCL's shutdown waits for all ranks, of which one is gone."""

    def body(r, n):
        dist.all_reduce(cuda(r, 4))
        dist.barrier()
        made[0].shutdown_hangs = True
        store = dist.distributed_c10d._get_default_store()
        if r == 1:
            store.wait(["leaving"])
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(0.3, lambda: store.set("leaving", "")).start()
        dist.destroy_process_group()
        assert made[0].aborted and not made[0].shut_down

    over([0, 1], body, expect_deaths=[1])


def closed_by_another_thread():
    """No call of NCCL's is made after its end, nor one beside another."""
    use_fake()

    def rank(comm):
        errors = []

        def go_on():
            with fake_cuda.stream():
                try:
                    while True:
                        comm.all_reduce(cuda(comm.rank, 4), async_op=True).wait()
                except pycomm.CommError as error:
                    errors.append(str(error))  # not the tensors of its frames

        threads = [threading.Thread(target=go_on) for _ in range(2)]
        for thread in threads:
            thread.start()
        fake_cuda.wait_until(lambda: made and len(made[0].calls) > 20)
        comm.close()
        for thread in threads:
            thread.join(20)
        assert len(errors) == 2, errors
        fake_cuda.check_nothing_left()

    run_ranks(2, rank, mode="processes", hosts=[0, 1], timeout=40)


def batch_refused():
    """All of the batch end."""

    def body(r, n):
        dist.all_reduce(cuda(r, 4))
        dist.barrier()
        made[0].refuse_after = 1
        left, right = (r - 1) % n, (r + 1) % n
        ops = [dist.P2POp(dist.isend, cuda(r, 4), right), dist.P2POp(dist.irecv, empty(4), left)]
        with raises(pycomm.AbortedError, "failed in it: NCCL: ncclInvalidUsage: refused here"):
            for work in dist.batch_isend_irecv(ops):
                ended(work)

    over([0, 1], body)


def device_fails():
    """An error of CUDA's that the watching thread meets is the group's error."""

    def body(r, n):
        dist.all_reduce(cuda(r, 4))
        dist.barrier()
        made[0].hang_after = 0
        if r == 1:
            fake_cuda.driver.fail("cuEventQuery", 1, 719)
        with raises(pycomm.AbortedError, "rank 1 (host1) failed in it: CUDA error: 719", rank=r):
            ended(dist.all_reduce(cuda(r, 3, SIZE).t(), async_op=True))

    over([0, 1], body)


def exits_while_broken(waits):
    """The interpreter ends in order, whether the error has been heard of or NCCL still runs."""
    use_fake()
    together = meeting(2)

    def rank(r):
        x = cuda(r, 4)
        dist.all_reduce(x)
        dist.barrier()
        together.wait()
        made[0].hang_after = 0
        if r == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.all_reduce(x, async_op=True)
        if waits:
            with raises(pycomm.PeerError, "rank 1 (host1) died"):
                ended(work)
        ctypes.pythonapi.Py_Exit(3)

    options = {"backend": "pycomm", "operation_timeout": 20.0, "timeout": 40, "fail": False}
    results = run_ranks(2, rank, mode="processes", hosts=[0, 1], **options)
    assert "exited with status 3" in str(results[0]) and "signal 9" in str(results[1]), results


def random_death(seed):
    """A rank dies anywhere in a program of collectives and messages on two groups. The others get an error
    that names it, can leave, and NCCL's rules are kept.
    """
    random = torch.Generator().manual_seed(seed)
    victim, moment = torch.randint(0, 4, (2,), generator=random).tolist()
    moment = 0.02 * moment + 0.4 * torch.rand(1, generator=random).item()

    def program(r, n, second, step):
        left, right = (r - 1) % n, (r + 1) % n
        group = second if step % 3 == 2 else None
        works = [dist.all_reduce(cuda(r, SIZE + step), async_op=True, group=group)]
        works.append(dist.all_reduce(cuda(r, 3, SIZE).t(), async_op=True, group=group))
        ops = [dist.P2POp(dist.isend, cuda(r, 5), right), dist.P2POp(dist.irecv, empty(5), left)]
        if step % 2:
            works += dist.batch_isend_irecv(ops)
        for work in works[step % 3 :]:
            work.wait()
        if step % 5 == 4:
            dist.barrier()
            fake_cuda.synchronize()

    def body(r, n):
        if r == victim:
            threading.Timer(moment, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        try:
            second = dist.new_group(timeout=datetime.timedelta(seconds=10))
            for step in range(10**6):
                program(r, n, second, step)
        except (pycomm.CommError, dist.DistError) as error:
            text = str(error)
        # The latter: it died before the others could know that it had come to new_group (docs/limits.md).
        assert f"rank {victim} " in text.lower() or f"rank(s) {victim} did not arrive" in text, text
        dist.destroy_process_group()

    assert over([0, 0, 1, 1], body, expect_deaths=[victim])[victim] == DIED
