"""Whether a block computes from pieces of the sequence what it computes from the whole: tried, at the first
forward, with the arguments that the model itself gives to its first block of each kind.

    a block as it was                  f(x, ...)              -> y     this rank's piece of y
    the same after the cut             f'(piece of x, ...)    -> y'    must be equal

Before block 0 the hidden state is whole; that of a later block is put together from the pieces of all ranks.

What a block does to positions cannot be read from its code: a convolution, a shift by one token, positions
worked out from the length of the input, attention that is not known as such, an auxiliary number over all
tokens. All of them show in the comparison, and so does everything else that a piece cannot know.

Both blocks are copies from the time before the first step, in fp64 (fp32 where one does not run in that)
and in eval mode, so that neither rounding, dropout, loaded weights nor sharded parameters matter. Weights
that are all zero (a residual branch that begins with nothing) are made 0.1 in both, as they would hide what
the branch does. Compared is what the block adds to its input (or its result, where that is another kind of
tensor, as an embedding's). Cost: the memory of two copies of a block of each kind until then, and three
forwards.

A kind is a tree of classes with the shapes of their parameters. What it does not see: what lies between
blocks and behind them (glue.py), and what blocks of one kind do by numbers that they keep. Blocks with
parallel.MoE exchange tokens and are passed over; so are blocks that draw random numbers even in eval mode,
and later ones that do not run on the whole, as they are given other pieces beside the hidden state.
"""

import copy
import math

import torch
from torch.utils._pytree import tree_map

from pycomm import CommError
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.modes import copied, eager, without_modes
from pycomm.parallel.ground.shared_state import SharedState
from pycomm.parallel.ground.trunk import hidden_of, hidden_out, replace_hidden

__all__ = ["BlockProof", "kind_of_block"]

MOST = 1e-3  # of what the block adds; norms that compute in fp32 by themselves give 1e-6


def kind_of_block(block):
    """Equal for blocks of which one is tried for all."""
    parts = tuple((name, type(module)) for name, module in block.named_modules())
    return parts, tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())


class BlockProof:
    """split: SequenceSplit. block: that with this index in the trunk, before tensor parallelism cuts it."""

    def __init__(self, split, block, index):
        self.split, self.index = split, index
        self.whole = self._copy(block)
        self.cut = self.whole

    def was_cut(self, block):
        """block: the same, after tensor parallelism has cut it."""
        self.cut = self._copy(block)

    def _copy(self, block):
        groups = (self.split.ring, self.split.ulysses, self.split.tp)
        shared = [self.split, *(group.pg for group in groups)]
        kept = copied(block, {id(value): value for value in shared}).double().eval()
        for parameter in kept.parameters():
            parameter.requires_grad_(False)
            if not parameter.any():
                parameter.fill_(0.1)
        return kept

    @torch.no_grad()
    def check(self, args, kwargs):
        """Collective over the ranks that hold pieces. args, kwargs: what the block is given. Raises
        ValueError on all of them where the results differ.
        """
        if self.index > 0:
            args, kwargs = self._joined(args, kwargs)
        with SharedState(self.whole.modules()).kept(), eager():
            try:
                whole, args, kwargs = self._run_whole(torch.float64, args, kwargs)
            except Exception:  # a kernel that is not there in fp64
                self.whole.float(), self.cut.float()
                whole, args, kwargs = self._run_whole(torch.float32, args, kwargs)
        hidden = hidden_of(args, kwargs)
        split = self.split
        if not split.all_agree(whole is not None, hidden.device):
            return
        random = not torch.equal(*whole)
        with SharedState(self.whole.modules()).kept(), eager():  # what was kept of the whole is no piece's
            error, cause = self._error(whole[0], args, kwargs, hidden)
        is_right, is_fixed = (
            self.split.all_agree(value, hidden.device) for value in (error <= MOST, not random)
        )
        if is_fixed and not is_right:
            which = "the first block" if self.index == 0 else f"block {self.index}"
            raise ValueError(
                f"{which} does not compute from pieces of the sequence what it computes from the "
                f"whole: {_how(error, cause)}. Something in it looks at other positions or at their number "
                f"(a convolution, a shift, positions worked out inside, {self._of_attention()}). Use a plan "
                "without ring, ulysses and megatron_sp"
            ) from cause

    def _of_attention(self):
        if self.split.degree > 1:
            return (
                "attention written out: let it call F.scaled_dot_product_attention, which models of "
                'transformers do that know attn_implementation="sdpa"'
            )
        return "attention under a name that is not known: name it in Plan(rules=...)"

    def _joined(self, args, kwargs):
        """args and kwargs with the whole hidden state."""
        hidden = hidden_of(args, kwargs)
        return replace_hidden(args, kwargs, hidden, self.split.joined(hidden.detach()))

    def _run_whole(self, dtype, args, kwargs):
        """(results of two runs, args and kwargs in the dtype); None for those of a later block that does not
        run.
        """
        args, kwargs = tree_map(lambda value: _real_to(dtype, value), (list(args), dict(kwargs)))
        try:
            with without_modes():  # else attention would take the whole for a piece
                whole = [hidden_out(self.whole(*args, **copy.deepcopy(kwargs))) for _ in range(2)]
        except Exception:
            if self.index == 0 or dtype == torch.float64:
                raise
            whole = None
        return whole, args, kwargs

    def _error(self, whole, args, kwargs, hidden):
        """(relative difference, None), or (nan, what the cut block raised)."""
        args, kwargs, piece = self.split.enter(True, True, args, copy.deepcopy(kwargs), hidden)
        try:
            found = hidden_out(self.cut(*args, **kwargs))
        except (ValueError, CommError):
            raise  # of pycomm, on all ranks alike
        except Exception as error:
            return math.nan, error
        right = self._piece(whole)
        if right.shape == piece.shape and piece.is_floating_point():
            found, right = found - piece, right - piece
        return float((found - right).norm() / right.norm().clamp_min(1e-300)), None

    def _piece(self, whole):
        piece = self.split.cut(whole)
        if self.split.megatron:
            piece = comm.split_dim(piece, 1, self.split.sizes, self.split.tp)
        return piece


def _how(error, cause):
    if cause is not None:
        return f"on this rank it fails ({cause})"
    if error <= MOST:
        return "on another rank it differs"
    return f"on this rank what it adds differs by {error:.1e} of its size"


def _real_to(dtype, value):
    is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_real else value
