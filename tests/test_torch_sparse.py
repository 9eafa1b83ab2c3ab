"""all_reduce of sparse tensors, and DDP with sparse embeddings on it."""

import resource

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_ranks import data, equal, meeting, spawn

import pycomm


def sparse(r, nnz, sizes=(50,), dense=(), dtype=torch.float32):
    """nnz elements, some of them at equal places."""
    generator = torch.Generator().manual_seed(50 + r)
    indices = torch.stack([torch.randint(0, size, (nnz,), generator=generator) for size in sizes])
    values = torch.randint(-8, 8, (nnz, *dense), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (*sizes, *dense))


def check_sums(r, n):
    shapes = [((50,), ()), ((50,), (3,)), ((7, 5), (2, 2)), ((3, 4, 5), ()), ((1000,), (64,))]
    for sizes, dense in shapes:
        for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
            for nnz in (lambda p: 8, lambda p: 5 * p, lambda p: 0):
                x = sparse(r, nnz(r), sizes, dense, dtype)
                expected = sum(sparse(p, nnz(p), sizes, dense, dtype).to_dense() for p in range(n))
                dist.all_reduce(x)
                assert x.is_coalesced()
                equal(x.to_dense(), expected)
    x, y = sparse(r, 9), data(r, 1000)  # in order with others, asynchronous, with a future
    before = dist.all_reduce(y, async_op=True)
    work = dist.all_reduce(x, async_op=True)
    after = dist.all_reduce(y, async_op=True)
    future = work.get_future()
    future.wait()
    assert future.value()[0] is x
    equal(x.to_dense(), sum(sparse(p, 9).to_dense() for p in range(n)))
    before.wait()
    after.wait()
    equal(y, sum(data(p, 1000) for p in range(n)) * n)
    xs = [sparse(r, 4), sparse(r + n, 5)]
    dist.group.WORLD.allreduce(xs).wait()
    for x in xs:
        equal(x.to_dense(), sum(sparse(p, 4).to_dense() + sparse(p + n, 5).to_dense() for p in range(n)))
    x = torch.sparse_coo_tensor([[3]], torch.tensor([1.0 if r == 0 else 2**-8], dtype=torch.bfloat16), (5,))
    dist.all_reduce(x)  # rounded once, at the end
    assert x.to_dense()[3] == torch.tensor(1 + (n - 1) * 2**-8).to(torch.bfloat16)


def test_sums():
    spawn(3, check_sums)


def check_no_room(r, n, together):
    """The sizes come with the data, and rank 0 cannot allocate 64 MiB for rank 1's: both raise the reason."""
    rows, row = 8 * r + 1, torch.zeros(1, 1 << 21)
    x = torch.sparse_coo_tensor(torch.arange(rows)[None], row.expand(rows, -1).contiguous(), (9, 1 << 21))
    x = x.coalesce()
    dist.all_reduce(torch.ones(2))
    if r == 0:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
    together.wait()
    if r == 0:
        with pytest.raises(RuntimeError, match="allocate memory") as caught:
            dist.all_reduce(x)
        assert not isinstance(caught.value, pycomm.CommError)
    else:
        with pytest.raises(pycomm.AbortedError, match="rank 0 failed in it: .*allocate memory"):
            dist.all_reduce(x)
    together.wait()


def test_a_rank_without_memory_tells_the_others():
    spawn(2, check_no_room, meeting(2))


def check_errors(r, n):
    sums = dist.ReduceOp
    wrong = [
        (lambda: dist.all_reduce(sparse(0, 3), op=sums.MAX), "sum only"),
        (lambda: dist.all_reduce(sparse(0, 3), op=sums.AVG), "sum only"),
        (lambda: dist.group.WORLD.allreduce([sparse(0, 3), sparse(0, 3, (51,))]), "alike"),
    ]
    for call, text in wrong:
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(pycomm.MismatchError, match=r"\[5[01]\].*\[5[01]\] with 1 sparse dim"):
        dist.all_reduce(sparse(r, 3, (50 + (r == 1),)))
    with pytest.raises(pycomm.MismatchError, match=r"Double|Float"):
        dist.all_reduce(sparse(r, 3, dtype=torch.float64 if r else torch.float32))
    with pytest.raises(pycomm.MismatchError, match="all_reduce"):
        dist.all_reduce(sparse(r, 3) if r else torch.ones(50))
    with pytest.raises(pycomm.MismatchError, match="all_to_all|size"):
        x = torch.zeros(n, dtype=torch.uint8)
        dist.all_reduce(sparse(r, 3)) if r else dist.all_to_all_single(x, x + 1, [1] * n, [1] * n)
    for odd in (0, n - 1):  # of equal sizes, and not of equal places
        with pytest.raises(pycomm.MismatchError, match="with 1 sparse dim.*with 2 sparse dim|with 2.*with 1"):
            dist.all_reduce(sparse(r, 3, (7,), (5,)) if r == odd else sparse(r, 3, (7, 5)))
    x = sparse(r, 6)  # the group is as good as new
    dist.all_reduce(x)
    equal(x.to_dense(), sum(sparse(p, 6).to_dense() for p in range(n)))


def test_errors():
    spawn(3, check_errors)


def train(r, n):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(40, 8, sparse=True, mode="sum"), torch.nn.Linear(8, 4))
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(r)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randint(0, 40, (6, 3), generator=generator)).square().sum().backward()
        assert model.module[0].weight.grad.is_sparse
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore")
def test_ddp_with_a_sparse_embedding():
    ours, gloos = (spawn(2, train, backend=backend) for backend in ("pycomm", "gloo"))
    equal(ours[0], ours[1])
    for mine, expected in zip(ours[0], gloos[0], strict=True):
        torch.testing.assert_close(mine, expected)
