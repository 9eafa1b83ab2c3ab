"""What tensor parallelism asks of modules before it cuts anything, and what it finds: without ranks."""

import pytest
import torch
from tensor_models import Experts, FusedAttention, FusedGrouped, Gpt, Low
from torch import nn

from pycomm.groups import Group
from pycomm.parallel.tensor import experts, modules, parallelize_tensor
from pycomm.parallel.tensor.adapters import factors_of
from pycomm.parallel.tensor.find import find
from pycomm.parallel.tensor.sublayers import Unfit
from pycomm.parallel.tensor.tables import is_table


def group(size, rank):
    return Group("tp", size, rank, None)


# Questions ------------------------------------------------------------


class Own(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    "function, expected",
    [
        (nn.Dropout(0.9), True),
        (nn.PReLU(), False),  # has a parameter
        (torch.relu, True),
        (Own(torch.sign), True),
        (Own(lambda x: x.cumsum(-1)), False),
        (Own(lambda x: x.flip(-1)), False),
        (Own(lambda x: x.cummax(-1)[0]), False),
        (Own(lambda x: x * x[..., :1]), False),
        (Own(lambda x: x[..., :2]), False),
        (Own(lambda x: x + x.shape[-1]), False),
        (Own(lambda x: x.mean(-1, keepdim=True)), False),
        (Own(lambda x: x.view(3, 4)), False),
        (Own(lambda x: x.nothing), False),
    ],
)
def test_what_is_elementwise(function, expected):
    assert modules.is_elementwise(function) is expected


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, True),
        ({"padding_idx": 2}, True),
        ({"max_norm": 1.0}, False),
        ({"scale_grad_by_freq": True}, False),
        ({"sparse": True}, False),
    ],
)
def test_what_is_a_table(options, expected):
    assert is_table(nn.Embedding(5, 3, **options)) is expected and not is_table(nn.Linear(2, 2))


def adapters(is_row=False, **options):
    """The names of a pair of layers of which one has an adapter."""
    layers = [nn.Linear(6, 7), Low(7, 6, **options)] if is_row else [Low(6, 7), nn.Linear(7, 6)]
    model = nn.Sequential(*layers)
    return dict(model.named_modules()), ("0",), "1"


def test_factors_that_all_ranks_hold():
    assert factors_of(*adapters()) == ("0.lora_A.default.weight",)
    assert factors_of(*adapters(is_row=True)) == ("1.lora_B.default.weight",)
    with pytest.raises(Unfit, match="lora_B of 1 has a bias"):
        factors_of(*adapters(is_row=True, bias=True))
    for is_row, change, why in (
        (False, {"lora_variant": {"default": object()}}, "0 is of the kind object, not plain LoRA"),
        (True, {"lora_magnitude_vector": {"default": 1}}, "1 looks at the whole weight"),
    ):
        named, columns, row = adapters(is_row)
        vars(named["1" if is_row else "0"]).update(change)
        with pytest.raises(Unfit, match=why):
            factors_of(named, columns, row)
    named, columns, row = adapters()
    named["0"].lora_B["default"] = nn.Sequential(nn.Linear(2, 7))
    with pytest.raises(Unfit, match="0 is not made of Linear layers"):
        factors_of(named, columns, row)


@pytest.mark.parametrize(
    "kernel, features, parts, why",
    [
        (None, 7, 2, None),
        ("eager", 7, 2, None),
        ("grouped_mm", 8, 2, None),
        ("grouped_mm", 8, 3, "8 features over 3 ranks, and grouped_mm needs parts of whole multiples of 4"),
        ("grouped_mm", 16, 3, "16 features over 3 ranks"),
        ("grouped_mm", 20, 2, "20 features over 2 ranks"),
        ("grouped_mm", 24, 3, None),
    ],
)
def test_kernels_of_experts_that_take_parts(kernel, features, parts, why):
    found = experts.misfit(Experts(kernel, features), parts)
    assert found is None if why is None else why in found


def test_experts_of_other_kinds_stay_whole():
    for change in ({"has_bias": True}, {"is_transposed": True}, {"has_gate": False}, {"has_bias": None}):
        module = Experts()
        vars(module).update(change)
        with pytest.raises(Unfit, match="its weights lie otherwise"):
            experts.check_experts(module)

    odd = Experts()
    odd.gate_up_proj = nn.Parameter(torch.ones(3, 7, 4))
    with pytest.raises(Unfit, match=r"shapes \(3, 7, 4\) and \(3, 4, 7\) are not those of gates"):
        experts.check_experts(odd)

    class Squared(Experts):
        def forward(self, *given):
            return super().forward(*given) ** 2

    with pytest.raises(Unfit, match="computes something else in parts"):
        experts.check_experts(Squared())


RULES = [  # rules, and what is said of what they name
    ({"wte": "replicate", "h*": "replicate"}, {"h": "replicate", "h.0.attn": None, "lm_head": "replicate"}),
    ({"h.0.attn": "replicate"}, {"h.0.attn": "replicate", "h.0.mlp": "mlp", "h.0.attn.c_attn": None}),
    ({"h.0.attn.c_attn": "column"}, {"h.0.attn": None, "h.0.attn.c_attn": "column", "wte": "vocab"}),
    ({"h.0.mlp.c_fc": "column", "h.0.mlp.c*": "row"}, {"h.0.mlp": None, "h.0.mlp.c_fc": "column"}),
    ({"h.0.mlp": "tokens"}, {"h.0.mlp": "tokens", "h.0.mlp.c_fc": None, "h.0.attn": "attention"}),
    ({"h.0.mlp": "mlp", "h.0": "replicate"}, {"h.0": "replicate", "h.0.mlp": "mlp", "h.0.attn": None}),
    ({"h.0": "replicate", "h.0.mlp": "mlp"}, {"h.0.mlp": "mlp", "h.0.ln_1": None}),
    ({"lm_head": "column"}, {"wte": None, "lm_head": "column"}),
    ({"wte": "vocab", "lm_head": "replicate"}, {"wte": "vocab", "lm_head": "replicate"}),
]


@pytest.mark.parametrize("rules, expected", RULES)
def test_what_rules_say(rules, expected):
    found = {line.fqn: line.rule for line in find(Gpt(layers=1, tied=False), rules=rules, blocks="h").found}
    assert {name: found.get(name) for name in expected} == expected


class Asking(FusedGrouped):
    """Asks for what transformers' attentions are given; `given` has the names of what is used."""

    def __init__(self):
        super().__init__(20, 5, 5, 4, by_head=True)

    def forward(self, x, residual, attention_mask, alibi, layer_past=None, position_embeddings=None):
        assert attention_mask is None and layer_past is None
        heads = self.num_heads  # of the rank
        slopes = alibi.unflatten(0, (-1, heads)).mean((2, 3))  # (rows, heads)
        cos, sin = position_embeddings
        shift = (cos * sin).mean() + slopes.sum() * 0
        return super().forward(x) * (1 + shift) + residual * 0


def test_an_attention_that_asks_for_more_is_tried():
    done = parallelize_tensor(nn.ModuleDict({"attn": Asking()}), group(2, 1))
    assert done.layouts["attn.query_key_value.weight"].ranges == ((36, 60),), str(done)


class Nameless(FusedAttention):
    def __init__(self):
        super().__init__(20, 5)
        self.parts = self.__dict__.pop("n_head")

    def forward(self, x):
        self.n_head = self.parts
        return super().forward(x)


def test_an_attention_whose_heads_are_not_known():
    done = parallelize_tensor(nn.ModuleDict({"attn": Nameless()}), group(2, 1))
    assert done.layouts["attn.c_attn.weight"].dim is None
    assert [line.detail for line in done.found] == [
        "attention: its number of heads is not among its attributes"
    ]


def test_which_head_goes_with_the_table():
    """The last of those with as many outputs, outside of any list; and it is in no MLP then."""
    layers = {"tok": nn.Embedding(7, 4), "first": nn.Linear(4, 7), "last": nn.Linear(4, 7)}
    model = nn.ModuleDict({**layers, "blocks": nn.ModuleList([nn.Linear(4, 7)])})
    lines = find(model).found
    assert {line.fqn for line in lines if line.rule == "vocab"} == {"tok", "last"}
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 7))
    assert [(line.fqn, line.rule) for line in find(model, blocks=None).found] == [
        ("0", "vocab"),
        ("1", "replicate"),
        ("3", "vocab"),
    ]


@pytest.mark.parametrize(
    "shape, name, is_cut",
    [
        ((5, 5), "mask", True),  # as many positions as heads
        ((1, 1, 5, 5), "mask", True),
        ((5, 3), "slopes", False),
        ((1, 5, 1, 1), "slopes", False),
        ((5,), "inv_freq", True),
        ((5,), "slopes", False),
        ((4, 3), "slopes", True),
    ],
)
def test_buffers_that_may_have_a_value_of_each_head(shape, name, is_cut):
    model = nn.ModuleDict({"attn": FusedAttention(20, 5)})
    model["attn"].register_buffer(name, torch.ones(shape))
    done = parallelize_tensor(model, group(2, 1))
    assert (done.layouts["attn.c_attn.weight"].dim is not None) == is_cut
    reason = f"buffer {name} of shape {shape} may hold one value per head"
    assert any(reason in line.detail for line in done.found) != is_cut
