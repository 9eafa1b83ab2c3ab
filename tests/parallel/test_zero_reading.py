"""What a forward asks a parameter of ZeRO-3 that is not whole: it becomes whole first, if an empty tensor
would answer otherwise.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pycomm.parallel.zero.reading import Reading

OF_ITS_SIZE = {
    "shape": lambda p: p.shape,
    "size": lambda p: p.size(),
    "size of dim": lambda p: p.size(-1),
    "len": len,
    "dim": lambda p: p.dim(),
    "ndim": lambda p: p.ndim,
    "numel": lambda p: p.numel(),
    "nelement": lambda p: p.nelement(),
    "nbytes": lambda p: p.nbytes,
    "stride": lambda p: p.stride(),
    "contiguous": lambda p: p.is_contiguous(),
    "iteration": lambda p: len(list(p)),
    "same size": lambda p: p.is_same_size(torch.ones(3, 4)),
    "text": str,
}
OF_ITS_VALUES = {
    "sum": lambda p: p.sum().item(),
    "torch.sum": lambda p: torch.sum(p).item(),
    "input of a keyword": lambda p: torch.sum(input=p).item(),
    "in a list": lambda p: torch.cat([torch.ones(1, 4), p]).sum().item(),
    "several": lambda p: torch.block_diag(p, p).sum().item(),
    "behind a text": lambda p: torch.einsum("ij->", [p]).item(),
    "item": lambda p: p[1, 2].item(),
    "data": lambda p: p.data.sum().item(),
    "detached": lambda p: p.detach().sum().item(),
    "linear": lambda p: nn.functional.linear(torch.ones(4), p).sum().item(),
    "foreach": lambda p: torch._foreach_norm([p])[0].item(),
    "equal": lambda p: torch.equal(p, torch.arange(12.0).view(3, 4)),
}
OF_NEITHER = {
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device,
    "layout": lambda p: p.layout,
    "requires_grad": lambda p: p.requires_grad,
    "is_leaf": lambda p: p.is_leaf,
    "grad": lambda p: p.grad,
    "grad_fn": lambda p: p.grad_fn,
    "is_floating_point": lambda p: p.is_floating_point(),
    "torch.is_floating_point": torch.is_floating_point,
    "is_complex": lambda p: p.is_complex(),
    "element_size": lambda p: p.element_size(),
    "requires_grad_": lambda p: p.requires_grad_().requires_grad,
    "hash": lambda p: hash(p) == id(p),
}


def asked(question):
    """(what it says of a whole parameter, of one that is not whole, how often that was read)"""
    values, read = torch.arange(12.0).view(3, 4), []
    param = nn.Parameter(values.clone())
    whole = question(param)
    param.data = torch.empty(0)
    unit = SimpleNamespace(is_whole=False)

    def gather(which):
        assert which is unit
        read.append(which)
        unit.is_whole, param.data = True, values.clone()

    with Reading({id(param): unit}, gather):
        found = question(param)
    return whole, found, len(read)


@pytest.mark.parametrize("name", [*OF_ITS_SIZE, *OF_ITS_VALUES])
def test_a_parameter_is_whole_before_it_answers(name):
    whole, found, reads = asked({**OF_ITS_SIZE, **OF_ITS_VALUES}[name])
    assert found == whole and reads == 1


@pytest.mark.parametrize("name", OF_NEITHER)
def test_what_an_empty_tensor_knows_gathers_nothing(name):
    whole, found, reads = asked(OF_NEITHER[name])
    assert found == whole and reads == 0


def test_other_tensors_and_parameters_of_whole_units_are_left_alone():
    whole, other, reads = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), []
    with Reading({id(whole): SimpleNamespace(is_whole=True)}, reads.append):
        assert (whole + other + torch.ones(2)).sum() == 6 and not reads
