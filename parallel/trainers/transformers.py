"""Hugging Face's Trainer under a plan: everything it does but the step, which is par.step.

    Trainer                                       PlanTrainer
    a loader deals batches to the processes       every rank reads whole batches, in the order of one process;
                                                  par.step takes this rank's rows and compares the batches
    prepare(model, optimizer), which is DDP       par.parallelize, when the optimizer is made
    training_step: forward, backward              par.step: forward, backward, clipping, update
    clip_grad_norm_; optimizer.step()             the norm that the step has found; nothing
    prediction_step                               par.evaluate and, where outputs are asked for, par.predict
    save_model                                    save_pretrained on all ranks: the files of one process
    optimizer.pt, scheduler.pt                    <checkpoint>/plan, by par.save: for any plan

A whole batch has per_device_train_batch_size x data ranks (dp x ep) x gradient_accumulation_steps rows, and
the last factor becomes microbatches. So losses and parameters are those of a Trainer in one process with
that batch size. What cannot be kept is refused by name when the trainer is made.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol, TypeAlias, TypedDict, cast

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, has_length

import pycomm.parallel as par
from pycomm.parallel.trainers.rows import Loader, enough_rows, fewer_microbatches

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    from pycomm.parallel.given import Batch, LossFunction, Tree
    from pycomm.parallel.ground.plan import Plan

__all__ = ["PlanTrainer"]

FOLDER = "plan"  # in a checkpoint of the Trainer: that of par.save

# Settings that a plan cannot keep, and what there is instead.
REFUSED = {
    "fp16": 'Plan(precision="bf16")',
    "bf16": 'Plan(precision="bf16")',
    "fp16_full_eval": "evaluation in the dtype of training",
    "bf16_full_eval": "evaluation in the dtype of training",
    "deepspeed": "Plan(zero=...)",
    "fsdp": "Plan(zero=3)",
    "parallelism_config": "the axes of the plan",
    "ddp_bucket_cap_mb": "Plan(bucket_mb=...)",
    "label_smoothing_factor": "PlanTrainer(loss_fn=...)",
    "torch_compile": "a plan without it",
    "use_liger_kernel": "a model without it",
    "neftune_noise_alpha": "a model that adds the noise itself",
    "auto_find_batch_size": "a batch size that fits, or more microbatches",
    "enable_jit_checkpoint": "save_steps",
    "torch_empty_cache_steps": "fewer rows or more microbatches",
}


class WrappedOptimizer(Protocol):
    """What is asked of the Trainer's optimizer, once Accelerate has wrapped it."""

    optimizer: torch.optim.Optimizer  # the one that was given to par.parallelize


Prepared: TypeAlias = "nn.Module | Loader | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler"


class _Call(TypedDict):
    """Of par.step and par.evaluate."""

    batch: Batch
    loss_fn: LossFunction | None
    microbatches: int


class Predicted(NamedTuple):
    """What the Trainer's loop takes of a batch."""

    loss: torch.Tensor | None
    logits: Tree = None
    labels: Tree = None


class PlanTrainer(Trainer):
    """A transformers.Trainer whose model is trained under a plan.

    Args:
        model, args, options: as Trainer's. With the labels of the batches under "labels".
        plan: None is a single process. Start as many processes as it has ranks, with torchrun.
        microbatches: in how many parts a batch is run (of each of gradient_accumulation_steps); fewer where a
        batch has fewer rows.
        loss_fn: (output, targets) -> mean, as par.step's; None: the model's own.

    The model is cut at the first train() or evaluate(), not here. on_pre_optimizer_step comes after the
    update, and `.grad` holds nothing that is of use to callbacks.
    Raises ValueError, on every rank, for settings that a plan cannot keep.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *,
        plan: Plan | str | None = None,
        microbatches: int = 1,
        loss_fn: LossFunction | None = None,
        **options: object,
    ) -> None:
        args = copy.copy(args) if args is not None else TrainingArguments()
        self.plan, self.loss_fn = par.Plan.of(plan), loss_fn
        self.data_ranks = self.plan.dp * self.plan.ep
        self.accumulated, args.gradient_accumulation_steps = args.gradient_accumulation_steps, 1
        self.microbatches = microbatches * self.accumulated
        self.flops_per_token = 0
        self._planned: nn.Module | None = None  # the model that has been through parallelize
        _refuse(type(self), args, options, self.plan)
        super().__init__(model, args, **options)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError("PlanTrainer: the launcher asks for DeepSpeed or FSDP; use Plan(zero=...)")
        if list(self.label_names) != ["labels"]:
            raise ValueError(
                f"PlanTrainer: {type(model).__name__} takes its targets as {self.label_names}, and a plan as "
                '"labels": pass label_names=["labels"], batches that have them, and loss_fn'
            )

    # --- data --------------------

    def _get_dataloader(
        self, dataset: Dataset[Batch], description: str, batch_size: int, **options: object
    ) -> Loader:
        rows = batch_size * self.data_ranks
        if options.get("is_training"):
            rows *= self.accumulated
            length = len(cast("Sized", dataset)) if has_length(dataset) else 0
            last = length % rows
            if 0 < last < self.data_ranks and not self.args.dataloader_drop_last:
                raise ValueError(
                    f"PlanTrainer: {length} rows in batches of {rows} leave {last} for the last one, "
                    f"and each of {self.data_ranks} data ranks needs one: dataloader_drop_last=True, or "
                    "another batch size"
                )
        return super()._get_dataloader(dataset, description, rows, **options)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return self._train_batch_size * self.data_ranks * self.accumulated

    def create_accelerator_and_postprocess(self) -> None:
        """Its accelerator distributes nothing: every rank has the whole batch and the plan."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare = self._prepare
        self.accelerator.prepare_model = lambda model, **_: model
        self.accelerator.gather = lambda tensor: tensor

    def _prepare(self, *things: Prepared) -> Prepared | tuple[Prepared, ...]:
        found = tuple(map(self._prepare_one, things))
        return found if len(found) > 1 else found[0]

    def _prepare_one(self, thing: Prepared) -> Prepared:
        if isinstance(thing, torch.nn.Module):
            self.accelerator._models.append(thing)
        elif isinstance(thing, torch.utils.data.DataLoader):
            return self._whole(thing)
        elif isinstance(thing, torch.optim.Optimizer) and not isinstance(thing, _Stepped):
            return _Stepped(thing, device_placement=False)
        return thing

    def _whole(self, loader: DataLoader[Batch]) -> Loader:
        """The loader as in one process: equal batches on all ranks, those of workers too."""
        config = self.accelerator.dataloader_config
        if isinstance(loader.worker_init_fn, functools.partial):
            loader.worker_init_fn.keywords["rank"] = 0
        return prepare_data_loader(
            loader,
            self.accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            dispatch_batches=False,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
        )

    # --- steps --------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        super().create_optimizer(model)
        if self._planned is not self.model:
            self._parallelize()
        return self.optimizer

    def _parallelize(self) -> None:
        if hasattr(self.optimizer, "eval"):
            raise ValueError(
                f"PlanTrainer: {type(self.optimizer).__name__} changes the parameters between training and "
                "evaluation, which it cannot do with the parts that a rank has: choose another optimizer"
            )
        self._set_signature_columns_if_needed()  # by the forward of the model as it is
        main = getattr(self.model, "main_input_name", "input_ids")
        self.flops_per_token = super().floating_point_ops({main: torch.zeros(1)})
        par.parallelize(self.model, self.optimizer, self.plan)
        self._planned = self.model

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        model.train()
        return par.step(self.model, self._planned_optimizer(), **self._batch(inputs), clip=self._clip())

    def _planned_optimizer(self) -> torch.optim.Optimizer:
        wrapped: WrappedOptimizer = self.optimizer
        return wrapped.optimizer

    def _batch(self, inputs: Batch) -> _Call:
        inputs = self._prepare_inputs(inputs)
        microbatches = fewer_microbatches(inputs, self.microbatches, self.plan)
        return {"batch": inputs, "loss_fn": self.loss_fn, "microbatches": microbatches}

    def _clip(self) -> float | None:
        if self.args.max_grad_norm > 0:
            return self.args.max_grad_norm
        return None if self.plan.schedule == "pipedream" else float("inf")  # inf: the norm is for the log

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor | None:
        return par.grad_norm(self.model)

    def _get_grad_norm(
        self, model: nn.Module, grad_norm: torch.Tensor | float | None = None
    ) -> torch.Tensor | None:
        return par.grad_norm(self.model)

    def floating_point_ops(self, inputs: Batch) -> int:
        """Of the whole model for the whole batch, told by one rank: the Trainer adds those of all ranks."""
        main = getattr(self.model, "main_input_name", "input_ids")
        return self.flops_per_token * inputs[main].numel() if main in inputs and self.args.should_save else 0

    # --- evaluation --------------------

    def evaluation_loop(self, *args: object, **options: object) -> EvalLoopOutput:
        self.create_optimizer()
        return super().evaluation_loop(*args, **options)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Batch,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Predicted:
        """Loss and, where there are metrics or predict() asks, logits of the whole batch, on every rank."""
        loss = None
        if inputs.get("labels") is not None:
            loss = par.evaluate(self.model, **self._batch(enough_rows(inputs, self.plan)))
            loss = loss.expand(self.data_ranks)  # the loop repeats it for each row of one rank
        if prediction_loss_only:
            return Predicted(loss)
        inputs = self._prepare_inputs(inputs)
        microbatches = fewer_microbatches(inputs, self.microbatches, self.plan)
        logits = par.predict(self.model, inputs, microbatches=microbatches)
        return Predicted(loss, logits, inputs.get("labels"))

    # --- checkpoints --------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """On all ranks."""
        self.create_optimizer()
        folder = Path(output_dir or self.args.output_dir)
        if hasattr(self.model, "save_pretrained"):
            self.model.save_pretrained(folder)
        else:
            state_dict = par.full_state_dict(self.model)
        if not self.args.should_save:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if state_dict is not None:
            torch.save(state_dict, folder / "pytorch_model.bin")
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str | Path) -> None:
        path, extra = Path(output_dir, FOLDER), self.lr_scheduler.state_dict()
        par.save(self.model, self._planned_optimizer(), path, extra=extra)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str | Path, model: nn.Module | None = None
    ) -> None:
        """Values are read with the optimizer's state, once both are under the plan."""
        if not Path(resume_from_checkpoint, FOLDER).is_dir():
            raise ValueError(
                f"PlanTrainer: {resume_from_checkpoint} has no folder {FOLDER!r}: it was written without a "
                "plan, or with save_only_model. Load its model with from_pretrained and train from there"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | Path | None) -> None:
        if checkpoint is not None:
            path = Path(checkpoint, FOLDER)
            self.lr_scheduler.load_state_dict(par.load(self.model, self._planned_optimizer(), path))

    def _load_best_model(self) -> None:
        par.load(self.model, None, Path(self.state.best_model_checkpoint, FOLDER))

    def hyperparameter_search(self, *args: object, **options: object) -> NoReturn:
        raise ValueError("PlanTrainer: no search over plans; run one training for each set of values")


class _Stepped(AcceleratedOptimizer):
    """What the Trainer's loop steps and clears: both are done, in par.step."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        pass

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        pass


def _refuse(
    kind: type[PlanTrainer], args: TrainingArguments, options: Mapping[str, object], plan: Plan
) -> None:
    """Raises ValueError for what cannot be kept; the same on every rank."""
    for name, instead in REFUSED.items():
        if getattr(args, name, None):
            raise ValueError(
                f"PlanTrainer: {name}={getattr(args, name)!r} is not possible under a plan; use {instead}"
            )
    config = args.accelerator_config
    others = {
        f"mixed_precision={args.mixed_precision!r}": args.mixed_precision != "no",
        "average_tokens_across_devices=False (the loss is the mean over the whole batch)": (
            not args.average_tokens_across_devices
        ),
        "train_sampling_strategy='batch_rebalance'": args.train_sampling_strategy == "batch_rebalance",
        f"optim={args.optim.value!r}": any(word in args.optim.value for word in ("lomo", "layerwise")),
        "an accelerator_config of your own": (
            config.split_batches or config.dispatch_batches or config.gradient_accumulation_kwargs
        ),
        "load_best_model_at_end with save_only_model": args.load_best_model_at_end and args.save_only_model,
        "compute_loss of your own (pass loss_fn)": kind.compute_loss is not Trainer.compute_loss,
        "compute_loss_func (pass loss_fn)": options.get("compute_loss_func"),
        "several GPUs in one process (CUDA_VISIBLE_DEVICES, torchrun)": args.n_gpu > 1,
    }
    wrong = [what for what, asked in others.items() if asked]
    if wrong:
        raise ValueError(f"PlanTrainer: {wrong[0]} is not possible under a plan")
    if args.world_size != plan.world_size:
        raise ValueError(
            f"PlanTrainer: Plan({plan}) is for {plan.world_size} ranks, and TrainingArguments knows of "
            f"{args.world_size}: start them with torchrun --nproc-per-node {plan.world_size}; on CPUs, with "
            "use_cpu=True"
        )
