"""PipeDream as a plan against a single process that keeps the versions of every stage by hand."""

import pytest
import torch
import torch.nn.functional as F
from models import GPT
from tiers import tier
from torch.func import functional_call
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.pipeline.placement import cut_blocks

ROWS, LENGTH, RATE = 12, 7, 0.2


def make():
    torch.manual_seed(0)
    return GPT(tied=False).double()


def batches(steps=2):
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        inputs, targets = (torch.randint(0, 37, (ROWS, LENGTH), generator=generator) for _ in range(2))
        targets[torch.rand(ROWS, LENGTH, generator=generator) < 0.3] = -100
        yield inputs, targets


def stage_of(name, stages):
    if name.startswith("blocks."):
        return next(
            s
            for s, (first, end) in enumerate(cut_blocks(4, stages))
            if first <= int(name.split(".")[1]) < end
        )
    return 0 if name.startswith(("tok", "pos")) else stages - 1


def by_hand(stages, microbatches):
    """w(t+1) = w(t) - rate * gradient at the versions that the schedule gives each stage of microbatch i."""
    model = make()
    latest = {name: parameter.detach() for name, parameter in model.named_parameters()}
    actions = par.pipeline.make_schedule("pipedream", stages, microbatches).actions
    losses = []
    for inputs, targets in batches():
        versions = [
            [{name: v for name, v in latest.items() if stage_of(name, stages) == s}] for s in range(stages)
        ]
        losses.append(0.0)
        for i, (x, y) in enumerate(zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True)):
            used = {}
            for s in range(stages):
                order = [(action.kind, action.microbatch) for action in actions[s]]
                updates = sum(kind == "U" for kind, _ in order[: order.index(("F", i))])
                used.update(
                    {name: value.clone().requires_grad_() for name, value in versions[s][updates].items()}
                )
            loss = F.cross_entropy(functional_call(model, used, (x,)).flatten(0, 1), y.flatten())
            gradients = dict(zip(used, torch.autograd.grad(loss, list(used.values())), strict=True))
            for s in range(stages):
                versions[s].append(
                    {name: value - RATE * gradients[name] for name, value in versions[s][-1].items()}
                )
            losses[-1] += loss.item() / microbatches
        latest = {name: value for s in range(stages) for name, value in versions[s][-1].items()}
    return losses, latest


def train(rank, world_size, text, microbatches):
    model = make()
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), lr=RATE), par.Plan.parse(text))
    losses = [par.step(model, opt, batch, microbatches=microbatches).item() for batch in batches()]
    return losses, par.full_state_dict(model)


@tier(quick=1 / 12, slow=1 / 4)
@pytest.mark.parametrize("text", ["pp=1", "pp=2", "pp=3", "pp=4", "pp=2,dp=2", "pp=2,tp=2"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_updates_are_the_ones_of_the_rule(text, microbatches):
    plan = par.Plan.parse(text + ",schedule=pipedream")
    losses, parameters = by_hand(plan.pp, microbatches)
    for found, state in spawn(plan.world_size, train, text + ",schedule=pipedream", microbatches):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, value in parameters.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12 * value.abs().max().item())


def evaluate(rank, world_size):
    model = make()
    model, _ = par.parallelize(model, None, par.Plan(pp=world_size, schedule="pipedream"))
    batch = next(batches(1))
    return [par.evaluate(model, batch, microbatches=m).item() for m in (1, 3)]


def test_evaluate_is_a_mean_over_the_batch():
    inputs, targets = next(batches(1))
    expected = F.cross_entropy(make()(inputs).flatten(0, 1), targets.flatten()).item()
    for found in spawn(2, evaluate):
        assert found == pytest.approx([expected, expected], rel=1e-12)


def test_it_is_not_the_synchronous_result():
    """With several microbatches under way the stale versions make a difference."""
    _, stale = by_hand(3, 4)
    _, fresh = by_hand(1, 4)
    assert max((stale[name] - fresh[name]).abs().max() for name in fresh) > 1e-4
