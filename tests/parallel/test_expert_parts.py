"""Experts dealt over ranks, without a plan: modules of some experts against the same module whole, with every
rank's results; and which modules are not dealt, with the reason.
"""

import types

import pytest
import torch
from torch import nn
from torch_ranks import spawn

from pycomm.groups import Group, as_group, even_sizes
from pycomm.parallel import MoE, Plan
from pycomm.parallel.expert import apply, stacked

EXPERTS, HIDDEN, FEATURES, TOP_K = 5, 4, 3, 2
SENT = {  # experts that the tokens of each rank choose: no row comes to rank 2, which has expert 4
    "none to the last": [[[0, 3], [1, 2], [3, 0]], [[2, 1]], [[1, 3], [0, 2]]],
    "all to the last": [[[4, 4]], [[4, 4], [4, 4]], [[4, 4]]],
    "no tokens on the first": [[], [[4, 1], [0, 3]], [[2, 4]]],
}


class Stacked(nn.Module):
    """As transformers has them; `power` of the weight that multiplies what an expert gives."""

    def __init__(self, power=1, experts=EXPERTS):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        shapes = {"gate_up_proj": (experts, 2 * FEATURES, HIDDEN), "down_proj": (experts, HIDDEN, FEATURES)}
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            setattr(self, name, nn.Parameter(value))
        self.num_experts, self.power = experts, power

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for choice in range(top_k_index.shape[1]):
            gate, up = torch.einsum(
                "th,tfh->tf", hidden_states, self.gate_up_proj[top_k_index[:, choice]]
            ).chunk(2, -1)
            down = torch.einsum("tf,thf->th", gate.sigmoid() * up, self.down_proj[top_k_index[:, choice]])
            out = out + down * top_k_weights[:, choice, None] ** self.power
        return out


def given(chosen):
    """(x, chosen, weights, the gradient of the result) of all ranks."""
    generator = torch.Generator().manual_seed(6)
    sizes = [len(each) for each in chosen]
    flat = torch.tensor([row for each in chosen for row in each], dtype=torch.int64)
    x, pull = torch.randn(2, len(flat), HIDDEN, generator=generator, dtype=torch.float64)
    weights = torch.rand(len(flat), TOP_K, generator=generator, dtype=torch.float64)
    return [tensor.split(sizes) for tensor in (x, flat, weights, pull)]


def whole(chosen, calls):
    """Output, gradients of x and of the weights, and of the parameters by name, after some calls."""
    module = Stacked()
    x, flat, weights, pull = (torch.cat(parts) for parts in given(chosen))
    x, weights = x.requires_grad_(), weights.requires_grad_()
    for _ in range(calls):
        out = module(x, flat, weights)
        (out * pull).sum().backward()
    return out.detach(), x.grad, weights.grad, {name: p.grad for name, p in module.named_parameters()}


def dealt_body(rank, world_size, calls):
    found = {}
    for name, chosen in SENT.items():
        module = Stacked()
        layouts = stacked.deal_stacked(module, "mlp.experts", as_group(None, "ep"))
        x, flat, weights, pull = (parts[rank].clone() for parts in given(chosen))
        x, weights = x.requires_grad_(), weights.requires_grad_()
        for _ in range(calls):
            out = module(x, top_k_weights=weights, top_k_index=flat)
            (out * pull).sum().backward()
        grads = {key: p.grad for key, p in module.named_parameters()}
        found[name] = out.detach(), x.grad, weights.grad, grads, layouts, module.num_experts
    return found


def test_stacked_experts_equal_the_whole_module():
    """On a rank without rows the experts have zero gradients, like experts that no token chose."""
    of_ranks = spawn(3, dealt_body, 2)
    for name, chosen in SENT.items():
        out, x_grad, weights_grad, grads = whole(chosen, 2)
        sizes = [len(each) for each in chosen]
        for rank, found in enumerate(of_ranks):
            mine = found[name]
            for value, right in zip(mine[:3], (out, x_grad, weights_grad), strict=True):
                torch.testing.assert_close(value, right.split(sizes)[rank], rtol=1e-12, atol=1e-12)
            assert mine[5] == even_sizes(EXPERTS, 3)[rank]
            for key, right in grads.items():
                layout = mine[4][key]
                assert mine[3][key] is not None, (name, rank, key)
                torch.testing.assert_close(mine[3][key], layout.take(right), rtol=1e-12, atol=1e-12)
                assert layout.ranges == layout.counted and layout.full_shape == tuple(right.shape)


def without_gradient_body(rank, world_size):
    """The rows and the weights ask for none, on the first rank or on the last: all ranks go back together."""
    group, chosen = as_group(None, "ep"), SENT["none to the last"]
    found = []
    for quiet in (0, world_size - 1, None):
        module = Stacked()
        stacked.deal_stacked(module, "mlp.experts", group)
        x, flat, weights, pull = (parts[rank].clone() for parts in given(chosen))
        x.requires_grad_(quiet is not None and rank != quiet)
        (module(x, flat, weights) * pull).sum().backward()
        found.append({key: p.grad for key, p in module.named_parameters()})
        with torch.no_grad():
            assert not module(x, flat, weights).requires_grad
    frozen = Stacked()
    frozen.down_proj.requires_grad_(False)
    stacked.deal_stacked(frozen, "mlp.experts", group)
    x, flat, weights, pull = (parts[rank].clone() for parts in given(chosen))
    (frozen(x, flat, weights) * pull).sum().backward()
    assert frozen.gate_up_proj.requires_grad and not frozen.down_proj.requires_grad
    found.append({"gate_up_proj": frozen.gate_up_proj.grad})
    assert frozen.down_proj.grad is None
    return found


def test_inputs_without_gradient_and_frozen_experts():
    right, start = whole(SENT["none to the last"], 1)[3], 0
    for rank, found in enumerate(spawn(3, without_gradient_body)):
        stop = start + even_sizes(EXPERTS, 3)[rank]
        for grads in found:
            for key, grad in grads.items():
                torch.testing.assert_close(grad, right[key][start:stop], rtol=1e-12, atol=1e-12)
        start = stop


def test_a_call_that_does_not_fit_names_the_module_and_the_shapes():
    module = Stacked()
    stacked.deal_stacked(module, "mlp.experts", Group("ep", 2, 1, None))
    x, chosen, weights = torch.zeros(6, 4), torch.zeros(6, 2, dtype=torch.int64), torch.zeros(6, 2)
    for given_ in ((x, chosen, weights[:, :1]), (x[:5], chosen, weights), (x[None], chosen, weights)):
        with pytest.raises(ValueError, match=r"\[rank 1/2\] mlp.experts is given tensors of shapes") as error:
            module(*given_)
        assert str(tuple(given_[0].shape)) in str(error.value) and "ep=1" in str(error.value)
    on_meta = module(x.to("meta"), chosen.to("meta"), weights.to("meta"))
    assert on_meta.is_meta and on_meta.shape == x.shape


def with_hook(module):
    module.down_proj.register_post_accumulate_grad_hook(lambda p: None)


def with_old_hook(module):
    module.gate_up_proj.register_hook(lambda grad: grad)


def with_a_vector(module):
    module.scale = nn.Parameter(torch.ones(3))


def with_a_norm(module):
    module.norm = nn.LayerNorm(HIDDEN)


def with_fewer(module):
    module.num_experts = 4


def with_another_name(module):
    module.bias = nn.Parameter(torch.ones(EXPERTS, HIDDEN))


def that_raises(module):
    module.forward = None
    module.power = "none"


REASONS = [  # what is done to the experts, ranks, why they are not dealt
    (lambda module: None, 2, None),
    (lambda module: None, EXPERTS, None),
    (lambda module: None, EXPERTS + 1, "5 experts, fewer than the 6 ranks of ep"),
    (with_hook, 2, "'down_proj' has a gradient hook"),
    (with_old_hook, 2, "'gate_up_proj' has a gradient hook"),
    (with_a_vector, 2, "not all of gate_up_proj, down_proj, scale have one part for each"),
    (with_a_norm, 2, "it has modules with parameters"),
    (with_fewer, 2, "not all of gate_up_proj, down_proj have one part for each of its num_experts"),
    (with_another_name, 2, "cannot be tried"),
    (that_raises, 2, "cannot be tried"),
    (lambda module: setattr(module, "power", 2), 2, "computes something else by its experts"),
    (lambda module: setattr(module, "power", 0), 2, "computes something else by its experts"),
]


@pytest.mark.parametrize("change, ranks, why", REASONS)
def test_which_experts_are_dealt(change, ranks, why):
    module = Stacked()
    change(module)
    found = stacked.misfit(module, ranks)
    assert found is None if why is None else why in found
    model = nn.ModuleDict({"odd": module, "other": Stacked()})
    names = {name: name for name, _ in model.named_parameters()}
    expected = ("other",) if why else ("odd", "other")
    if ranks <= EXPERTS:
        assert apply.stacked_to_deal(model, names, ranks) == expected
        assert apply.stacked_to_deal(model, names, 1) == ()
        alone = nn.ModuleDict({"odd": module})
        if why is not None:
            with pytest.raises(ValueError, match=rf"Plan\(ep={ranks}\).*'odd' is left whole: .*{why}"):
                apply.stacked_to_deal(alone, names, ranks)


def test_tied_experts_and_those_inside_of_a_moe_stay_whole():
    model = nn.ModuleDict({"one": Stacked(), "other": Stacked()})
    names = {name: name for name, _ in model.named_parameters()}
    names["other.down_proj"] = "one.down_proj"
    with pytest.raises(ValueError, match="'one' is left whole: 'down_proj' is tied to another parameter"):
        apply.stacked_to_deal(model, names, 2)
    model = nn.ModuleDict({"moe": MoE(HIDDEN, Stacked, 2), "moe2": Stacked()})
    assert apply.moe_names_of(model) == ("moe",)
    assert apply.stacked_to_deal(model, {}, 2) == ("moe2",)
    assert apply.stacked_to_deal(nn.ModuleDict({"moe": model["moe"]}), {}, 2) == ()


@pytest.mark.parametrize("text", ["ep=2,tp=2", "ep=2,tp=2,megatron_sp"])
def test_whose_tokens_the_loss_of_the_load_counts(text):
    """Under megatron_sp each rank of tp has its own tokens."""
    groups = {name: Group(name, 2, 1, None) for name in ("ep", "data", "data_tp")}
    mesh = types.SimpleNamespace(group=groups.get, data=groups["data"], data_tp=groups["data_tp"])
    model = nn.ModuleDict(
        {"moe": MoE(HIDDEN, lambda: nn.Linear(HIDDEN, HIDDEN), 3), "plain": nn.Linear(2, 2)}
    )
    found = apply.deal_moes(model, ["moe", "plain"], mesh, Plan.parse(text))
    assert list(found) == ["moe"] and list(model["moe"].experts) == ["2"]
    assert model["moe"].group is groups["ep"]
    assert model["moe"].counted_over is groups["data_tp" if "megatron" in text else "data"]


def expert():
    return nn.Sequential(nn.Linear(HIDDEN, 6), nn.Tanh(), nn.Linear(6, HIDDEN))


def mixture(**options):
    torch.manual_seed(3)
    return MoE(HIDDEN, expert, 4, 2, **{"aux_loss": 0.5, **options}).double()


def rows_of_others_body(rank, world_size, left_out):
    """One rank's rows are not its own: it sends none, and takes part; twice, and then they count again."""
    found = []
    moe = mixture()
    moe.shard(as_group(None, "ep"), as_group(None, "data"))
    x = torch.randn(world_size, 2, 3, HIDDEN, generator=torch.Generator().manual_seed(8)).double()
    for counted in (False, False, True):
        moe.is_counted = counted or rank != left_out
        moe.zero_grad()
        mine = x[rank].clone().requires_grad_()
        out = moe(mine)
        out.square().sum().backward()
        grads = {name: p.grad.clone() for name, p in moe.named_parameters()}
        found.append((out.detach(), mine.grad, grads, moe.last_aux))
    return x, found


@pytest.mark.parametrize("left_out", [0, 2])
def test_rows_that_are_not_a_ranks_own(left_out):
    results = spawn(3, rows_of_others_body, left_out)
    x = results[0][0]
    for call in range(3):
        moe, kept = mixture(), [rank for rank in range(3) if rank != left_out or call == 2]
        mine = x[kept].clone().requires_grad_()
        moe(mine).square().sum().backward()
        right = dict(moe.named_parameters())
        for rank, (_, found) in enumerate(results):
            out, grad, grads, aux = found[call]
            torch.testing.assert_close(aux, moe.last_aux)
            if rank in kept:
                torch.testing.assert_close(grad, mine.grad[kept.index(rank)], rtol=1e-12, atol=1e-12)
            else:
                assert not out.any() and not grad.any()
            for name, value in grads.items():
                if name != "gate.weight":
                    torch.testing.assert_close(value, right[name].grad, rtol=1e-12, atol=1e-12)
        gate = sum(found[call][2]["gate.weight"] for _, found in results)
        torch.testing.assert_close(gate, right["gate.weight"].grad, rtol=1e-12, atol=1e-12)


def autocast_body(rank, world_size, experts):
    torch.manual_seed(3)
    moe = MoE(HIDDEN, expert, experts, 1)
    moe.shard(as_group(None, "ep"), as_group(None, "data"))
    x = torch.ones(2, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = moe(x)
    out.sum().backward()
    moe.eval()
    before = moe.last_aux
    moe(x)
    return out.dtype, x.grad.dtype, moe.last_aux is before, sorted(moe.experts)


def test_autocast_where_a_rank_has_no_expert():
    """All ranks send rows of one type, also the one that cannot know the type of an expert's."""
    assert spawn(3, autocast_body, 2) == [
        (torch.float32, torch.float32, True, names) for names in (["0"], ["1"], [])
    ]
