"""A tied weight that a rank holds once in each of its stages: what fills a model fills all of them, with
their state of the optimizer and their averages, bit for bit as one process has them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import SIZES, batch, compare, held, make, quiet, train  # noqa: F401
from models import Llama
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.parts import parts_of

ZBV = "pp=2,schedule=zbv"  # rank 0 has stages 0 and 3, rank 1 has stages 1 and 2
TWICE = ({"embed.weight", "layers.0.mlp.weight"}, {"layers.0.mlp.weight"})  # what a rank of pp has twice


def shared(seed: int, dtype: torch.dtype) -> nn.Module:
    """Embedding and head are tied, and all four feed-forwards."""
    torch.manual_seed(seed)
    model = Llama(**SIZES, mlp=lambda: nn.Linear(12, 12, bias=False))
    model.lm_head.weight = model.embed.weight
    for layer in model.layers:
        layer.mlp.weight = model.layers[0].mlp.weight
    return model.to(dtype)


def averages(model: nn.Module, held_here: list[tuple]) -> list[tuple]:
    """As held(), with the average in the place of the value, and no state."""
    shadows = parts_of(model).averages.all["average"].shadows
    assert [shadow.name for shadow in shadows] == [name for name, *_ in held_here]
    return [(*one[:4], shadow.values.clone(), {}) for one, shadow in zip(held_here, shadows, strict=True)]


def losses(model: nn.Module, opt: torch.optim.Optimizer) -> list[float]:
    return [par.step(model, opt, batch(number), par.cross_entropy).item() for number in (7, 8)]


def filled(rank: int, world_size: int, plan: str, root: Path, state: Any) -> list[tuple]:
    """What load(), then load_state_dict() has put into a model that was trained, and its next losses."""
    found = []
    for seed, fill in enumerate((par.load, par.load_state_dict), 2):
        model, opt = make(plan, seed, shared)
        average = par.ema(model, 0.5, name="average")
        train(model, opt, [5])
        average.update()
        if fill is par.load:
            fill(model, opt, root / "saved")
        else:
            fill(model, state, opt)
        here = held(model, opt)
        found.append((here, averages(model, here) if fill is par.load else [], losses(model, opt)))
    return found


@pytest.mark.parametrize("plan", [ZBV, pytest.param(f"dp=2,{ZBV},zero=2", marks=pytest.mark.slow)])
def test_all_that_a_rank_has_of_a_tied_weight_is_filled(plan: str, tmp_path: Path) -> None:
    model, opt = make("", 1, shared)
    average = par.ema(model, 0.5, name="average")
    train(model, opt, [0, 1])
    average.update()
    par.save(model, opt, tmp_path / "saved")
    state = par.state_dict(model, opt)
    here = held(model, opt)
    expected = {name: (values, its_state) for name, _, _, _, values, its_state in here}
    expected_averages = {name: (values, {}) for name, _, _, _, values, _ in averages(model, here)}
    expected_losses = losses(model, opt)
    world_size = par.Plan.parse(plan).world_size
    for rank, fills in enumerate(spawn(world_size, filled, plan, tmp_path, state)):
        for found, its_averages, its_losses in fills:
            names = [name for name, *_ in found]
            if world_size == 2:
                assert {name for name in names if names.count(name) > 1} == TWICE[rank]
            compare(found, expected, f"{plan}, rank {rank}")
            compare(its_averages, expected_averages, f"averages of {plan}, rank {rank}")
            assert its_losses == pytest.approx(expected_losses, rel=1e-10)
