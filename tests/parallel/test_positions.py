"""The sequence axis off against on: what is refused, what trains, and what nobody can tell."""

import functools
import logging

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from left_behind import differences, held
from models import Block
from odd_models import Plain, cross, tokens
from positions_models import (
    NO_DROPOUT,
    Asleep,
    Average,
    Between,
    Convolution,
    Draws,
    Kept,
    Positions,
    Shift,
    by_length,
    mean,
)
from tiers import tier
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm import CommError
from pycomm.parallel.ground.answers import Answers
from pycomm.parallel.parts import parts_of

PLANS = ["ring=2", "ulysses=2", "tp=2,megatron_sp", "ring=2,zero=3", "dp=2,ring=2", "pp=2,ring=2"]
MORE_PLANS = ["tp=2,ring=2,megatron_sp", "dp=2,tp=2,zero=3,megatron_sp", "pp=2,ring=2,schedule=zbv"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NOT_DEEP = {  # one type of a plan, and one plan of a kind
    **dict.fromkeys(["ring=2", "ulysses=2", "ring=2,zero=3"], "fp32"),
    **dict.fromkeys(["tp=2,megatron_sp", "pp=2,ring=2"], "bf16"),
}
LOOKS_AROUND = {
    **{
        name: functools.partial(Plain, block, 4)
        for name, block in (
            ("convolution", Convolution),
            ("shift", Shift),
            ("positions", Positions),
            ("average", Average),
            ("asleep", Asleep),
        )
    },
    "mean between": functools.partial(Between, mean, 2),
    "length between": functools.partial(Between, by_length, 2),
    "mean behind": functools.partial(Between, mean, 4),
    "length behind": functools.partial(Between, by_length, 4),
}
# In front of a norm: what moves there is 0.9% of a position, by the norm's eps.
IN_32_BITS_ONLY = {"length behind"}


def with_number(out, targets):
    return cross(out[0], targets) + out[1]


def answer(make, text, dtype, loss_fn, batch):
    """What the check says: the error, or the state."""
    torch.manual_seed(0)
    model = make().to(dtype)
    par.parallelize(model, None, par.Plan.parse(text))
    try:
        par.evaluate(model, batch, loss_fn)
    except ValueError as error:
        return str(error)
    return parts_of(model).checks.of["positions"].state.value


def answers(rank, world_size, cases, text, dtype, loss_fn=cross):
    return {name: answer(make, text, dtype, loss_fn, tokens(0)) for name, make in cases.items()}


@tier(quick=1 / 4)
@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        pytest.param(
            text, dtype, marks=[pytest.mark.deep] * (NOT_DEEP.get(text) != name), id=f"{text}-{name}"
        )
        for text in PLANS + MORE_PLANS
        for name, dtype in DTYPES.items()
    ],
)
def test_what_looks_at_other_positions_is_refused(text, dtype):
    cases = {**LOOKS_AROUND, "plain": functools.partial(Plain, layers=4)}
    found = spawn(par.Plan.parse(text).world_size, answers, cases, text, dtype)
    held = {"plain"} | (IN_32_BITS_ONLY if dtype == torch.bfloat16 else set())
    for name, said in found[-1].items():
        assert (said == "held") if name in held else "does not compute from pieces" in said, (name, said)


@tier(quick=1 / 3)
@pytest.mark.parametrize("text", ["ring=2", "ulysses=2", "tp=2,megatron_sp"])
def test_a_number_that_blocks_keep_is_refused(text):
    for found in spawn(2, answers, {"kept": Kept}, text, torch.float32, with_number):
        assert "the loss differs by" in found["kept"] or "cannot be put together" in found["kept"], found


def noted(rank, world_size, make, text, loss_fn, train):
    """(the state, why, the warnings) after two calls."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("pycomm.parallel").addHandler(handler)
    torch.manual_seed(0)
    model = make()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    par.parallelize(model, opt, par.Plan.parse(text))
    for _ in range(2):
        par.step(model, opt, tokens(0), loss_fn) if train else par.evaluate(model, tokens(0), loss_fn)
    state, why = parts_of(model).checks.of["positions"]
    return state.value, why, [text for text in said if "positions was not tried" in text]


def test_what_draws_in_eval_mode_is_not_tried_and_told_once():
    first, second = spawn(2, noted, Draws, "ring=2", cross, False)
    for state, why, _ in (first, second):
        assert state == "not tried" and "random numbers in eval mode" in why
    assert len(first[2]) == 1 and "par.verify" in first[2][0] and second[2] == []


def of_many_rows(out, targets):
    if len(out) < 4:
        raise ValueError("four rows at least")
    return cross(out, targets)


def test_a_loss_of_many_rows_is_not_tried():
    for state, why, _ in spawn(2, noted, Plain, "ring=2", of_many_rows, False):
        assert state == "not tried" and "four rows at least" in why


class Alone(Plain):
    """Rank 1 alone raises, on pieces."""

    class Block(Block):
        def forward(self, x):
            if dist.get_rank() == 1 and x.shape[1] < tokens(0)[0].shape[1]:
                raise KeyError("of rank 1")
            return super().forward(x)

    def __init__(self):
        super().__init__(self.Block)


def raised(rank, world_size, text):
    with pytest.raises((KeyError, CommError)) as caught:
        noted(rank, world_size, Alone, text, cross, False)
    return caught.type, str(caught.value)


@pytest.mark.parametrize("text", ["ulysses=2", "tp=2,megatron_sp"])
def test_a_rank_that_raises_alone_lets_none_wait(text):
    others, own = spawn(2, raised, text)
    assert own[0] is KeyError and issubclass(others[0], CommError), (own, others)
    assert "Rank 1 had raised KeyError: 'of rank 1'" in others[1], others


def gpt2(**dropout):
    config = {"vocab_size": 29, "n_embd": 16, "n_layer": 2, "n_head": 2, **NO_DROPOUT, **dropout}
    return hf.GPT2LMHeadModel(hf.GPT2Config(bos_token_id=None, eos_token_id=None, **config)).train()


def logits_cross(out, targets):
    return cross(out.logits, targets)


@tier(quick=1 / 3)
@pytest.mark.parametrize("text", ["ring=2", "ulysses=2", "tp=2,megatron_sp"])
def test_dropout_of_activations_trains(text):
    make = functools.partial(gpt2, resid_pdrop=0.1, embd_pdrop=0.1)
    assert [found[0] for found in spawn(2, noted, make, text, logits_cross, True)] == ["held"] * 2


def dropped(rank, world_size, text):
    with pytest.raises(ValueError, match="dropout of attention weights") as caught:
        noted(rank, world_size, functools.partial(gpt2, attn_pdrop=0.1), text, logits_cross, True)
    return str(caught.value)


@tier(quick=1 / 2)
@pytest.mark.parametrize("text", ["ring=2", "ulysses=2"])
def test_dropout_of_attention_weights_is_refused_by_name(text):
    assert all("dropout_p=0.1" in found for found in spawn(2, dropped, text))


class Writes(Plain):
    """Its blocks count their calls in several ways, hang a hook on themselves, and begin with zeros."""

    class Block(Block):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.calls, self.lengths, self.is_hooked = 0, [], False
            self.register_buffer("total", torch.zeros(()))
            torch.nn.init.zeros_(self.mlp[2].weight)

        def forward(self, x):
            if not self.is_hooked:
                self.ln_1.register_forward_hook(lambda *_: self.lengths.append(len(self.lengths)))
                self.is_hooked = True
            self.calls += 1
            self.total += 1
            return super().forward(x * (1 + 0.01 * (self.calls + len(self.lengths) + self.total)))

    def __init__(self):
        super().__init__(self.Block)


def trained(text):
    """What three steps leave."""
    torch.manual_seed(0)
    model = Writes()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    par.parallelize(model, opt, par.Plan.parse(text))
    losses = [par.step(model, opt, tokens(0), cross, microbatches=2).item() for _ in range(3)]
    here = {
        name: each for name, each in model.named_modules() if not any(p.is_meta for p in each.parameters())
    }
    values = {name: value.clone() for name, value in par.full_state_dict(model).items()}
    return losses, values, {name: held(each) for name, each in here.items()}, torch.get_rng_state()


def compared(rank, world_size, text):
    outcomes = []
    for Answers.asks in (False, True):
        outcomes.append(trained(text))
    return differences(*outcomes)


@tier(quick=1 / 3)
@pytest.mark.parametrize("text", PLANS)
def test_the_check_changes_nothing(text):
    assert not any(spawn(par.Plan.parse(text).world_size, compared, text))
