"""Models that recompute by themselves (gradient_checkpointing_enable() of transformers), under every plan:
equal to one process.
"""

import functools

import pytest
import torch
from against_one import check_equal, planned, sgd
from models import Block
from odd_models import Plain, cross, tokens
from tiers import tier
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_ranks import spawn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_layers import GradientCheckpointingLayer

import pycomm.parallel as par


def llama():
    config = LlamaConfig(
        vocab_size=29, hidden_size=16, intermediate_size=20, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    return model


def reentrant():
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model


def gpt2():
    rates = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    config = GPT2Config(
        vocab_size=29, n_positions=8, n_embd=16, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0, **rates
    )
    model = GPT2LMHeadModel(config)
    model.gradient_checkpointing_enable()
    return model


def t5():
    config = T5Config(
        vocab_size=29, d_model=16, d_kv=8, d_ff=20, num_heads=2, num_layers=2, num_decoder_layers=2,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    model.gradient_checkpointing_enable()
    return model


def named(step):
    x, y = tokens(step)
    return {"input_ids": x}, y


def pairs(step):
    x, y = tokens(step)
    return {"input_ids": x, "decoder_input_ids": x.flip(1)}, y


def logits(out, y):
    return cross(out.logits, y)


PLANS = {
    2: ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "tp=2,megatron_sp", "ring=2", "ulysses=2", "pp=2"]
    + ["pp=2,schedule=zb-h1", "pp=2,schedule=zbv", "ring=2,checkpoint"],
    4: ["pp=2,ulysses=2,schedule=zb-h1", "dp=2,pp=2,zero=3", "ring=2,tp=2,megatron_sp"],
}


@tier(slow=1 / 4)
@pytest.mark.parametrize("world_size", PLANS)
@pytest.mark.parametrize("make", [llama, gpt2])
def test_equal_to_one_process(make, world_size):
    check_equal(make, *PLANS[world_size], batch=named, loss_fn=logits)


@tier(slow=1)
def test_a_reentrant_one():
    check_equal(reentrant, *PLANS[2][2:], batch=named, loss_fn=logits)


def test_t5():
    """The encoder is no part of the blocks, and its layers are recomputed, too."""
    check_equal(t5, "dp=2,zero=3,blocks=decoder.block", batch=pairs, loss_fn=logits)


class EarlyLayer(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self, x):
        return torch.tanh(self.lin(x))


class Early(Plain):
    """A layer in front of the blocks that is recomputed; the blocks are not."""

    def __init__(self):
        super().__init__(layers=4)
        self.tok = nn.Sequential(self.tok, EarlyLayer())
        self.tok[1].gradient_checkpointing = True
        self.tok[1]._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)


@tier(slow=1)
def test_a_layer_in_front_of_the_blocks():
    check_equal(
        Early, *(f"{text},blocks=blocks" for text in ("pp=2,schedule=zb-h1", "dp=2,zero=3", "ring=2"))
    )


class InnerBlock(Block):
    """Recomputes its attention itself."""

    reentrant = True

    def forward(self, x):
        x = x + checkpoint(self.attn, self.ln_1(x), use_reentrant=self.reentrant)
        return x + self.mlp(self.ln_2(x))


class Inner(Plain):
    def __init__(self):
        super().__init__(InnerBlock, 2)


class InnerOfNow(Inner):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.reentrant = False


@tier(quick=1 / 2)
@pytest.mark.parametrize("make", [Inner, InnerOfNow])
def test_checkpoints_inside_of_blocks(make):
    """Attention that is run again in backward is over the whole sequence, too."""
    check_equal(make, "ring=2", "ulysses=2", "dp=2,zero=3", "tp=2,megatron_sp", "pp=2", "ulysses=2,zero=3")


@tier(slow=1)
def test_checkpoints_inside_of_the_blocks_of_stages():
    check_equal(Inner, "pp=2,ring=2", "pp=2,ulysses=2,schedule=zb-h1", "dp=2,ring=2,zero=3")


class ByHand(Plain):
    def run_blocks(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def refused(rank, world_size, plan):
    with pytest.raises(ValueError, match="checkpoint in the model's own code .* use Plan.checkpoint=True"):
        planned(rank, world_size, ByHand, [plan], tokens, cross)


@pytest.mark.parametrize("plan", ["ring=2", "ulysses=2"])
def test_checkpoints_around_blocks_are_refused(plan):
    spawn(2, refused, plan, timeout=10.0)


def late(rank, world_size, text):
    """Switched on after parallelize(), off and on again."""
    torch.manual_seed(0)
    model = without().double()
    model, opt = par.parallelize(model, sgd(model), par.Plan.parse(text))
    par.evaluate(model, named(0), logits)  # and what is run aside in the first call
    block = model.model.layers[-1 if rank else 0].mlp
    calls, losses = [], []
    block.register_forward_pre_hook(lambda *_: calls.append(1))
    for turn in (lambda: None, model.gradient_checkpointing_enable, model.gradient_checkpointing_disable):
        turn()
        calls.clear()
        losses.append(par.step(model, opt, named(0), logits).item())
        losses.append(len(calls))
    return losses


def without():
    model = llama()
    model.gradient_checkpointing_disable()
    return model


@tier(quick=1 / 3)
@pytest.mark.parametrize("text", ["pp=2,schedule=zb-h1", "ulysses=2", "tp=2"])
def test_switched_after_parallelize(text):
    """A layer runs twice in a step while it is on, and the losses are those of one process."""
    model = without().double()
    torch.manual_seed(0)
    model = without().double()
    opt, right = sgd(model), []
    for _ in range(3):
        loss = logits(model(**named(0)[0]), named(0)[1])
        opt.zero_grad()
        loss.backward()
        opt.step()
        right.append(loss.item())
    for losses in spawn(2, late, text):
        assert losses[::2] == pytest.approx(right, rel=1e-9) and losses[1::2] == [1, 2, 1]


class OwnCheckpoint(Block):
    reentrant = False

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + checkpoint(self.mlp, self.ln_2(x), use_reentrant=self.reentrant)


class Reentrant(OwnCheckpoint):
    reentrant = True


@tier(slow=1)
@pytest.mark.parametrize("block", [OwnCheckpoint, Reentrant])
def test_inside_of_a_block_whose_weight_gradients_wait(block):
    check_equal(lambda: Plain(block, 4), "pp=2,schedule=zb-h1", "pp=2,schedule=zbv")
