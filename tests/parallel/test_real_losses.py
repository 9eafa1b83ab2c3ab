"""Losses and models as people have them (real_losses.py): a plan that cuts the batch trains as one process
does, or refuses with a sentence that is true.
"""

import functools
import warnings

import pytest
import torch
from real_losses import CASES
from torch_ranks import spawn

import pycomm.parallel as par

# (text of a plan, microbatches)
PLANS = [
    ("dp=1", 2),
    ("dp=2,zero=2", 2),
    *(pytest.param("dp=2", microbatches, marks=pytest.mark.slow) for microbatches in (1, 2)),
]
STEPS = 2


def made(case):
    torch.manual_seed(3)
    model = case.make().double()
    return model, torch.optim.SGD(model.parameters(), 0.1)


def right(name):
    """(losses, parameters) of plain torch."""
    case, losses = CASES[name], []
    model, opt = made(case)
    for seed in range(STEPS):
        inputs, targets = case.batch(seed)
        out = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        loss = case.loss(out, targets)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def planned(case, text, microbatches):
    """(sentence or None, losses, parameters)"""
    model, opt = made(case)
    model, opt = par.parallelize(model, opt, par.Plan.parse(text))
    losses = []
    try:
        for seed in range(STEPS):
            loss = par.step(
                model, opt, case.batch(seed), case.loss, microbatches=microbatches, count=case.count
            )
            losses.append(loss.item())
    except ValueError as error:
        return str(error), losses, None
    return None, losses, par.full_state_dict(model)


def steps(rank, world_size, text, microbatches):
    warnings.simplefilter("ignore")
    return {name: planned(case, text, microbatches) for name, case in CASES.items()}


@functools.cache
def outcomes(text, microbatches):
    """Of each rank."""
    return spawn(par.Plan.parse(text).world_size, steps, text, microbatches)


@pytest.mark.parametrize("text, microbatches", PLANS)
@pytest.mark.parametrize("name", CASES)
def test_as_in_one_process_or_refused(name, text, microbatches):
    for rank, found in enumerate(outcomes(text, microbatches)):
        sentence, losses, state = found[name]
        if CASES[name].refused:
            assert sentence is not None and CASES[name].refused in sentence and not losses
            assert sentence.startswith(f"[rank {rank}] ") or "weights of classes" in sentence
            continue
        assert sentence is None
        expected, parameters = right(name)
        assert losses == pytest.approx(expected, rel=1e-6)
        for key, value in parameters.items():
            assert torch.allclose(state[key], value, rtol=1e-6, atol=1e-8), key


@pytest.mark.parametrize("name", ["weights of rows, fractions", "class weights, fractions"])
def test_counts_that_are_fractions_in_several_calls(name):
    """A batch in two calls is that batch."""
    case = CASES[name]
    model, opt = made(case)
    model, opt = par.parallelize(model, opt, par.Plan())
    inputs, targets = case.batch(0)
    for rows, update in ((slice(0, 3), False), (slice(3, None), True)):
        part = (
            inputs[rows],
            tuple(each[rows] for each in targets) if isinstance(targets, tuple) else targets[rows],
        )
        par.step(model, opt, part, case.loss, count=case.count, update=update)
    other, opt = made(case)
    case.loss(other(inputs), targets).backward()
    opt.step()
    for one, right_one in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, right_one, rtol=1e-9, atol=1e-12)
