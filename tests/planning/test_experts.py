"""Mixtures of experts under the planner: tokens dealt evenly, FLOPs and parameters counted by hand, plans
that train, and what else reads values is refused by name.
"""

import sys
from pathlib import Path

import pytest
import torch
from tiers import tier
from torch import nn

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "parallel")]

import models  # noqa: E402
from torch_ranks import spawn  # noqa: E402

import pycomm.parallel as par  # noqa: E402
from pycomm.parallel.planning import collectives, dry_run, load_machine, named, trace_model  # noqa: E402
from pycomm.parallel.planning.compute import Cut, block_time, product_time  # noqa: E402
from pycomm.parallel.planning.costs import sent  # noqa: E402
from pycomm.parallel.planning.job import PYCOMM, Job  # noqa: E402
from pycomm.parallel.planning.memory import owned_parameters  # noqa: E402

ROWS, LENGTH, WIDTH, INSIDE, EXPERTS, TOP_K = 8, 16, 24, 16, 4, 2
HF_SIZES = {"hidden_size": 24, "intermediate_size": INSIDE, "num_hidden_layers": 2, "num_attention_heads": 4}
HF_SIZES |= {"num_key_value_heads": 2, "vocab_size": 37, "num_experts_per_tok": TOP_K}


def moe_model(experts=EXPERTS, top_k=TOP_K):
    def expert():
        return nn.Sequential(nn.Linear(WIDTH, INSIDE), nn.SiLU(), nn.Linear(INSIDE, WIDTH))

    return models.Llama(mlp=lambda: par.MoE(WIDTH, expert, experts, top_k=top_k))


def hf_model(kind="Mixtral"):
    hf = pytest.importorskip("transformers")
    more = {"Mixtral": {"num_local_experts": EXPERTS}}.get(
        kind, {"num_experts": EXPERTS, "moe_intermediate_size": INSIDE}
    )
    config = getattr(hf, f"{kind}Config")(**HF_SIZES, **more)
    return hf.AutoModelForCausalLM.from_config(config)


def tokens(rows=ROWS):
    return torch.randint(0, 29, (rows, LENGTH), generator=torch.Generator().manual_seed(0))


def batch(kind, rows=ROWS):
    given = tokens(rows)
    return (given, given) if kind == "moe" else {"input_ids": given, "labels": given}


MAKE = {"moe": moe_model, "Mixtral": hf_model, "Qwen3Moe": lambda: hf_model("Qwen3Moe")}
# products of one expert, as (k, n): gates and up are one product in transformers
PRODUCTS = {"moe": [(WIDTH, INSIDE), (INSIDE, WIDTH)], "hf": [(WIDTH, 2 * INSIDE), (INSIDE, WIDTH)]}


def on_meta(kind):
    with torch.device("meta"):
        return MAKE[kind]()


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("rows", [1, 3])
def test_experts_counted_by_hand(kind, rows):
    model = on_meta(kind)
    found = trace_model(model, batch(kind, rows))
    assert found.parameters == sum(p.numel() for p in model.parameters())
    products = PRODUCTS["moe" if kind == "moe" else "hf"]
    biases = INSIDE + WIDTH if kind == "moe" else 0
    assert found.experts[:3] == (EXPERTS, TOP_K, sum(k * n for k, n in products) + biases)
    (experts,) = [module for module in found.block if module.experts]
    by_hand = sum(2 * k * n for k, n in products) * TOP_K  # of a token
    assert sum(2 * p.k * p.n * p.times for p in experts.products) == by_hand
    gate = 2 * WIDTH * EXPERTS
    kv = 2 if kind != "moe" else found.kv_heads
    attention = 2 * WIDTH * (2 * found.heads + 2 * kv) * found.head_dim
    assert found.block_flops()[0] == by_hand + gate + attention


def test_a_named_mixture_and_its_traced_model_agree():
    hf = pytest.importorskip("transformers")
    from pycomm.parallel.planning.named import from_config

    config = hf.MixtralConfig(**HF_SIZES, num_local_experts=EXPERTS, max_position_embeddings=LENGTH)
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    traced, read = trace_model(model, batch("Mixtral")), from_config(config)
    assert traced.parameters == read.parameters and traced.experts == read.experts
    assert traced.block_flops() == read.block_flops()


@pytest.mark.parametrize("ep", [1, 2, 3, 4])
@pytest.mark.parametrize("stacked", [True, False])
def test_time_of_experts(ep, stacked):
    """Of a mixture with nothing else: each expert of the rank has its part of what ep ranks send."""
    machine, model = load_machine("h100"), named("mixtral-8x7b")
    product = next(m for m in model.block if m.experts).products[0]._replace(cut=None)
    only = model._replace(block=(model.block[0]._replace(moved=(0, 0), products=(product,)),))
    only = only._replace(experts=model.experts._replace(stacked=stacked))
    without = only._replace(block=(only.block[0]._replace(products=()),))
    cut = Cut(2, experts=ep)
    took = block_time(machine, only, cut).forward - block_time(machine, without, cut).forward
    held = -(-8 // ep)
    rows = 2 * model.sequence * 2 * ep / 8
    calls = 1 if stacked else held
    expected = product_time(machine, rows, 2 * 14336, 4096, batch=held, launches=calls)
    assert took == pytest.approx(expected) and rows * held >= 2 * model.sequence * 2


def test_all_to_all_of_even_tokens():
    """Rows of top_k experts there and back, in forward and backward."""
    machine, model = load_machine("h100"), named("mixtral-8x7b")
    where = collectives.span(machine, 8, 1)
    alone = block_time(machine, model, Cut(1, experts=8))
    dealt = block_time(machine, model, Cut(1, experts=8), (("ep", where),))
    once = collectives.all_to_all(where, 2 * model.sequence * 2 * model.hidden)
    assert dealt.forward - alone.forward == pytest.approx(2 * once)
    assert dealt.input - alone.input == pytest.approx(2 * once)


@tier(quick=1 / 7, slow=1 / 2)
@pytest.mark.parametrize(
    ("kind", "text", "parts"),
    [("moe", "ep=2", 2), ("moe", "tp=2", 1), ("moe", "ep=2,tp=2", 2), ("Mixtral", "tp=2", 2)]
    + [("Mixtral", "ep=2", 2), ("Mixtral", "ep=2,tp=2", 2), ("Mixtral", "ep=4", 4)],
)
def test_what_a_rank_holds(kind, text, parts):
    """As many parameters as parallelize leaves; tp cuts stacked experts that ep does not deal."""
    plan = par.Plan.parse(text)
    model = MAKE[kind]()
    job = Job(trace_model(model, batch(kind)), load_machine("cpu"), plan, ROWS, 1, "none", PYCOMM)
    _, experts = owned_parameters(job, 0)
    layers = len(model.layers) if kind == "moe" else 2
    whole = layers * EXPERTS * job.model.experts.parameters
    assert experts == whole / parts

    def left(rank, world_size):
        torch.manual_seed(0)
        model = MAKE[kind]()
        model, _ = par.parallelize(model, None, plan)
        own = {n: p for n, p in model.named_parameters() if ".experts." in n}
        return sum(p.numel() for p in own.values())

    assert spawn(plan.world_size, left)[0] == experts


@tier(quick=1 / 4, slow=1 / 2)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("fixed", [{}, {"ep": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_a_plan_of_a_mixture_trains(kind, fixed):
    plan = par.auto(on_meta(kind), torch.optim.AdamW, batch=batch(kind), world=2, fixed=fixed)
    assert all(getattr(plan, key) == value for key, value in fixed.items())
    text = str(par.explain(plan, on_meta(kind), batch=batch(kind), microbatches=plan.microbatches))
    assert f"dealt evenly, {TOP_K} rows of work for a token over {EXPERTS} experts" in text

    def body(rank, world_size):
        torch.manual_seed(0)
        model = MAKE[kind]()
        model, opt = par.parallelize(model, torch.optim.AdamW(model.parameters(), lr=0.01), plan)
        return [par.step(model, opt, batch(kind), microbatches=plan.microbatches).item() for _ in range(4)]

    one, other = spawn(2, body)
    assert one == pytest.approx(other) and one[-1] < one[0]


@pytest.mark.parametrize("kind", ["moe", "Mixtral"])
def test_calls_of_ep_are_those_of_a_dry_run(kind):
    """What a block adds. Bytes of all_to_all follow the values, so only their calls are compared."""
    (run,) = dry_run(MAKE[kind](), torch.optim.SGD, batch(kind), par.Plan(ep=2), ranks=[0], microbatches=2)
    job = Job(trace_model(on_meta(kind), batch(kind)), load_machine("cpu"), par.Plan(ep=2), ROWS, 2)
    calls, _ = sent(job)["ep"]
    assert calls == sum(call.op == "all_to_all" for call in run.calls)


def test_even_tokens_travel_as_counted():
    """A gate that chooses the experts in turn deals evenly: then the bytes are those of a run."""

    def even():
        model = moe_model(EXPERTS, 1)
        for moe in (m for m in model.modules() if isinstance(m, par.MoE)):
            moe.choose = lambda x, moe=moe: in_turn(x, moe)
        return model

    def body(rank, world_size):
        torch.manual_seed(0)
        model = even()
        model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), par.Plan(ep=2))
        par.step(model, opt, batch("moe"))  # the first one has runs of the checks, too
        with par.count_traffic() as traffic:
            par.step(model, opt, batch("moe"))
        return sum(call.nbytes for call in traffic.chosen("all_to_all"))

    job = Job(trace_model(moe_model(EXPERTS, 1), batch("moe")), load_machine("cpu"), par.Plan(ep=2), ROWS, 1)
    assert spawn(2, body) == [sent(job)["ep"][1]] * 2


def in_turn(x, moe):
    chosen = (torch.arange(len(x)) % EXPERTS)[:, None]
    probabilities = torch.softmax(moe.gate(x), -1)
    return probabilities, probabilities.gather(1, chosen), chosen


class Reads(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read, self.inner = read, nn.Linear(6, 6)

    def forward(self, x):
        return self.read(self.inner(x))


class Blocks(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), Reads(read)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (lambda x: x if x.sum() > 0 else -x, "one value of a tensor"),
        (lambda x: x * x.mean().item(), "one value of a tensor"),
        (lambda x: x * float(x.max()), "one value of a tensor"),
        (lambda x: x * x.nonzero().shape[0], "where a tensor is not zero"),
        (lambda x: x * x[x > 0].mean(), "where a tensor is not zero"),
        (lambda x: x * x.masked_select(x > 0).mean(), "masked_select"),
        (lambda x: x if torch.equal(x, x) else -x, "whether two tensors are equal"),
        (lambda x: x * len(x.unique()), "what only values tell (_unique2)"),
    ],
)
def test_a_forward_that_reads_values_is_refused_by_name(read, text):
    x = torch.ones(8, 6)
    with pytest.raises(ValueError, match="cannot be traced") as refused:
        par.auto(Blocks(read), batch=(x, x), world=2)
    assert "'blocks.0.1' (Reads) reads" in str(refused.value) and text in str(refused.value)


def test_experts_that_lie_on_ranks_are_refused():
    def body(rank, world_size):
        moe = par.MoE(6, lambda: nn.Linear(6, 6), 2, group=None)
        moe.shard(None, None)
        model, x = nn.Sequential(moe, nn.Linear(6, 6)), torch.ones(8, 6)
        try:
            par.auto(model, batch=(x, x), world=2)
        except ValueError as error:
            return str(error)

    assert all("laid over 2 ranks already" in text for text in spawn(2, body))


@pytest.mark.parametrize("kind", ["moe", "Mixtral"])
def test_kept_is_what_autograd_keeps(kind):
    """Counted by autograd's own hooks in a real forward of a block; kernels of transformers differ by some
    rows of what they keep.
    """
    torch.manual_seed(0)
    model, kept = MAKE[kind](), {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    blocks = model.layers if kind == "moe" else model.model.layers

    def keep(tensor):
        if inside and tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inside = []
    blocks[0].register_forward_pre_hook(lambda *_: inside.append(1))
    blocks[0].register_forward_hook(lambda *_: inside.clear())
    options = {} if kind == "moe" else {"use_cache": False}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        alive = model(tokens(3), **options)
    found = trace_model(on_meta(kind), batch(kind, 3))
    assert sum(found.kept()) * 3 * LENGTH == pytest.approx(
        sum(kept.values()), rel=0.02 if kind == "moe" else 0.15
    )
    assert alive is not None
