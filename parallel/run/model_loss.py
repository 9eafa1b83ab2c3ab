"""The loss that a model has of its own, where the caller names none.

A plain module has none: its targets stand where its outputs stand, and cross_entropy compares them. A model
of Hugging Face's transformers has one, chosen by its class, which it would compute from `labels`:

    class                                     labels                             here
    decoders (ForCausalLM, ...)               = input_ids: position t is         shifted once, before the
                                              compared with the label of t + 1   batch is cut and counted
    decoders of encoder-decoders (Bart-       aligned: the caller has shifted    as they are
    ForCausalLM, WhisperForCausalLM, ...)
    encoder-decoders (T5, BART, Marian, ...)  aligned; the decoder's inputs are  made as the model would
                                              the labels, one later
    ForMaskedLM, ForTokenClassification       aligned                            as they are
    ForSequence-, ForImageClassification      one class per row                  as they are
    others                                    -                                  refused

Then the loss is cross_entropy over the targets that count, equal under every plan; with
config.output_router_logits, and that of the routers (router_loss.py). Shifting before the cut
is what makes it right where the sequence is cut, and where microbatches or ranks have unequal counts.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from pycomm.parallel.run.router_loss import Loss, RouterLoss
from pycomm.parallel.tensor import cross_entropy

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from pycomm.parallel.given import Batch, LossFunction
    from pycomm.parallel.ground.plan import Plan

__all__ = ["for_loss", "model_loss_of", "with_targets"]

_ALIGNED = ("ForMaskedLM", "ForTokenClassification", "ForSequenceClassification", "ForImageClassification")
_SHIFTED = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# Named ...ForCausalLM, and do not shift.
_DECODERS_ALONE = {
    *("Bart", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "CpmAnt", "MBart", "Marian", "Mvp"),
    *("PLBart", "Pegasus", "TrOCR", "Whisper"),
}


def for_loss(model: nn.Module, batch: Batch, loss_fn: LossFunction | None, plan: Plan) -> tuple[Batch, Loss]:
    """(batch, loss function) of a step, as its caller gave them to it: the loss that is meant, and the batch
    with its targets.
    """
    loss, own = model_loss_of(model, loss_fn, plan)
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    return with_targets(model, batch) if own else batch, loss


def model_loss_of(model: nn.Module, loss_fn: LossFunction | None, plan: Plan) -> tuple[Loss, bool]:
    """(loss function, whether the targets are those of the model's own loss). Raises ValueError for a model
    whose own loss is not among those above, or not to be had under the plan.
    """
    if loss_fn is not None:
        return loss_fn, False
    model = _inner(model)
    if not _is_pretrained(model):
        return cross_entropy, False
    name = type(model).__name__
    if "_loss_function" in model.__dict__:
        raise ValueError(
            f"{name} was given a loss function: pass it to step(loss_fn=...), as (output, targets) -> mean"
        )
    if not (_is_shifted(model) or _is_aligned(model)):
        raise ValueError(
            f"the loss of {name} is not known here: pass loss_fn, (output, targets) -> mean over the targets"
        )
    return _with_routers(model, plan), True


def _with_routers(model: PreTrainedModel, plan: Plan) -> Loss:
    """cross_entropy, with the loss of the routers where the configuration asks for it."""
    configs = model.config, model.config.get_text_config()
    if not any(getattr(config, "output_router_logits", False) for config in configs):
        return cross_entropy
    what = f"{type(model).__name__} adds a loss of its routers (config.output_router_logits)"
    names = _names_in_forward(model)
    known = {"load_balancing_loss_func", "router_aux_loss_coef"} <= names
    if not known or any("z_loss" in name for name in names):
        raise ValueError(f"{what}, which is not known here: set it to False, or pass loss_fn")
    cuts = [axis for axis in ("pp", "ring", "ulysses") if getattr(plan, axis) > 1]
    cuts += ["megatron_sp"] * (plan.megatron_sp and plan.tp > 1)
    if cuts:
        raise ValueError(
            f"{what}, over all tokens and layers, of which a rank of {cuts[0]} has some only: set it to "
            f"False, pass loss_fn, or use a plan without {cuts[0]}"
        )
    return RouterLoss(model)


def with_targets(model: nn.Module, batch: Batch) -> Batch:
    """A batch whose targets are aligned with the model's output. Raises ValueError for labels that the loss
    cannot take.
    """
    if not isinstance(batch, Mapping) or "labels" not in batch:
        return batch
    model, batch = _inner(model), dict(batch)
    labels = batch["labels"]
    if labels.is_floating_point():
        raise ValueError(
            f"labels of {type(model).__name__} are real numbers (a regression, or several classes at once): "
            "pass loss_fn"
        )
    if _is_encoder_decoder(model):
        if "decoder_input_ids" not in batch and "decoder_inputs_embeds" not in batch:
            batch["decoder_input_ids"] = _decoder_inputs(model, labels)
    elif _is_shifted(model):
        nothing = torch.full_like(labels[:, :1], -100)
        batch["labels"] = torch.cat([labels[:, 1:], nothing], dim=1)
    return batch


def _decoder_inputs(model: PreTrainedModel, labels: torch.Tensor) -> torch.Tensor:
    """What the model gives its decoder where it is given labels alone: these, one later."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels=labels)
    shift = getattr(sys.modules[_own_class(model).__module__], "shift_tokens_right", None)
    if shift is None:
        raise ValueError(
            f"how {type(model).__name__} makes its decoder's inputs from labels is not known here: put "
            "decoder_input_ids into the batch"
        )
    return shift(labels, model.config.pad_token_id, model.config.decoder_start_token_id)


def _inner(model: nn.Module) -> nn.Module:
    """Without the wrapper of peft."""
    base = getattr(model, "get_base_model", None)
    return base() if base is not None else model


def _is_pretrained(model: nn.Module) -> bool:
    kinds = type(model).__mro__
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers") for kind in kinds
    )


def _is_encoder_decoder(model: PreTrainedModel) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False)) and model.can_generate()


def _is_aligned(model: PreTrainedModel) -> bool:
    name, config = type(model).__name__, model.config
    if name.removesuffix("ForCausalLM") in _DECODERS_ALONE and not _is_encoder_decoder(model):
        return True
    if _is_encoder_decoder(model):
        return bool({"loss_function", "CrossEntropyLoss"} & _names_in_forward(model))
    if name.endswith(("ForSequenceClassification", "ForImageClassification")):
        kind = getattr(config, "problem_type", None)
        return kind == "single_label_classification" or kind is None and config.num_labels > 1
    return name.endswith(_ALIGNED)


def _is_shifted(model: PreTrainedModel) -> bool:
    """Whether the class computes its loss as transformers' decoders do: by the function of that name."""
    name = type(model).__name__
    by_function = "loss_function" in _names_in_forward(model)
    return name.endswith(_SHIFTED) and by_function and not _is_encoder_decoder(model)


def _own_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The first class that is transformers' own."""
    return next(kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))


def _names_in_forward(model: PreTrainedModel) -> set[str]:
    """What the forward of that class refers to."""
    return set(inspect.unwrap(_own_class(model).forward).__code__.co_names)
