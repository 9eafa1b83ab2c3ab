"""Gradients that a model or a loss takes by itself: equal to one process under plans, or refused."""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import equality
import pytest
import second_models as cases
import torch
import torch.nn.functional as F
from against_one import STEPS, sgd
from tiers import tier
from torch_ranks import spawn

import pycomm
import pycomm.parallel as par
from pycomm.parallel.ground import comm
from pycomm.parallel.tensor import products
from pycomm.parallel.tensor.cut_logits import VocabShard


class Case(NamedTuple):
    make: Callable[[], torch.nn.Module]
    batch: Callable
    loss_fn: Callable
    options: Mapping = {}  # noqa: RUF012


WHOLE = ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,checkpoint"]
CUT = ["tp=2", "tp=2,megatron_sp", "tp=2,checkpoint"]
PLANS = [*WHOLE, *CUT]
attending = functools.partial(cases.Potential, cases.Attending)
over_rows = functools.partial(cases.Potential, cases.OverRows)


def alone(case):
    make, batch, loss_fn, _ = case
    torch.manual_seed(0)
    model = make().double()
    opt, losses = sgd(model), []
    for step in range(STEPS):
        inputs, targets = batch(step)
        loss = loss_fn(model(**inputs) if isinstance(inputs, dict) else model(inputs), targets)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def planned(rank, world_size, texts, case):
    make, batch, loss_fn, options = case
    products.LEAST_FLOPS = options.get("least_flops", products.LEAST_FLOPS)
    microbatches, found = options.get("microbatches", 2), []
    for text in texts:
        torch.manual_seed(0)
        model = make().double()
        model, opt = par.parallelize(model, sgd(model), text)
        losses = [
            par.step(model, opt, batch(step), loss_fn, microbatches=microbatches, clip=0.5).item()
            for step in range(STEPS)
        ]
        found.append((losses, par.full_state_dict(model)))
    return found


# (plans, case)
EQUAL = {
    "forces": (PLANS, Case(attending, cases.atoms, cases.forces)),
    "forces, batch norm": (["dp=2"], Case(over_rows, cases.atoms, cases.forces, {"microbatches": 1})),
    "forces, overlapped products": (["tp=2"], Case(attending, cases.atoms, cases.forces, {"least_flops": 0})),
    "penalty": (PLANS, Case(cases.Critic, cases.atoms, cases.penalty)),
    "embeddings": (PLANS, Case(cases.Embedded, cases.few_tokens, cases.smooth)),
    "inner step": (WHOLE, Case(cases.Learner, cases.tasks, cases.squares)),
    "no graph": ([*PLANS, "dp=2,zero=3"], Case(cases.Critic, cases.atoms, cases.first_only)),
    "forces, dp x tp": (["dp=2,tp=2"], Case(attending, cases.atoms, cases.forces)),
}


@tier(quick=1 / 8, slow=1 / 2)
@pytest.mark.parametrize("name", EQUAL)
def test_equal_to_one_process(name):
    texts, case = EQUAL[name]
    losses, state = alone(case)
    ranks = par.Plan.parse(texts[0]).world_size
    for found in spawn(ranks, planned, texts, case):
        for text, (its_losses, its_state) in zip(texts, found, strict=True):
            assert equality.relative(its_losses, losses) < 1e-10, text
            for name, value in state.items():
                assert equality.relative(its_state[name], value) < 1e-10, (text, name)


def twice(logits, targets, cross_entropy):
    """The gradient of a function of the gradient."""
    loss = cross_entropy(logits.tanh(), targets).square()
    (first,) = torch.autograd.grad(loss, logits, create_graph=True)
    return torch.autograd.grad(first.pow(2), logits, torch.ones_like(first))[0]


def of_columns(rank, world_size, logits, targets):
    group = comm.as_group(None, "tp")
    start, stop = [(0, 5), (5, 9)][rank]

    def cross_entropy(part, targets):
        part.vocab_shard = VocabShard(group, start, stop, 9)
        return par.cross_entropy(part, targets)

    return twice(logits[:, start:stop].clone().requires_grad_(), targets, cross_entropy)


def test_cut_logits():
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([0, 8, -100, 5, 4, 3])
    right = twice(logits.clone().requires_grad_(), targets, F.cross_entropy)
    found = torch.cat(spawn(2, of_columns, logits, targets), 1)
    assert equality.relative(found, right) < 1e-12


def backward_in_loss(out, y):
    loss = F.mse_loss(out[0], y["energy"])
    loss.backward(retain_graph=True)
    return loss


def unused(out, y):
    """What torch would answer with None, or with a part."""
    score, x = out
    (gradient,) = torch.autograd.grad(score.sum(), x, allow_unused=True, retain_graph=True)
    return score.mean() if gradient is None else (score.mean() + gradient.mean())


def mean(out, y):
    return out[0].mean()


class LaterPotential(cases.Energy):
    """Takes no gradient in its first steps."""

    steps = 0

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = super().forward(x)
        type(self).steps += self.training
        if self.steps < 9:
            return energy, x
        return energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


def refused(rank, world_size, text, case):
    """The words of the error of 12 steps at most, or None."""
    make, batch, loss_fn, options = case
    products.LEAST_FLOPS = options.get("least_flops", products.LEAST_FLOPS)
    torch.manual_seed(0)
    model = make().double()
    model, opt = par.parallelize(model, sgd(model), text)
    try:
        for step in range(12):
            par.step(model, opt, batch(step), loss_fn)
    except (ValueError, pycomm.CommError) as error:  # one rank may get it from another
        return str(error)
    return None


# (plan, case, words of the error)
GRAPH = "use a plan with pp=1"
FORCES = Case(attending, cases.atoms, cases.forces)
PENALTY = Case(cases.Critic, cases.atoms, cases.penalty)
INNER = Case(cases.Learner, cases.tasks, cases.squares)
SMOOTH = Case(cases.Embedded, cases.few_tokens, cases.smooth)
REFUSED = {
    "zero=3": ("dp=2,zero=3", FORCES, "use a plan with zero=2"),
    "zero=3, inner step": ("dp=2,zero=3", INNER, "use a plan with zero=2"),
    "pp, model": ("pp=2", FORCES, GRAPH),
    "pp, loss": ("pp=2", PENALTY, GRAPH),
    "pp, zb": ("pp=2,schedule=zb-h1", PENALTY._replace(loss_fn=cases.first_only), GRAPH),
    "pp, None": ("pp=2", PENALTY._replace(loss_fn=unused), GRAPH),
    "pp, later": ("pp=2", Case(LaterPotential, cases.atoms, mean), GRAPH),
    "ring": ("ring=2", SMOOTH, "without ring"),
    "ulysses": ("ulysses=2", SMOOTH, "without ulysses"),
    "overlapped": ("tp=2,megatron_sp", FORCES._replace(options={"least_flops": 0}), "without megatron_sp"),
    "inner step, tp": ("tp=2", INNER, "use a plan with tp=1"),
    "backward": ("dp=2", PENALTY._replace(loss_fn=backward_in_loss), "calls backward"),
}


@tier(quick=1 / 12, slow=1 / 3)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_way_out(name):
    text, case, words = REFUSED[name]
    for found in spawn(2, refused, text, case):
        assert found is not None, "no error"
        assert words in found, found
