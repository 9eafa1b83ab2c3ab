"""DistributedDataParallel: against torch's class of that name beside it, and against a single process where
torch has no equal.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from tiers import tier
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_ranks import spawn

from pycomm.groups import as_group
from pycomm.parallel import count_traffic
from pycomm.parallel.data import DistributedDataParallel

TORCH = nn.parallel.DistributedDataParallel


class Net(nn.Module):
    """Branches that a rank may leave out, a frozen layer, a buffer, parameters without dimensions and without
    elements.
    """

    def __init__(self, norm=False, recompute=None):
        super().__init__()
        self.first, self.left, self.right, self.never = (
            nn.Linear(7, 11),
            nn.Linear(11, 11),
            nn.Linear(11, 11),
            nn.Linear(3, 5),
        )
        self.frozen, self.last = nn.Linear(11, 11).requires_grad_(False), nn.Linear(11, 3)
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 4))
        self.norm = nn.BatchNorm1d(11) if norm else nn.Identity()
        self.recompute = recompute

    def forward(self, x, branch="both"):
        x = self.norm(torch.tanh(self.first(x)))
        if branch != "right":
            x = x + (
                checkpoint(self.left, x, use_reentrant=self.recompute == "reentrant")
                if self.recompute
                else self.left(x)
            )
        if branch != "left":
            x = x + self.right(x)
        return self.last(torch.relu(self.frozen(x))) * self.scale


def batch(rank, step, rows=4):
    generator = torch.Generator().manual_seed(100 * rank + step)
    rows += rank  # ranks differ in rows; DDP averages the ranks all the same
    return torch.randn(rows, 7, generator=generator, dtype=torch.float64), torch.randn(
        rows, 3, generator=generator, dtype=torch.float64
    )


def build(kind, **options):
    torch.manual_seed(3)
    net = Net(**options).double()
    if kind is TORCH:
        return kind(net, find_unused_parameters=True)
    return kind(net, bucket_mb=0.0005)


def loss_of(model, rank, step, *args):
    x, y = batch(rank, step)
    return F.mse_loss(model(x, *args), y)


def plain(model, opt, rank, none):
    for step in range(3):
        opt.zero_grad(set_to_none=none)
        loss_of(model, rank, step).backward()
        opt.step()


def no_sync(model, opt, rank, none):
    for step in range(2):
        opt.zero_grad(set_to_none=none)
        for part in range(3):
            with model.no_sync() if part < 2 else contextlib.nullcontext():
                loss_of(model, rank, 3 * step + part).backward()
        opt.step()


def accumulate_synced(model, opt, rank, none):
    opt.zero_grad(set_to_none=none)
    for step in range(2):
        loss_of(model, rank, step).backward()
    opt.step()


def branches(model, opt, rank, none):
    """Parameters that only some ranks use. (One that none uses has a gradient of zeros here, and with torch
    the one it had before.)
    """
    for step in range(3 if as_group().size > 1 else 0):
        opt.zero_grad(set_to_none=none)
        loss_of(model, rank, step, ("left", "right", "both")[(rank + step) % 3]).backward()
        opt.step()


def two_forwards(model, opt, rank, none):
    opt.zero_grad(set_to_none=none)
    (loss_of(model, rank, 0) + 2 * loss_of(model, rank, 1)).backward()
    opt.step()


def foreign_gradients(model, opt, rank, none):
    """The user puts tensors of his own into .grad, also of what some ranks do not use."""
    for step in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5) if parameter.requires_grad else None
        loss_of(model, rank, step, ("both", "left" if rank else "both")[step]).backward()
        opt.step()


CASES = [
    (plain, {}),
    (plain, {"norm": True}),
    (plain, {"recompute": "plain"}),
    (no_sync, {}),
    (accumulate_synced, {}),
    (branches, {}),
    (foreign_gradients, {}),
]


def beside_torch(rank, world_size):
    worst = []
    for scenario, options in CASES:
        for none in (True, False):
            results = []
            for kind in (TORCH, DistributedDataParallel):
                model = build(kind, **options)
                opt = torch.optim.SGD(
                    [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9
                )
                scenario(model, opt, rank, none)
                results.append(model.state_dict())
            theirs, ours = results
            assert theirs.keys() == ours.keys()
            difference = max(
                ((theirs[name] - ours[name]).abs().max().item() for name in theirs if theirs[name].numel()),
                default=0.0,
            )
            worst.append((scenario.__name__, options, none, difference))
    return worst


@tier(quick=1 / 3)
@pytest.mark.parametrize(
    ("world_size", "backend"),
    [
        (3, "pycomm"),
        (2, "gloo"),
        *(pytest.param(world_size, "pycomm", marks=pytest.mark.deep) for world_size in (1, 2, 4)),
    ],
)
def test_beside_torch(world_size, backend):
    for found in spawn(world_size, beside_torch, backend=backend):
        for name, options, none, difference in found:
            assert difference < 1e-12, (name, options, none, difference)


def oracle(scenario_steps, world_size):
    """Mean over the ranks of gradients, in one process: scenario_steps(net, rank) -> loss."""
    torch.manual_seed(3)
    net = Net().double()
    for rank in range(world_size):
        (scenario_steps(net, rank) / world_size).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def gradients(model):
    return {name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None}


def assert_close(actual, expected):
    for name, value in expected.items():
        assert value.numel() == 0 or (actual[name] - value).abs().max() < 1e-12, name


def alone(rank, world_size):
    out = {}
    model = build(DistributedDataParallel)
    (loss_of(model, rank, 0) + 2 * loss_of(model, rank, 1)).backward()
    out["two forwards"] = gradients(model)
    model.zero_grad()
    loss = loss_of(model, rank, 0)
    loss.backward(retain_graph=True)
    loss.backward()
    out["backward twice"] = gradients(model)
    model = build(
        DistributedDataParallel, norm=True
    )  # the second forward brings rank 0's averages while the first's graph lives
    (loss_of(model, rank, 0) + loss_of(model, rank, 1)).backward()
    model = build(DistributedDataParallel, recompute="reentrant")
    with count_traffic() as traffic:
        loss_of(model, rank, 0).backward()
    out["reentrant"], out["calls"] = (
        gradients(model),
        (traffic.calls("all_reduce"), len(model.reducer.buckets)),
    )
    return out


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_against_one_process(world_size):
    twice = oracle(lambda net, rank: loss_of(net, rank, 0) * 2, world_size)
    two = oracle(lambda net, rank: loss_of(net, rank, 0) + 2 * loss_of(net, rank, 1), world_size)
    once = oracle(lambda net, rank: loss_of(net, rank, 0), world_size)
    for out in spawn(world_size, alone):
        assert_close(out["two forwards"], two)
        assert_close(out["backward twice"], twice)
        assert_close(out["reentrant"], once)
        assert world_size == 1 or out["calls"][0] == out["calls"][1]


def failing_backward(rank, world_size):
    """A backward that raises on all ranks leaves a model that goes on as if it had not been."""
    model = build(DistributedDataParallel)

    def fail(grad):
        raise ArithmeticError("stop")

    for place in ("early", "late"):
        out = model(batch(rank, 0)[0])
        handle = (out if place == "early" else model.module.first.weight).register_hook(fail)
        with pytest.raises(ArithmeticError):
            out.sum().backward()
        handle.remove()
        model.zero_grad()
        loss_of(model, rank, 0).backward()
    return gradients(model)


def test_after_a_failed_backward():
    expected = oracle(lambda net, rank: loss_of(net, rank, 0), 2)
    for out in spawn(2, failing_backward):
        assert_close(out, expected)


def bytes_sent(rank, world_size):
    found = []
    for bucket_mb in (0.0002, 0.001, 25.0):
        torch.manual_seed(0)
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(13, 17), nn.Linear(17, 5)), bucket_mb=bucket_mb
        )
        with count_traffic() as traffic:
            with model.no_sync():
                with model.no_sync():
                    pass
                model(torch.ones(2, 13)).sum().backward()
            quiet = traffic.calls()
            model(torch.ones(2, 13)).sum().backward()
        sizes = [bucket.spec.numel for bucket in model.reducer.buckets]
        found.append((quiet, traffic.calls("all_reduce", "dp"), traffic.calls(), traffic.nbytes(), sizes))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes(world_size):
    """2(n-1)/n P, with less than an element per rank of padding in each bucket; nothing inside no_sync."""
    count = 13 * 17 + 17 + 17 * 5 + 5
    for found in spawn(world_size, bytes_sent):
        assert [len(sizes) for *_, sizes in found] == sorted(
            (len(sizes) for *_, sizes in found), reverse=True
        )
        for quiet, calls, all_calls, nbytes, sizes in found:
            assert quiet == 0 and calls == all_calls == len(sizes)
            assert count <= sum(sizes) < count + world_size * len(sizes)
            assert nbytes == sum(2 * (world_size - 1) * 4 * size // world_size for size in sizes)


def compressed(rank, world_size):
    errors = {}
    for kind, steps in ((None, 1), ("fp16", 1), ("bf16", 1), ("int8", 30), ("powersgd", 30), ("topk", 60)):
        torch.manual_seed(0)
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 3)), compression=kind
        )
        start = [p.detach().clone() for p in model.parameters()]
        total = [torch.zeros_like(p) for p in start]
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
        for _ in range(steps):
            model.zero_grad()
            model(x).square().mean().backward()
            for kept, p in zip(total, model.parameters(), strict=True):
                kept += p.grad / steps
        errors[kind] = torch.cat([kept.flatten() for kept in total])
    return errors


def test_compression():
    """The mean over steps of what error feedback lets through comes close to the gradient; all ranks get the
    same bits.
    """
    first, second = spawn(2, compressed)
    limits = {"fp16": 1e-3, "bf16": 1e-2, "int8": 1e-3, "powersgd": 0.05, "topk": 0.3}
    for kind, limit in limits.items():
        assert torch.equal(first[kind], second[kind]), kind
        assert 0 < (first[kind] - first[None]).norm() / first[None].norm() < limit, kind


def buffers(rank, world_size):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    other = DistributedDataParallel(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), broadcast_buffers=False
    )
    for each in (model, other):
        each(torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)))
        each.eval()
        each(torch.randn(5, 3))
        each.train()
        before = each.module[1].running_mean.clone()
        each(torch.zeros(5, 3))
        yield before, each.module[1].running_mean.clone()


def test_buffers_follow_rank_0():
    (mine, mine_off), (theirs, theirs_off) = spawn(
        2, lambda rank, world_size: list(buffers(rank, world_size))
    )
    assert not torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
    assert not torch.equal(mine_off[1], theirs_off[1])


def test_nothing_to_train():
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))
