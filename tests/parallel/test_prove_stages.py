"""Trials of rows and losses where the model is cut into stages: refused on every rank, or trained as ever."""

import models
import pytest
import torch
import torch.nn.functional as F
from odd_models import Plain, cross, tokens
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel import count_traffic

ROWS, LENGTH, LAYERS = 16, 4, 4  # a microbatch of a rank has 4 or 8 rows


class Centered(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        return y - 0.5 * y.mean(0)


class Mixing(Plain):
    """Where: in front of the blocks, in the first or the last one, between them, behind them."""

    def __init__(self, where):
        super().__init__(layers=LAYERS)
        self.where = where
        if where in ("first", "last"):
            at = 0 if where == "first" else LAYERS - 1
            self.blocks[at].mlp = Centered(self.blocks[at].mlp)

    def forward(self, idx):
        x = self.tok(idx)
        x = x - 0.5 * x.mean(0) if self.where == "front" else x
        for block in self.blocks:
            x = block(x)
            x = x - 0.5 * x.mean(0) if self.where == "between" else x
        x = x - 0.5 * x.mean(0) if self.where == "behind" else x
        return self.head(self.norm(x))


class PickyBlock(models.Block):
    """Does not take two rows that have values."""

    def forward(self, x):
        if len(x) == 2 and not x.is_meta:
            raise RuntimeError("not these")
        return super().forward(x)


class Picky(Plain):
    """Mixes rows, which two of them do not show."""

    def __init__(self, at):
        super().__init__(layers=LAYERS)
        self.at = at
        if at is not None:
            self.blocks[at] = PickyBlock(16, 2, 20)

    def forward(self, idx):
        if self.at is None and len(idx) == 2:
            raise RuntimeError("not these")
        x = super().forward(idx)
        return x - 0.5 * x.mean(0)


class TimeFirst(nn.Module):
    """As nn.Transformer has it by default: (T, B, C) in the blocks, and in what it returns. how: what else it
    returns of this, a number.
    """

    def __init__(self, how=None):
        super().__init__()
        self.tok = nn.Embedding(29, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 20, dropout=0.0) for _ in range(LAYERS))
        self.head, self.how = nn.Linear(16, 29), how

    def forward(self, idx):
        x = self.tok(idx).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        out = self.head(x)
        return out if self.how is None else (out, self.how(out))


def time_first(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.T.flatten())


def time_first_sum(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.T.flatten(), reduction="sum")


def with_number(out, y):
    return time_first(out[0], y) + 0.1 * out[1]


def summed(out):
    return out.square().sum()


def averaged(out):
    return out.square().mean()


def data(seed, uneven=False):
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(0, 29, (ROWS, LENGTH), generator=g) for _ in range(2))
    if uneven:
        y[::3, 1:] = -100
    return x, y


MIXES, NO_MEAN = "the model mixes rows of the batch: its output", "is no mean over the targets that count"
NO_PARTS = "the loss of a batch cannot be put together"
# name -> (model, loss, what the sentence has; None: it trains)
CASES = {
    **{where: (lambda where=where: Mixing(where), cross, MIXES) for where in ("front", "first", "last")},
    **{where: (lambda where=where: Mixing(where), cross, MIXES) for where in ("between", "behind")},
    "plain": (lambda: Mixing(None), cross, None),
    "default loss": (lambda: Mixing("between"), None, MIXES),
    **{f"picky {at}": (lambda at=at: Picky(at), cross, MIXES) for at in (None, 0, LAYERS - 1)},
    "time first": (TimeFirst, time_first, None),
    "time first, sum": (TimeFirst, time_first_sum, NO_MEAN),
    "number": (lambda: TimeFirst(averaged), with_number, None),
    "sum": (lambda: TimeFirst(summed), with_number, NO_PARTS),
}
PLANS = {
    "pp=2": 2,
    "pp=2,schedule=interleaved": 4,
    "pp=2,schedule=zbv": 2,
    "pp=3": 2,
    "dp=2,pp=2,zero=3": 2,
    "tp=2,pp=2": 2,
}


def made(make):
    torch.manual_seed(0)
    model = make().double()
    return model, torch.optim.SGD(model.parameters(), 0.1)


def run(rank, world_size, text, microbatches, names):
    """{name of a case: (sentence of the step, of evaluate, of predict; losses of steps)}"""
    found = {}
    for name in names:
        make, loss_fn, _ = CASES[name]
        model, opt = par.parallelize(*made(make), par.Plan.parse(text))
        said, losses = [], []
        for call in (par.step, par.evaluate, par.predict):
            args = {par.step: (opt, data(0), loss_fn), par.evaluate: (data(0), loss_fn)}.get(
                call, (data(0)[0],)
            )
            try:
                losses.append(call(model, *args, microbatches=microbatches))
                said.append("")
            except ValueError as error:
                said.append(str(error))
        found[name] = said, losses
    return found


@tier(slow=1 / 4)
@pytest.mark.parametrize("text", PLANS)
def test_through_the_stages(text):
    names = list(CASES)
    for some in (names[0::3], names[1::3], names[2::3]):  # each within the limit of a spawn, under load too
        check(text, some)


def check(text, names):
    for rank, found in enumerate(spawn(par.Plan.parse(text).world_size, run, text, PLANS[text], names)):
        for name in names:
            make, loss_fn, expected = CASES[name]
            (stepped, evaluated, predicted), losses = found[name]
            if expected is None:
                assert stepped == evaluated == "", name
                model, _ = made(make)
                x, y = data(0)
                assert losses[0].item() == pytest.approx(loss_fn(model(x), y).item(), rel=1e-9), name
                continue
            for sentence in (stepped, evaluated):
                assert sentence.startswith(f"[rank {rank}] ") and expected in sentence, (name, sentence)
            assert (MIXES in predicted) == (expected == MIXES), (name, predicted)


def counted(rank, world_size):
    """Collectives and messages of steps, and what is kept of a trial with as many rows as a later batch."""
    model, opt = par.parallelize(*made(lambda: Mixing(None)), par.Plan(pp=2))
    counts = []
    for rows in (8, 8, 8, 4):  # the last in microbatches of 2, as the trial
        with count_traffic() as traffic:
            par.step(model, opt, tokens(rows, rows), cross, microbatches=2)
        counts.append(traffic.calls())
    return counts


def test_later_steps_send_no_more_than_before():
    for first, second, third, other in spawn(2, counted):
        assert first > second == third and other >= second
