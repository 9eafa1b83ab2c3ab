"""A check of pycomm.parallel changes nothing of what is trained: three steps with all checks and three
without give the same bits in losses, parameters, buffers, attributes, tables of hooks and random numbers.

The models write in their forwards whatever a module can hold.
"""

import collections
import functools
import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from left_behind import differences, state_of
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.ground.answers import Answers

ROWS, DIM, STEPS = 12, 8, 3
# text of a plan -> options of a step
PLANS = {
    "dp=1": {"microbatches": 2},
    "dp=2": {},
    "dp=2,zero=1": {"microbatches": 2},
    "dp=2,zero=2": {"sharded": True},
    "dp=2,precision=bf16": {},
    "dp=2,checkpoint": {"microbatches": 2},
    "dp=2,zero=3": {},
    "tp=2": {"microbatches": 2},
    "pp=2": {"microbatches": 2},
}


class Stack(nn.Module):
    """Two blocks of a kind, between two Linears."""

    def __init__(self, block):
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([block(), block()])
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.seen(x))))

    def seen(self, x):
        return x


class Writes(Block):
    """A number, a list, a dict in a list, a tensor, an object, a buffer; its output depends on them."""

    def __init__(self):
        super().__init__()
        self.calls, self.sizes, self.inner = 0, [], [collections.Counter()]
        self.last = torch.zeros(())
        self.own = Notes()
        self.register_buffer("total", torch.zeros(()))

    def seen(self, x):
        self.calls += 1
        self.sizes.append(len(x))
        self.inner[0]["calls"] += 1
        self.last = x.detach().mean()
        self.own.count += 1
        self.total += 1
        known = self.calls + len(self.sizes) + self.inner[0]["calls"] + self.own.count + self.total
        return x * (1 + 0.01 * known)


class Notes:
    def __init__(self):
        self.count = 0


class Averages(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def seen(self, x):
        return self.norm(x)


class Drops(Block):
    def seen(self, x):
        return F.dropout(x, 0.3, self.training) * (1 + 0.01 * random.random())


class Hooks(Block):
    """Hangs a hook on its layer in its first forward, and notes that it did."""

    def __init__(self):
        super().__init__()
        self.is_hooked, self.outputs = False, []

    def seen(self, x):
        if not self.is_hooked:
            self.up.register_forward_hook(self.note)
            self.is_hooked = True
        return x * (1 + 0.01 * len(self.outputs))

    def note(self, module, args, out):
        self.outputs.append(tuple(out.shape))


class Holds(Block):
    """What cannot be copied, alone and in a list, beside what it writes."""

    def __init__(self):
        super().__init__()
        self.lock, self.several = threading.Lock(), [threading.Lock(), []]
        self.drawn = (number / 10 for number in range(1000))
        self.calls = 0

    def seen(self, x):
        with self.lock:
            self.calls += 1
        return x * (1 + 0.01 * self.calls)


class Wrapped(Block):
    """Its forward is one of the instance, as other libraries put it there."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.forward = functools.partial(self.counted, self.forward)

    def counted(self, plain, x):
        self.calls += 1
        return plain(x) * (1 + 0.01 * self.calls)


class Closes(Block):
    """Its hook is a closure that writes to the block, which the forward reads. An attribute is one, too."""

    def __init__(self):
        super().__init__()
        self.features, self.calls = {}, 0
        outputs, calls = [], 0

        def note(module, args, out):
            nonlocal calls
            calls += 1
            outputs.append(out)
            self.features["up"] = out
            self.features["calls"] = calls + len(outputs)

        self.outputs = outputs
        self.up.register_forward_hook(note)
        self.several = [lambda x: self.counted(x)]

    def counted(self, x):
        self.calls += 1
        return x * (1 + 0.01 * self.calls)

    def forward(self, x):
        out = super().forward(self.several[0](x))
        return out + 0.1 * self.features.pop("up").mean(1, keepdim=True) * self.features["calls"]


def patched():
    """The forward of its blocks was replaced by a closure around it."""
    model = Stack(Writes)

    def around(plain, block):
        def forward(x):
            block.calls += 1
            return plain(x) * 1.1

        return forward

    for block in model.blocks:
        block.forward = around(block.forward, block)
    return model


class Grows(Block):
    """Makes a module and a buffer in its first forward."""

    def seen(self, x):
        if not hasattr(self, "late"):
            self.calls = 0
            self.late = nn.Dropout(0.0)
            self.register_buffer("total", torch.zeros(()))
        self.calls += 1
        self.total += 1
        return self.late(x) * (1 + 0.01 * (self.calls + self.total))


class Unhooks(Block):
    """Takes away its hook in its first forward."""

    def __init__(self):
        super().__init__()
        self.handle = self.up.register_forward_hook(lambda module, args, out: out * 1.5)

    def seen(self, x):
        if self.handle is not None:
            self.handle.remove()
            self.handle = None
        return x


class Draws(Block):
    """From generators of its own: torch's, Python's and NumPy's."""

    def __init__(self):
        super().__init__()
        self.own = torch.Generator().manual_seed(3), random.Random(3), np.random.default_rng(3)
        self.table = np.zeros(2)

    def seen(self, x):
        torchs, pythons, numpys = self.own
        self.table += 1
        drawn = torch.rand((), generator=torchs) + pythons.random() + numpys.random() + self.table.sum()
        return x * (1 + 0.01 * drawn)


class Watched(nn.Module):
    """An object outside of it, whose method is a hook, keeps what the last layer is given."""

    def __init__(self):
        super().__init__()
        self.inner = Stack(Block)
        self.register_buffer("scale", torch.ones(()))
        SEEN.clear()
        self.inner.out.register_forward_hook(Watcher().note)

    def forward(self, x):
        return self.inner(x) + 0.1 * SEEN[-1]


class Watcher:
    def note(self, module, args, out):
        SEEN[:] = [args[0].detach()]


SEEN = []


def normed(norm):
    def make():
        block = Block()
        block.up = norm(block.up)
        return block

    return make


def traced():
    return torch.fx.symbolic_trace(Block())


def shared():
    """A block stands in two places, and a weight."""
    model = Stack(Writes)
    model.blocks[1] = model.blocks[0]
    model.out.weight = model.inp.weight
    return model


def bert():
    return hf.BertModel(
        hf.BertConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="eager",
        )
    )


MODELS = {
    "writes": lambda: Stack(Writes),
    "averages": lambda: Stack(Averages),
    "drops": lambda: Stack(Drops),
    "hooks": lambda: Stack(Hooks),
    "holds": lambda: Stack(Holds),
    "wrapped": lambda: Stack(Wrapped),
    "closes": lambda: Stack(Closes),
    "patched": patched,
    "grows": lambda: Stack(Grows),
    "unhooks": lambda: Stack(Unhooks),
    "draws": lambda: Stack(Draws),
    "watched": Watched,
    "traced": lambda: Stack(traced),
    "shared": shared,
    "spectral norm": lambda: Stack(normed(nn.utils.parametrizations.spectral_norm)),
    "spectral norm by a hook": lambda: Stack(normed(nn.utils.spectral_norm)),
    "weight norm by a hook": lambda: Stack(normed(nn.utils.weight_norm)),
    "hidden states": bert,
}
NOT_UNDER = {
    # States of other stages; what cannot be copied, or be run for shapes alone; a block on two stages.
    "pp=2": {"hidden states", "holds", "weight norm by a hook", "closes", "patched", "shared", "grows"},
    "dp=2,precision=bf16": {"spectral norm", "spectral norm by a hook"},  # torch's do not take it
    "dp=2,checkpoint": {"averages"},
}


def of_states(out, y):
    return F.cross_entropy(out.hidden_states[-2][:, 0], y)


def batch(name, rank):
    """rank: that of rows of its own, or None."""
    generator = torch.Generator().manual_seed(1 + (rank or 0))
    if name == "hidden states":
        ids = torch.randint(3, 40, (ROWS, 6), generator=generator)
        return {"input_ids": ids, "output_hidden_states": True}, torch.arange(ROWS) % 16
    return tuple(torch.randn(ROWS, DIM, generator=generator) for _ in range(2))


def seed():
    torch.manual_seed(0)
    random.seed(0)


def trained(name, text, options, rank):
    """What three steps leave."""
    seed()
    model = MODELS[name]()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    model, opt = par.parallelize(model, opt, par.Plan.parse(text))
    loss_fn = of_states if name == "hidden states" else F.mse_loss
    given = batch(name, rank if options.get("sharded") else None)
    losses = [par.step(model, opt, given, loss_fn, **options).item() for _ in range(STEPS)]
    return state_of(model, losses)


def compared(rank, world_size, names):
    """{(plan, model): differences, or what was raised}"""
    found = {}
    for text, options in PLANS.items():
        if par.Plan.parse(text).world_size != world_size:
            continue
        for name in [name for name in names if name not in NOT_UNDER.get(text, ())]:
            outcomes = []
            for proves in (False, True):
                Answers.asks = proves
                try:
                    outcomes.append(trained(name, text, options, rank))
                except ValueError as error:
                    outcomes.append(str(error))
            found[text, name] = outcomes if isinstance(outcomes[0], str) else differences(*outcomes)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_of_some(world_size):
    check(world_size, ["writes", "hooks", "closes"])


@tier(slow=1)
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_of_all(world_size):
    check(world_size, list(MODELS))


def check(world_size, names):
    for found in spawn(world_size, compared, names, limit=600):
        wrong = {key: each for key, each in found.items() if each}
        assert not wrong, wrong
