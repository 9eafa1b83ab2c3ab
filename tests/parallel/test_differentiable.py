"""Collectives inside of a model: value, gradient and the gradient of the gradient, against a formula of what
all ranks have.
"""

import pytest
import torch
from torch_ranks import spawn

from pycomm.parallel.ground import comm, differentiable

SIZES = {2: [(3, 0), (2, 2), (1, 4)], 3: [(1, 0, 3), (2, 2, 2)]}
GATHERS = ("gather_from", "gather_sum")


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shape_of(length, dim):
    return (2, length, 3) if dim in (1, -2) else (length, 2, 3)


def case(name, sizes, dim, number):
    """(input, gradient of the output) of a rank."""
    total, own = shape_of(sum(sizes), dim), shape_of(sizes[number], dim)
    small, large = numbers(number, *own), numbers(10 + number, *total)
    same, other = numbers(5, *total), numbers(20 + number, *total)
    return {
        "copy_to": (same, other),
        "reduce_from": (large, same),
        "gather_from": (small, same),
        "gather_sum": (small, large),
        "scatter_to": (same, small),
        "reduce_scatter": (large, small),
    }[name]


def expected(name, sizes, dim, rank, order):
    """Value (order 0), or gradient (order 1), of a rank."""
    inputs, grads = zip(*(case(name, sizes, dim, number) for number in range(len(sizes))), strict=True)
    given = (inputs, grads)[order]
    kind = {
        "copy_to": ("same", "sum"),
        "reduce_from": ("sum", "same"),
        "gather_from": ("join", "cut"),
        "gather_sum": ("join", "cut sum"),
        "scatter_to": ("cut", "join"),
        "reduce_scatter": ("cut sum", "join"),
    }[name][order]
    return {
        "same": lambda: given[rank],
        "sum": lambda: sum(given),
        "join": lambda: torch.cat(given, dim),
        "cut": lambda: given[rank].split(sizes, dim)[rank],
        "cut sum": lambda: sum(given).split(sizes, dim)[rank],
    }[kind]()


def run(rank, world_size):
    group, found = comm.as_group(), []
    for sizes in SIZES[world_size]:
        for name in ("copy_to", "reduce_from", *GATHERS, "scatter_to", "reduce_scatter"):
            for dim in (0, 1, -2) if name not in ("copy_to", "reduce_from") else (0,):
                x, grad = case(name, sizes, dim, rank)
                x, grad, kept = x.requires_grad_(), grad.requires_grad_(), x.detach().clone()
                function = getattr(differentiable, name)
                more = (dim, list(sizes)) if dim or name not in ("copy_to", "reduce_from") else ()
                y = function(x, *more, group)
                value = y.detach().clone()
                (first,) = torch.autograd.grad(y, x, grad, create_graph=True)
                (without,) = torch.autograd.grad(y, x, grad.detach())
                (second,) = torch.autograd.grad(first, grad, kept)  # the function again
                y = function(x, *more, group)
                with torch.no_grad():
                    y.mul_(2)  # the result is the model's own, but where it is x
                assert torch.equal(x, kept) or name == "copy_to", name
                found.append(((name, sizes, dim), value, first.detach(), without, second))
    return found


@pytest.mark.parametrize("world_size", SIZES)
def test_value_gradient_and_the_gradient_of_that(world_size):
    for rank, found in enumerate(spawn(world_size, run)):
        assert len(found) == len(SIZES[world_size]) * 14
        for (name, sizes, dim), value, first, without, second in found:
            wanted = [expected(name, sizes, dim, rank, order) for order in range(2)]
            for actual, right in zip((value, first, without, second), (*wanted, *wanted[::-1]), strict=True):
                assert actual.shape == right.shape, (name, sizes, dim)
                assert (actual - right).abs().sum() < 1e-12, (name, sizes, dim)


def exchanged(rank, world_size):
    """Rows to each rank: rank r sends 1 + r + p rows to rank p, and some send none."""
    group = comm.as_group()
    table = [[(1 + 2 * r + p) % 4 for p in range(world_size)] for r in range(world_size)]
    there, back = table[rank], [row[rank] for row in table]
    x = (torch.arange(sum(there)).double()[:, None] + 100 * rank).requires_grad_()
    y = differentiable.all_to_all(x, there, back, group)
    weight = (torch.arange(sum(back)).double()[:, None] + 1000 * rank).requires_grad_()
    (grad,) = torch.autograd.grad(y, x, weight, create_graph=True)
    (again,) = torch.autograd.grad(grad, weight, x.detach())
    return y.detach(), grad.detach(), again, table


def test_rows_go_there_and_their_gradients_back():
    found = spawn(3, exchanged)
    table = found[0][3]
    for rank, (y, grad, again, _) in enumerate(found):
        rows, grads = [], []
        for other in range(3):
            first = sum(table[other][:rank])
            rows += [100.0 * other + first + i for i in range(table[other][rank])]
            first = sum(row[other] for row in table[:rank])
            grads += [1000.0 * other + first + i for i in range(table[rank][other])]
        assert y.flatten().tolist() == again.flatten().tolist() == rows
        assert grad.flatten().tolist() == grads


def test_one_rank_alone():
    x = numbers(0, 3, 2).requires_grad_()
    for name in (*GATHERS, "scatter_to", "reduce_scatter"):
        assert getattr(differentiable, name)(x, 0, [3], comm.ALONE) is x
    assert differentiable.copy_to(x, comm.ALONE) is x and differentiable.reduce_from(x, comm.ALONE) is x
    assert differentiable.all_to_all(x, [3], [3], comm.ALONE) is x


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    @differentiable.once("this product", "take another")
    def backward(ctx, grad):
        return grad * 2


def test_what_has_no_second_derivative_says_so():
    x = numbers(0, 3).requires_grad_()
    assert torch.equal(torch.autograd.grad(Once.apply(x).sum(), x)[0], torch.full_like(x, 2.0))
    with pytest.raises(ValueError, match=r"create_graph=True.*this product has no .*: take another"):
        torch.autograd.grad(Once.apply(x).sum(), x, create_graph=True)
    assert differentiable.in_graph(3) == 3 and differentiable.in_graph(x) is x
