"""ZeRO-3 where more happens than that each module computes with its own parameters: tensors that pass through
all units, parameters that others read, units inside of units. Equal to one process.
"""

import pytest
import torch
import torch.nn.functional as F
from against_one import check_equal, sgd
from models import Block
from odd_models import Plain, cross, tokens
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.parts import parts_of
from pycomm.parallel.zero.units import Phase


class BiasedBlock(Block):
    """The first makes a bias from parameters of its own, and all hand it on."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.bias = nn.Linear(16, 16)

    def forward(self, x, bias=None):
        bias = self.bias(x) if bias is None else bias
        return super().forward(x + bias), bias


class Biased(Plain):
    def __init__(self):
        super().__init__(BiasedBlock, 3)

    def run_blocks(self, x):
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


class HandedOnInPlace(Plain):
    """Blocks whose result is the tensor that they were given, and which they have changed."""

    class Block(nn.Module):
        def __init__(self, *sizes):
            super().__init__()
            self.lin = nn.Linear(16, 16)

        def forward(self, x):
            return x.add_(torch.tanh(self.lin(x * 1.0)))

    def __init__(self):
        super().__init__(self.Block, 3)

    def run_blocks(self, x):
        return super().run_blocks(x * 1.0)


class WritesIntoViews(Plain):
    """What a Linear gives for three dimensions is a view; the model writes into it, at blocks and outside."""

    class Block(nn.Sequential):
        def __init__(self, *sizes):
            super().__init__(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def __init__(self):
        super().__init__(self.Block, 3)
        self.before = nn.Linear(16, 16)

    def run_blocks(self, x):
        x = self.before(x)
        x /= 2.0
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return x


class TiedByHand(Plain):
    """The head is the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.head = None

    def forward(self, idx):
        return F.linear(self.norm(self.run_blocks(self.tok(idx))), self.tok.weight)


class OtherViews(TiedByHand):
    """The same weight through a view, a table that nobody calls, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.pos, self.scale = nn.Embedding(12, 16), nn.Linear(16, 1, bias=False).requires_grad_(False)

    def forward(self, idx):
        x = self.tok(idx) + self.pos.weight[: idx.shape[1]] * self.scale.weight
        return self.norm(self.run_blocks(x)) @ self.tok.weight.t()


class OutOfBlocks(Plain):
    """Reads a weight that lies in a block."""

    def forward(self, idx):
        return self.head(
            self.norm(F.linear(self.run_blocks(self.tok(idx)), self.blocks[1].mlp[0].weight[:16]))
        )


class Attending(Plain):
    """nn.MultiheadAttention outside of the blocks reads its out_proj; a weight norm reads its parts."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))

    def run_blocks(self, x):
        x = super().run_blocks(x)
        return self.last(x + self.attend(x, x, x, need_weights=False)[0])


class Scaled(nn.Module):
    """Parameters of its own around those of a child that makes its result."""

    def __init__(self, inner):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.randn(16)), inner

    def forward(self, x):
        return self.inner(torch.tanh(x * self.scale))


class Nested(Plain):
    def __init__(self):
        super().__init__()
        self.early, self.late = (Scaled(Scaled(nn.Linear(16, 16))) for _ in range(2))

    def run_blocks(self, x):
        return self.late(super().run_blocks(self.early(x)))


class SharedInside(Plain):
    """A module that all blocks run, and that belongs to none."""

    class Block(Block):
        shared = None

        def forward(self, x):
            return super().forward(x) + self.shared[0](x)

    def __init__(self):
        super().__init__(self.Block, 3)
        self.shared = nn.Linear(16, 16)
        for block in self.blocks:
            block.shared = [self.shared]


class Penalized(Plain):
    """Its own forward looks at all parameters, of which an empty one would count as nothing."""

    def forward(self, idx):
        return super().forward(idx) * (1 + sum(p.square().sum() for p in self.parameters()))


MODELS = [
    Biased,
    HandedOnInPlace,
    WritesIntoViews,
    TiedByHand,
    OtherViews,
    OutOfBlocks,
    Attending,
    Nested,
    SharedInside,
    Penalized,
]


@tier(quick=1 / 5)
@pytest.mark.parametrize("make", MODELS)
def test_equal_to_one_process(make):
    texts = ["dp=2,zero=3,blocks=blocks", "dp=2,zero=3,blocks=blocks,checkpoint"]
    check_equal(make, *texts[: 1 if make is HandedOnInPlace else 2])  # a recomputation would write twice


class Clamping(Plain):
    """Writes to its own weights in the forward."""

    def forward(self, idx):
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)
        return super().forward(idx)


def clamping(rank, world_size, text):
    model = Clamping()
    model, opt = par.parallelize(model, sgd(model), par.Plan.parse(text))
    with pytest.raises(ValueError, match="writes to the parameter 'head.weight'"):
        par.step(model, opt, tokens(0), cross)


def test_weights_that_a_forward_writes():
    spawn(2, clamping, "dp=2,zero=3")
    check_equal(Clamping, "dp=2,zero=1", "dp=2,zero=2")


def t5(only_encoder=False):
    from transformers import T5Config, T5ForConditionalGeneration, T5ForTokenClassification

    config = T5Config(
        vocab_size=29, d_model=16, d_kv=8, d_ff=20, num_heads=2, num_layers=2, num_decoder_layers=3,
        dropout_rate=0.0, relative_attention_num_buckets=8, decoder_start_token_id=0, num_labels=29,
        classifier_dropout=0.0, use_cache=False,
    )  # fmt: skip
    return (T5ForTokenClassification if only_encoder else T5ForConditionalGeneration)(config)


def encoder():
    return t5(only_encoder=True)


def pairs(step):
    x, y = tokens(step)
    return {"input_ids": x, "decoder_input_ids": x.flip(1)}, y


def alone(step):
    x, y = tokens(step)
    return {"input_ids": x}, y


def logits(out, y):
    return cross(out.logits, y)


@tier(quick=1 / 2)
@pytest.mark.parametrize(
    ("make", "batch", "texts"),
    [
        (t5, pairs, ["blocks=decoder.block", "blocks=encoder.block", "blocks=decoder.block,checkpoint"]),
        (encoder, alone, ["checkpoint=false", "checkpoint", "blocks=transformer.encoder.block"]),
    ],
    ids=["t5", "its encoder, where the blocks are found"],
)
def test_t5(make, batch, texts):
    """Its first block makes the bias of the positions for all of them."""
    check_equal(make, *(f"dp=2,zero=3,{text}" for text in texts), batch=batch, loss_fn=logits)


def held(rank, world_size):
    """Which units are whole, when the head of the last block runs, in the first step and in the second. What
    is read beside its module was found by the check in front of these.
    """
    torch.manual_seed(0)
    model = TiedByHand().double()
    par.parallelize(model, opt := sgd(model), par.Plan(dp=2, zero=3))
    units, found = parts_of(model).units, []
    model.norm.register_forward_hook(lambda *_: found.append({u.name for u in units.units if u.is_whole}))
    for step in range(2):
        par.step(model, opt, tokens(step), cross)
    return [found[0], found[-1]], [unit.name for unit in units.always], units.phase is Phase.IDLE


def test_only_what_was_read_stays_whole():
    for found, always, idle in spawn(2, held):
        assert found == [{"tok"}, {"tok"}] and always == ["tok"] and idle


class Forking(Plain):
    """The caller sets which blocks run before each call, equal on all ranks. Sizes are queried as well."""

    def __init__(self):
        super().__init__(layers=3)
        self.ways = [0, 1, 2]

    def run_blocks(self, x):
        assert x.shape[-1] == self.tok.weight.size(1) == self.tok.weight.shape[1] == self.norm.weight.numel()
        for way in self.ways:
            x = self.blocks[way](x)
        return x


# blocks of each call, by update: the guess of a call after the first is wrong
FORKS = [([0, 1, 2],), ([0, 2], [2, 1]), ([2], [1, 2, 0]), ([1],), ([0, 1, 2], [0, 2])]


def forked(rank, world_size, texts):
    found = []
    for text in texts:
        torch.manual_seed(0)
        model = Forking().double()
        par.parallelize(model, opt := sgd(model), text)
        losses = []
        for number, calls in enumerate(FORKS):
            for call, model.ways in enumerate(calls):
                update = call == len(calls) - 1
                losses.append(par.step(model, opt, tokens(number + 10 * call), cross, update=update).item())
            model.ways = [2, 1]
            losses.append(par.evaluate(model, tokens(number), cross).item())
        found.append((losses, par.full_state_dict(model)))
    return found


def forked_alone():
    torch.manual_seed(0)
    model = Forking().double()
    opt, losses = sgd(model), []
    for number, calls in enumerate(FORKS):
        batches = [tokens(number + 10 * call) for call in range(len(calls))]
        total = sum((y != -100).sum() for _, y in batches)
        opt.zero_grad()
        for model.ways, (x, y) in zip(calls, batches, strict=True):
            loss = cross(model(x), y)
            (loss * (y != -100).sum() / total).backward()
            losses.append(loss.item())
        opt.step()
        model.ways, (x, y) = [2, 1], tokens(number)
        losses.append(cross(model(x), y).item())
    return losses, model.state_dict()


def test_calls_that_take_other_branches():
    """A block that was fetched ahead and not used has its new values in the next call."""
    losses, state = forked_alone()
    for found in spawn(2, forked, ("dp=2,zero=3", "dp=2,zero=2")):
        for its_losses, its_state in found:
            assert its_losses == pytest.approx(losses, rel=1e-11)
            for name, value in state.items():
                torch.testing.assert_close(its_state[name], value, rtol=1e-10, atol=1e-12)
