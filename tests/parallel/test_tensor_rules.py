"""Tensor parallelism of plain models against one process: what is found, cut, counted, and refused."""

import re

import pytest
import torch
from tensor_models import (
    Encoder,
    FusedAttention,
    Gpt,
    GptScaled,
    Llama,
    Mlp,
    Scaled,
    Sizes,
    batch,
    compare,
    make,
    single,
    tensor_step,
)
from tiers import tier
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_ranks import spawn

from pycomm.groups import Group, as_group
from pycomm.parallel import count_traffic
from pycomm.parallel.tensor import parallelize_tensor
from pycomm.parallel.tensor.find import find


class PerHead(FusedAttention):
    """[q k v] of each head side by side in the projection: the same names and sizes as [q | k | v], another
    meaning of the rows.
    """

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).view(B, T, self.n_head, -1).transpose(1, 2).chunk(3, -1)
        return self.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C))


class GptPerHead(Gpt):
    attention = PerHead


SCALED = (GptScaled, 19, "h")
PER_HEAD = (GptPerHead, 19, "h")
GPT, LLAMA, ENCODER = (Gpt, 19, "h"), (Llama, 17, "layers"), (Encoder, 13, "encoder.layers")
CASES = [  # model, its arguments, options
    (GPT, {}, {}),
    (GPT, {}, {"sharded": True}),
    (GPT, {"tied": False}, {"sharded": True, "sequence": True}),
    (GPT, {}, {"sequence": True}),
    (GPT, {}, {"sequence": True, "length": 2, "sharded": True}),
    (GPT, {"mlp": 3}, {}),
    (SCALED, {}, {"sharded": True}),
    (SCALED, {"tied": False}, {"sequence": True}),
    (PER_HEAD, {}, {"sharded": True}),
    (PER_HEAD, {}, {"sequence": True}),
    (LLAMA, {}, {"sharded": True}),
    (LLAMA, {"kv_heads": 1}, {"sequence": True}),
    (LLAMA, {"kv_heads": 3}, {}),
    (LLAMA, {"kv_heads": 6}, {"sequence": True, "sharded": True}),
    (ENCODER, {"norm_first": True}, {"sequence": True}),
    (ENCODER, {"norm_first": False}, {"sharded": True}),
    (ENCODER, {"norm_first": False, "bias": False}, {}),
    (GPT, {}, {"rules": {"h.*.mlp": "replicate", "h.0.attn": "replicate"}}),
    (GPT, {}, {"sequence": True, "rules": {"h.*.mlp": "replicate", "h.0.attn": "replicate"}}),
    (
        GPT,
        {},
        {
            "sequence": True,
            "rules": {
                "h.*.mlp.c_fc": "column",
                "h.*.mlp.c_proj": "row",
                "wte": "replicate",
                "lm_head": "replicate",
            },
        },
    ),
    (
        LLAMA,
        {},
        {
            "sequence": True,
            "rules": {"lm_head": "column", "layers.0.mlp.*": "column", "embed_tokens": "replicate"},
        },
    ),
    (
        LLAMA,
        {},
        {
            "sequence": True,
            "rules": {"lm_head": "row", "layers.1.mlp.down_proj": "row", "embed_tokens": "vocab"},
        },
    ),
]


@pytest.fixture(scope="module", autouse=True)
def slow_imports():
    """What torch loads at the first use of these, loaded here and not in every forked rank."""
    torch.testing.assert_close(
        checkpoint(torch.exp, torch.zeros(1, requires_grad=True), use_reentrant=False), torch.ones(1)
    )


def expected_of(build, kwargs, options):
    return single(
        make(build, kwargs, options.get("dtype", torch.float64)),
        *batch(options["vocab"], options.get("length", 7)),
    )


def many_steps(rank, world_size, cases):
    return [tensor_step(rank, world_size, *case) for case in cases]


def complete(case):
    (build, vocab, blocks), kwargs, options = case
    return build, kwargs, {"vocab": vocab, "blocks": blocks, **options}


@tier(quick=1 / 2)
@pytest.mark.parametrize(
    "world_size, backend",
    [
        (1, "pycomm"),
        (3, "gloo"),
        (4, "pycomm"),
        *(pytest.param(world_size, "pycomm", marks=pytest.mark.deep) for world_size in (2, 3)),
    ],
)
def test_models_equal_one_process(world_size, backend):
    cases = [complete(case) for case in CASES]
    if backend == "gloo":
        cases = cases[:1] + cases[7:8]
    results = spawn(world_size, many_steps, cases, backend=backend)
    for index, case in enumerate(cases):
        try:
            compare([of_rank[index] for of_rank in results], expected_of(*case))
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def test_five_ranks_and_single_precision():
    case = Gpt, {}, {"vocab": 19, "blocks": "h", "dtype": torch.float32, "sharded": True}
    compare(spawn(5, tensor_step, *case), expected_of(*case))


def test_megatrons_counts():
    """Two blocks: 2 + 2 collectives each way in a block, one for the embedding, one for the head, two for the
    cut loss.
    """
    block, sequence_block = ["all_reduce"] * 4, ["all_gather", "reduce_scatter"] * 4
    case = Gpt, {}, {"vocab": 19, "blocks": "h", "sharded": True}
    for result in spawn(2, tensor_step, *case):
        assert result["counts"] == [["all_reduce", *block], ["all_reduce"] * 2, ["all_reduce", *block]]
    case = (
        Llama,
        {},
        {"vocab": 17, "blocks": "layers", "sharded": True},
    )  # q, k and v share one entry, and so do gate and up
    for result in spawn(2, tensor_step, *case):
        assert result["counts"] == [["all_reduce", *block], ["all_reduce"] * 2, ["all_reduce", *block]]
    case = Gpt, {}, {"vocab": 19, "blocks": "h", "sharded": True, "sequence": True}
    for result in spawn(2, tensor_step, *case):
        forward, loss, backward = result["counts"]
        assert forward == [
            "all_reduce",
            *sequence_block,
            "all_gather",
        ]  # embedding, blocks, entry of the head
        assert loss == ["all_reduce"] * 2
        assert backward == [
            "reduce_scatter",
            *["all_gather", "reduce_scatter"] * 4,
            "all_gather",
        ]  # the last: cut at block 0, by the engine


def found(model, **options):
    return {line.fqn: (line.rule, line.detail) for line in find(model, **options).found}


def test_a_layout_is_found_by_trying():
    done = parallelize_tensor(GptPerHead(layers=1), Group("tp", 5, 2, None), blocks="h")
    assert done.layouts["h.0.attn.c_attn.weight"].ranges == ((24, 36),)
    done = parallelize_tensor(Gpt(layers=1), Group("tp", 5, 2, None), blocks="h")
    assert done.layouts["h.0.attn.c_attn.weight"].ranges == ((8, 12), (28, 32), (48, 52))


def test_found_is_printable():
    lines = found(Gpt(layers=1), blocks="h")
    assert lines == {
        "wte": ("vocab", "19 rows, tied to lm_head"),
        "h.0.attn": ("attention", "c_attn by rows, c_proj by columns; 5 heads of 4, 5 kv heads"),
        "h.0.mlp": ("mlp", "c_fc by rows, c_proj by columns"),
        "lm_head": ("vocab", "19 rows, tied to wte"),
    }
    done = parallelize_tensor(Gpt(layers=1), Group("tp", 5, 2, None), blocks="h")
    assert (
        "h.0.attn" in str(done)
        and done.head.fqn == "lm_head"
        and (done.head.full_size, done.head.local_size) == (19, 4)
    )


class Between(Mlp):
    """An MLP with something between its Linears, as a child or as a function."""

    def __init__(self, what):
        super().__init__(8, 24)
        self.what = what

    def forward(self, x):
        return self.c_proj(self.what(self.c_fc(x)))


class WidthScale(FusedAttention):
    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (
            t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(self.n_embd, 2)
        )
        return self.c_proj(
            F.scaled_dot_product_attention(q, k, v, scale=C**-0.5).transpose(1, 2).reshape(B, T, C)
        )


class Gated(FusedAttention):
    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.gate = nn.Linear(width, width // heads)


REPLICATED = [  # model, why
    (Between(nn.LayerNorm(24)), ".LayerNorm. is not elementwise"),
    (Between(nn.Softmax(-1)), ".Softmax. is not elementwise"),
    (Between(lambda x: x.softmax(-1)), "computes something else in parts"),
    (Between(lambda x: F.layer_norm(x, (24,))), "does not run in parts"),
    (WidthScale(8, 4), "computes something else in parts"),
    (Gated(8, 4), "parameter gate.weight"),
]


@pytest.mark.parametrize("model, why", REPLICATED, ids=lambda value: type(value).__name__)
def test_what_does_not_fit_is_replicated_or_refused(model, why):
    group, before = Group("tp", 2, 0, None), dict(model.named_parameters())
    rule = "attention" if isinstance(model, FusedAttention) else "mlp"
    with pytest.raises(ValueError, match=f"rule '{rule}' for '': .*{why}"):
        parallelize_tensor(model, group, rules={"": rule})
    done = parallelize_tensor(model, group)
    assert any(line.rule == "replicate" and re.search(why, line.detail) for line in done.found)
    assert all(layout.dim is None and not layout.partial for layout in done.layouts.values())
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_elementwise_functions_between_are_cut():
    for what in (nn.GELU(), nn.Dropout(0.5), nn.SiLU(), torch.tanh, lambda x: x * torch.sigmoid(1.7 * x)):
        model = Between(what)
        assert parallelize_tensor(model, Group("tp", 2, 1, None)).layouts["c_fc.weight"].ranges == ((12, 24),)


@pytest.mark.parametrize(
    "build, options, text",
    [
        (
            lambda: Gpt(heads=2),
            {},
            r"h.0.attn: 2 query heads cannot be split over 3 ranks of tp.*'replicate'",
        ),
        (Gpt, {"rules": {"h.7.*": "mlp"}}, r"\['h.7.\*'\] match no module"),
        (Gpt, {"rules": {"h.*": "rows"}}, "'rows'.* not among attention, column"),
        (Gpt, {"rules": {"h.0": "column"}}, "'h.0': it is a Block, not a Linear"),
        (Gpt, {"rules": {"h.0.ln_1": "mlp"}}, "no Linear layers of the known forms in LayerNorm"),
        (Gpt, {"blocks": "blocks"}, "no module 'blocks'"),
        (Gpt, {"blocks": None, "sequence": Sizes()}, "needs blocks="),
        (Gpt, {"rules": {"wte": "replicate", "lm_head": "row"}}, "tied to a parameter that is cut"),
        (lambda: Encoder(True, heads=2), {"blocks": "encoder.layers"}, "self_attn: 2 query heads .* 3 ranks"),
    ],
)
def test_refused_at_plan_time(build, options, text):
    model = build()
    with pytest.raises(ValueError, match=text):
        parallelize_tensor(model, Group("tp", 3, 1, None), **{"blocks": "h", **options})


class Shifted(nn.Embedding):
    """Reads a row beside the one that is asked for."""

    def forward(self, ids):
        return super().forward((ids + 1).clamp(max=self.num_embeddings - 1))


@pytest.mark.parametrize("kind, is_cut", [(Scaled, True), (Shifted, False)])
def test_an_embedding_of_ones_own_is_tried(kind, is_cut):
    model = Gpt(tied=False)
    model.wte = kind(19, 20)
    done = parallelize_tensor(model, Group("tp", 3, 1, None), blocks="h")
    assert (done.layouts["wte.weight"].dim == 0) == is_cut
    if is_cut:
        assert model.wte.weight.shape == (6, 20) and type(model.wte) is kind


def test_an_embedding_is_cut_only_with_its_head():
    done = parallelize_tensor(Gpt(), Group("tp", 3, 1, None), blocks="h", rules={"lm_head": "replicate"})
    assert done.layouts["wte.weight"].dim is None and done.head is None


class Unprobed(FusedAttention):
    """Asks for an argument, so it cannot be tried alone, and does not fit."""

    def forward(self, x, table):
        B, T, C = x.float().size()
        return self.c_proj(self.c_attn(x).view(B, T, 3, C)[:, :, 0] + table)


def test_first_forward_names_the_module_and_the_way_out():
    model = nn.ModuleDict({"attn": Unprobed(8, 4)})
    parallelize_tensor(model, Group("tp", 2, 1, None))
    with pytest.raises(
        ValueError,
        match=r"\[rank 1/2\] attn does not run on its part.*rules=\{'attn': 'replicate'\}, or 'column'",
    ):
        model["attn"](torch.randn(1, 3, 8), 0.0)


def test_a_group_of_one_changes_nothing():
    model = Gpt()
    before, classes = dict(model.named_parameters()), [type(module) for module in model.modules()]
    done = parallelize_tensor(model, None, blocks="h")
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert classes == [type(module) for module in model.modules()] and done.head is None
    assert all(
        layout.dim is None and layout.counted and not layout.partial for layout in done.layouts.values()
    )


def test_frozen_parameters_stay_frozen_and_tied_ones_stay_one():
    model = Gpt()
    model.h[0].mlp.requires_grad_(False)
    done = parallelize_tensor(model, Group("tp", 3, 0, None), blocks="h")
    assert not model.h[0].mlp.c_fc.weight.requires_grad and model.h[1].mlp.c_fc.weight.requires_grad
    assert model.wte.weight is model.lm_head.weight
    assert done.layouts["wte.weight"] == done.layouts["lm_head.weight"] and done.layouts[
        "wte.weight"
    ].ranges == ((0, 7),)
    assert set(done.layouts) == {name for name, _ in model.named_parameters(remove_duplicate=False)}


def wrong_order_body(rank, world_size):
    model = nn.Module()
    model.norm, model.blocks = nn.LayerNorm(4), nn.ModuleList([nn.Linear(4, 4)])
    model.forward = lambda x: model.norm(model.blocks[0](x))
    sequence = Sizes()
    sequence.sizes = [2, 1]
    parallelize_tensor(model, as_group(None, "tp"), blocks="blocks", sequence=sequence)
    with pytest.raises(ValueError, match="norm is registered before the blocks but runs after"):
        model(torch.randn(1, sequence.sizes[rank], 4))


def test_a_norm_registered_in_the_wrong_place_is_noticed():
    spawn(2, wrong_order_body)


MULTIHEAD = [  # constructor, shapes of query and key/value (batch_first as constructed), call
    ({}, (5, 2, 8), (5, 2, 8), {}),
    ({"batch_first": True, "add_bias_kv": True}, (2, 5, 8), (2, 6, 8), {"average_attn_weights": False}),
    (
        {"batch_first": True, "bias": False, "add_zero_attn": True},
        (2, 5, 8),
        (2, 5, 8),
        {"need_weights": False},
    ),
    ({"kdim": 5, "vdim": 3}, (4, 2, 8), (6, 2), {}),
    ({}, (5, 8), (5, 8), {}),
]


def multihead_cases(group):
    for options, q_shape, kv_shape, call in MULTIHEAD:
        torch.manual_seed(2)
        whole = nn.MultiheadAttention(8, 4, dtype=torch.float64, **options)
        for parameter in whole.parameters():
            nn.init.normal_(parameter, std=0.5)
        mine = nn.MultiheadAttention(8, 4, dtype=torch.float64, **options)
        mine.load_state_dict(whole.state_dict())
        done = parallelize_tensor(mine, group)
        generator = torch.Generator().manual_seed(3)
        query = torch.randn(q_shape, generator=generator, dtype=torch.float64)
        if "kdim" in options:
            key, value = (
                torch.randn((*kv_shape, n), generator=generator, dtype=torch.float64) for n in (5, 3)
            )
        else:
            key = value = (
                query
                if q_shape == kv_shape
                else torch.randn(kv_shape, generator=generator, dtype=torch.float64)
            )
        L, S = (q_shape[1], kv_shape[1]) if options.get("batch_first") else (q_shape[0], kv_shape[0])
        batches = 1 if query.dim() == 2 else 2
        mask = torch.rand((batches * 4, L, S), generator=generator) < 0.3
        mask[..., 0] = False
        padding = torch.zeros((2, S) if query.dim() == 3 else (S,), dtype=torch.bool)
        padding[..., -1] = True
        for masks in (
            {},
            {"attn_mask": mask},
            {"attn_mask": mask[0].double(), "key_padding_mask": padding.double() * -2},
            {"key_padding_mask": padding},
        ):
            expected, weights = whole(query, key, value, **call, **masks)
            out, local_weights = mine(query, key, value, **call, **masks)
            torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
            assert (weights is None) == (local_weights is None)
            if weights is not None:
                torch.testing.assert_close(local_weights, weights, rtol=1e-12, atol=1e-12)
        for module in (whole, mine):
            module.zero_grad()
            module(query, key, value, **call)[0].square().sum().backward()
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(
                mine.get_parameter(name).grad, done.layouts[name].take(parameter.grad), rtol=1e-12, atol=1e-12
            )


def inference_case(group):
    """Evaluation without gradients: torch would take its fused kernel, which reads whole weights."""
    model = make(Encoder, {"norm_first": False}).eval()
    ids, _ = batch(13)
    with torch.no_grad():
        expected = model.encoder(model.embed(ids))
        parallelize_tensor(model, group, blocks="encoder.layers")
        torch.testing.assert_close(model.encoder(model.embed(ids)), expected, rtol=1e-12, atol=1e-12)


def sequential_case(group):
    torch.manual_seed(1)
    widths = (5, 9, 3, 7, 2)
    layers = [
        layer
        for i, o in zip(widths, widths[1:], strict=False)
        for layer in (nn.Linear(i, o, dtype=torch.float64), nn.Tanh())
    ][:-1]
    whole = nn.Sequential(*layers)
    x = torch.randn(4, 5, dtype=torch.float64)
    expected = whole(x)
    expected.square().sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in whole.named_parameters()}
    whole.zero_grad()
    done = parallelize_tensor(whole, group)
    assert {line.rule for line in done.found} == {"mlp"} and len(done.found) == 2
    with count_traffic() as traffic:
        out = whole(x)
    assert [call.op for call in traffic.log] == ["all_reduce"] * 2
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    out.square().sum().backward()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(
            parameter.grad, done.layouts[name].take(grads[name]), rtol=1e-12, atol=1e-12
        )


def checkpoint_case(group):
    """Recomputation in backward runs sublayers again, up to the point where enough is known."""
    model, whole = (make(Gpt, {}) for _ in range(2))
    done = parallelize_tensor(model, group, blocks="h")
    for block in model.h:
        block.forward = (lambda inner: lambda x: checkpoint(inner, x, use_reentrant=False))(block.forward)
    ids, _ = batch(19)
    whole(ids).square().mean().backward()
    model(ids).square().mean().backward()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(
            model.get_parameter(name).grad, done.layouts[name].take(parameter.grad), rtol=1e-11, atol=1e-12
        )


def parts_body(rank, world_size):
    group = as_group(None, "tp")
    multihead_cases(group)
    inference_case(group)
    sequential_case(group)
    checkpoint_case(group)


@pytest.mark.parametrize("world_size", [2, 3])
def test_multihead_inference_sequential_checkpoint(world_size):
    spawn(world_size, parts_body)
