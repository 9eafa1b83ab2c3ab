"""Plan(compare_every=N): values that several ranks hold are compared before every N-th update, so a parameter
that one rank alone has changed is named on all ranks; without a fault no plan raises.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from odd_models import cross, gpt, tokens
from tiers import tier
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.parts import parts_of
from pycomm.parallel.run import replicas

STEPS = 4


def train(rank: int, plan: str, change: Callable[[Any, int], None] | None = None) -> list[float | str]:
    """Losses, and what the step said that raised. change: is called before each step."""
    torch.manual_seed(rank)
    model = models.GPT(dim=16, heads=2, hidden=20, layers=4)
    opt = torch.optim.AdamW(model.parameters(), 0.01)
    par.parallelize(model, opt, par.Plan.parse(plan))
    found: list[float | str] = []
    for step in range(STEPS):
        if change is not None:
            with torch.no_grad():
                change(parts_of(model), step)
        try:
            found.append(par.step(model, opt, tokens(step), cross, microbatches=2).item())
        except ValueError as error:
            return [*found, str(error)]
    return found


# --- a parameter that one rank changes -----------------------------------------------------------

# plan, name of the parameter that the last rank changes, ranks that then differ
FAULTS = [
    ("dp=2", "norm.bias", ("rank 0", "rank 1")),
    ("tp=2", "pos.weight", ("rank 0", "rank 1")),
    ("pp=2", "tok.weight", ("rank 0", "rank 1")),
    ("dp=3", "norm.bias", ("ranks 0, 1", "rank 2")),
    ("dp=2,zero=1", "norm.bias", ("rank 0", "rank 1")),
    ("dp=2,zero=2", "norm.bias", ("rank 0", "rank 1")),
    ("tp=2,zero=3", "pos.weight", ("rank 0", "rank 1")),
    ("dp=2,pp=2", "norm.bias", ("rank 2", "rank 3")),
    ("dp=2,tp=2", "blocks.1.mlp.0.weight", ("rank 1", "rank 3")),
    ("pp=2,zero=3", "tok.weight", ("rank 0", "rank 1")),
    ("ulysses=2", "norm.bias", ("rank 0", "rank 1")),
]
DEEP = ("dp=3", "tp=2,zero=3", "dp=2,tp=2")  # what they compare, others here do, too


def drift(parts: Any, name: str) -> None:
    """Changes one element of what this rank computes with."""
    for shards in parts.all_shards:
        for info, piece, _ in shards.owned:
            if info.name == name and parts.plan.zero == 3:
                shards.bucket.elements(piece, shards.values_here)[0] += 1e-6
    for info in parts.infos:
        if info.name == name and parts.plan.zero < 3:
            info.param.view(-1)[0] += 1e-6


def drifting(rank: int, world_size: int, plan: str, name: str, at: int) -> list[float | str]:
    last = world_size - 1
    return train(rank, plan, lambda parts, step: drift(parts, name) if (step, rank) == (at, last) else None)


@tier(quick=1 / 3)
@pytest.mark.parametrize(
    ("plan", "name", "sides"),
    [pytest.param(*fault, marks=[pytest.mark.deep] * (fault[0] in DEEP), id=fault[0]) for fault in FAULTS],
)
def test_a_parameter_that_one_rank_changes(plan: str, name: str, sides: tuple[str, str]) -> None:
    """It is found in the second step, the first that compares, and nothing is found without compare_every."""
    world_size = par.Plan.parse(plan).world_size
    for rank, found in enumerate(spawn(world_size, drifting, f"{plan},compare_every=2", name, 1)):
        (_, said) = found
        assert said.startswith(
            f"[rank {rank}] step: the ranks that hold {name!r} do not have the same values: there is one on "
            f"{sides[0]} and another on {sides[1]} (compare_every=2). "
        ), said
    assert all(len(found) == STEPS for found in spawn(world_size, drifting, plan, name, 1))


def test_only_every_second_step_compares() -> None:
    """A change before the third step is found before the fourth."""
    for found in spawn(2, drifting, "dp=2,compare_every=2", "norm.bias", 2):
        assert len(found) == 4 and "'norm.bias'" in found[3]


def test_planted_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """With marks that are all alike nothing is found."""
    monkeypatch.setattr(replicas, "_mark", lambda values: 7)
    assert all(len(found) == STEPS for found in spawn(2, drifting, "dp=2,compare_every=1", "norm.bias", 1))


# --- no false alarm ------------------------------------------------------------------------------

SOUND = [
    "dp=2",
    "tp=2",
    "pp=2",
    "dp=2,zero=2,offload=optimizer",
    "dp=2,zero=3,offload=parameters",
    "tp=2,megatron_sp",
    "pp=2,schedule=zbv",
    "ring=2",
    "ulysses=2,zero=1",
    "dp=2,compression=powersgd",
]
COMBINED = ["dp=2,zero=1,precision=bf16", "tp=2,zero=3", "pp=2,zero=3", "dp=2,tp=2", "dp=2,pp=2,zero=1"]


def undisturbed(rank: int, world_size: int, plan: str) -> list[float | str]:
    return train(rank, plan)


@tier(quick=1 / 5)
@pytest.mark.parametrize("plan", [*SOUND, *(pytest.param(plan, marks=pytest.mark.deep) for plan in COMBINED)])
def test_nothing_is_found_in_sound_plans(plan: str) -> None:
    """And losses are the same to the bit as without the comparison."""
    world_size = par.Plan.parse(plan).world_size
    compared = spawn(world_size, undisturbed, f"{plan},compare_every=1")
    assert compared == spawn(world_size, undisturbed, plan) and len(compared[0]) == STEPS


def experts(rank: int, world_size: int, plan: str, bad: int) -> str:
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), par.MoE(8, lambda: torch.nn.Linear(8, 8), 4))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    par.parallelize(model, opt, par.Plan.parse(plan))
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    mse = torch.nn.functional.mse_loss
    for step in range(2):
        if (step, rank) == (1, bad):
            with torch.no_grad():
                next(info for info in parts_of(model).infos if "experts" in info.name).param[0] += 1
        try:
            par.step(model, opt, (x, x), mse)
        except ValueError as error:
            return str(error)
    return "nothing"


def test_experts() -> None:
    """Experts of one rank are those of no other; under dp they have replicas."""
    assert spawn(2, experts, "ep=2,compare_every=1", 1) == ["nothing"] * 2
    for said in spawn(4, experts, "dp=2,ep=2,compare_every=1", 3):
        assert "experts" in said and "one on rank 1 and another on rank 3" in said


# --- the option ----------------------------------------------------------------------------------


def test_the_option() -> None:
    plan = par.Plan.parse("dp=2,compare_every=100")
    assert plan == par.Plan(dp=2, compare_every=100) and str(plan) == "dp=2,compare_every=100"
    assert par.Plan().compare_every is None and "compare_every=100" in repr(plan)
    for wrong in (0, -1, True, 2.0, "2"):
        with pytest.raises(ValueError, match=r"Plan\(compare_every=.*1 or more, or None"):
            par.Plan(compare_every=wrong)
    with pytest.raises(ValueError, match="compare_every='x' is not a whole number"):
        par.Plan.parse("compare_every=x")


def traffic(rank: int, world_size: int) -> list[int]:
    torch.manual_seed(rank)
    model = gpt()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    par.parallelize(model, opt, par.Plan(dp=2, compare_every=3))
    calls = []
    for step in range(7):
        with par.count_traffic() as counted:
            par.step(model, opt, tokens(step), cross, update=step != 2)
        calls.append(len(counted.log))
    return [*calls, len(parts_of(model).original.names)]


def test_two_calls_in_the_steps_that_compare() -> None:
    """Before the third update, whose first call this is, and the sixth; nothing more in the others."""
    for first, second, third, fourth, fifth, sixth, seventh, _ in spawn(2, traffic):
        assert third > 2 and fourth == second == fifth == sixth and seventh == second + 2, first


def saved(rank: int, world_size: int, path: Path, plan: str, save: bool) -> float:
    torch.manual_seed(rank)
    model = gpt()
    opt = torch.optim.AdamW(model.parameters(), 0.01)
    par.parallelize(model, opt, par.Plan.parse(plan))
    if save:
        par.step(model, opt, tokens(0), cross)
        par.save(model, opt, path)
    else:
        par.load(model, opt, path)
    return par.step(model, opt, tokens(1), cross).item()


def test_a_checkpoint_of_another_value(tmp_path: Path) -> None:
    one = spawn(2, saved, tmp_path / "one", "dp=2,compare_every=2", True)
    assert one == spawn(2, saved, tmp_path / "one", "dp=2,compare_every=1", False)
    assert one == spawn(2, saved, tmp_path / "one", "dp=2", False)
