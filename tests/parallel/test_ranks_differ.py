"""Ranks that were given different models or optimizers, or whose hyperparameters part ways: an error on every
rank that names what differs, before anything is changed, and a step that works afterwards.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.building import alike
from pycomm.parallel.ground import hyperparameters
from pycomm.parallel.ground.plain import class_text, text_of

PLANS = ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2"]
slow = pytest.mark.slow
ON_PLANS = pytest.mark.parametrize(
    "plan", [PLANS[0], PLANS[4], *(pytest.param(plan, marks=slow) for plan in PLANS[1:4])]
)


class Model(nn.Module):
    """Two blocks. `rank` is an attribute of the user's own."""

    def __init__(self, hidden: int = 6, activation: Callable[[], nn.Module] = nn.Tanh, rate: float = 0.0):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, hidden), activation(), nn.Dropout(rate), nn.Linear(hidden, 4))
            for _ in range(2)
        )
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


Pair = tuple[nn.Module, torch.optim.Optimizer | None]


def adamw(model: nn.Module, **options: Any) -> Pair:
    return model, torch.optim.AdamW(model.parameters(), **{"lr": 0.1, **options})


def frozen(model: nn.Module) -> Pair:
    model.head.bias.requires_grad_(False)
    return adamw(model)


def tied(model: nn.Module) -> Pair:
    model.blocks[0][3].weight = model.blocks[0][0].weight = nn.Parameter(torch.ones(4, 4))
    return adamw(model)


def in_two_groups(model: nn.Module) -> Pair:
    first, *others = model.parameters()
    return model, torch.optim.AdamW([{"params": [first]}, {"params": others}], 0.1)


def with_key(model: nn.Module, value: object) -> Pair:
    model, opt = adamw(model)
    opt.param_groups[0]["mine"] = value
    return model, opt


def of_rank(rank: int) -> Pair:
    model = Model()
    model.rank, model.path, model.head.rank = rank, f"/tmp/{rank}", rank
    return adamw(model)


# what rank 1 has -> what is different: kind, place, on rank 0, on rank 1
DIFFERENT: dict[str, tuple[Callable[[], Pair], tuple[str, str, str, str]]] = {
    "lr": (lambda: adamw(Model(), lr=0.2), ("optimizers", "lr of group 0", "0.1", "0.2")),
    "betas": (
        lambda: adamw(Model(), betas=(0.8, 0.999)),
        ("optimizers", "betas of group 0", "(0.9, 0.999)", "(0.8, 0.999)"),
    ),
    "weight_decay": (
        lambda: adamw(Model(), weight_decay=0.5),
        ("optimizers", "weight_decay of group 0", "0.01", "0.5"),
    ),
    "lr is a tensor": (
        lambda: adamw(Model(), lr=torch.tensor(0.25)),
        ("optimizers", "lr of group 0", "0.1", "0.25"),
    ),
    "key": (lambda: with_key(Model(), "x"), ("optimizers", "mine of group 0", "missing", "'x'")),
    "groups": (
        lambda: in_two_groups(Model()),
        ("optimizers", "the group of parameter 'blocks.0.0.bias'", "0", "1"),
    ),
    "optimizer": (
        lambda: (lambda model: (model, torch.optim.SGD(model.parameters(), 0.1)))(Model()),
        ("optimizers", "the optimizer", "AdamW", "SGD"),
    ),
    "no optimizer": (lambda: (Model(), None), ("optimizers", "the optimizer", "AdamW", "None")),
    "activation": (
        lambda: adamw(Model(activation=nn.ReLU)),
        ("models", "module 'blocks.0.1'", "Tanh", "ReLU"),
    ),
    "dropout": (
        lambda: adamw(Model(rate=0.5)),
        ("models", "p of module 'blocks.0.2' (Dropout)", "0", "0.5"),
    ),
    "module": (
        lambda: adamw(nn.Sequential(Model())),
        ("models", "the model", "Model", "Sequential"),
    ),
    "frozen": (
        lambda: frozen(Model()),
        ("models", "requires_grad of parameter 'head.bias'", "True", "False"),
    ),
    "shape": (
        lambda: adamw(Model(hidden=8)),
        ("models", "out_features of module 'blocks.0.0' (Linear)", "6", "8"),
    ),
    "dtype": (
        lambda: adamw(Model().double()),
        ("models", "the dtype of parameter 'blocks.0.0.weight'", "float32", "float64"),
    ),
    "tied": (
        lambda: tied(Model(hidden=4)),
        ("models", "out_features of module 'blocks.0.0' (Linear)", "6", "4"),
    ),
    "refused by itself": (
        lambda: (lambda model: (model, torch.optim.LBFGS(model.parameters())))(Model()),
        ("optimizers", "the optimizer", "AdamW", "LBFGS"),
    ),
    "meta": (
        lambda: adamw(Model().to("meta")),
        ("models", "the kind of device of parameter 'blocks.0.0.weight'", "cpu", "meta"),
    ),
}

# what rank 0 and rank 1 have, which is the same
SAME: dict[str, tuple[Callable[[], Pair], Callable[[], Pair]]] = {
    "seeds": (lambda: adamw(Model()), lambda: adamw(Model())),
    "own attributes": (lambda: of_rank(0), lambda: of_rank(1)),
    "number of numpy": (lambda: adamw(Model()), lambda: adamw(Model(), lr=np.float64(0.1))),
    "whole and real": (lambda: adamw(Model(), lr=1), lambda: adamw(Model(), lr=1.0)),
    "nan": (lambda: with_key(Model(), float("nan")), lambda: with_key(Model(), np.float32("nan"))),
    "objects": (lambda: with_key(Model(), [object()]), lambda: with_key(Model(), (object(),))),
    "functions": (lambda: with_key(Model(), print), lambda: with_key(Model(), print)),
}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)


def take(model: nn.Module, opt: torch.optim.Optimizer, step: int = 0) -> float:
    return par.step(model, opt, batch(step), F.mse_loss).item()


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


# --- parallelize ---------------------------------------------------------------------------------


def given(rank: int, world_size: int, plan: str, kinds: list[str]) -> list[tuple[str, bool]]:
    """For each kind what parallelize said, and whether the model is as it was."""
    found = []
    for kind in kinds:
        torch.manual_seed(rank)
        model, opt = DIFFERENT[kind][0]() if rank == 1 else adamw(Model())
        before = [parameter.clone() for parameter in model.parameters()]
        said = outcome(lambda: par.parallelize(model, opt, par.Plan.parse(plan)))  # noqa: B023
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True) if not b.is_meta]
        found.append((said, all(same) and "_parallel" not in vars(model)))
    model, opt = adamw(Model())
    par.parallelize(model, opt, par.Plan.parse(plan))
    assert take(model, opt) > 0
    return found


@ON_PLANS
def test_what_parallelize_is_given(plan: str) -> None:
    kinds = list(DIFFERENT)
    for rank, found in enumerate(spawn(2, given, plan, kinds)):
        for kind, (said, unchanged) in zip(kinds, found, strict=True):
            what, place, first, second = DIFFERENT[kind][1]
            expected = (
                f"[rank {rank}] parallelize: ranks 0 and 1 were given different {what}: {place} is {first} "
                f"on rank 0 and {second} on rank 1. "
            )
            assert said.startswith(expected) and "alike on all ranks" in said and unchanged, (kind, said)


def given_of_three(rank: int, world_size: int) -> list[str]:
    model, opt = adamw(Model(), lr=0.1 + 0.1 * (rank == 2))
    plans = [par.Plan(dp=3), par.Plan(dp=3, zero=int(rank == 1))]
    return [outcome(lambda: par.parallelize(model, opt, plan)) for plan in plans]  # noqa: B023


def test_the_third_rank_is_named() -> None:
    for rank, (said, of_plans) in enumerate(spawn(3, given_of_three)):
        assert f"[rank {rank}] parallelize: ranks 0 and 2 were given different optimizers: lr" in said
        other = rank or 1
        kind = ("plans", "zero is 0 on rank 0 and 1 on rank 1") if other == 1 else ("optimizers", "lr of")
        assert f"ranks 0 and {other} were given different {kind[0]}: {kind[1]}" in of_plans


def refused(rank: int, world_size: int, plan: str) -> str:
    model, opt = adamw(Model())
    if rank == 1:
        take_alone = batch(0)
        F.mse_loss(model(take_alone[0]), take_alone[1]).backward()
        opt.step()
    return outcome(lambda: par.parallelize(model, opt, par.Plan.parse(plan)))


def test_one_rank_is_refused() -> None:
    """What no comparison shows."""
    said, own = spawn(2, refused, "dp=2")
    assert own.startswith("the optimizer has taken steps already")
    assert said == f"[rank 0] parallelize: rank 1 failed: {own}"


def same(rank: int, world_size: int, plan: str) -> dict[str, list]:
    """For each kind what was said or logged, and losses."""
    found = {}
    for kind, makers in SAME.items():
        lines = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: lines.append(record.getMessage())  # noqa: B023
        logging.getLogger("pycomm.parallel").addHandler(handler)
        torch.manual_seed(rank)
        model, opt = makers[rank]()
        par.parallelize(model, opt, par.Plan.parse(plan))
        logging.getLogger("pycomm.parallel").removeHandler(handler)
        found[kind] = [*lines, *(take(model, opt, step) for step in range(2))]
    return found


@ON_PLANS
def test_what_is_the_same(plan: str) -> None:
    """Attributes of the user's own are one warning on rank 0, and that of numbers alone."""
    one, other = spawn(2, same, plan)
    (said, *losses), expected = one.pop("own attributes"), other.pop("own attributes")
    assert said.startswith("parallelize: rank of the model (Model) is 0 on rank 0 and 1 on rank 1.")
    assert losses == expected and one == other
    assert all(len(losses) == 2 for losses in one.values())


# --- steps ---------------------------------------------------------------------------------------

CHANGES: dict[str, tuple[object, str, str]] = {  # key: what rank 1 has, what the texts of both ranks are
    "lr": (0.01, "0.1", "0.01"),
    "betas": ((0.5, 0.9), "(0.9, 0.999)", "(0.5, 0.9)"),
    "weight_decay": (0.2, "0.01", "0.2"),
    "amsgrad": (True, "False", "True"),
    "mine": ([1, 2], "missing", "(1, 2)"),
    "eps": (torch.tensor(0.5), "1e-08", "0.5"),
    "maximize": (None, "False", "None"),
}


def changed(rank: int, world_size: int, plan: str, keys: list[str]) -> list:
    """For each change what the step said, and whether parameters and the next steps are those of a run
    without.
    """
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model, opt = adamw(Model().double())
        runs.append(par.parallelize(model, opt, par.Plan.parse(plan)))
    (model, opt), (undisturbed, its_opt) = runs
    data = tuple(tensor.double() for tensor in batch(0))
    found = []
    for key in keys:
        value = CHANGES[key][0]
        group = opt.param_groups[0]
        before = dict(group)
        if rank == 1:
            group[key] = value
        said = outcome(lambda: par.step(model, opt, data, F.mse_loss))
        group.clear()
        group.update(before)
        losses = [par.step(*run, data, F.mse_loss).item() for run in ((model, opt), (undisturbed, its_opt))]
        found.append((said, losses[0] == losses[1]))
    return found


MORE = [*PLANS[1:4], "pp=2,schedule=pipedream"]
ON_MORE = pytest.mark.parametrize(
    "plan", [PLANS[0], PLANS[4], *(pytest.param(plan, marks=slow) for plan in MORE)]
)


@ON_MORE
def test_hyperparameters_that_change_on_one_rank(plan: str) -> None:
    for rank, found in enumerate(spawn(2, changed, plan, list(CHANGES))):
        for (key, (_, first, second)), (said, works) in zip(CHANGES.items(), found, strict=True):
            here, there = (first, second) if rank == 0 else (second, first)
            assert said.startswith(
                f"[rank {rank}] step: the optimizer's {key} of group 0 differs between ranks: {here} here, "
                f"{there} on rank {1 - rank}. Change hyperparameters alike on all ranks"
            ), said
            assert "no parameter was changed" in said and works, key


def calls_that_wait(rank: int, world_size: int) -> list[str]:
    """The change is seen in a call that does not update, too, and with clip."""
    model, opt = par.parallelize(*adamw(Model()), par.Plan(dp=2))
    opt.param_groups[0]["lr"] = 0.1 + rank
    wrong = [
        outcome(lambda: par.step(model, opt, batch(0), F.mse_loss, **options))  # noqa: B023
        for options in ({"update": False}, {"clip": 1.0})
    ]
    opt.param_groups[0]["lr"] = 0.1
    par.step(model, opt, batch(0), F.mse_loss, update=False)
    par.step(model, opt, batch(1), F.mse_loss)
    return wrong


def test_calls_that_wait() -> None:
    for said in spawn(2, calls_that_wait):
        assert all("lr of group 0 differs" in each for each in said), said


class Counting(torch.optim.SGD):
    """Keeps a count in its groups, as some optimizers do: on a rank without parameters it stands still."""

    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            if group["params"]:
                group["steps"] = group.get("steps", 0) + 1
        super().step()


def schedulers(rank: int, world_size: int, plan: str) -> list[float]:
    """Schedulers on all ranks are no difference."""
    losses = []
    make_scheduler = [
        lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, 0.5),
        lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, total_steps=8),
        lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0),
        lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: np.float64(0.9) ** step),
    ]
    for make in make_scheduler:
        torch.manual_seed(0)
        model, opt = par.parallelize(*adamw(Model()), par.Plan.parse(plan))
        scheduler = make(opt)
        for step in range(4):
            losses.append(take(model, opt, step))
            scheduler.step(*([losses[-1]] if "Plateau" in type(scheduler).__name__ else []))
    if "tp" in plan:  # which takes torch's own optimizers only
        return losses
    model = Model()
    first, *others = model.parameters()
    opt = Counting([{"params": [first]}, {"params": others}], 0.1)
    par.parallelize(model, opt, par.Plan.parse(plan))
    for step in range(4):
        opt.param_groups[0]["lr"] *= 0.5
        losses.append(take(model, opt, step))
    return losses


@ON_PLANS
def test_schedulers_on_all_ranks(plan: str) -> None:
    one, other = spawn(2, schedulers, plan)
    assert one == other and len(one) == 16 + 4 * ("tp" not in plan)


# --- the tests can fail --------------------------------------------------------------------------

FAULTS: list[tuple[Any, str, Any, str]] = [
    (alike, "_texts_of_optimizer", lambda given: (), "lr"),
    (alike, "_constants_of", lambda kind: (), "dropout"),
    (alike, "_texts_of_model", lambda model: (), "activation"),
]


@pytest.mark.parametrize(("where", "name", "instead", "kind"), FAULTS, ids=[fault[1] for fault in FAULTS])
def test_planted_faults(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, instead: Any, kind: str
) -> None:
    """Without a part of the fingerprint its kind passes."""
    monkeypatch.setattr(where, name, instead)
    assert all(said == "nothing" for ((said, _),) in spawn(2, given, "dp=2", [kind]))


def test_planted_fault_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyperparameters.Hyperparameters, "mark", lambda self: 0)
    for found in spawn(2, changed, "dp=2", ["lr", "betas"]):
        assert all(said == "nothing" for said, _ in found)


# --- texts ---------------------------------------------------------------------------------------

EQUAL: list[list[object]] = [
    [1, 1.0, np.float32(1), torch.tensor(1.0), torch.tensor(1), np.int64(1)],
    [0.1, np.float64(0.1), torch.tensor(0.1, dtype=torch.float64), np.array(0.1)],
    [float("nan"), np.float32("nan"), -float("nan"), torch.tensor(float("nan"))],
    [0.0, -0.0, 0],
    [(1, 2), [1, 2], torch.tensor([1.0, 2.0]), np.array([1, 2])],
    [{"a": 1, "b": 2}, {"b": 2.0, "a": 1}],
    [{1, 2}, frozenset({2, 1})],
    [object(), object()],
    [lambda: 1],
    [print],
    [None],
    [True, np.True_],
    ["1"],
    [float("inf")],
    [1e300],
    [10**300],
    [1 + 2j],
    [torch.float32],
    [F.relu],
    [F.gelu],
]


def test_texts_are_equal_where_values_are() -> None:
    texts = [{text_of(value) for value in values} for values in EQUAL]
    assert all(len(some) == 1 for some in texts), texts
    assert len(set.union(*texts)) == len(texts)
    endless: list = []
    endless.append(endless)
    assert text_of(endless) == text_of([[[[[]]]]])
    assert class_text(nn.Linear) == "torch.nn.modules.linear.Linear" and class_text(Model) == "Model"
    assert text_of(torch.zeros(65)) == text_of(torch.zeros((), device="meta")) == "a tensor"


def test_a_change_that_was_refused_is_still_one_after_the_next() -> None:
    """Of two keys and two groups: what a rank has set is compared until it is as on the others."""
    ranks = []
    for _ in range(2):
        params = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
        opt = torch.optim.SGD([{"params": [param]} for param in params], lr=0.1)
        watched = hyperparameters.Hyperparameters(opt, lambda texts: told)
        ranks.append((opt.param_groups, watched))
    told: list[dict[str, str]] = []

    def marks() -> list[int]:
        return [watched.mark() for _, watched in ranks]

    assert len(set(marks())) == 1
    ranks[1][0][0]["lr"] = 0.2
    assert len(set(marks())) == 2
    for groups, _ in ranks:
        groups[1]["momentum"] = 0.9  # alike on all
    assert len(set(marks())) == 2 and len(set(marks())) == 2
    told[:] = [watched._set for _, watched in ranks]
    for rank, (_, watched) in enumerate(ranks):
        with pytest.raises(ValueError, match=rf"rank {rank}\] step: the optimizer's lr of group 0 differs"):
            watched.refuse(rank)
    ranks[0][0][0]["lr"] = 0.2
    assert len(set(marks())) == 1
    for groups, watched in ranks:
        groups[0]["steps"] = len(told)  # by a step of the optimizer
        watched.note()
    ranks[1][0][0]["steps"] = 7
    ranks[1][1].note()
    assert len(set(marks())) == 1
    for groups, _ in ranks:
        groups[1]["mine"] = [1, (2, 3)]
    assert len(set(marks())) == 1
    ranks[1][0][1]["mine"].append(4)  # in place
    assert len(set(marks())) == 2
    ranks[0][0][1]["mine"].append(4.0)
    assert len(set(marks())) == 1
    for number, keys in enumerate((("first", "second"), ("second", "first"))):  # in another order
        for key in keys:
            ranks[number][0][0][key] = 1
            ranks[number][1].mark()
    assert len(set(marks())) == 1
    ranks[0][0][1]["momentum"] = 0.5
    assert len(set(marks())) == 2
