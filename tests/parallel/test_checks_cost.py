"""What the checks cost where all holds: forwards, their length, calls of loss_fn, collectives, memory. It is
what the first step has more than a later one.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par

OF_ROWS, OF_POSITIONS, LOSSES_MORE, COLLECTIVES = 5, 2, 7, 2  # more in the first step
TOKENS = 1024  # of a short forward
MEMORY = 1.1  # the peak of the first step over that of a later one
PLANS = {
    "": OF_ROWS,
    "dp=2": OF_ROWS,
    "dp=2,zero=1": OF_ROWS,
    "dp=2,zero=3": OF_ROWS,
    "tp=2": OF_ROWS,
    "pp=2": OF_ROWS,
    "tp=2,megatron_sp": OF_ROWS + OF_POSITIONS,
    "ring=2": OF_ROWS + OF_POSITIONS,
    "ulysses=2": OF_ROWS + OF_POSITIONS,
    "pp=2,ring=2": OF_ROWS + OF_POSITIONS,
    "dp=2,ring=2,zero=3": OF_ROWS + OF_POSITIONS,
}
LOSSES = []  # a call each


class Step(NamedTuple):
    """Of one step on one rank. forwards: {MLP of a block: tokens of each of its calls}."""

    forwards: dict[str, list[int]]
    losses: int
    collectives: int


def llama(**sizes: int) -> nn.Module:
    small = {"vocab_size": 41, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**small, **heads, **sizes}))


def batch(rows: int, length: int, vocabulary: int = 41) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids, targets = (torch.randint(1, vocabulary, (rows, length), generator=generator) for _ in range(2))
    return ids, targets.masked_fill(torch.rand(rows, length, generator=generator) < 0.3, -100)


def cross(out: Any, targets: torch.Tensor) -> torch.Tensor:
    LOSSES.append(1)
    return F.cross_entropy(out.logits.flatten(0, 1).float(), targets.flatten())


@contextmanager
def counted(model: nn.Module) -> Iterator[dict[str, list[int]]]:
    """By a hook of torch's own, which no check of a model's hooks puts back. Not what a stage runs for shapes
    alone.
    """
    names = {id(each): name for name, each in model.named_modules() if name.endswith("mlp.down_proj")}
    found = {}

    def note(module: nn.Module, args: tuple) -> None:
        if id(module) in names and type(args[0]) is torch.Tensor and not args[0].is_meta:
            found.setdefault(names[id(module)], []).append(args[0].shape[0] * args[0].shape[1])

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def steps(rank: int, world_size: int, text: str, rows: int, length: int, options: dict) -> list[Step]:
    torch.manual_seed(0)
    model = llama()
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), text)
    found = []
    for _ in range(3):
        LOSSES.clear()
        with counted(model) as forwards, par.count_traffic() as traffic:
            par.step(model, opt, batch(rows, length), cross, **options)
        found.append(Step(forwards, len(LOSSES), traffic.calls()))
    assert par.describe(model).checks["rows"] == "held"
    return found


def of_all(text: str, rows: int, length: int, **options: Any) -> Iterator[tuple[Step, Step]]:
    """(the first step, a later one) of each rank."""
    for first, second, third in spawn(par.Plan.parse(text).world_size, steps, text, rows, length, options):
        assert second == third and second.forwards, "later steps are alike"
        yield first, second


def asides(first: Step, later: Step) -> Iterator[list[int]]:
    """Of each block the tokens of the forwards that the first step has more: they come before its passes."""
    for name, calls in later.forwards.items():
        assert first.forwards[name][-len(calls) :] == calls
        yield first.forwards[name][: -len(calls)]


@tier(quick=1 / 11, slow=1 / 3)
@pytest.mark.parametrize("text", PLANS)
def test_forwards_and_calls_of_the_loss(text: str) -> None:
    most, asked = PLANS[text], 0
    for first, later in of_all(text, 8, 16, microbatches=2):
        assert all(0 < len(calls) <= most for calls in asides(first, later)), (first, later)
        if most == OF_ROWS:
            assert first.losses - later.losses <= LOSSES_MORE, (first, later)
        asked += first.losses - later.losses
    assert asked, "somewhere the loss is asked"


@tier(slow=1 / 4)
@pytest.mark.parametrize("text", ["dp=2", "ring=2", "ulysses=2", "tp=2,megatron_sp"])
def test_forwards_are_short(text: str) -> None:
    """However long a sequence is."""
    for first, later in of_all(text, 4, 700, microbatches=2):
        for calls in asides(first, later):
            assert max(calls) <= TOKENS, calls


@tier(quick=1 / 6, slow=1 / 2)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("text", ["dp=2", "dp=2,zero=1", "dp=2,zero=2"])
def test_collectives_under_dp(text: str, sharded: bool) -> None:
    for first, later in of_all(text, 8, 16, microbatches=2, sharded=sharded):
        assert 0 < first.collectives - later.collectives <= COLLECTIVES, (first, later)


# Memory ------------------------------------------------------------------------------

WIDE = {"vocab_size": 4096, "hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 10}
PARAMETERS = 50e6


def peaks(rank: int, world_size: int, text: str) -> list[int]:
    """The most that this process has held in each of three steps. The optimizer has no state, which the first
    step would begin without.
    """
    model = llama(**WIDE)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(PARAMETERS, rel=0.05)
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), text)
    given, found = batch(8, 48, WIDE["vocab_size"]), []
    for _ in range(3):
        with open("/proc/self/clear_refs", "w") as mark:
            mark.write("5")  # the peak begins anew
        par.step(model, opt, given, cross, microbatches=2)
        with open("/proc/self/status") as status:
            found.append(int(re.search(r"VmHWM:\s+(\d+) kB", status.read())[1]) * 1024)
    assert par.describe(model).checks["rows"] == "held"
    return found


@tier(slow=1 / 5)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("text", ["", "dp=2", "dp=2,zero=3", "tp=2", "ring=2"])
def test_peak_of_the_first_step(text: str) -> None:
    for first, *later in spawn(par.Plan.parse(text).world_size, peaks, text, timeout=300.0, limit=900):
        assert first <= MEMORY * max(later), (first, later)
