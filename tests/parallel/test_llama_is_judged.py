"""A Llama of transformers with 4 rows or more: every assumption is tried and held, under every plan, and
no WARNING is logged.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from tiers import tier
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.checks import assumptions_of

VOCABULARY = 41
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

ONE = ["", "checkpoint", "precision=bf16"]
TWO = [
    "dp=2",
    "dp=2,checkpoint",
    "dp=2,grad_sync=naive",
    "dp=2,compression=bf16",
    "dp=2,precision=bf16",
    "dp=2,compare_every=1",
    "dp=2,zero=1",
    "dp=2,zero=1,offload=optimizer",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "dp=2,zero=3,checkpoint",
    "dp=2,zero=3,precision=bf16",
    "dp=2,zero=3,offload=parameters",
    "tp=2",
    "tp=2,checkpoint",
    "tp=2,megatron_sp",
    "tp=2,megatron_sp,precision=bf16",
    "ring=2",
    "ring=2,checkpoint",
    "ring=2,precision=bf16",
    "ring=2,zigzag=false",
    "ring=2,zero=1",
    "ring=2,zero=2",
    "ring=2,zero=3",
    "ulysses=2",
    "ulysses=2,checkpoint",
    "ulysses=2,precision=bf16",
    "ulysses=2,zero=3",
    "pp=2,schedule=gpipe",
    "pp=2,schedule=1f1b",
    "pp=2,schedule=interleaved",
    "pp=2,schedule=zb-h1",
    "pp=2,schedule=zbv",
    "pp=2,schedule=pipedream",
    "pp=2,precision=bf16",
    "pp=2,checkpoint",
    "pp=2,stages=3:1",
]
FOUR = [
    "dp=4",
    "dp=4,zero=3",
    "pp=4",
    "dp=2,tp=2",
    "dp=2,tp=2,zero=3",
    "dp=2,tp=2,zero=2,megatron_sp",
    "dp=2,tp=2,zero=3,megatron_sp",
    "dp=2,ring=2",
    "dp=2,ring=2,zero=3",
    "dp=2,ulysses=2",
    "dp=2,ulysses=2,zero=3",
    "dp=2,pp=2",
    "dp=2,pp=2,zero=1,schedule=zb-h1",
    "dp=2,pp=2,zero=2,schedule=interleaved",
    "dp=2,pp=2,zero=3,schedule=zbv",
    "tp=2,pp=2",
    "tp=2,pp=2,megatron_sp",
    "tp=2,ring=2",
    "tp=2,ring=2,megatron_sp",
    "tp=2,ulysses=2",
    "tp=2,ulysses=2,megatron_sp",
    "pp=2,ring=2",
    "pp=2,ring=2,schedule=zbv",
    "pp=2,ulysses=2",
    "ring=2,ulysses=2",
    "ring=4",
]
EIGHT = ["dp=2,tp=2,pp=2,zero=3", "dp=2,ring=2,ulysses=2", "tp=2,pp=2,ring=2,megatron_sp"]
WITH_EXPERTS = ["ep=2", "ep=2,zero=3", "ep=2,pp=2", "ep=2,tp=2", "ep=2,ring=2", "dp=2,ep=2"]


def llama() -> torch.nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))


def mixtral() -> torch.nn.Module:
    """Llama's blocks with experts, for the plans that deal these."""
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))


class Call(NamedTuple):
    """A step. rows, length: of the batch."""

    rows: int
    length: int
    shifts: bool = False  # in loss_fn; else it is the model's own loss
    sharded: bool = False


# The fewest rows; numbers that ranks and microbatches do not divide; more positions than the checks run.
CALLS = [Call(4, 8), Call(9, 70), Call(7, 9, shifts=True, sharded=True)]


def batch(call: Call) -> dict[str, torch.Tensor]:
    """Labels as a collator gives them: the inputs, some of which count nothing."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (call.rows, call.length), generator=generator)
    ignored = torch.rand(ids.shape, generator=generator) < 0.3
    return {"input_ids": ids, "labels": ids.masked_fill(ignored, -100)}


def shifting(out: Any, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def in_place(out: Any, labels: torch.Tensor) -> torch.Tensor:
    """Where a rank has a piece of each sequence it cannot shift."""
    return F.cross_entropy(out.logits.flatten(0, 1).float(), labels.flatten())


def judged(
    rank: int, world_size: int, make: Callable[[], torch.nn.Module], text: str, dtype: torch.dtype
) -> tuple[dict, list[str]]:
    """({(what was called, assumption): what describe() says}, the warnings)"""
    said, found = [], {}
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("pycomm.parallel").addHandler(handler)
    plan = par.Plan.parse(text)
    for call in CALLS:
        torch.manual_seed(0)
        model = make().to(dtype)
        model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), plan)
        loss_fn, options = None, {"microbatches": 2, "sharded": call.sharded}
        if call.shifts:
            loss_fn = in_place if plan.ring * plan.ulysses > 1 else shifting
        par.step(model, opt, batch(call), loss_fn, **options)
        note(found, model, call, "step")
        model.eval()
        par.evaluate(model, batch(call), loss_fn, **options)
        note(found, model, call, "evaluate")
        par.predict(model, batch(call), microbatches=2)
        note(found, model, call, "predict")
    return found, said


def note(found: dict, model: torch.nn.Module, *key: Any) -> None:
    parts = par.describe(model)
    for each in assumptions_of(parts.plan):
        if each.is_experiment:
            found[(*key, each.name)] = parts.checks[each.name]


def check(make: Callable[[], torch.nn.Module], text: str, kind: str) -> None:
    for found, warnings in spawn(par.Plan.parse(text).world_size, judged, make, text, DTYPES[kind]):
        wrong = {key: said for key, said in found.items() if not said.startswith("held")}
        assert not wrong and not warnings, (wrong, warnings)


QUICK = [("dp=2,zero=3", "bf16"), ("ring=2", "fp32")]
SLOW = [
    ("pp=2,schedule=1f1b", "bf16"),
    ("dp=2,precision=bf16", "fp32"),
    ("tp=2,megatron_sp", "bf16"),
    ("ulysses=2,zero=3", "bf16"),
]


def marked(*case: str) -> Any:
    if case in QUICK:
        return case
    return pytest.param(*case, marks=pytest.mark.slow if case in SLOW else pytest.mark.deep)


@pytest.mark.parametrize(
    ("text", "kind"), [marked(text, kind) for text in (*ONE, *TWO, *FOUR, *EIGHT) for kind in DTYPES]
)
def test_every_assumption_is_tried_and_held(text: str, kind: str) -> None:
    check(llama, text, kind)


@tier(slow=1 / 12)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("text", WITH_EXPERTS)
def test_with_experts(text: str, kind: str) -> None:
    check(mixtral, text, kind)
