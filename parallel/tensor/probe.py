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
Where rows of a fused projection may mean different things (Sublayer.layouts), the first meaning with which
y' = y is right. Some arguments are made up by their names (arguments()); an owner that asks for others cannot
be run, and is accepted unseen if its names have one meaning everywhere. Cost: two copies of one owner in
float32, n + 2 small forwards for each layout.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn import functional as F

from pycomm.parallel.ground import comm
from pycomm.parallel.tensor.adapters import AdapterForward
from pycomm.parallel.tensor.cut_sublayer import Cutter, cut_sublayer
from pycomm.parallel.tensor.experts import misfit
from pycomm.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from pycomm.parallel.tensor.modules import base_of, linear_sizes
from pycomm.parallel.tensor.slices import cut

if TYPE_CHECKING:
    from pycomm.parallel.given import Tree
    from pycomm.parallel.tensor.edges import SublayerOutput, SumEdge
    from pycomm.parallel.tensor.sublayers import Rows, Sublayer

__all__ = ["probe"]

# Owners whose forwards need no proof.
KNOWN = (nn.MultiheadAttention, nn.Sequential, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
LENGTH = 5
TOLERANCE = 1e-3  # of the largest output; float32 sums in another order are off by 1e-6
LARGEST = 1 << 28  # parameters of an owner that is still copied


class _Left(BaseException):
    """The output edge was reached. Not an Exception, so that nothing on the way takes it for an error."""

    def __init__(self, part: torch.Tensor) -> None:
        super().__init__()
        self.part = part


class StopHere:
    """In the place of the output edge."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lengths: Sequence[int]
    ) -> NoReturn:
        raise _Left(F.linear(x, weight))

    def sum(self, part: torch.Tensor, bias: torch.Tensor | None) -> NoReturn:
        raise _Left(part)


class Give:
    """In the place of the output edge, which has the sum already."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = whole

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lengths: Sequence[int]
    ) -> torch.Tensor:
        return self.sum(x, bias)

    def sum(self, part: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.whole if bias is None else self.whole + bias


def arguments(
    module: nn.Module, sublayer: Sublayer, x: torch.Tensor, generator: torch.Generator
) -> dict[str, Tree]:
    """{name: value} of what the forward of an owner asks for beside x, where its name tells what it is."""
    parameters = list(inspect.signature(module.forward).parameters.values())[1:]
    needed = {p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    made: dict[str, Tree] = {"residual": x, "attention_mask": None}
    if sublayer.counts is not None:
        heads, dim = sublayer.counts.q_heads, sublayer.counts.head_dim
        made["position_embeddings"] = tuple(
            torch.randn((2, 1, LENGTH, dim), generator=generator).to(x.device)
        )
        made["alibi"] = torch.randn((heads, 1, LENGTH), generator=generator).to(x.device)
    wanted = {*needed, *(p.name for p in parameters if p.name == "position_embeddings")}
    return {name: made[name] for name in wanted if name in made}


def run(module: nn.Module, x: torch.Tensor, others: Mapping[str, Tree]) -> torch.Tensor:
    out = module(x, **others)
    return out[0] if isinstance(out, (tuple, list)) else out


def prepared(owner: nn.Module) -> tuple[nn.Module, torch.Generator] | None:
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


def relative(sublayer: Sublayer) -> Sublayer:
    """The sublayer with names as seen from its owner."""
    skip = len(sublayer.owner) + 1 if sublayer.owner else 0
    return sublayer._replace(
        owner="", columns=tuple(name[skip:] for name in sublayer.columns), row=sublayer.row[skip:]
    )


class Verdict(NamedTuple):
    """layout: the one of Sublayer.layouts that computes the same; None where none does, for this reason."""

    layout: Rows | None
    reason: str | None = None


def probe(model: nn.Module, sublayer: Sublayer, parts: int) -> Verdict:
    """Seen or unseen."""
    found = _seen(model, sublayer, parts)
    if found is not None:
        return found
    if sublayer.is_known:
        return Verdict(sublayer.layout)
    return Verdict(None, "cannot be run alone to see what the rows of its fused projection mean")


def _seen(model: nn.Module, sublayer: Sublayer, parts: int) -> Verdict | None:
    """None for what cannot be run."""
    owner = model.get_submodule(sublayer.owner)
    outside = sublayer.owner and not sublayer.row.startswith(sublayer.owner + ".")
    if sublayer.rule == "experts":
        reason = misfit(owner, parts)
        return None if reason is None else Verdict(None, reason)
    if type(owner) in KNOWN or outside:
        return None
    with torch.no_grad():
        ready = prepared(owner)
        if ready is None:
            return None
        twin, generator = ready
        sublayer = relative(sublayer)
        first = twin.get_submodule(sublayer.columns[0])
        hidden, _ = linear_sizes(first)
        x = torch.randn((1, LENGTH, hidden), generator=generator).to(base_of(first).weight.device)
        others = arguments(twin, sublayer, x, generator)
        try:
            expected = run(twin, x, others)
        except Exception:  # it wants other arguments, and says so in any way
            return None
        if not isinstance(expected, torch.Tensor):
            return None
        reasons = []
        for layout in _possible(sublayer, twin):
            case = _Case(x, others, expected)
            reasons.append(compare(twin, sublayer._replace(layouts=(layout,)), parts, case))
            if reasons[-1] is None:
                return Verdict(layout)
        return Verdict(None, reasons[0])


def _possible(sublayer: Sublayer, twin: nn.Module) -> tuple[Rows, ...]:
    """Layouts that are not the same: with one projection only."""
    return sublayer.layouts if len(sublayer.columns) == 1 else sublayer.layouts[:1]


class _Case(NamedTuple):
    x: torch.Tensor
    others: Mapping[str, Tree]  # other arguments
    expected: torch.Tensor


def compare(twin: nn.Module, sublayer: Sublayer, parts: int, case: _Case) -> str | None:
    """None where the sublayer computes the same in parts, or why not."""
    x, others, expected = case
    total: torch.Tensor | int = 0
    for rank in itertools.chain(range(parts), [None]):
        piece = copy.deepcopy(twin)
        group = comm.Group("probe", parts, rank or 0, None)
        output = cut_sublayer(piece, sublayer, Cutter(group, None, cut))
        replace_edges(piece, output, StopHere() if rank is not None else Give(torch.as_tensor(total)))
        try:
            out = run(piece, x, others)
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


def replace_edges(piece: nn.Module, output: SublayerOutput | None, instead: SumEdge) -> None:
    """`instead` in the place of `output`, and no communication at inputs: there is no group here."""
    for module in piece.modules():
        forward = getattr(module, "forward", None)
        if isinstance(module, RowParallelLinear) and module.output_edge is output:
            module.give_output_to(instead)
        if isinstance(forward, AdapterForward):
            if forward.enters is not None:
                forward.enters.leave_group()
            elif forward.output is output:
                forward.output = instead
        if isinstance(module, ColumnParallelLinear):
            module.input_edge.leave_group()
