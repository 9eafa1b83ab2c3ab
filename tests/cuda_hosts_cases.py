"""CUDA tensors of groups over simulated hosts in tests/test_cuda_hosts.py: each function runs in a process of
its own, on the device of tests/fake_cuda.py. NCCL is played by FakeNccl (tests/cpp/cuda/fake_nccl.h).
"""

import os
import signal
import sys
import time

import cuda_native_cases as native
import cuda_torch_cases as backend
import fake_cuda
import torch
import torch.distributed as dist
from cuda_native_cases import raises
from cuda_torch_cases import SIZE, cuda, empty, ranks, total
from torch_ranks import DIED, data, equal, meeting

import pycomm
import pycomm.hosts
from pycomm.hosts import addresses, engine
from pycomm.testing import run_ranks

made = []  # the FakeNccl of this process, in the order in which they were made
real = None  # process_group of pycomm/hosts/nccl_engine.py


def fake_group(store, rank, world_size):
    gloo = engine._gloo_on(addresses.Address("lo", "127.0.0.1"))(store, rank, world_size)
    made.append(fake_cuda.driver.FakeNccl(gloo))
    return made[-1]


def use_fake():
    global real
    fake_cuda.driver.bind_fake_nccl()
    module = sys.modules["pycomm.hosts.nccl_engine"]
    real, module.process_group = module.process_group, fake_group


def over(hosts, body, *args, checks=None, **options):
    use_fake()
    if checks is not None:
        os.environ["PYCOMM_NCCL_CHECKS"] = checks
    return ranks(len(hosts), body, *args, hosts=hosts, **options)


def ended(work, limit=15.0):
    """Waits until a work has completed; raises its error."""
    fake_cuda.wait_until(work.is_completed, limit)
    work.wait()


# --- what works


def same_as_on_one_host(name, hosts, checks):
    """A case of cuda_torch_cases.py."""

    def body(r, n):
        getattr(backend, name)(r, n)
        if dist.is_initialized():  # else the case has destroyed it
            dist.barrier()
        assert made and made[0].calls and not made[0].aborted, [each.calls for each in made]

    over(hosts, body, checks=checks)


# Not its ring of messages, in which each rank sends first: see messages() and messages_cross().
OPERATIONS = [operation for operation in native.OPERATIONS if operation is not native.messages]


def native_operations(hosts):
    use_fake()

    def rank(comm):
        with fake_cuda.stream():
            for async_op in (False, True):
                each = native.Ranks(comm, 0, async_op)
                for operation in OPERATIONS:
                    for count in (0, 1, 4099):
                        result, expected = operation(each, comm.world_size, comm.rank, count)
                        equal(
                            [x.cpu() for x in result] if isinstance(result, list) else result.cpu(), expected
                        )
            del result
            comm.barrier()
        comm.close()
        assert made[0].shut_down and not made[0].aborted
        fake_cuda.check_nothing_left()

    run_ranks(len(hosts), rank, mode="processes", hosts=hosts, timeout=40)


DTYPES = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.uint32, torch.uint64, torch.bool]
DTYPES += [torch.complex64, torch.complex128, torch.float64, torch.float16, torch.bfloat16]


def dtypes(r, n):
    """Sums that NCCL has under another name; everything moves."""
    ops = dist.ReduceOp
    for dtype in DTYPES:
        mine = [(data(p, 40).abs() % 2).to(dtype) for p in range(n)]
        x = mine[r].to("cuda")
        dist.all_reduce(x)
        count = sum(y.to(torch.float64 if not dtype.is_complex else dtype) for y in mine)
        equal(x.cpu(), count.to(dtype))
        if dtype.is_floating_point:
            x = mine[r].to("cuda")
            dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
            equal(x.cpu(), count.to(dtype) * 0.5)
    for dtype in (*DTYPES, torch.int16, torch.uint16, torch.float8_e4m3fn):
        x = torch.full((5,), 1).to(dtype) if r == 0 else torch.zeros(5, dtype=dtype)
        x = x.to("cuda")
        dist.broadcast(x, 0)
        equal(x.cpu().view(torch.uint8), torch.full((5,), 1).to(dtype).view(torch.uint8))
    refused = [(torch.int16, dist.ReduceOp.SUM), (torch.int32, dist.ReduceOp.BAND)]
    refused += [(torch.int32, ops.AVG), (torch.int64, ops.BXOR)]
    refused += [(dtype, op) for dtype in (torch.uint32, torch.uint64) for op in (ops.MIN, ops.MAX)]
    for dtype, op in refused:
        with raises(ValueError, "NCCL, which has no", "all_reduce"):
            dist.all_reduce(torch.ones(3, dtype=dtype).to("cuda"), op=op)
    dist.barrier()


def many(r, n):
    """More operations than may run ahead of their headers, none of which anybody waits for."""
    x = cuda(r, 4)
    dist.all_reduce(x)
    for _ in range(600):
        dist.all_reduce(x.fill_(1.0))
    equal(x.cpu(), torch.full((4,), float(n)))
    dist.barrier()


def grouped(r, n):
    """What is coalesced with a device is one group of NCCL's, also after a batch cut off by an error."""
    dist.all_reduce(cuda(r, 3))
    try:
        with dist.distributed_c10d._coalescing_manager(device=torch.device("cuda", 0)):
            dist.all_reduce(cuda(r, 4))
            raise KeyError
    except KeyError:
        dist.distributed_c10d._world.pg_coalesce_state.pop(dist.group.WORLD)  # which torch leaves there
    made[0].calls = []
    backend.coalescing(r, n)
    # torch hands the gathers over as one call without a device: they are no group.
    assert made[0].calls == ["start", *["allreduce"] * 4, "end", *["allgather_base"] * 3], made[0].calls


def messages(r, n):
    """One by one they run in the order of a rank's calls, so somebody begins; in a batch they may cross."""
    left, right = (r - 1) % n, (r + 1) % n
    x, out = cuda(r, 2, SIZE).t(), empty(2, SIZE).t()
    if r == 0:
        works = [dist.isend(x, right, tag=3), dist.irecv(out, left, tag=3)]
    else:
        works = [dist.irecv(out, left, tag=3), dist.isend(x, right, tag=3)]
    for work in works:
        work.wait()
    equal(out.cpu(), data(left, 2, SIZE).t())
    backend.batched_messages(r, n)
    dist.barrier()


CASES = {"dtypes": dtypes, "many": many, "grouped": grouped, "messages": messages}


def case(name, hosts):
    over(hosts, CASES[name])


def sizes_on_some_ranks(hosts, checks):
    """NCCL's form is the same for both."""

    def body(r, n):
        for count, with_sizes in ((1, {0}), (SIZE, {n - 1}), (SIZE, set(range(1, n))), (0, {0})):
            splits = [[count] * n] * 2 if r in with_sizes else []
            for async_op in (False, True):
                out = empty(n * count)
                work = dist.all_to_all_single(out, cuda(r, n * count), *splits, async_op=async_op)
                if async_op:
                    ended(work)
                mine = slice(r * count, (r + 1) * count)
                equal(out.cpu(), torch.cat([data(p, n * count)[mine] for p in range(n)]))
        dist.barrier()

    over(hosts, body, checks=checks)


def not_compared(hosts):
    def body(r, n):
        x = cuda(r, SIZE)
        dist.all_reduce(x)
        dist.all_reduce(x)
        equal(x.cpu(), total(n, SIZE) * n)
        dist.barrier()
        comm = dist.group.WORLD._get_backend(torch.device("cuda")).communicator
        del comm

    over(hosts, body, checks="off")


# --- what goes wrong


def mismatch(kind, checks):
    """Named on all ranks; with `before` NCCL has not been reached, and the group goes on."""

    def call(r, n):
        if kind == "count":
            return dist.all_reduce(cuda(r, SIZE + (r == 3)), async_op=True)
        if kind == "operation" and r == 3:
            return dist.broadcast(cuda(r, SIZE), 0, async_op=True)
        if kind == "device" and r == 3:
            return dist.all_reduce(data(r, SIZE), async_op=True)
        if kind in ("splits", "splits on one rank"):
            splits = [2] * n
            wrong = [2, 2, 2, 3] if r == 1 else splits
            out, x = torch.zeros(sum(wrong), device="cuda"), cuda(r, sum(splits))
            passed = (wrong, splits) if r == 1 or kind == "splits" else ()
            return dist.all_to_all_single(out, x, *passed, async_op=True)
        return dist.all_reduce(cuda(r, SIZE), async_op=True)

    texts = {
        "count": ["count=", f"{SIZE} ", f"{SIZE + 1} ", "(host"],
        "operation": ["operation=", "broadcast"],
        "device": ["device=", "cpu", "All ranks must pass tensors on the same kind of device."],
        "splits": ["rank 3 (host1) sends 2 elements to rank 1 (host0), which expects 3"],
    }[kind.removesuffix(" on one rank")]

    def body(r, n):
        dist.all_reduce(cuda(r, 4))
        dist.barrier()
        before = len(made[0].calls)
        if checks == "beside":
            made[0].hang_after = 0  # over calls that differ NCCL may do so
        with raises(pycomm.MismatchError, *texts, rank=r, world_size=n):
            work = call(r, n)
            ended(work)
        if checks == "before":
            assert len(made[0].calls) == before
            x = cuda(r, SIZE)
            dist.all_reduce(x)
            equal(x.cpu(), total(n, SIZE))
            return dist.barrier()
        with raises(pycomm.MismatchError):
            dist.all_reduce(data(r, 3))
        fake_cuda.wait_until(lambda: made[0].aborted or (kind == "device" and r == 3))

    over([0, 0, 1, 1], body, checks=checks)


def engine_fails():
    """NCCL reports an error on one rank; the others would wait for ever."""

    def body(r, n):
        dist.all_reduce(cuda(r, 4))
        dist.barrier()
        if r == 1:
            made[0].fail_text = "[socket.cpp:5] ncclRemoteError: A call failed. Last error: reset"
            made[0].fail_after = 0
        else:
            made[0].hang_after = 0
        told = ["NCCL ended it: ncclRemoteError: A call failed", "seen by rank 1 (host1)", "all_reduce #5"]
        with raises(pycomm.PeerError, *told, rank=r):
            ended(dist.all_reduce(cuda(r, 4), async_op=True))
        with raises(pycomm.PeerError, "ncclRemoteError"):
            dist.all_reduce(data(r, 4))
        fake_cuda.wait_until(lambda: made[0].aborted)

    over([0, 1], body)


def engine_refuses():
    def body(r, n):
        dist.all_reduce(cuda(r, 4))
        dist.barrier()
        if r == 1:
            made[0].refuse_after = 0
        else:
            made[0].hang_after = 0
        with raises(pycomm.AbortedError, "rank 1 (host1) failed in it: NCCL: ncclInvalidUsage: refused here"):
            ended(dist.all_reduce(cuda(r, 4), async_op=True))

    over([0, 1], body)


def engine_hangs():
    def body(r, n):
        dist.all_reduce(cuda(r, 4))
        dist.barrier()
        made[0].hang_after = 0
        told = "NCCL did not finish it within the timeout of 1 s, though all ranks had called it"
        with raises(pycomm.CommTimeoutError, told, rank=r):
            ended(dist.all_reduce(cuda(r, 4), async_op=True))
        fake_cuda.wait_until(lambda: made[0].aborted)
        fake_cuda.synchronize()  # aborted, it holds up no stream

    over([0, 1], body, timeout=1.0)


def does_not_come():
    """The headers name who it is, and NCCL is let go."""

    def body(r, n):
        dist.all_reduce(cuda(r, 4))
        dist.barrier()
        if r == 2:
            fake_cuda.wait_until(lambda: made[0].aborted or broken())
            return
        told = ["rank 2 (host1) did not arrive within the timeout of 1 s"]
        with raises(pycomm.CommTimeoutError, *told, rank=r, peer=2):
            ended(dist.all_reduce(cuda(r, 4), async_op=True))

    def broken():
        return dist.group.WORLD._get_backend(torch.device("cuda")).communicator.describe()["broken"]

    over([0, 0, 1, 1], body, timeout=1.0)


def killed(victim):
    together = meeting(4)

    def body(r, n):
        dist.all_reduce(cuda(r, 4))
        dist.barrier()
        together.wait()
        if r == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        with raises(pycomm.PeerError, f"rank {victim} (host{victim // 2}) died", rank=r, peer=victim):
            ended(dist.all_reduce(cuda(r, 4), async_op=True))
        assert time.monotonic() - start < 9  # host_timeout is 10
        dist.destroy_process_group()  # aborts NCCL if no pending operation has
        fake_cuda.wait_until(lambda: made[0].aborted)

    results = over([0, 0, 1, 1], body, expect_deaths=[victim])
    assert results[victim] == DIED


def messages_cross():
    """Each rank's send is before its recv and waits for the other's: a limit ends that."""

    def body(r, n):
        dist.all_reduce(cuda(r, 4))
        dist.barrier()
        sent = dist.isend(cuda(r, SIZE), 1 - r)
        received = dist.irecv(empty(SIZE), 1 - r)
        told = "messages between devices are not compared, so its other end may be missing"
        for work in (sent, received):
            with raises(pycomm.CommTimeoutError, told, rank=r):
                ended(work)
        fake_cuda.wait_until(lambda: made[0].aborted)

    over([0, 1], body, timeout=1.0)


def aborted():
    together = meeting(2)

    def body(r, n):
        dist.all_reduce(cuda(r, 4))
        dist.barrier()
        made[0].hang_after = 0
        work = dist.all_reduce(cuda(r, 4), async_op=True)
        together.wait()
        if r == 1:
            dist.group.WORLD._get_backend(torch.device("cuda")).abort()
        with raises(pycomm.AbortedError, "rank 1"):
            ended(work)

    over([0, 1], body)


def without_nccl():
    """All ranks say so, and CPU tensors go on."""

    def body(r, n):
        if r == 1:
            sys.modules["pycomm.hosts.nccl_engine"].process_group = real
        with raises(pycomm.CommError, "NCCL could not connect the ranks: this torch was built without NCCL"):
            dist.all_reduce(cuda(r, 4))
        x = data(r, 4)
        dist.all_reduce(x)
        equal(x, total(n, 4))
        with raises(ValueError, "registered memory on devices is there for groups within one host"):
            pycomm_of().empty([4], torch.float32, torch.device("cuda", 0))
        dist.barrier()

    def pycomm_of():
        return dist.group.WORLD._get_backend(torch.device("cpu")).communicator

    over([0, 1], body)


def dies_while_it_is_made():
    def body(r, n):
        if r == 1:
            sys.modules["pycomm.hosts.nccl_engine"].process_group = lambda *of: os._exit(9)
        with raises(pycomm.PeerError, "rank 1 (host1) died"):
            dist.all_reduce(cuda(r, 4))

    assert over([0, 1], body, expect_deaths=[1])[1] == DIED
