"""The memory of gradient buckets and of ZeRO's values: registered with the group without being asked for,
given back with the model, and ordinary memory on every rank where it cannot be had.
"""

import copy
import gc
import os
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from models import GPT
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm
import pycomm.parallel as par
from pycomm.parallel.ground import comm

LAST = 2  # regions that a rank has dropped and a peer not yet; a leak of one per model is more
PLANS = ["dp=2", "dp=2,zero=1", "dp=2,zero=2"]


def build(text, seed=0):
    torch.manual_seed(seed)
    model = GPT(heads=4, layers=2)
    return par.parallelize(model, torch.optim.AdamW(model.parameters(), 1e-2), par.Plan.parse(text))


def step(model, opt, number=0):
    generator = torch.Generator().manual_seed(number)
    batch = tuple(torch.randint(0, 29, (4, 8), generator=generator) for _ in range(2))
    return par.step(model, opt, batch).item()


def segments():
    """(mappings of shared memory of groups, open files) of this process."""
    with open("/proc/self/maps") as maps:
        mapped = len({line.split()[4] for line in maps if "/memfd:pycomm" in line})
    return mapped, len(os.listdir("/proc/self/fd"))


def build_and_drop(rank, world_size, text, times):
    """Models that come and go; rank 1 lets go of three at a time, so that the ranks free in another order."""
    gc.disable()
    before, kept, losses = None, [], set()
    for i in range(times):
        model, opt = build(text)
        kept.append((model, opt))
        losses.add(step(model, opt))
        del model, opt
        if rank == 0 or i % 3 == 2:
            kept.clear()
            gc.collect()
        if i == 5:
            dist.barrier()
            comm.empty(1, torch.float32, comm.as_group())  # unmaps what all ranks have dropped
            before = segments()
    kept.clear()
    gc.collect()
    dist.barrier()
    comm.empty(1, torch.float32, comm.as_group())
    after = segments()
    dist.barrier()  # a rank that sees a peer leave keeps what it has mapped until the end of the group
    return before, after, len(losses)


@tier(quick=1 / 3)
@pytest.mark.parametrize("text", PLANS)
def test_models_that_are_built_and_dropped_leave_nothing(text):
    for before, after, losses in spawn(2, build_and_drop, text, 15):
        assert all(a <= b + LAST for a, b in zip(after, before, strict=True)), (before, after)
        assert losses == 1


def wrap_and_drop(rank, world_size):
    """The same of DistributedDataParallel."""
    seen = []
    for _ in range(8):
        model = par.data.DistributedDataParallel(nn.Linear(3, 4))
        model(torch.ones(2, 3)).sum().backward()
        del model
        gc.collect()
        dist.barrier()
        comm.empty(1, torch.float32, comm.as_group())
        seen.append(segments())
    dist.barrier()  # as in build_and_drop
    return seen[2:]


def test_wrapped_modules_that_are_dropped_leave_nothing():
    for seen in spawn(2, wrap_and_drop):
        assert all(max(counts) - min(counts) <= LAST for counts in zip(*seen, strict=True)), seen


def with_and_without(rank, world_size, text):
    """Losses and weights with registered memory, and where the group has none to give."""
    found = []
    for gives in (True, False):
        asked = []

        def refuse(*args, asked=asked, **kwargs):
            asked.append(args)
            raise pycomm.CommError("[rank 0/2] alloc #5: rank 1: memfd_create: Too many open files")

        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        original = type(backend).allocate_tensor
        if not gives:
            type(backend).allocate_tensor = refuse
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model, opt = build(text)
        finally:
            type(backend).allocate_tensor = original
        told = [str(w.message) for w in caught if "registered" in str(w.message)]
        assert bool(told) == bool(asked) == (not gives), (told, asked)
        assert all("Too many open files" in text and "ordinary memory" in text for text in told)
        losses = [step(model, opt, number) for number in range(3)]
        found.append((losses, [p.detach().clone() for p in model.parameters()]))
    return found[0][0] == found[1][0] and all(map(torch.equal, found[0][1], found[1][1]))


@pytest.mark.parametrize("text", PLANS)
def test_where_no_memory_can_be_registered_ordinary_memory_gives_the_same_bits(text):
    assert spawn(2, with_and_without, text) == [True, True]


def other_errors(rank, world_size):
    backend = type(dist.group.WORLD._get_backend(torch.device("cpu")))
    original = backend.allocate_tensor
    for kind in (pycomm.MismatchError, pycomm.PeerError, pycomm.CommTimeoutError, pycomm.AbortedError):

        def fail(*args, kind=kind, **kwargs):
            raise kind("no")

        backend.allocate_tensor = fail
        try:
            with pytest.raises(kind):
                comm.empty(5, torch.float32, comm.as_group())
        finally:
            backend.allocate_tensor = original


def test_a_broken_group_is_no_reason_for_ordinary_memory():
    spawn(2, other_errors)


class Branches(nn.Module):
    """Which layer runs is said by each row, so it changes from step to step."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        hidden, chosen = x.new_zeros(len(x), 4), x[:, 0] > 0
        for layer, rows in ((self.first, chosen), (self.second, ~chosen)):
            if rows.any():
                hidden = hidden.index_put((rows,), layer(x[rows]))
        return self.out(hidden)


def stale(rank, world_size, text):
    """A layer that a rank leaves out counts as zero, not as what it got the step before."""
    torch.manual_seed(0)
    model = Branches()
    reference = copy.deepcopy(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    plain = torch.optim.SGD(reference.parameters(), lr=0.5)
    model, opt = par.parallelize(model, opt, par.Plan.parse(text))
    worst = 0.0
    for signs in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
        x, y = torch.randn(4, 3), torch.randn(4, 2)
        x[:, 0] = x[:, 0].abs() * torch.tensor(signs).repeat_interleave(2)
        par.step(model, opt, (x, y), nn.functional.mse_loss)
        plain.zero_grad()
        for rows in (slice(0, 2), slice(2, 4)):
            (nn.functional.mse_loss(reference(x[rows]), y[rows]) / 2).backward()
        plain.step()
        worst = max(
            worst,
            *(
                (a - b).abs().max().item()
                for a, b in zip(model.parameters(), reference.parameters(), strict=True)
            ),
        )
    return worst


@pytest.mark.parametrize("text", PLANS)
def test_nothing_of_the_last_step_is_summed(text):
    assert max(spawn(2, stale, text)) < 1e-6


def copies(rank, world_size):
    """Tensors copied out of a model are memory of their own; a model on its ranks is not copied."""
    model, opt = build("dp=2,zero=1")
    step(model, opt)
    weights = {name: copy.deepcopy(p.detach()) for name, p in model.named_parameters()}
    again = pickle.loads(pickle.dumps({name: p.detach().clone() for name, p in model.named_parameters()}))
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="cannot be copied"):
        copy.deepcopy(model)
    step(model, opt, 1)
    for name, value in expected.items():
        assert torch.equal(weights[name], value) and torch.equal(again[name], value)
        assert not torch.equal(dict(model.named_parameters())[name], value)


def test_copies_are_ordinary_memory():
    spawn(2, copies)
