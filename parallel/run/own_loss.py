"""The loss that a model has of its own, where the caller names none.

A plain module has none: its targets stand where its outputs stand, and cross_entropy compares them. A model
of Hugging Face's transformers has one, chosen by its class, which it would compute from `labels`:

    class                                     labels                             here
    decoders (ForCausalLM, ...)               = input_ids: position t is         shifted once, before the
                                              compared with the label of t + 1   batch is cut and counted
    encoder-decoders (T5, BART, Marian, ...)  aligned; the decoder's inputs are  made as the model would
                                              the labels, one later
    ForMaskedLM, ForTokenClassification       aligned                            as they are
    ForSequence-, ForImageClassification      one class per row                  as they are
    others                                    -                                  refused

Then the loss is cross_entropy over the targets that count, equal under every plan. Shifting before the cut
is what makes it right where the sequence is cut, and where microbatches or ranks have unequal counts.
"""

from collections.abc import Mapping

import torch

from pycomm.parallel.tensor import cross_entropy

__all__ = ["own_loss_of", "with_targets"]

_ALIGNED = ("ForMaskedLM", "ForTokenClassification", "ForSequenceClassification", "ForImageClassification")
_SHIFTED = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_UNLIKE = ("XLNet", "XLM", "Flaubert")  # named like decoders; their labels are not


def own_loss_of(model, loss_fn):
    """(loss function, whether the targets are those of the model's own loss). Raises ValueError for a model
    whose own loss is not among those above.
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
    if getattr(model.config, "output_router_logits", False):
        raise ValueError(
            f"{name} adds a loss of its routers (config.output_router_logits), which step would leave out: "
            "set it to False, or pass loss_fn"
        )
    if not (_is_shifted(model) or _is_encoder_decoder(model) or name.endswith(_ALIGNED)):
        raise ValueError(
            f"the loss of {name} is not known here: pass loss_fn, (output, targets) -> mean over the targets"
        )
    return cross_entropy, True


def with_targets(model, batch):
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
        make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if make is not None and "decoder_input_ids" not in batch and "decoder_inputs_embeds" not in batch:
            batch["decoder_input_ids"] = make(labels=labels)
    elif _is_shifted(model):
        nothing = torch.full_like(labels[:, :1], -100)
        batch["labels"] = torch.cat([labels[:, 1:], nothing], dim=1)
    return batch


def _inner(model):
    """Without the wrapper of peft."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _is_pretrained(model):
    kinds = type(model).__mro__
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers") for kind in kinds
    )


def _is_encoder_decoder(model):
    return bool(getattr(model.config, "is_encoder_decoder", False)) and model.can_generate()


def _is_shifted(model):
    name = type(model).__name__
    return name.endswith(_SHIFTED) and not name.startswith(_UNLIKE) and not _is_encoder_decoder(model)
