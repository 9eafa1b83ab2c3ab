"""Tensor parallelism of models of transformers and peft, unchanged, against one process: adapters, fused
projections in their layouts, Linears in two modules. That the layers are cut is asserted by what a rank
holds.
"""

import re

import equality
import pytest
import torch
from foreign_models import STEPS, alone, planned, step
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.parts import parts_of

LIMIT = 1e-11
CASES = [  # model, plans of one number of ranks
    ("LoRA", ["tp=2", "tp=2,megatron_sp", "tp=2,zero=1"]),
    ("LoRA", ["tp=3", "tp=3,megatron_sp,checkpoint"]),
    ("LoRA", ["tp=2,pp=2,schedule=zb-h1", "dp=2,tp=2,zero=3"]),
    ("LoRA in part", ["tp=2", "tp=2,megatron_sp"]),
    ("LoRA of Conv1D", ["tp=2", "tp=2,megatron_sp"]),
    ("LoRA of phi3", ["tp=3", "tp=3,megatron_sp"]),
    ("phi3", ["tp=2", "tp=2,megatron_sp"]),
    ("phi3", ["tp=3", "tp=3,megatron_sp"]),
    ("neox", ["tp=2", "tp=2,megatron_sp"]),
    ("neox", ["tp=4", "tp=2,pp=2", "tp=4,megatron_sp"]),
    ("bloom", ["tp=2", "tp=2,megatron_sp"]),
    ("bert", ["tp=2", "tp=2,zero=3"]),
    ("bert", ["tp=3"]),
]
# All that stays whole: norms, positions, biases of row layers, the factors of adapters that are not cut.
ROW = r"(o_proj|down_proj|c_proj|attention\.dense|dense_4h_to_h|output\.dense)"
COLUMN = r"([qkv]_proj|gate_proj|up_proj|qkv_proj|c_attn|c_fc)"
WHOLE = re.compile(
    rf"norm|ln_|position|wpe|token_type|{ROW}(\.base_layer)?\.bias|{ROW}\.lora_B|{COLUMN}\.lora_A"
    r"|cls\.predictions\.transform",
    re.I,
)


@pytest.fixture(autouse=True, scope="module")
def keep_dtype():
    """bloom's softmax is in fp32 whatever it is given."""
    own = torch.nn.functional.softmax
    torch.nn.functional.softmax = lambda x, dim=None, dtype=None, **rest: own(x, dim, **rest)
    yield
    torch.nn.functional.softmax = own


def train(rank, world_size, kind, texts):
    found = []
    for text in texts:
        model, opt = planned(kind, text)
        layouts = parts_of(model).tensor.layouts
        losses = [step(model, opt, number) for number in range(STEPS)]
        found.append((losses, par.full_state_dict(model), layouts))
    return found


_alone = {}


def expected(kind):
    if kind not in _alone:
        _alone[kind] = alone(kind)
    return _alone[kind]


def held(layout):
    """The share of a parameter that a rank has."""
    if layout.dim is None:
        return 1.0
    return sum(stop - start for start, stop in layout.ranges) / layout.full_shape[layout.dim]


@pytest.mark.parametrize("kind, texts", CASES, ids=lambda value: str(value)[:40])
def test_equal_to_one_process(kind, texts):
    losses, parameters = expected(kind)
    world_size = par.Plan.parse(texts[0]).world_size
    for found in spawn(world_size, train, kind, texts):
        for text, (own_losses, state, layouts) in zip(texts, found, strict=True):
            assert equality.relative(own_losses, losses) < LIMIT, text
            for name, value in parameters.items():
                assert equality.relative(state[name], value) < LIMIT, (text, name)
            for name, layout in layouts.items():
                assert (held(layout) == 1) if WHOLE.search(name) else (held(layout) < 0.6), (text, name)
