"""auto, explain and simulate on torch models; memory by dry_run against that of runs."""

import random
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "parallel")]

from halves import quick  # noqa: E402
from models import GPT, Llama  # noqa: E402
from torch_ranks import spawn  # noqa: E402

import pycomm.parallel as par  # noqa: E402
from pycomm.parallel.planning import dry_run, trace_model  # noqa: E402
from pycomm.parallel.planning.dry_run import peak_of  # noqa: E402
from pycomm.parallel.planning.planner import ChosenPlan  # noqa: E402

ROWS, LENGTH = 8, 16


def batch(rows=ROWS, vocab=29):
    tokens = torch.randint(0, vocab, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    return tokens, tokens


@pytest.mark.parametrize("make", [GPT, lambda: GPT(tied=False), Llama], ids=["tied", "untied", "llama"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_traced_model(make, device):
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device(device):
        model = make()
    found = trace_model(model, batch(3))
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (found.layers, found.hidden, found.sequence, found.item) == (
        len(found_blocks(model)),
        24,
        LENGTH,
        4,
    )
    if device == "cpu":
        with FlopCounterMode(display=False) as counter:  # which leaves a fused attention on the CPU out
            model(batch(3)[0])
        weights = found.layers * found.block_flops()[0] + 2 * found.hidden * found.vocab
        assert weights * 3 * LENGTH == counter.get_total_flops()
    whole, cut, experts = found.block_parameters()
    assert cut > 3 * whole and not experts, "attention and mlp are cut, norms are not"


def found_blocks(model):
    return model.blocks if hasattr(model, "blocks") else model.layers


def test_kept_is_what_autograd_keeps():
    """Counted by autograd's own hooks, in a real forward."""
    model, kept = GPT(layers=2), {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(3, LENGTH, 24, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        alive = model.blocks[0](x)
    assert alive.requires_grad
    found = trace_model(model, batch(3))
    assert sum(found.kept()) * 3 * LENGTH == pytest.approx(sum(kept.values()), rel=0.01)


def test_auto_returns_a_plan_that_runs():
    def body(rank, world_size):
        torch.manual_seed(0)
        model = GPT()
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        plan = par.auto(model, opt, batch=batch())
        model, opt = par.parallelize(model, opt, plan)
        loss = par.step(model, opt, batch(), microbatches=plan.microbatches)
        return str(plan), plan.microbatches, loss.item()

    found = spawn(2, body)
    assert found[0] == found[1]
    torch.manual_seed(0)
    model = GPT()
    expected = torch.nn.functional.cross_entropy(model(batch()[0]).flatten(0, 1), batch()[1].flatten())
    assert found[0][2] == pytest.approx(expected.item(), rel=1e-5)


def test_a_chosen_plan_is_a_plan():
    plan = par.auto("gpt3-13b", batch=64, world=32, machine="h100")
    assert isinstance(plan, ChosenPlan) and isinstance(plan, par.Plan)
    same = par.Plan.parse(str(plan))
    assert plan == same and same == plan and hash(plan) == hash(same)
    assert plan.microbatches == plan.prediction.job.microbatches and len(plan.others) == 9
    assert "seconds" not in str(plan)


def test_explain_and_simulate_agree():
    plan = par.Plan(tp=8, pp=4)
    found = par.planning.simulate(plan, "gpt3-13b", batch=64, microbatches=16, machine="h100")
    text = str(par.explain(plan, "gpt3-13b", batch=64, microbatches=16, machine="h100"))
    assert f"{found.seconds:.3f} s" in text and "the one change that helps most" in text


def test_arguments_that_are_wrong():
    with pytest.raises(ValueError, match="traced with a batch"):
        par.auto(GPT(), batch=8, world=2)
    with pytest.raises(ValueError, match="has no list of blocks"):
        par.auto(torch.nn.Linear(3, 3), batch=(torch.ones(2, 3), torch.ones(2, 3)), world=2)


class Blocks(torch.nn.Module):
    """Blocks, run in order. make(number) makes one."""

    def __init__(self, make, count=4):
        super().__init__()
        self.blocks = torch.nn.ModuleList(make(number) for number in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Reads(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


VALUES = torch.ones(8, 6)


@pytest.mark.parametrize(
    ("make", "given", "text"),
    [
        (lambda _: Reads(6, 6), VALUES, "cannot be traced"),
        (lambda _: torch.nn.Linear(6, 6), torch.ones(8, 5), "the batch must fit the model"),
        (lambda _: torch.nn.Linear(6, 6), torch.ones(7, 6), "differ in rows"),
        (lambda _: torch.nn.Linear(6, 6), torch.tensor(1.0), "no dimensions"),
        (lambda _: torch.nn.ReLU(), VALUES, "no parameters to train"),
    ],
)
def test_models_that_cannot_be_traced_say_why(make, given, text):
    with pytest.raises(ValueError, match=text):
        par.auto(Blocks(make), batch=(given, VALUES), world=2)


def test_plans_that_the_model_refuses_are_not_proposed():
    shared = torch.nn.Linear(6, 6)
    model = Blocks(lambda _: shared)
    plan = par.auto(model, batch=(VALUES, VALUES), world=4)
    assert {each.plan.pp for each in (plan.prediction, *plan.others)} == {1}
    with pytest.raises(ValueError, match="every plan is refused: one Linear is part of"):
        par.auto(model, batch=(VALUES, VALUES), world=4, fixed={"pp": 2})
    with pytest.raises(ValueError, match="one Linear is part of"):
        par.explain(par.Plan(pp=2), model, batch=(VALUES, VALUES))


def test_fixed_blocks_and_precision_are_heard():
    model = Blocks(lambda number: Blocks(lambda _: torch.nn.Linear(6, 6), 3), 2)
    plan = par.auto(model, batch=(VALUES, VALUES), world=2, fixed={"blocks": "blocks.1.blocks"})
    assert plan.prediction.job.model.layers == 3 and plan.blocks == "blocks.1.blocks"
    with pytest.raises(ValueError, match="in bfloat16"):
        par.auto(model, batch=(VALUES, VALUES), world=2, fixed={"precision": "bf16", "blocks": "blocks"})


def test_rows_that_do_not_divide_train():
    """Four ranks, five rows: of plans with many microbatches each has a row for every data rank."""

    def body(rank, world_size):
        torch.manual_seed(0)
        model, given = GPT(), batch(5)
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        plan = par.auto(model, opt, batch=given, fixed={"dp": 4}, microbatch=2)
        model, opt = par.parallelize(model, opt, plan)
        return par.step(model, opt, given, microbatches=plan.microbatches).item()

    torch.manual_seed(0)
    logits = GPT()(batch(5)[0]).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, batch(5)[1].flatten()).item()
    assert spawn(4, body) == pytest.approx([expected] * 4, rel=1e-5)


MEMORY = [
    *("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "tp=2,megatron_sp", "pp=2"),
    *("pp=2,schedule=zb-h1", "ulysses=2", "dp=2,tp=2,zero=3"),
]
OPTIONS = {"loss_fn": par.cross_entropy, "microbatches": 2}


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def large():
    torch.manual_seed(0)
    return GPT(vocab=64, dim=96, heads=4, layers=8, hidden=384)


def measured(rank, world_size, text):
    """Peak of the second step of this rank, as torch's allocator has it, and what is registered beside it."""
    from pycomm.benchmarks.zero_memory import _registered
    from pycomm.parallel.parts import parts_of

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        model = large()
        model, opt = par.parallelize(model, adam(model.parameters()), par.Plan.parse(text))
        par.step(model, opt, batch(8, 64), **OPTIONS)
        with record_function("second step"):
            par.step(model, opt, batch(8, 64), **OPTIONS)
    return peak_of(events.profiler.kineto_results.events()) + _registered(parts_of(model))


@pytest.mark.parametrize(
    "text", quick(MEMORY, "dp=2,zero=2", deep=("dp=2", "tp=2", "pp=2", "dp=2,tp=2,zero=3"))
)
def test_memory_within_five_percent(text):
    plan = par.Plan.parse(text)
    predicted = dry_run(large(), adam, batch(8, 64), plan, memory=True, **OPTIONS)
    found = spawn(plan.world_size, measured, text)
    for run, bytes_ in zip(predicted, found, strict=True):
        assert run.peak == pytest.approx(bytes_, rel=0.05), (text, run.rank, run.peak / bytes_)


class Unlike(torch.nn.Module):
    """Blocks of several sizes, the largest in the middle, called with keywords; a head and two tables."""

    def __init__(self, sizes):
        super().__init__()
        self.words = torch.nn.Embedding(19, 6)
        self.places = torch.nn.Embedding(5, 6)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(6, size), torch.nn.GELU(), torch.nn.Linear(size, 6))
            for size in sizes
        )
        self.norm = torch.nn.LayerNorm(6)
        self.head = torch.nn.Linear(6, 23, bias=False)

    def forward(self, x):
        h = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(input=h)
        return self.head(self.norm(h))


@pytest.mark.parametrize("sizes", [(4, 9, 5), (9, 4, 5), (4, 5, 9)])
def test_the_largest_block_stands_for_all(sizes):
    """Parameters outside blocks are distinguished: tables, the head, the norm."""
    x = torch.randint(0, 19, (3, 5))
    found = trace_model(Unlike(sizes), (x, x))
    alike = trace_model(Unlike((9, 9, 9)), (x, x))
    assert found == alike and found.layers == 3
    whole, cut, _ = found.block_parameters()
    assert whole + cut == 6 * 9 + 9 + 9 * 6 + 6
    assert (found.embedding, found.head, found.last) == ((19 + 5) * 6, 23 * 6, 12)
    assert (found.vocab, found.hidden, found.sequence, found.tied) == (23, 6, 5, False)
    assert found.block_flops().weights == 2 * 2 * 6 * 9
    doubled = trace_model(Unlike(sizes).double(), (x, x))
    assert doubled.item == 8 and sum(doubled.kept()) == pytest.approx(2 * sum(found.kept()))
    assert doubled._replace(item=4, block=()) == found._replace(block=())


class Event(NamedTuple):
    kind: str
    at: int
    size: int = 0

    def name(self):
        return self.kind

    def start_ns(self):
        return self.at

    def duration_ns(self):
        return self.size

    nbytes = duration_ns


def test_the_peak_is_that_of_the_second_step():
    """Of what was alive before it and what it makes, by time; a higher peak before or after is none."""
    changes = [(1, 100), (2, 900), (3, -900), (10, 30), (12, 50), (13, -60), (14, 20), (20, 5), (25, 700)]
    events = [Event("[memory]", at, size) for at, size in changes]
    events += [Event("second step", 10, 10), Event("aten::mm", 11, 10**9)]
    for seed in range(5):
        random.Random(seed).shuffle(events)
        assert peak_of(events) == 180
    events = [Event("[memory]", 1, 100), Event("[memory]", 11, -1), Event("second step", 10, 5)]
    assert peak_of(events) == 99
