"""Tensor parallelism of models of transformers and peft, unchanged, against one process: adapters, fused
projections in their layouts, Linears in two modules. That the layers are cut is asserted by what a rank
holds.
"""

import re

import equality
import pytest
import torch
from foreign_models import STEPS, alone, make, planned, step
from tiers import tier
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.parts import parts_of

LIMITS = {"mixtral": 1e-9, "qwen2-moe": 1e-9}  # the softmax of their routers, and its gradient, are in fp32
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
    ("bert", ["tp=3", "tp=3,megatron_sp"]),
    ("mixtral", ["tp=2", "tp=2,megatron_sp", "tp=2,zero=3"]),
    ("mixtral", ["dp=2,tp=2", "tp=2,pp=2"]),
    ("qwen2-moe", ["tp=2", "tp=2,megatron_sp"]),
]
# All that stays whole: norms, positions, biases of row layers, the factors of adapters that are not cut.
# Of mixtures of experts the router, and the gate of an expert that all tokens use.
ROW = r"(o_proj|down_proj|c_proj|attention\.dense|dense_4h_to_h|output\.dense)"
COLUMN = r"([qkv]_proj|gate_proj|up_proj|qkv_proj|c_attn|c_fc)"
WHOLE = re.compile(
    rf"norm|ln_|position|wpe|token_type|{ROW}(\.base_layer)?\.bias|{ROW}\.lora_B|{COLUMN}\.lora_A"
    r"|cls\.predictions\.transform|mlp\.gate\.|shared_expert_gate",
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


def cases():
    """The first of a model; the others are deep, as are models of which another test has a case."""
    seen = {"bert", "mixtral", "qwen2-moe"}
    for kind, texts in CASES:
        yield pytest.param(kind, texts, marks=[pytest.mark.deep] * (kind in seen))
        seen.add(kind)


@tier(quick=1 / 12)
@pytest.mark.parametrize("kind, texts", list(cases()), ids=lambda value: str(value)[:40])
def test_equal_to_one_process(kind, texts):
    (losses, parameters), limit = expected(kind), LIMITS.get(kind, 1e-11)
    world_size = par.Plan.parse(texts[0]).world_size
    for found in spawn(world_size, train, kind, texts):
        for text, (own_losses, state, layouts) in zip(texts, found, strict=True):
            assert equality.relative(own_losses, losses) < limit, text
            for name, value in parameters.items():
                assert equality.relative(state[name], value) < limit, (text, name)
            for name, layout in layouts.items():
                assert (held(layout) == 1) if WHOLE.search(name) else (held(layout) < 0.6), (text, name)


def save_one(rank, world_size, kind, text, folder):
    model, opt = planned(kind, text)
    losses = [step(model, opt, 0)]
    par.save(model, opt, folder)
    return losses


def load_one(rank, world_size, kind, text, folder):
    model, opt = planned(kind, text)
    par.load(model, opt, folder)
    return [step(model, opt, 1)], par.full_state_dict(model)


@tier(quick=1 / 5, slow=1 / 2)
@pytest.mark.parametrize(
    "kind, saved, loaded",
    [
        ("LoRA", "tp=3", "pp=2"),
        ("phi3", "tp=2,zero=1", ""),
        ("neox", "dp=2", "tp=4"),
        ("mixtral", "tp=3", "dp=2,zero=3"),
        ("bert", "", "tp=2,megatron_sp"),
    ],
)
def test_checkpoints_between_plans(tmp_path, kind, saved, loaded):
    (losses, parameters), limit = expected(kind), LIMITS.get(kind, 1e-11)
    folder = str(tmp_path / "checkpoint")
    for found in run(saved, save_one, kind, folder):
        assert equality.relative(found, losses[:1]) < limit
    for found, state in run(loaded, load_one, kind, folder):
        assert equality.relative(found, losses[1:]) < limit
        for name, value in parameters.items():
            assert equality.relative(state[name], value) < limit, name


def run(text, body, kind, folder):
    return spawn(par.Plan.parse(text).world_size, body, kind, text, folder)


def pretrained(rank, world_size, kind, text, folder):
    model, opt = planned(kind, text)
    step(model, opt, 0)
    model.save_pretrained(folder)
    return par.full_state_dict(model)


@tier(quick=1 / 3)
@pytest.mark.parametrize("kind", ["phi3", "neox", "mixtral"])
def test_files_of_one_process(tmp_path, kind):
    for state in run("tp=2", pretrained, kind, str(tmp_path)):
        loaded = type(make(kind)).from_pretrained(tmp_path, dtype=torch.float64)
        for name, value in loaded.named_parameters():
            assert torch.equal(value, state[name]), name


def test_files_of_an_adapter(tmp_path):
    for state in run("tp=2", pretrained, "LoRA", str(tmp_path)):
        from safetensors.torch import load_file

        saved = load_file(tmp_path / "adapter_model.safetensors")
        assert len(saved) == sum("lora_" in name for name in state)
        for name, value in saved.items():
            assert torch.equal(value, state[name.replace(".weight", ".default.weight")]), name


def with_dropout(rank, world_size):
    model, opt = planned("LoRA with dropout", "tp=2")
    drawn = {}

    def note(name, result):
        drawn.setdefault(name, result.detach() != 0)

    for name, module in model.named_modules():
        if "lora_dropout.default" in name:
            module.register_forward_hook(lambda m, x, y, name=name: note(name, y))
    losses = [step(model, opt, number) for number in range(STEPS)]
    return losses, drawn, par.full_state_dict(model)


def test_dropout_of_adapters():
    """Before a factor that is whole all ranks draw the same mask, before one that is cut each its own; what
    the ranks hold alike stays alike.
    """
    (losses, drawn, state), other = spawn(2, with_dropout)
    assert losses == other[0] and len(drawn) == 14
    for name, mask in drawn.items():
        same = mask.shape == other[1][name].shape and torch.equal(mask, other[1][name])
        assert same == (re.search(ROW, name) is None), name
    for name, value in state.items():
        assert torch.equal(value, other[2][name]), name


REASONS = {
    "DoRA": "attention: the adapter of .*q_proj is of the kind DoraLinearVariant",
    "LoRA with a bias": "mlp: lora_B of .*fc2 has a bias",
    "gates apart": "mlp: cannot be run alone|mlp: computes something else",
}


def described(rank, world_size, kind):
    model, opt = planned(kind, "tp=2")
    return [step(model, opt, number) for number in range(STEPS)], str(par.describe(model))


@tier(quick=1 / 3)
@pytest.mark.parametrize("kind", REASONS)
def test_what_stays_whole_says_why(kind):
    losses, _ = expected(kind)
    for found, text in spawn(2, described, kind):
        assert equality.relative(found, losses) < 1e-11
        assert re.search(REASONS[kind], text), text


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(12, 3, 10, dropout=0.4, batch_first=True)
        self.tok, self.head = torch.nn.Embedding(19, 12), torch.nn.Linear(12, 19)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids):
        return self.head(self.encoder(self.tok(ids)))


def uneven_heads(rank, world_size):
    torch.manual_seed(0)
    model = Encoder()
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), par.Plan(tp=2))
    ids = torch.arange(35).reshape(5, 7) % 19
    loss = lambda out, y: torch.nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
    for _ in range(STEPS):
        par.step(model, opt, (ids, ids), loss)
    return {name: value.detach() for name, value in model.named_parameters() if "norm" in name}


def test_ranks_with_unequal_heads_draw_the_same_masks_outside():
    """Two heads of torch's attention draw more numbers than one."""
    one, other = spawn(2, uneven_heads)
    assert len(one) == 8 and all(torch.equal(value, other[name]) for name, value in one.items())
