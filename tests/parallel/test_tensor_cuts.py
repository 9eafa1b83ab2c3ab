"""What each rank holds of a model that tensor parallelism cuts, and what is asked of modules before: without
ranks, as cutting communicates nothing.
"""

import functools

import pytest
import torch
from tensor_models import (
    Adapted,
    Encoder,
    Experts,
    FusedAttention,
    FusedGrouped,
    Gpt,
    GptScaled,
    Llama,
    Mlp,
    Sizes,
    make,
)
from torch import nn

from pycomm.groups import Group, even_sizes
from pycomm.parallel.ground.layout import Layout
from pycomm.parallel.models.modes import as_written
from pycomm.parallel.models.trunk import Side
from pycomm.parallel.tensor import apply, narrow, parallelize_tensor, slices, split_heads
from pycomm.parallel.tensor.reads import Reads
from pycomm.parallel.tensor.whole_sequence import after_trunk, check_order


def group(size, rank):
    return Group("tp", size, rank, None)


# What the ranks hold ------------------------------------------------------------


class Multihead(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attn = nn.MultiheadAttention(10, 5, batch_first=True, **options)


class Holder(nn.Module):
    """A head whose bias has a second name in the module that it lies in, which nothing reads (BERT)."""

    def __init__(self):
        super().__init__()
        self.tok, self.end = nn.Embedding(7, 4), nn.Module()
        self.end.head = nn.Linear(4, 7)
        self.end.bias, self.end.head.weight = self.end.head.bias, self.tok.weight
        nn.init.normal_(self.end.bias)


TRUNK = {"blocks": "h"}
CUTS = [  # model, options, ranks, names of what is cut, in part
    (Gpt, TRUNK, 4, ["wte.weight", "c_attn.weight", "c_fc.bias", "c_proj.weight"]),
    (functools.partial(Gpt, tied=False), {**TRUNK, "sequence": Sizes()}, 5, ["lm_head", "c_attn.bias"]),
    (functools.partial(Gpt, mlp=3), TRUNK, 5, ["mlp.c_fc"]),
    (GptScaled, TRUNK, 3, ["wte.weight"]),
    (functools.partial(Llama, kv_heads=1), {"blocks": "layers"}, 5, ["sinks", "k_proj.bias", "v_proj"]),
    (functools.partial(Llama, kv_heads=2), {"blocks": "layers", "sequence": Sizes()}, 3, ["k_proj.weight"]),
    (functools.partial(Llama, kv_heads=3), {"blocks": "layers"}, 2, ["o_proj.weight", "gate_proj"]),
    (functools.partial(Encoder, True), {"blocks": "encoder.layers"}, 3, ["in_proj_bias", "linear1.bias"]),
    (Multihead, {}, 4, ["in_proj_weight", "out_proj.weight"]),
    (FusedGrouped, {}, 5, ["qkv_proj.weight", "qkv_proj.bias", "o_proj.weight"]),
    (functools.partial(FusedGrouped, kv_heads=3), {}, 2, ["qkv_proj.weight"]),
    (functools.partial(FusedGrouped, by_head=True), {}, 4, ["query_key_value.weight", "dense.weight"]),
    (functools.partial(FusedGrouped, kv_heads=3, by_head=True), {}, 2, ["query_key_value.bias"]),
    (functools.partial(Multihead, kdim=3, vdim=4, add_bias_kv=True), {}, 3, ["q_proj", "v_proj", "bias_k"]),
    (Adapted, {}, 3, ["up.base_layer.bias", "up.lora_B", "down.base_layer.weight", "down.lora_A"]),
    (Experts, {}, 4, ["gate_up_proj", "down_proj"]),
    (Holder, {}, 3, ["tok.weight", "end.head.weight", "end.head.bias", "end.bias"]),
    (Gpt, {**TRUNK, "rules": {"h.0.mlp.c*": "column", "h.1.mlp.c*": "row"}}, 3, ["h.0.mlp.c_proj.bias"]),
]


@pytest.mark.parametrize("build, options, ranks, names", CUTS)
def test_each_element_is_held_and_counted_once(build, options, ranks, names):
    """Held by several ranks only where the layout says that each has a part of its gradient; partial ones are
    counted by the first rank. What is not cut is the same parameter; flags, modes and hooks stay.
    """
    full = dict(make(build, {}).named_parameters(remove_duplicate=False))
    counted, held = ({name: torch.zeros(p.shape) for name, p in full.items()} for _ in range(2))
    for rank in range(ranks):
        model = make(build, {})
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("o_proj" not in name and "c_fc.weight" not in name)
        before = dict(model.named_parameters(remove_duplicate=False))
        flags = {name: p.requires_grad for name, p in before.items()}
        calls = with_hooks(model.eval())
        done = parallelize_tensor(model, group(ranks, rank), **options)
        assert with_hooks(model, added=False) == calls and not any(m.training for m in model.modules())
        mine = dict(model.named_parameters(remove_duplicate=False))
        assert mine.keys() == full.keys() == done.layouts.keys()
        for name, parameter in mine.items():
            layout = done.layouts[name]
            assert layout.full_shape == tuple(full[name].shape), name
            assert torch.equal(parameter, layout.take(full[name])), (name, rank)
            assert type(parameter) is nn.Parameter and parameter.requires_grad == flags[name], name
            assert (parameter is before[name]) == (layout.dim is None), name
            mask, ones = layout.counted_mask(parameter), torch.ones(parameter.shape)
            layout.put(held[name], ones)
            layout.put(counted[name], ones if mask is None else mask)
    for name in full:
        assert (counted[name] == 1).all(), f"{name} is not counted once"
        shares = done.layouts[name].overlap or done.layouts[name].dim is None
        assert (held[name] >= 1).all() if shares else (held[name] == 1).all(), name
    for part in names:
        assert any(part in name and done.layouts[name].dim is not None for name in full), part


def with_hooks(model, added=True):
    """Names of the modules with hooks, in the order of the model; first gives one to each."""
    if added:
        for module in model.modules():
            module.register_forward_hook(lambda *_: None)
            module.register_full_backward_pre_hook(lambda *_: None)
    return [name for name, m in model.named_modules() if m._forward_hooks and m._backward_pre_hooks]


def test_a_gradient_hook_would_be_given_a_part():
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = Mlp(4, 6)
        getattr(model.c_fc.weight, register)(lambda grad: None)
        with pytest.raises(ValueError, match=r"shape \(6, 4\) has a gradient hook.*'replicate'"):
            parallelize_tensor(model, group(2, 0))
        parallelize_tensor(model, group(2, 0), rules={"": "replicate"})
        model = Mlp(4, 6)
        getattr(model.c_proj.bias, register)(lambda grad: None)  # which is whole on every rank
        parallelize_tensor(model, group(2, 1))


class ByWidth(Mlp):
    """With 20 features its parts are not an MLP."""

    def forward(self, x):
        x = self.c_fc(x)
        return self.c_proj(x.softmax(-1) if self.c_fc.weight.shape[0] in (20, 10) else x.tanh())


def test_sublayers_of_other_widths_are_tried_each():
    for widths in ((24, 20, 24), (20, 24, 20)):
        model = nn.ModuleDict({str(n): ByWidth(8, width) for n, width in enumerate(widths)})
        layouts = parallelize_tensor(model, group(2, 1)).layouts
        assert [layouts[f"{n}.c_fc.weight"].dim for n in range(3)] == [0 if w == 24 else None for w in widths]


def test_dealt_experts_are_counted_by_one_rank_of_tp():
    whole, part = Layout((4, 2), None, (), ((0, 4),)), ((2, 4),)
    dealt = Layout((4, 2), 0, part, part)
    for partial in (False, True):
        for rank in range(3):
            done = apply.TensorParallel({"w": whole._replace(partial=partial), "x": whole}, [])
            done.note_dealt({"w": dealt}, rank)
            assert done.layouts["x"] == whole and done.layouts["w"].partial == partial
            assert done.layouts["w"].ranges == part
            assert done.layouts["w"].counted == (part if partial or rank == 0 else ())


# Reading a parameter beside its layer ------------------------------------------------------------


def test_parameters_are_themselves_after_a_loss_that_raises():
    model = Mlp(4, 6)
    layouts = parallelize_tensor(model, group(2, 1)).layouts
    reads = Reads(model, layouts, {}, ())
    for _ in range(2):
        with pytest.raises(KeyError), reads.refused():
            assert model.c_fc.weight.shape == (6, 4) and type(model.c_fc.weight) is not nn.Parameter
            with pytest.raises(ValueError, match="reads 'c_fc.weight', of which this rank of tp"):
                model.c_fc.weight.sum()
            assert model.c_proj.bias.sum() is not None  # whole
            raise KeyError
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        assert model.c_fc.weight.shape == (3, 4)
    with reads.refused():  # inside a sublayer the sizes are local
        as_written(model.forward).running = True
        assert model.c_fc.weight.shape == (3, 4) and model.c_proj.weight.size(1) == 3
        as_written(model.forward).running = False
        assert model.c_fc.weight.shape == (6, 4) and model.c_proj.weight.size(1) == 6


# A narrower attention ------------------------------------------------------------


@pytest.mark.parametrize(
    "name, full, local",
    [
        *((name, 6, 4) for name in ("n_head", "num_heads", "_heads", "nhead", "n_local_heads", "n_heads")),
        *((name, 3, 2) for name in ("num_key_value_heads", "n_kv_head", "n_local_kv_heads", "kv_heads")),
        *((name, 2, 2) for name in ("num_key_value_groups", "n_rep")),
        *((name, 15, 10) for name in ("kv_dim", "k_size", "value_width")),
        *((name, 30, 20) for name in ("n_embd", "hidden_size", "q_size", "d_model", "all_head_size")),
        *((name, 7, None) for name in ("n_head", "kv_heads", "hidden_size")),  # of something else
        *((name, 5, None) for name in ("head_dim", "num_heads_of", "width_of_head")),
    ],
)
def test_what_an_attribute_counts(name, full, local):
    heads = split_heads(6, 3, 2)[0]
    assert narrow.HeadCounts(6, 3, 5, heads).local(name, full) == local


class Config:
    """With a name that its class only maps."""

    def __init__(self):
        self.num_key_value_heads, self.hidden_size, self.other = 2, 24, 24

    num_attention_heads = property(lambda self: 6)


def test_each_rank_sees_its_heads_in_its_own_view():
    config, seen = Config(), []
    for mine in split_heads(6, 2, 4):
        module = FusedAttention(24, 6)
        module.config, module.is_causal = config, True
        before = narrow.narrow_attributes(module, narrow.HeadCounts(6, 2, 4, mine))
        view = module.config
        seen.append((module.n_head, module.n_embd, view.num_attention_heads, view.num_key_value_heads))
        assert before["n_head"] == 6 and before["n_embd"] == 24 and before["config"] is config
        assert view.other == 24 and module.is_causal is True and view.hidden_size == module.n_embd
    assert seen == [(2, 8, 2, 1), (1, 4, 1, 1), (2, 8, 2, 1), (1, 4, 1, 1)]
    assert config.hidden_size == 24


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_values_of_each_head_are_dealt_as_the_heads(ranks):
    alibi = torch.arange(3 * 5.0)[:, None, None].expand(15, 1, 2)  # (rows x heads, 1, T)
    parts = []
    for mine in split_heads(5, 5, ranks):
        narrowed = narrow.Narrowed(8, 4, 5, mine.q, {})
        parts.append(narrowed.of_heads(alibi).unflatten(0, (3, -1)))
        assert narrowed.of_heads(None) is None
    assert torch.equal(torch.cat(parts, 1).flatten(0, 1), alibi)


def test_a_passed_over_attention_is_whole_for_a_moment():
    model = nn.ModuleDict({"attn": FusedAttention(8, 4)})
    forward = parallelize_tensor(model, group(2, 1)).forwards["attn.c_attn"]
    passed = [True]
    forward.run_whole_while(lambda: passed[0])
    seen = []
    forward.inner = lambda x: seen.append((model["attn"].n_head, tuple(x.size()), forward.running)) or 1 / x
    for fails in (False, True):
        x = 0 if fails else torch.ones(1, 2, 8)
        if fails:
            with pytest.raises(AttributeError):
                model["attn"](x)
        else:
            model["attn"](x)
        assert model["attn"].n_head == 2 and not forward.running
    passed[0] = False
    model["attn"](torch.ones(1, 2, 8))
    assert seen == [(4, (1, 2, 8), False), (2, (1, 2, 4), True)] and model["attn"].n_head == 2


def test_what_looks_narrow_and_what_does_not():
    """Hidden states do, of their width and three dimensions; each has one view, and keeps its data."""
    model = nn.ModuleDict({"attn": FusedAttention(8, 4)})
    forward = parallelize_tensor(model, group(2, 1)).forwards["attn.c_attn"]
    x, views = torch.arange(2 * 3 * 8.0).view(2, 3, 8), {}
    seen = forward.view("x", x, views)
    assert forward.view("y", x, views) is seen and narrow.plain(seen) is x
    assert tuple(seen.shape) == tuple(seen.size()) == (2, 3, 4)
    assert [seen.size(0), seen.size(-1), seen.size(dim=2), seen.shape[1]] == [2, 4, 4, 3]
    assert torch.equal(seen + 0, x) and type(seen + 0) is torch.Tensor and seen.sum() == x.sum()
    kept = narrow.plain({"a": [seen, (seen, 3)], "b": None})
    assert kept["a"][0] is x is kept["a"][1][0] and kept["b"] is None
    for other in (x.long(), x > 1, x[0], x[..., :4], x[None], 5, None, "x"):
        assert forward.view("x", other, views) is other


def test_parts_of_a_fused_projection():
    for ranks in (1, 2, 3):
        seen = []
        for rank in range(ranks):
            mine = slices.even_slices(5, group(ranks, rank))
            both = slices.part_slices(mine, 5, 10)
            assert [start + 5 for start, _ in both.ranges[:1]] == [start for start, _ in both.ranges[1:]]
            assert both.lengths == tuple(2 * size for size in even_sizes(5, ranks))
            seen += [index for span in both.ranges for index in range(*span)]
        assert sorted(seen) == list(range(10))


# Before and after the trunk ------------------------------------------------------------


class Ordered(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.last, self.table = nn.Linear(2, 2), nn.Embedding(3, 2)
        self.order = ["first", "blocks.0", "blocks.1", "last"]

    def forward(self, x):
        for name in self.order:
            x = self.get_submodule(name)(x)
        return x


@pytest.mark.parametrize(
    "order, text",
    [
        (["first", "blocks.0", "blocks.1", "last"], None),
        (["blocks.0", "first", "blocks.1"], "first is registered before the blocks but runs after them"),
        (["blocks.0", "blocks.1", "last", "first"], "first is registered before the blocks but runs after"),
        (["first", "last", "blocks.0"], "last is registered after the blocks but runs before them"),
    ],
)
def test_the_first_forward_is_watched(order, text):
    model, x = Ordered(), torch.ones(1, 2)
    after = after_trunk(model, "blocks", {})
    assert after == {"last"}
    check_order(model, "blocks", after)
    model.order = order
    if text is None:
        model(x)
    else:
        with pytest.raises(ValueError, match=text):
            model(x)
    model.order = ["last", "blocks.0", "first"]
    model(x)
    model(x)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_sides_that_are_known_count_more_than_the_order():
    before, after = Side.BEFORE, Side.AFTER
    assert after_trunk(Ordered(), "blocks", {"last": before}) == set()
    assert after_trunk(Ordered(), "blocks", {"first": after, "table": after}) == {"first", "last"}
