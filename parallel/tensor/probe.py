"""Runs a sublayer whole and in parts on this rank alone, to see that what was found by names computes the
same.

Names say nothing of what a forward does between the Linears: a softmax over the hidden features, a scale
taken from a width, a fused projection that is interleaved per head. So the owner of a sublayer is copied,
given random weights, and run on a random input (1, 5, h)

    whole       y
    in parts    rank 0 .. n-1 up to the output edge: p_r; once more, where the edge gives sum_r p_r: y'
                accept when y' = y

without communication, alike on all ranks because weights and input come from one seed. One owner of each kind
is run, not every block; its weights may be on meta, as those of other pipeline stages are, its buffers not.
An owner that cannot be run on x alone (it asks for more arguments) is accepted unseen. Cost: two copies of
one owner in float32, n + 2 small forwards.
"""

import copy
import itertools

import torch
from torch import nn
from torch.nn import functional as F

from pycomm.parallel.ground import comm
from pycomm.parallel.tensor.cut_sublayer import Cutter, cut_sublayer
from pycomm.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from pycomm.parallel.tensor.slices import cut

__all__ = ["probe"]

# Owners whose forwards need no proof.
KNOWN = (nn.MultiheadAttention, nn.Sequential, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
LENGTH = 5
TOLERANCE = 1e-3  # of the largest output; float32 sums in another order are off by 1e-6
LARGEST = 1 << 28  # parameters of an owner that is still copied


class _Left(BaseException):
    """The output edge was reached. Not an Exception, so that nothing on the way takes it for an error."""

    def __init__(self, part):
        super().__init__()
        self.part = part


def stop_here(x, weight, bias, shards):
    raise _Left(F.linear(x, weight))


def give(whole):
    return lambda x, weight, bias, shards: whole if bias is None else whole + bias


def run(module, x):
    out = module(x)
    return out[0] if isinstance(out, (tuple, list)) else out


def prepared(owner):
    """A copy in evaluation mode with random weights, and a generator for the input; None for an owner that
    cannot be copied.
    """
    parameters = list(owner.parameters())
    if any(buffer.is_meta for buffer in owner.buffers()) or sum(p.numel() for p in parameters) > LARGEST:
        return None
    empty = {id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype)) for p in parameters if p.is_meta}
    try:
        twin = copy.deepcopy(owner, empty).float().eval()
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
        return None
    generator = torch.Generator().manual_seed(1)
    for parameter in twin.parameters():
        parameter.requires_grad_(False).copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return twin, generator


def relative(sublayer):
    """The sublayer with names as seen from its owner."""
    skip = len(sublayer.owner) + 1 if sublayer.owner else 0
    return sublayer._replace(
        owner="", columns=tuple(name[skip:] for name in sublayer.columns), row=sublayer.row[skip:]
    )


def probe(model, sublayer, parts):
    """None when the sublayer computes the same in parts, or cannot be run alone; else the reason why it must
    not be cut.
    """
    owner = model.get_submodule(sublayer.owner)
    if type(owner) in KNOWN or sublayer.owner and not sublayer.row.startswith(sublayer.owner + "."):
        return None
    with torch.no_grad():
        ready = prepared(owner)
        if ready is None:
            return None
        twin, generator = ready
        first = twin.get_submodule(relative(sublayer).columns[0])
        hidden = first.in_features if hasattr(first, "in_features") else first.nx
        x = torch.randn((1, LENGTH, hidden), generator=generator).to(first.weight.device)
        try:
            expected = run(twin, x)
        except Exception:  # it wants other arguments, and says so in any way
            return None
        if not isinstance(expected, torch.Tensor):
            return None
        return compare(twin, relative(sublayer), parts, x, expected)


def compare(twin, sublayer, parts, x, expected):
    total = 0
    for rank in itertools.chain(range(parts), [None]):
        piece = copy.deepcopy(twin)
        group = comm.Group("probe", parts, rank or 0, None)
        output = cut_sublayer(piece, sublayer, Cutter(group, None, cut))
        replace_edges(piece, output, stop_here if rank is not None else give(total))
        try:
            out = run(piece, x)
        except _Left as left:
            total = total + left.part
        except Exception as error:  # any: shapes that do not fit end in many kinds
            return f"does not run in parts: {error.__cause__ or error}"
    if not (out.shape == expected.shape and (out - expected).abs().max() <= TOLERANCE * expected.abs().max()):
        return (
            "computes something else in parts (what happens between its Linear layers mixes heads or "
            "features, or uses a width as a number)"
        )
    return None


def replace_edges(piece, output, instead):
    """`instead` in the place of SublayerOutput `output`, and no communication at inputs: there is no group
    here.
    """
    for module in piece.modules():
        if isinstance(module, RowParallelLinear) and module.output_edge is output:
            module.give_output_to(instead)
        if isinstance(module, ColumnParallelLinear):
            module.input_edge.leave_group()
