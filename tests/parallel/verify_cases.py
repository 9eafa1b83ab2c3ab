"""Models for the tests of par.verify: right ones, and ones with a fault that shows on several ranks only."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Block
from odd_models import Normed, Plain, cross, gpt, pictures, tokens
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import pycomm.parallel as par

ROWS = 13


def llama():
    config = LlamaConfig(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def text_rows(rows=ROWS):
    inputs, labels = tokens(0, rows)
    return {"input_ids": inputs, "labels": labels}


class Centred(nn.Module):
    """Subtracts the mean over the rows: right in one process, another number where rows are cut."""

    def __init__(self, width=16):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return (x - x.mean(0)) * self.weight


class CentredBlock(Block):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.centre = Centred()

    def forward(self, x):
        return super().forward(self.centre(x))


class BareBlock(Block):
    """The same without a module for it."""

    def forward(self, x):
        x = super().forward(x)
        return x - x.mean(0)


class Drifting(nn.Module):
    """Off by 1e-3 on rank 1 alone, and only where it is not given the whole batch."""

    def forward(self, x):
        wrong = dist.is_initialized() and dist.get_rank() == 1 and x.shape[0] < ROWS
        return x + 1e-3 * wrong


class ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.shape[0] / ROWS


class ScaledBlock(Block):
    def forward(self, x):
        return ScaleGradient.apply(super().forward(x))


class Raising(nn.Module):
    """What it raises on rank 1, and only where it is not given the whole batch."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        if dist.get_rank() == 1 and x.shape[0] < ROWS:
            raise self.kind("no such rows")
        return x


def with_block(number, block):
    def model():
        model = Plain(layers=4)
        model.blocks[number] = block(16, 2, 20)
        return model

    return model


def with_experts():
    model = Plain(layers=4)
    model.blocks[1].mlp = par.MoE(16, lambda: nn.Linear(16, 16), 4)
    return model


def wrong_columns(module, args, out):
    """A forward hook: off by 1e-3 on rank 1, where tensor parallelism has cut the layer."""
    wrong = dist.is_initialized() and dist.get_rank() == 1 and out.shape[-1] < 20
    return out + 1e-3 * wrong


def with_hook():
    model = Plain(layers=4)
    model.blocks[1].mlp[0].register_forward_hook(wrong_columns)
    return model


def with_norm(norm):
    def model():
        model = Plain(layers=4)
        model.norm = norm()
        return model

    return model


MODELS = {
    "gpt": lambda: Plain(layers=4),
    "tied": gpt,
    "llama": llama,
    "normed": lambda: Normed().double(),
    "moe": with_experts,
    "rows": with_block(1, BareBlock),
    "centred": with_block(2, CentredBlock),
    "columns": with_hook,
    "drifting": with_norm(Drifting),
    "scaled": with_block(1, ScaledBlock),
    "raising": with_norm(lambda: Raising(RuntimeError)),
    "refusing": with_norm(lambda: Raising(ValueError)),
}


def make(kind):
    torch.manual_seed(0)
    return MODELS[kind]()


def data_for(kind):
    """(batch, loss_fn)"""
    if kind == "llama":
        return text_rows(), None
    return (pictures(0), F.mse_loss) if kind == "normed" else (tokens(0), cross)


def verify(rank, world_size, kind, text, microbatches, **options):
    batch, loss = data_for(kind)
    loss = options.pop("loss_fn", loss)
    plan = par.Plan.parse(text)
    return par.verify(make(kind), batch, plan, loss, microbatches=microbatches, show=False, **options)


def error_of(call, *args, **options):
    try:
        call(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)
