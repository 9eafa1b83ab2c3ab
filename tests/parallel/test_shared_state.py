"""What blocks write beside themselves, where a pipeline's later stages would not get it: refused. Tables that
they keep for their next call are right, and no run without data leaves anything there.
"""

import collections
import re
import types

import pytest
import torch
from against_one import check_equal, sgd
from models import Block
from odd_models import Plain, cross, tokens
from tiers import tier
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.models.call_order import called_sides
from pycomm.parallel.models.shared_state import SharedState
from pycomm.parallel.models.trunk import find_trunk

LOSSES, COUNTS, AFTER = [], {"calls": 0}, {"steps": 0}
TOTAL = 0.0


class InList(Block):
    def forward(self, x):
        LOSSES.append(x.square().mean())
        return super().forward(x)


class InGlobal(Block):
    def forward(self, x):
        global TOTAL
        TOTAL = TOTAL + x.square().mean()
        return super().forward(x)


def note(x):
    COUNTS["calls"] += 1
    return x


class InHelper(Block):
    def forward(self, x):
        return super().forward(note(x))


class OnClass(Block):
    total = 0.0

    def forward(self, x):
        OnClass.total = OnClass.total + x.mean()
        return super().forward(x)


class OnType(Block):
    def forward(self, x):
        type(self).last = x.mean()
        return super().forward(x)


class Late(Block):
    """From the third step on, as its caller says."""

    def forward(self, x):
        if AFTER["steps"] > 2 and not x.is_meta:
            LOSSES.append(x.square().mean())
        return super().forward(x)


class Holding(Block):
    stats = None

    def forward(self, x):
        self.stats.total = self.stats.total + x.mean()
        return super().forward(x)


class Numbered(Block):
    """Its second result is a number from a state of its own."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x), self.calls


class Told(Block):
    """Its second result is a number that its caller changes between steps."""

    rate = 1.0

    def forward(self, x):
        return super().forward(x), self.rate


class Count(Block):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Pairs(Plain):
    def run_blocks(self, x):
        scale = 1.0
        for block in self.blocks:
            x, number = block(x)
            scale = scale * number
        return x * scale


class Counted(Plain):
    def forward(self, idx):
        return super().forward(idx) * sum(block.calls for block in self.blocks)


def holding():
    model = Plain(Holding, 4)
    model.stats = types.SimpleNamespace(total=0.0)
    for block in model.blocks:
        block.stats = model.stats
    return model


CASES = {
    "list": (lambda: Plain(InList, 4), r"writes? to the global 'LOSSES'"),
    "global": (lambda: Plain(InGlobal, 4), r"writes? to the global 'TOTAL'"),
    "helper": (lambda: Plain(InHelper, 4), r"writes? to the global 'COUNTS'"),
    "class": (lambda: Plain(OnClass, 4), r"writes? to the attribute 'total' of the class OnClass"),
    "type": (lambda: Plain(OnType, 4), r"writes? to the attribute 'last' of the class OnType"),
    "late": (lambda: Plain(Late, 4), r"write to the global 'LOSSES'"),
    "object": (holding, r"write to the object 'stats', which several modules hold"),
    "number": (lambda: Pairs(Numbered, 4), r"returns a number \(\[\d\], (then|not) \[\d\]\)"),
    "told": (lambda: Pairs(Told, 4), r"returns a number \(\[0.5\], not \[1.0\]\)"),
    "count": (lambda: Counted(Count, 4), r"comes from block 0 \('calls'\)"),
}


def steps(rank, world_size, name, plan):
    torch.manual_seed(0)
    model = CASES[name][0]().double()
    model, opt = par.parallelize(model, sgd(model), par.Plan.parse(plan))
    for step in range(5):
        AFTER["steps"] = step
        if name == "told" and step:
            for block in model.blocks:
                block.rate = 0.5
        par.step(model, opt, tokens(step), cross, microbatches=2)


def refused(rank, world_size, name, plan):
    with pytest.raises(Exception) as caught:
        steps(rank, world_size, name, plan)
    return type(caught.value).__name__, str(caught.value)


@tier(quick=1 / 12)
@pytest.mark.parametrize(
    ("name", "plan"), [*((name, "pp=2") for name in CASES), ("list", "pp=2,schedule=zbv")]
)
def test_what_later_stages_would_not_get(name, plan):
    """Said on every rank, by one that has seen it."""
    found = spawn(2, refused, name, plan, timeout=10.0)
    assert any(kind == "ValueError" for kind, _ in found), found
    for _, words in found:
        assert re.search(CASES[name][1], words), words


# What is right ------------------------------------------------------------


class Tables(Block):
    """Keeps a mask for each length on its class, and a number that it always returns."""

    tables = {}

    def forward(self, x):
        length = x.shape[1]
        if length not in Tables.tables:
            Tables.tables[length] = torch.arange(length, dtype=x.dtype, device=x.device)[:, None] / 100
        return super().forward(x + Tables.tables[length]), 0.5


@tier(slow=1)
def test_tables_on_a_class():
    check_equal(lambda: Pairs(Tables, 4), "pp=2", "pp=2,schedule=zbv", "dp=2,zero=3")
    check_equal(lambda: Pairs(Tables, 4), "pp=2,checkpoint", "pp=2,schedule=interleaved")


class OuterList(Plain):
    """Its own forward, outside of the blocks, writes to a global."""

    def forward(self, idx):
        COUNTS["calls"] += 1
        return super().forward(idx) * COUNTS["calls"]


def _made(make):
    model = make().double()
    return model, sgd(model)


def test_the_forward_around_the_blocks():
    """Counted once for a microbatch; runs for a shape count nothing."""
    COUNTS["calls"] = 0
    losses = spawn(2, outer, None)[0]
    assert spawn(2, outer, "pp=2") == [losses, losses]


def outer(rank, world_size, text):
    model, opt = par.parallelize(*_made(lambda: OuterList(layers=4)), par.Plan.parse(text or "dp=2"))
    return [round(par.step(model, opt, tokens(0), cross, microbatches=2).item(), 9) for _ in range(2)]


class Made(collections.OrderedDict):
    """Gives an object of the class that it has."""

    def __getitem__(self, name):
        return super().__getitem__(name)()


MADE = Made(relu=torch.nn.ReLU)


class Looking(Block):
    def forward(self, x):
        return super().forward(MADE["relu"](x))


def test_a_table_keeps_what_it_has():
    """Not what its class makes of it, as transformers' table of activations does."""
    state = SharedState([Looking(16, 2, 20)])
    tokens = state.tokens()
    with state.kept(on_meta=True):
        MADE["gelu"] = torch.nn.GELU
    assert dict(collections.OrderedDict.items(MADE)) == {"relu": torch.nn.ReLU}
    assert isinstance(MADE["relu"], torch.nn.ReLU) and tokens == state.tokens()


def test_nan_is_no_change():
    """Nan is another number than itself; what holds it has not changed for that."""
    global TOTAL
    before, TOTAL = TOTAL, float("nan")
    try:
        state = SharedState([InGlobal(16, 2, 20)])
        tokens = state.tokens()
        assert state.changed(tokens) is None and tokens == state.tokens()
        TOTAL = 0.5
        assert "TOTAL" in state.changed(tokens)
    finally:
        TOTAL = before


def test_kept():
    state = SharedState([InList(16, 2, 20), InHelper(16, 2, 20), OnType(16, 2, 20), InGlobal(16, 2, 20)])
    LOSSES[:], COUNTS["calls"] = [1], 3
    before = state.tokens()
    with state.kept():
        LOSSES.append(2)
        COUNTS["calls"], COUNTS["new"], OnType.last, globals()["TOTAL"] = 4, [], 1.0, 7.0
        assert state.changed(before)
    assert state.changed(before) is None
    assert LOSSES == [1] and COUNTS == {"calls": 3} and not hasattr(OnType, "last") and TOTAL == 0.0


class Inputs(Plain):
    """Can be run without a batch, as models of transformers."""

    kept = {}
    dummy_inputs = {"idx": torch.zeros(2, 7, dtype=torch.int64)}

    def forward(self, idx):
        if "mask" not in Inputs.kept:
            Inputs.kept["mask"] = torch.ones(7, 1)
        return super().forward(idx) * Inputs.kept["mask"]


def test_a_run_on_meta_leaves_no_table_behind():
    model = Inputs()
    sides = called_sides(model, find_trunk(model, None))
    assert sides["tok"].name == "BEFORE" and Inputs.kept == {}
