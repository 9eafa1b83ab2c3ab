"""If a check refuses on one rank, all ranks raise a ValueError with the same reason. Nobody waits, and nobody
is told of a broken group.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from odd_models import Plain, cross, tokens
from positions_models import Between, shifted
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par

ROWS, LENGTH = 8, 6


class Centered(Plain):
    """Takes the mean over rows off where these begin with token 1, in front of the blocks or behind them."""

    def __init__(self, at_end: bool = False) -> None:
        super().__init__(layers=4)
        self.at_end = at_end

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        is_mixed = (idx[:, :1] == 1).float().mean()[None, None, None]
        x = self.tok(idx)
        if not self.at_end:
            x = x - is_mixed * x.mean(0)
        x = self.run_blocks(x)
        if self.at_end:
            x = x - is_mixed * x.mean(0)
        return self.head(self.norm(x))


class AtEnd(Centered):
    def __init__(self) -> None:
        super().__init__(at_end=True)


class Plainly(Plain):
    def __init__(self) -> None:
        super().__init__(layers=4)


class Between4(Between):
    def __init__(self) -> None:
        super().__init__(shifted, 2)


def sum_of_ones(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A sum where targets are 1, and a mean elsewhere."""
    return cross(out, y) * (len(y) if (y == 1).any() else 1)


def weighted(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """By class, where targets are 1."""
    weight = torch.linspace(0.5, 2, out.shape[-1]) if (y == 1).any() else None
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), weight=weight)


class Case(NamedTuple):
    """own: "rows": each rank has its own, and only those of the last have the token 1. "lengths": these rows
    differ in length, too, so that each rank looks at its own alone.
    """

    plan: str
    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], torch.Tensor]
    own: str
    words: str


MIXES, NO_MEAN = "the model mixes rows of the batch", "loss_fn is no mean over the targets that count"
PIECES = "the model does not compute from pieces of the sequence"
CASES = [
    Case("dp=2", Centered, cross, "rows", MIXES),
    Case("dp=2", Centered, cross, "lengths", MIXES),
    Case("dp=2", Plainly, sum_of_ones, "lengths", NO_MEAN),
    Case("dp=2", Plainly, weighted, "lengths", "weights of classes"),
    Case("dp=3,zero=2", Centered, cross, "lengths", MIXES),
    Case("dp=2,zero=3", Centered, cross, "rows", MIXES),
    Case("pp=2", Centered, cross, "", MIXES),
    Case("pp=2", AtEnd, cross, "", MIXES),
    Case("pp=2,schedule=zbv", AtEnd, cross, "", MIXES),
    Case("pp=2", Plainly, sum_of_ones, "", NO_MEAN),
    Case("pp=2", Plainly, weighted, "", "weights of classes"),
    Case("tp=2", Centered, cross, "", MIXES),
    Case("tp=2", Plainly, sum_of_ones, "", NO_MEAN),
    Case("ring=2", Between4, cross, "", PIECES),
    Case("ulysses=2", Between4, cross, "", PIECES),
    Case("tp=2,megatron_sp", Between4, cross, "", PIECES),
    Case("pp=2,ring=2", Between4, cross, "", PIECES),
    Case("dp=2,tp=2,zero=3", Centered, cross, "", MIXES),
    Case("dp=2,pp=2", AtEnd, cross, "", MIXES),
]


def batch(has_ones: bool, seed: int = 0, longer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(2, 29, (ROWS, LENGTH + longer), generator=generator) for _ in range(2))
    if has_ones:
        x[:, 0] = y[:, 0] = 1
    return x, y


def refused(rank: int, world_size: int, case: Case) -> tuple[str, str, bool]:
    """(kind, sentence, whether a step with a fine model and loss goes on after it)"""
    torch.manual_seed(0)
    model = case.make()
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), case.plan)
    longer = rank if case.own == "lengths" else 0
    given = batch(rank == world_size - 1, rank, longer) if case.own else batch(True)
    with pytest.raises(Exception) as caught:
        par.step(model, opt, given, case.loss, microbatches=2, sharded=bool(case.own))
    fine = Plainly()
    fine, opt = par.parallelize(fine, torch.optim.SGD(fine.parameters(), 0.1), case.plan)
    loss = par.step(fine, opt, tokens(0), cross, microbatches=2)
    return type(caught.value).__name__, str(caught.value), bool(torch.isfinite(loss))


@tier(quick=1 / 12, slow=1 / 3)
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.plan}-{case.make.__name__}-{case.loss.__name__}-{case.own}"
)
def test_all_ranks_raise_the_same(case: Case) -> None:
    found = spawn(par.Plan.parse(case.plan).world_size, refused, case)
    reasons = {re.sub(r"^\[rank \d+\] ", "", sentence) for _, sentence, _ in found}
    assert len(reasons) == 1 and case.words in reasons.pop(), found
    assert [(kind, goes_on) for kind, _, goes_on in found] == [("ValueError", True)] * len(found), found
    for rank, (_, sentence, _) in enumerate(found):
        assert sentence.startswith(f"[rank {rank}] "), sentence
