"""A model that knows nothing of ranks, under plans and by one process: losses of some steps and the
parameters after them, on every rank.
"""

import equality
import torch
from odd_models import cross, tokens
from torch_ranks import spawn

import pycomm.parallel as par

STEPS = 2


def sgd(model):
    """Not Adam, which scales up gradients that are zero but for rounding."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def alone(make, batch=tokens, loss_fn=cross):
    """(losses, parameters) of one process."""
    torch.manual_seed(0)
    model = make().double()
    opt, losses = sgd(model), []
    for step in range(STEPS):
        inputs, targets = batch(step)
        out = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        loss = loss_fn(out, targets)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def planned(rank, world_size, make, texts, batch, loss_fn):
    found = []
    for text in texts:
        torch.manual_seed(0)
        model = make().double()
        model, opt = par.parallelize(model, sgd(model), par.Plan.parse(text))
        losses = [
            par.step(model, opt, batch(step), loss_fn, microbatches=2, clip=0.5).item()
            for step in range(STEPS)
        ]
        found.append((losses, par.full_state_dict(model)))
    return found


def check_equal(make, *texts, batch=tokens, loss_fn=cross, limit=1e-11):
    """Under plans of one number of ranks."""
    losses, state = alone(make, batch, loss_fn)
    for found in spawn(par.Plan.parse(texts[0]).world_size, planned, make, texts, batch, loss_fn):
        for text, (its_losses, its_state) in zip(texts, found, strict=True):
            assert equality.relative(its_losses, losses) < limit, text
            for name, value in state.items():
                assert equality.relative(its_state[name], value) < limit, (text, name)
