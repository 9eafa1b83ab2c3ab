"""step(), evaluate() and predict(): the same line on every rank under every plan."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar, overload

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from pycomm import MismatchError
from pycomm.parallel.ground.comm import count_traffic
from pycomm.parallel.parts import parts_of
from pycomm.parallel.run.evaluate import run_evaluation
from pycomm.parallel.run.model_loss import for_loss
from pycomm.parallel.run.predict import run_prediction
from pycomm.parallel.run.prepare import Options
from pycomm.parallel.run.step import run_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from torch import nn
    from torch.utils.data import Dataset

    from pycomm.parallel.checks.choice import Count
    from pycomm.parallel.checks.measures import Measure
    from pycomm.parallel.given import Batch, LossFunction, Tree
    from pycomm.parallel.parts import Parallelized

__all__ = ["evaluate", "grad_norm", "predict", "sampler", "step"]

T = TypeVar("T")  # of a dataset


def step(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    batch: Batch,
    loss_fn: LossFunction | None = None,
    *,
    microbatches: int = 1,
    clip: float | None = None,
    count: Count | None = None,
    sharded: bool = False,
    update: bool = True,
    scaler: torch.amp.GradScaler | None = None,
) -> torch.Tensor:
    """One training step: forward, backward, gradients summed and clipped, optimizer. Collective.

    Args:
        model, opt: as parallelize() returned them.
        batch: (inputs, targets) or a mapping with "labels"; tensors (or tuples, lists, dicts) with rows as
            dim 0 and, under sequence parallelism, positions as dim 1. The whole batch, equal on all ranks;
            with `sharded` the rows of this data rank, as a loader with parallel.sampler() gives them.
        loss_fn: (output, targets) -> mean over the targets that count, a tensor without dimensions.
            parallel.cross_entropy takes the output, or its `.logits`, and keeps the logits of a tensor
            parallel head in shards; any other function gets them whole. None: cross_entropy; of a model of
            transformers its own loss, with labels as its class takes them (run/model_loss.py): a decoder's
            are compared one position later.
        microbatches: in how many parts the rows are run, at most one for each row; their gradients are
            accumulated, and a pipeline works on several at a time. Data ranks may be without rows.
        clip: largest L2 norm of the gradient of the whole model, each parameter counted once; None: no
            clipping, and no norm is computed.
        count: targets -> number of values that the mean runs over (or the sum of their weights), where that
            is not the targets other than -100 (whole numbers) or all elements (real numbers).
        update: False adds this batch's gradients to those of the next call, which may be another such one;
            `clip` and the optimizer wait for a call that updates. The mean is over the targets of all these
            calls, as if their batches were one. opt.zero_grad(), an error and load() drop what waits.
        scaler: torch.amp.GradScaler: the loss is scaled, an inf or nan in a gradient of any rank skips the
            optimizer on all, and the scaler is updated. Norm and clip are of unscaled gradients.

    A parameter that got no gradient on any rank is passed over by the optimizer, as in a single process.
    BatchNorm is over the rows of a microbatch on all data ranks, and its averages are equal there; other
    buffers are each rank's own. After a step that raised on all ranks the model is as it was before it, but
    for buffers; where only some raised, the groups are broken and the others raise what the backend says, and
    what those had raised. A loop of your own calls opt.step() itself: run/own_loop.py.

    Returns the mean loss over the whole batch, a float64 tensor without dimensions, the same on all ranks,
    without load-balance losses of parallel.MoE. Raises ValueError for batches that differ between ranks or
    have no rows, and for a write to a parameter since the last call that would be lost (parallel.gathered),
    CommError and its kinds for a diverging or a lost rank; then it names the last save.
    """
    parts = parts_of(model, opt)
    if opt is None:
        raise ValueError(
            "step needs the optimizer that the model was parallelized with; parallel.evaluate needs none"
        )
    with _way_back(parts), parts.last_words.told():
        batch, measure = for_loss(model, batch, loss_fn, parts.plan)
        options = Options(measure, microbatches, clip, count, sharded, update, scaler)
        with count_traffic() if parts.mesh.spans_hosts else contextlib.nullcontext() as traffic:
            result = run_step(parts, batch, options)
    parts.last_step.note(result.norm, None if traffic is None else traffic.by_group())
    return result.loss


@contextlib.contextmanager
def _way_back(parts: Parallelized) -> Iterator[None]:
    """An error that breaks the groups names the checkpoint to go back to."""
    try:
        yield
    except MismatchError:
        raise
    except dist.DistError as error:
        if parts.saves.last is not None and error.args:
            text = f"{error.args[0]} The last checkpoint is {parts.saves.last}."
            error.args = (text, *error.args[1:])
        raise


@overload
def evaluate(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction | None = None,
    *,
    microbatches: int = 1,
    count: Count | None = None,
    sharded: bool = False,
    metrics: None = None,
) -> torch.Tensor: ...
@overload
def evaluate(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction | None = None,
    *,
    microbatches: int = 1,
    count: Count | None = None,
    sharded: bool = False,
    metrics: Mapping[str, Measure],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...
def evaluate(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction | None = None,
    *,
    microbatches: int = 1,
    count: Count | None = None,
    sharded: bool = False,
    metrics: Mapping[str, Measure] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean loss of a batch, without gradients; arguments and result as in step(). Call model.eval()
    before where that matters.

    metrics: {name: (output, targets) -> mean over the targets that count}, a number or a tensor without
    dimensions. As the loss, each is given this rank's rows and positions with whole logits, and weighted with
    their targets that count, so that the result is the mean over the whole batch. What is no mean over
    targets (F1, BLEU) is computed from predict(). Then returns (loss, {name: float64 tensor}).
    """
    parts = parts_of(model)
    with parts.last_words.told():
        batch, measure = for_loss(model, batch, loss_fn, parts.plan)
        options = Options(measure, microbatches, count=count, sharded=sharded)
        loss, *means = run_evaluation(parts, batch, options, metrics)
    return loss if metrics is None else (loss, dict(zip(metrics, means, strict=True)))


def predict(model: nn.Module, inputs: Tree, *, microbatches: int = 1) -> Tree:
    """The model's output for a whole batch, without gradients, on every rank. Collective over all ranks. Call
    model.eval() before where that matters.

    Args:
        inputs: what the model is called with: a tensor, a tuple or list of arguments, or a mapping of
            keywords, whose "labels" are left out. Tensors have the rows as dim 0. Equal on all ranks.
        microbatches: in how many parts the rows are run.

    Returns the tensor or the tree of tensors (tuple, list, dict, dataclass that torch's pytree knows) that
    the model returns, with all rows in order, all positions and whole logits; of an object with `.logits`,
    as transformers' are, the logits alone. It is as large as the whole output, on every rank. There may be
    fewer rows than data ranks.

    Raises ValueError on every rank for inputs that differ between ranks, and for an output with tensors that
    do not have the rows as dim 0 and, where the sequence is cut, the positions as dim 1, or that tp has cut.
    """
    parts = parts_of(model)
    with parts.last_words.told():
        return run_prediction(parts, inputs, microbatches)


def grad_norm(model: nn.Module) -> torch.Tensor | None:
    """L2 norm of the whole model's gradient in the last step, before clipping: a float64 tensor without
    dimensions.

    None where that step had clip=None, which computes no norm; clip=float("inf") only measures.
    """
    return parts_of(model).last_step.norm


def sampler(
    model: nn.Module, dataset: Dataset[T], *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> DistributedSampler[T]:
    """torch's DistributedSampler over the data ranks (dp x ep) of the model's plan."""
    parts, part = parts_of(model).mesh.rows
    return DistributedSampler(
        dataset, num_replicas=parts, rank=part, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
