"""Lightning's Trainer under a plan: its loops, loggers, callbacks and checkpoints around par.step.

    class Module(lightning.LightningModule):           # forward, configure_optimizers: as they are
        def training_step(self, batch, index):
            return self.trainer.strategy.step(batch, loss_fn)
        def validation_step(self, batch, index):
            self.log("val_loss", self.trainer.strategy.evaluate(batch, loss_fn))

    lightning.Trainer(devices=8, strategy=PlanStrategy("dp=2,tp=2,pp=2", microbatches=4))

    Trainer                           DDPStrategy                 PlanStrategy
    setup                             DistributedDataParallel     par.parallelize, after configure_optimizers
    loaders                           rows of this rank           whole batches, as in one process
    training_step                     forward                     par.step: all four, clipped by
    backward                          loss.backward()               gradient_clip_val
    optimizer_step                    opt.step()
    save_checkpoint                   a file                      a folder of par.save: for any plan

A backward of the loss that training_step returns could not run what other ranks hold; so the step is asked
for where the loss would be computed, and what Lightning calls after it does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol, TypedDict, TypeVar

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerState
from lightning.pytorch.utilities.model_helpers import is_overridden

import pycomm.parallel as par
from pycomm.parallel.trainers.rows import enough_rows, fewer_microbatches

if TYPE_CHECKING:
    from pathlib import Path

    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
    from torch import nn
    from typing_extensions import Unpack

    from pycomm.parallel.checks.choice import Count
    from pycomm.parallel.given import Batch, LossFunction
    from pycomm.parallel.ground.plan import Plan
    from pycomm.parallel.trainers.rows import Loader

__all__ = ["PlanStrategy"]

NOT_CALLED = (
    *("backward", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "configure_gradient_clipping"),
)


L = TypeVar("L", bound="Loader")
T = TypeVar("T")


Checkpoint = dict[str, object]  # of Lightning's: {name: state}


class PlannedTrainer(Protocol):
    """What is asked of Lightning's Trainer."""

    accumulate_grad_batches: int
    gradient_clip_val: float | None
    gradient_clip_algorithm: str | None
    callbacks: Sequence[Callback]
    state: TrainerState
    strategy: DDPStrategy
    _accelerator_connector: _AcceleratorConnector


class Options(TypedDict, total=False):
    """Of par.evaluate."""

    count: Count | None
    microbatches: int  # the strategy's


class StepOptions(Options, total=False):
    """Of par.step."""

    clip: float | None  # the Trainer's


class PlanStrategy(DDPStrategy):
    """A strategy for lightning.Trainer. The batch size of a loader is that of the whole job.

    Args:
        plan: its number of ranks is the Trainer's devices.
        microbatches: as par.step's; fewer where a batch has fewer rows.
        model: name of the submodule that is put under the plan, such as "net"; None: the LightningModule with
        its own forward. All parameters lie in it.
        options: as DDPStrategy's; process_group_backend is "pycomm" if not given.

    Raises ValueError, on every rank, for settings of the Trainer that a plan cannot keep.
    """

    def __init__(
        self,
        plan: Plan | str | None = None,
        *,
        microbatches: int = 1,
        model: str | None = None,
        **options: object,
    ) -> None:
        super().__init__(**{"process_group_backend": "pycomm", **options})
        self.plan, self.microbatches, self.name = par.Plan.of(plan), microbatches, model
        self._set_up: nn.Module | None = None  # the model that has been through parallelize
        self._stepped = False  # since training_step began

    def step(
        self, batch: Batch, loss_fn: LossFunction | None = None, **options: Unpack[StepOptions]
    ) -> torch.Tensor:
        """To be called, and its result returned, by training_step: par.step of the module. options: count.

        Returns the mean loss over the batch, on every rank.
        """
        self._check_loss(loss_fn)
        trainer = self.lightning_module.trainer
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"PlanStrategy: accumulate_grad_batches={trainer.accumulate_grad_batches}: a plan does so "
                "inside of a batch. Make the batch so many times larger, with PlanStrategy(microbatches=...)"
            )
        self._stepped = True
        options["microbatches"] = fewer_microbatches(batch, self.microbatches, self.plan)
        options["clip"] = trainer.gradient_clip_val
        return par.step(self._planned, self.optimizers[0], batch, loss_fn, **options)

    def evaluate(
        self, batch: Batch, loss_fn: LossFunction | None = None, **options: Unpack[Options]
    ) -> torch.Tensor:
        """par.evaluate of the module, for validation_step and test_step. options: count."""
        self._check_loss(loss_fn)
        batch = enough_rows(batch, self.plan)
        options["microbatches"] = fewer_microbatches(batch, self.microbatches, self.plan)
        return par.evaluate(self._planned, batch, loss_fn, **options)

    @property
    def _planned(self) -> nn.Module:
        assert self._set_up is not None  # Lightning calls setup() first
        return self._set_up

    def _check_loss(self, loss_fn: LossFunction | None) -> None:
        if loss_fn is None and self.name is None:
            raise ValueError(
                "PlanStrategy: pass loss_fn, (output, targets) -> mean; a model of transformers has its own "
                'where it is named: PlanStrategy(model="net")'
            )

    # --- what the Trainer asks for --------------------

    def setup(self, trainer: PlannedTrainer) -> None:
        _refuse(trainer, self.lightning_module, self.precision_plugin)
        self.accelerator.setup(trainer)
        # As use_distributed_sampler=False: it would deal rows to the ranks, in an order of its own.
        trainer._accelerator_connector.use_distributed_sampler = False
        model = attrgetter(self.name)(self.lightning_module) if self.name else self.lightning_module
        fits = trainer.state.fn == TrainerFn.FITTING
        if self._set_up is model and not fits:
            return  # validate() after fit()
        self.precision_plugin.convert_module(self.model)
        if self._set_up is not model:
            self.model_to_device()
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        par.parallelize(model, self.optimizers[0] if fits else None, self.plan)
        self._set_up = model

    def process_dataloader(self, dataloader: L) -> L:
        """Workers draw the same numbers on all ranks."""
        if getattr(dataloader, "worker_init_fn", self) is None:
            dataloader.worker_init_fn = functools.partial(pl_worker_init_function, rank=0)
        return dataloader

    def backward(
        self,
        closure_loss: torch.Tensor,
        optimizer: torch.optim.Optimizer | None,
        *args: object,
        **options: object,
    ) -> torch.Tensor:
        if not self._stepped:
            raise ValueError(
                "PlanStrategy: training_step has to return self.trainer.strategy.step(batch, loss_fn), since "
                "no rank could run the backward of a loss that it has computed itself"
            )
        return closure_loss

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], T],
        model: nn.Module | None = None,
        **options: object,
    ) -> T:
        self._stepped = False
        return closure()

    def teardown(self) -> None:
        """The model and the optimizer stay on their device, parts of the plan."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # --- checkpoints --------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, torch.Tensor]:
        return {}  # in save_checkpoint

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        return {}

    def save_checkpoint(
        self, checkpoint: Checkpoint, filepath: str | Path, storage_options: object = None
    ) -> None:
        """A folder that par.load reads too, whose extra is Lightning's dict."""
        optimizer = self.optimizers[0] if "optimizer_states" in checkpoint and self.optimizers else None
        par.save(self._planned, optimizer, filepath, extra=checkpoint)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> Checkpoint:
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        return par.load(self._planned, self.optimizers[0] if fits else None, checkpoint_path)

    def load_model_state_dict(self, checkpoint: Checkpoint, strict: bool = True) -> None:
        """Nothing: done in load_checkpoint."""

    def load_optimizer_state_dict(self, checkpoint: Checkpoint) -> None:
        """Nothing: done in load_checkpoint."""


def _refuse(trainer: PlannedTrainer, module: LightningModule, precision: Precision) -> None:
    """Raises ValueError for what cannot be kept; the same on every rank."""
    averaging = [type(one).__name__ for one in trainer.callbacks if _averages(one)]
    hooks = [name for name in NOT_CALLED if is_overridden(name, module)]
    wrong = {
        "accumulate_grad_batches > 1 (use microbatches)": trainer.accumulate_grad_batches != 1,
        'gradient_clip_algorithm="value"': trainer.gradient_clip_algorithm == "value",
        f'precision="{precision.precision}" (use Plan(precision="bf16"))': (
            precision.precision not in ("32-true", "64-true", "bf16-true")
        ),
        "sync_batchnorm=True (BatchNorm is over all data ranks anyway)": trainer.strategy._layer_sync,
        "manual optimization": not module.automatic_optimization,
        f"a callback that averages ({', '.join(averaging)})": averaging,
        f"a hook that is not called then ({', '.join(hooks)})": hooks,
    }
    for what, asked in wrong.items():
        if asked:
            raise ValueError(f"PlanStrategy: {what} is not possible under a plan")


def _averages(callback: Callback) -> bool:
    kinds = {kind.__name__ for kind in type(callback).__mro__}
    return bool(kinds & {"StochasticWeightAveraging", "WeightAveraging"})
