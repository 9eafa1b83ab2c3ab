"""Small exchanges between ranks: objects, failures, values of rank 0, sums of losses."""

import types

import pytest
import torch
from torch_ranks import data, spawn

from pycomm.parallel.checkpoint.agree import exchange_over, together_over
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.losses import own_loss, sum_losses

CPU = torch.device("cpu")


def objects(rank, world_size):
    """Of other lengths on each rank, nothing and much."""
    group = comm.as_group()
    return [exchange_over(group, CPU, given(rank)) for given in GIVEN]


GIVEN = [
    lambda rank: rank,
    lambda rank: {"rank": rank, "text": "ü" * 1000 * rank},
    lambda rank: None if rank else ("x", torch.float32),
]


def test_objects_in_order_of_rank():
    for found in spawn(3, objects):
        assert found == [[given(rank) for rank in range(3)] for given in GIVEN]


class Odd(Exception):
    """A kind of error that other ranks do not have."""


KINDS = [ValueError, FileNotFoundError, RuntimeError, Odd, KeyError]


def failing(rank, world_size):
    """Each rank fails alone, with each kind; then all of them; then none."""
    group, found = comm.as_group(), []
    for number, kind in enumerate(KINDS):
        culprit = number % world_size

        def act(kind=kind, culprit=culprit):
            if rank == culprit:
                raise kind("no room")
            return rank

        with pytest.raises(Exception, match="no room") as caught:
            together_over(group, CPU, act)
        found.append((type(caught.value).__name__, str(caught.value)))
    with pytest.raises(ArithmeticError, match=f"mine {rank}"):
        together_over(group, CPU, lambda: (_ for _ in ()).throw(ArithmeticError(f"mine {rank}")))
    return found, together_over(group, CPU, lambda: rank * 10)


def test_one_rank_fails_and_all_raise():
    for rank, (found, value) in enumerate(spawn(3, failing)):
        assert value == rank * 10
        for number, (kind, (name, text)) in enumerate(zip(KINDS, found, strict=True)):
            if number % 3 == rank:
                assert name == kind.__name__
            else:
                known = kind in (ValueError, FileNotFoundError)
                assert name == (kind.__name__ if known else "RuntimeError")
                assert text.startswith(f"[rank {rank}] rank {number % 3} failed: ")


def values(rank, world_size):
    """Of several dtypes, one twice, one without elements, one that is not contiguous."""
    group = comm.as_group()
    tensors = [data(rank, 3, 2), data(rank, 4, dtype=torch.int64), data(rank, 2, 3).t(), torch.empty(0)]
    tensors += [data(rank, 2, dtype=torch.bfloat16), data(rank, dtype=torch.int64)]
    with comm.count_traffic() as traffic:
        comm.broadcast_values([*tensors, tensors[0]], group)
    mesh = types.SimpleNamespace(coordinate=lambda axis: rank % 2, world=group)
    losses = [torch.tensor(float(rank + n), requires_grad=True) for n in range(2)]
    total = sum_losses(losses, mesh, CPU)
    return tensors, traffic.calls("broadcast"), total, sum_losses([], mesh, CPU), own_loss([], mesh, CPU)


def test_values_of_rank_0_and_losses_that_one_rank_of_tp_counts():
    found = spawn(3, values)
    for tensors, calls, total, nothing, own in found:
        assert calls == 3  # one for each dtype
        for tensor, first in zip(tensors, found[0][0], strict=True):
            assert torch.equal(tensor, first) and tensor.dtype == first.dtype
        assert total.item() == 0 + 1 + 2 + 3 and total.dtype == torch.float64 and not total.requires_grad
        assert nothing.item() == 0 == own.item()
    assert torch.equal(found[2][0][0], data(0, 3, 2)) and torch.equal(found[1][0][2], data(0, 2, 3).t())
