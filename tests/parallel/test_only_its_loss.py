"""A model that takes the labels and returns its loss, and nothing else, with uneven ignored targets: it is
proven to be a mean over what counts and trains as one process does, or all ranks refuse it for one reason.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_one import check_equal, sgd
from models import Block
from odd_models import Plain, tokens
from tiers import tier
from torch_ranks import spawn

import pycomm.parallel as par

ROWS = 7


class OnlyLoss(Plain):
    """The mean over the targets that count."""

    def __init__(self) -> None:
        super().__init__(Block, 4)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.loss(super().forward(ids), labels)


class InADict(OnlyLoss):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(ids, labels)}


class OfOneValue(OnlyLoss):
    """As a model under DataParallel returns it."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(ids, labels)[None]


class OverRows(OnlyLoss):
    """The sum of each row, a mean over rows."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / len(labels)


class Summed(OnlyLoss):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Contrasts(OnlyLoss):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = logits.mean(1)
        return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


class Root(OnlyLoss):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().loss(logits, labels).sqrt()


def batch(step: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Each row has other targets that count, the first one all."""
    ids, labels = tokens(step, ROWS)[0], tokens(step + 100, ROWS)[0]
    for row in range(ROWS):
        labels[row, 1 + (row * 3) % labels.shape[1] :] = -100
    return {"ids": ids, "labels": labels}, labels


def as_it_is(out: Any, labels: torch.Tensor) -> torch.Tensor:
    return out["loss"] if isinstance(out, dict) else out.sum()


@tier(quick=1 / 20, slow=1 / 4)
@pytest.mark.parametrize(
    "texts",
    [("",), ("dp=2", "dp=2,zero=1", "dp=2,zero=3"), ("dp=3",), ("tp=2",), ("pp=2", "pp=2,schedule=zbv")],
    ids=lambda texts: texts[0],
)
@pytest.mark.parametrize("make", [OnlyLoss, InADict, OfOneValue, OverRows])
def test_trains_as_one_process_does(make: type, texts: tuple[str, ...]) -> None:
    check_equal(make, *texts, batch=batch, loss_fn=as_it_is)


def said(rank: int, world_size: int, make: type, text: str) -> tuple[str | None, dict[str, str]]:
    """(the sentence of a refusal, what describe() says)"""
    torch.manual_seed(0)
    model = make()
    model, opt = par.parallelize(model, sgd(model), text)
    found = None
    try:
        par.step(model, opt, batch(0), as_it_is, microbatches=2)
    except ValueError as error:
        found = str(error)
    return found, par.describe(model).checks


@tier(quick=1 / 4)
@pytest.mark.parametrize("text", ["dp=2", "dp=2,zero=3", "tp=2", "pp=2"])
def test_is_proven(text: str) -> None:
    for make, over in ((OnlyLoss, "targets"), (OverRows, "rows")):
        for refused, checks in spawn(2, said, make, text):
            assert refused is None
            assert (checks["rows"], checks["loss"]) == ("held", f"held: a mean over {over}")


@tier(quick=1 / 4)
@pytest.mark.parametrize("text", ["dp=2", "dp=2,zero=3", "tp=2", "pp=2"])
def test_is_refused_with_one_reason(text: str) -> None:
    for make in (Summed, Contrasts, Root):
        sentences = [sentence for sentence, _ in spawn(2, said, make, text)]
        assert "the loss of a batch cannot be put together from those of its parts" in sentences[0]
        assert sentences == [f"[rank {rank}] {sentences[0].removeprefix('[rank 0] ')}" for rank in range(2)]
