"""Batches of fewer rows than microbatches or data ranks: a rank without rows counts for nothing, and losses,
gradients, parameters, averages and predictions are those of one process, which has no more microbatches than
rows.
"""

import equality
import pytest
import torch
import torch.nn.functional as F
from models import GPT
from odd_models import cross, tokens
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.ground.comm import even_sizes
from pycomm.parallel.parts import parts_of

ROWS, MICROBATCHES = (3, 1, 6), 4  # of each step
EPS = 1e-10


class Strict(GPT):
    """Takes no batch without rows."""

    def __init__(self):
        super().__init__(dim=16, heads=2, hidden=20, layers=2)

    def forward(self, idx):
        return super().forward(idx.reshape(len(idx), -1))


class Normed(nn.Module):
    """BatchNorms over few rows, and far from zero."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(5, 5, 3, padding=1), nn.BatchNorm2d(5, momentum=None)) for _ in range(2)
        )
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        x = self.norm(self.stem(x + 9))
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x.mean((2, 3)))


class Experts(Strict):
    """A mixture, whose balance is over all rows of a microbatch."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.mlp = par.MoE(16, lambda: nn.Linear(16, 16), 3, aux_loss=0.5)


def pictures(step, rows):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 1, 6, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, 4, generator=generator, dtype=torch.float64)


def words(step, rows):
    x, y = tokens(step, 12)
    return x[:rows], y[1 : rows + 1].clone().fill_(3) if rows == 1 else y[:rows]


KINDS = {
    "gpt": (Strict, words, cross),
    "norm": (Normed, pictures, F.mse_loss),
    "moe": (Experts, words, cross),
}


def made(kind):
    torch.manual_seed(0)
    model = KINDS[kind][0]().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def counted(y):
    return int((y != -100).sum()) if not y.is_floating_point() else y.numel()


def alone(kind):
    """(losses, of evaluations, outputs, parameters and buffers) of one process."""
    model, opt = made(kind)
    _, batch, loss_fn = KINDS[kind]
    losses, others, outputs = [], [], []
    for step, rows in enumerate(ROWS):
        x, y = batch(step, rows)
        model.eval()
        with torch.no_grad():
            outputs.append(model(x))
            others.append(float(loss_fn(outputs[-1], y)))
        model.train()
        opt.zero_grad()
        pieces = even_sizes(rows, min(rows, MICROBATCHES))
        for module in model.modules():
            if isinstance(module, par.MoE):
                module.aux_scale = 1 / len(pieces)
        total = 0.0
        for xs, ys in zip(x.split(pieces), y.split(pieces), strict=True):
            share = counted(ys) / counted(y)
            loss = loss_fn(model(xs), ys) * share if share else model(xs).sum() * 0.0
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        losses.append(total)
    return losses, others, outputs, model.state_dict()


def planned(rank, world_size, kind, texts):
    found = []
    for text in texts:
        model, opt = par.parallelize(*made(kind), text)
        _, batch, loss_fn = KINDS[kind]
        losses, others, outputs = [], [], []
        for step, rows in enumerate(ROWS):
            given = batch(step, rows)
            model.eval()
            outputs.append(par.predict(model, given[0], microbatches=MICROBATCHES))
            others.append(par.evaluate(model, given, loss_fn, microbatches=MICROBATCHES).item())
            model.train()
            loss = par.step(model, opt, given, loss_fn, microbatches=MICROBATCHES, clip=0.5)
            losses.append(loss.item())
        found.append((losses, others, outputs, par.full_state_dict(model)))
    return found


def check(kind, *texts):
    right = alone(kind)
    for found in spawn(par.Plan.of(texts[0]).world_size, planned, kind, texts):
        for text, its in zip(texts, found, strict=True):
            for what, one, other in zip(("losses", "evaluations"), right[:2], its[:2], strict=True):
                assert equality.relative(other, one) < EPS, (text, what, one, other)
            for one, other in zip(right[2], its[2], strict=True):
                assert equality.relative(other, one) < EPS, (text, "predictions")
            for name, value in right[3].items():
                assert equality.relative(its[3][name], value) < EPS, (text, name)


def cases(*table):
    """(kind, plans of one number of ranks); the first is quick."""
    marks = [(), *[pytest.mark.slow] * len(table)]
    return [pytest.param(*case, marks=mark) for case, mark in zip(table, marks, strict=False)]


@tier(quick=1, slow=1 / 2)
@pytest.mark.parametrize(
    "kind, texts",
    cases(
        ("gpt", ("dp=2", "dp=2,zero=3", "pp=2", "ring=2")),
        ("gpt", ("dp=2,zero=1", "dp=2,zero=2", "tp=2", "tp=2,megatron_sp")),
        ("gpt", ("ulysses=2", "dp=2,checkpoint", "pp=2,schedule=gpipe")),
        ("gpt", ("dp=2,tp=2", "dp=2,pp=2", "dp=2,ring=2", "dp=4,zero=3", "dp=2,pp=2,schedule=zb-h1")),
        ("norm", ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2")),
        ("moe", ("dp=2", "ep=2", "ep=2,zero=3", "pp=2", "dp=2,checkpoint", "ep=2,checkpoint")),
    ),
)
def test_equal_to_one_process(kind, texts):
    check(kind, *texts)


# Rows of each rank's own --------------------------------------------------------------

OWN = ((3, 0), (0, 2), (1, 4))  # rows of both data ranks, by step


def mean(output, targets):
    """Not par.cross_entropy, so that it is tried."""
    return cross(output, targets)


def own_rows(rank, world_size, kind, texts):
    found = []
    for text in texts:
        model, opt = par.parallelize(*made(kind), text)
        _, batch, loss_fn = KINDS[kind]
        part, losses = parts_of(model).mesh.rows[1], []
        for step, rows in enumerate(OWN):
            x, y = batch(step, sum(rows))
            here = slice(rows[0]) if part == 0 else slice(rows[0], None)
            given = {"loss_fn": loss_fn, "microbatches": 3 if kind == "gpt" else 1, "sharded": True}
            losses.append(par.evaluate(model, (x[here], y[here]), **given).item() if kind == "gpt" else 0.0)
            losses.append(par.step(model, opt, (x[here], y[here]), clip=0.5, **given).item())
        with pytest.raises(ValueError, match="a batch of 0 rows on all data ranks"):
            par.step(model, opt, (x[:0], y[:0]), loss_fn, sharded=True)
        with pytest.raises(ValueError, match="a batch of 0 rows: it has no loss"):
            par.step(model, opt, (x[:0], y[:0]), loss_fn)
        found.append((losses, par.full_state_dict(model)))
    return found


def own_alone(kind):
    model, opt = made(kind)
    _, batch, loss_fn = KINDS[kind]
    losses = []
    for step, rows in enumerate(OWN):
        x, y = batch(step, sum(rows))
        loss = loss_fn(model(x), y)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        losses += [loss.item() if kind == "gpt" else 0.0, loss.item()]
    return losses, model.state_dict()


@tier(quick=1, slow=1 / 2)
@pytest.mark.parametrize(
    "kind, texts",
    cases(
        ("gpt", ("dp=2", "dp=2,zero=3")),
        ("norm", ("dp=2", "dp=2,zero=2")),
        ("gpt", ("dp=2,tp=2", "dp=2,pp=2", "dp=2,ring=2")),
    ),
)
def test_a_data_rank_without_rows(kind, texts):
    losses, state = own_alone(kind)
    for found in spawn(par.Plan.of(texts[0]).world_size, own_rows, kind, texts):
        for text, (its_losses, its_state) in zip(texts, found, strict=True):
            assert equality.relative(its_losses, losses) < EPS, (text, losses, its_losses)
            for name, value in state.items():
                assert equality.relative(its_state[name], value) < EPS, (text, name)


# Other ways ---------------------------------------------------------------------------


def weights(targets):
    """What a mean over weights of classes runs over."""
    return ((targets % 3 + 1) * (targets != -100)).sum()


def weighted(output, targets):
    each = F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="none")
    return (each * ((targets % 3 + 1) * (targets != -100)).flatten()).sum() / weights(targets)


class Contrast(Strict):
    """Compares each row with all of the batch."""

    def forward(self, idx):
        x = F.normalize(super().forward(idx).mean(1), dim=-1)
        return x @ par.gather_rows(x).T


class Means(Strict):
    def forward(self, idx):
        return super().forward(idx).mean(1)


def nearest(output, targets):
    return F.cross_entropy(output, targets)


def gathered(output, targets):
    """A loss that compares each row with all."""
    x = F.normalize(output, dim=-1)
    return F.cross_entropy(5 * x @ par.gather_rows(x).T, targets) + par.gather_rows(x).square()[:, 3].sum()


def others(rank, world_size):
    """Differences to one process."""
    found = []
    for make, loss_fn, count, texts in (
        (Strict, weighted, weights, ("dp=2", "dp=2,zero=1")),
        (Contrast, nearest, None, ("dp=2", "dp=2,zero=3")),
        (Means, gathered, None, ("dp=2", "dp=2,zero=3")),
    ):
        x, y = words(0, 1)
        y = y if make is Strict else torch.zeros(1, dtype=torch.int64)
        torch.manual_seed(0)
        right = make().double()
        loss = loss_fn(right(x), y)
        loss.backward()
        for text in texts:
            torch.manual_seed(0)
            model = make().double()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            par.parallelize(model, opt, text)
            found.append(abs(par.evaluate(model, (x, y), loss_fn, count=count).item() - loss.item()))
            its = par.step(model, opt, (x, y), loss_fn, count=count)
            found.append(abs(its.item() - loss.item()))
            gradients = par.full_gradients(model)
            for name, parameter in right.named_parameters():
                found.append(equality.relative(gradients[name], parameter.grad))
    return found


@tier(slow=1)
def test_counts_and_gathered_rows():
    for found in spawn(2, others):
        assert max(found) < EPS, found
