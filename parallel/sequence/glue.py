"""Whether what a model's own code does between its blocks, and behind them, gives for pieces of the sequence
what it gives for the whole: tried once, after the first forward, without the blocks.

    embedding, positions | block 0   own code   block 1   own code   block 2 | own code, norm, head
    as it is               passed over: each returns the hidden state that it is given   as it is
                           |
    whole                  x                a              b                   c      compared: this rank's
    pieces                 piece of x       a'             b'                  c'     piece of a is a' ...

The forward runs twice on the whole (if the results differ, it draws random numbers and nothing can be said)
and once on pieces, in eval mode without gradients, with few rows and positions of the batch, so that neither
the head's logits nor the time count. A later pipeline stage begins with random numbers. What a block returns
beside the hidden state has no stand-in: such models are passed over, as are those that do not run in this way
(their code looks at what blocks leave behind).

Under megatron_sp a forward is left where a head gathers the sequence: what comes after it is of the whole. A
model that returns before has given a piece for the whole.

What it does not see: what is hidden by weights that are zero, losses inside of the model.
"""

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from pycomm.parallel.ground import differentiable
from pycomm.parallel.ground.trunk import hidden_out

__all__ = ["RETURNS_PIECE", "Glue", "check_whole"]

ROWS = 2
MOST = {torch.float64: 1e-6, torch.float32: 1e-4}  # relative; some models compute a part in fp32 in fp64
MOST_ELSE = 5e-2
RETURNS_PIECE = (
    "what the model returns comes from a piece of the sequence: behind its blocks there is no Linear that "
    "the plan knows as its head, where the sequence would be gathered. Use an nn.Linear, or a plan without "
    "megatron_sp"
)


def check_whole(split, output):
    """For an output that the loss does not take: raises ValueError where it is that of a piece."""
    if split is None or not split.megatron:
        return
    local, length = split.sizes[split.tp.rank], sum(split.sizes)
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.dim() > 1]
    if local != length and any(leaf.shape[1] == local for leaf in leaves):
        raise ValueError(RETURNS_PIECE)


class Glue:
    """split: SequenceSplit. stages: those of this rank, each of which is tried once."""

    def __init__(self, split, stages):
        self.split = split
        self.left = set(stages)
        self.kinds = {}  # index of a block -> (tree of what it returns, leaves, place of the hidden state)
        self.is_known = True  # whether all blocks return nothing but the hidden state
        self.entered = None  # the whole hidden state in front of the first block
        self.seen = None  # [(where, value)] of a run; None: none is under way
        self.in_pieces = False
        self.gathering = ()  # names of the modules that gather the sequence, under megatron_sp
        self.returns = False  # the model has returned, in front of these

    def gathers(self, name):
        """Whether the module behind the blocks does, or lies in one that does."""
        return any(name == each or name.startswith(each + ".") for each in self.gathering)

    def note_block(self, index, out):
        """A block has returned this."""
        if not self.left or index in self.kinds:
            return
        hidden, (leaves, spec) = hidden_out(out), tree_flatten(out)
        kept = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.is_known &= sum(isinstance(leaf, torch.Tensor) for leaf in leaves) == 1
        self.kinds[index] = spec, kept, next(n for n, leaf in enumerate(leaves) if leaf is hidden)

    def begin(self, in_pieces):
        self.in_pieces, self.seen = in_pieces, []

    def end(self):
        """What was seen: [(where, value)]."""
        seen, self.seen = self.seen, None
        return seen

    def note(self, where, values):
        """Copies: what follows may write into them."""
        tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
        self.seen += [(where, tensor.clone()) for tensor in tensors]

    def enter(self, given, is_absent):
        """The hidden state with which the first block of a stage is passed over, from the one that it is
        given. is_absent: which has no values.
        """
        if not self.in_pieces:
            self.entered = given
            if is_absent:
                generator = torch.Generator().manual_seed(0)
                values = torch.randn(tuple(given.shape), generator=generator, dtype=torch.float64)
                self.entered = values.to(given.device, given.dtype)
            return self.entered.clone()
        self.split.begin(self.entered.shape[1])
        return self._cut(self.entered)

    def _cut(self, value):
        piece = self.split.cut(value)
        if self.split.megatron:
            piece = differentiable.scatter_to(piece, 1, self.split.sizes, self.split.tp)
        return piece

    def returned(self, index, hidden):
        """What a block that is passed over returns."""
        spec, leaves, place = self.kinds[index]
        return tree_unflatten([hidden if n == place else leaf for n, leaf in enumerate(leaves)], spec)

    def difference(self, whole, pieces):
        """(where, relative difference) of the first that differs, or None."""
        for (where, value), (_, piece) in zip(whole, pieces, strict=True):
            expected = self._piece_of(value)
            if expected is None or not value.is_floating_point():
                continue
            if piece.shape != expected.shape:
                return where, float("inf")
            norms = torch.stack([(piece - expected).double().norm(), expected.double().norm()])
            error, size = norms.tolist()
            if not error <= MOST.get(value.dtype, MOST_ELSE) * size:
                return where, error / max(size, 1e-300)
        return None

    def _piece_of(self, value):
        """This rank's positions of a value of the whole; None where it has no positions."""
        length = self.entered.shape[1]
        if value.dim() > 1 and value.shape[1] == length:
            return self._cut(value)
        if value.dim() > 1 and value.shape[0] == self.entered.shape[0] * length:
            return self._cut(value.unflatten(0, (-1, length))).flatten(0, 1)
        return None

    def small(self, inputs):
        """The inputs with few rows and positions."""
        length = self.split.length
        ranks = self.split.degree * (self.split.tp.size if self.split.megatron else 1)
        few = min(length, 4 * ranks + 1)

        def cut(leaf):
            if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
                return leaf
            leaf = leaf[:ROWS]
            for dim in range(1, leaf.dim()):
                leaf = leaf.narrow(dim, 0, few) if leaf.shape[dim] == length else leaf
            return leaf

        return tree_map(cut, inputs)
