"""What a rank holds, against sums over all ranks and the table in memory.py; sizes of models and machines
against their files and papers.
"""

import math

import pytest

from pycomm.parallel import Plan
from pycomm.parallel.planning import load_machine, named
from pycomm.parallel.planning.costs import sent
from pycomm.parallel.planning.job import PYCOMM, Job
from pycomm.parallel.planning.machine import FOLDER, from_toml, known, tomllib
from pycomm.parallel.planning.memory import activations, owned_parameters, rank_memory, worst_rank
from pycomm.parallel.planning.model import gpt, llama

GIB = 2**30


def job(text, model="gpt3-1.3b", rows=64, microbatches=4, recompute="none", **software):
    described = named(model) if isinstance(model, str) else model
    plan, machine = Plan.parse(text), load_machine("h100")
    return Job(described, machine, plan, rows, microbatches, recompute, PYCOMM._replace(**software))


TIED = gpt("tied", 7, 64, 4, vocab=1000, sequence=32)
UNTIED = gpt("untied", 7, 64, 4, vocab=1000, sequence=32, tied=False)
MIXED = llama("mixed", 6, 64, 4, 2, 32, vocab=500, sequence=32, experts=(4, 2))
WHOLE = [
    *("pp=3", "dp=2,pp=7", "pp=2,schedule=zbv", "pp=2,schedule=interleaved,chunks=3", "pp=3,stages=1:1:5"),
    *("dp=4,zero=1", "dp=4,zero=2,pp=2", "dp=2,zero=3", "ring=2,ulysses=2,zero=3", "dp=8,zero=3,pp=3"),
]


@pytest.mark.parametrize("text", WHOLE)
@pytest.mark.parametrize("model", [TIED, UNTIED], ids=["tied", "untied"])
def test_all_ranks_together_hold_the_model(model, text):
    """Once, or as often as there are data ranks; what zero deals once. A tied table is in both its stages."""
    given = job(text, model)
    plan, ranks = given.plan, [rank_memory(given, rank) for rank in range(given.plan.pp)]
    data = plan.dp * plan.ring * plan.ulysses
    twice = model.vocab * model.hidden if model.tied and plan.pp > 1 and plan.schedule != "zbv" else 0
    expected = model.parameters + twice
    dealt = {"parameters": plan.zero == 3, "gradients": plan.zero >= 2, "optimizer": plan.zero >= 1}
    of_each = {"parameters": 2, "gradients": 2, "optimizer": 12}
    for name, is_dealt in dealt.items():
        held = sum(getattr(rank, name) for rank in ranks) / of_each[name] * (data if is_dealt else 1)
        assert held == pytest.approx(expected), name
    assert sum(owned_parameters(given, rank).dense for rank in range(plan.pp)) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text", ["ep=4", "ep=2,dp=3", "ep=2,dp=2,zero=1", "ep=4,dp=2,zero=3", "ep=2,pp=3,zero=2"]
)
def test_all_ranks_together_hold_the_experts(text):
    given = job(text, MIXED)
    plan, ranks = given.plan, [rank_memory(given, rank) for rank in range(given.plan.pp)]
    experts = 6 * 4 * MIXED.experts.parameters
    dense = MIXED.parameters - experts
    for name, zero, nbytes in (("parameters", 3, 2), ("gradients", 2, 2), ("optimizer", 1, 12)):
        times = (1, 1) if plan.zero >= zero else (plan.dp * plan.ep, plan.dp)
        everything = nbytes * (times[0] * dense + times[1] * experts)
        found = plan.dp * plan.ep * sum(getattr(rank, name) for rank in ranks)
        assert found == pytest.approx(everything), name


def test_the_rank_with_the_most_experts_counts():
    for ep, held in ((1, 8), (2, 4), (3, 3), (5, 2), (7, 2), (8, 1)):
        model = named("mixtral-8x7b")
        assert model.experts.held(ep) == held
        assert model.expert_parameters(1, ep) == held * model.experts.parameters
        cut = 8 / 4 if ep == 1 else held  # tp cuts stacked ones that ep does not deal
        assert model.expert_parameters(4, ep) == cut * model.experts.parameters


LARGE_VOCABULARY = gpt("vocabulary", 8, 64, 4, vocab=500_000, sequence=64, tied=False)
SMALL = gpt("small", 8, 256, 4, vocab=100, sequence=64, tied=False)
WORST = [
    *((LARGE_VOCABULARY, text) for text in ("pp=4", "pp=2", "pp=8,schedule=zb-h1")),
    *((SMALL, text) for text in ("pp=4", "pp=8", "pp=2,schedule=zbv", "pp=4,schedule=interleaved,chunks=2")),
    *((SMALL, text) for text in ("pp=4,stages=1:1:5:1", "pp=8,schedule=gpipe", "tp=2,pp=4,zero=1,dp=2")),
]


@pytest.mark.parametrize(("model", "text"), WORST, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("microbatches", [1, 16])
def test_the_worst_rank_is_that_of_all(model, text, microbatches):
    given = job(text, model, microbatches=microbatches)
    every = [rank_memory(given, rank) for rank in range(given.plan.pp)]
    assert worst_rank(given).peak == max(memory.peak for memory in every)
    for memory in every:
        assert sum(memory.parts().values()) == pytest.approx(memory.peak)
        assert memory.states == memory.parameters + memory.gradients + memory.optimizer
        after = "backward" if memory.activations + memory.workspace >= memory.update else "update"
        assert memory.where == after


def test_each_end_of_a_pipeline_can_be_the_worst():
    """A table of words in the first, logits in the last, most microbatches in flight in the first."""
    assert worst_rank(job("pp=4", LARGE_VOCABULARY, rows=8, microbatches=2)).rank == 3
    assert worst_rank(job("pp=4", SMALL, microbatches=16)).rank == 0


@pytest.mark.parametrize("text", ["dp=2", "dp=4,zero=1", "tp=2,dp=2,zero=2"])
def test_an_update_needs_gradients_in_fp32(text):
    """Bytes of master copies of a rank: 0 if gradients are fp32, or without master copies."""
    given = job(text)
    found = rank_memory(given, 0)
    assert found.update == pytest.approx(found.optimizer / 12 * 4)
    assert rank_memory(given._replace(software=PYCOMM._replace(gradient=4)), 0).update == 0
    assert rank_memory(given._replace(software=PYCOMM._replace(state=8)), 0).update == 0
    assert rank_memory(given._replace(software=PYCOMM._replace(state=0)), 0).update == 0


def test_what_is_offloaded_is_in_the_host():
    text = "dp=2,zero=3"
    here, state, values = (
        rank_memory(job(text + more), 0) for more in ("", ",offload=optimizer", ",offload=parameters")
    )
    assert here.host == 0 and here.update > 0
    assert (state.host, state.optimizer, state.parameters) == (here.optimizer, 0, here.parameters)
    assert (values.host, values.optimizer, values.parameters) == (here.optimizer + here.parameters, 0, 0)
    assert (state.update, values.update) == (here.update, 0)
    assert here.gradients == state.gradients == values.gradients


def test_what_backward_holds_beside():
    """Logits in the last stage, a block that is recomputed, four hidden states, units or buckets of zero."""
    model = named("gpt3-1.3b")
    tokens = 16 * model.sequence
    hidden, block = 4 * 2 * tokens * model.hidden, sum(model.block_parameters())
    logits = tokens * model.vocab * (4 + 4 + 2)
    one = activations(model, tokens)
    found = {text: rank_memory(job(text, rows=64), 0).workspace for text in ("pp=2", "")}
    assert found == pytest.approx({"pp=2": hidden, "": hidden + logits})
    assert rank_memory(job("pp=2", rows=64), 1).workspace == pytest.approx(hidden + logits)
    again = rank_memory(job("pp=2", rows=64, recompute="full"), 0)
    assert again.workspace == pytest.approx(hidden + one)
    assert again.activations == pytest.approx(2 * 12 * tokens * 2 * model.hidden)
    alone = hidden + logits
    units = rank_memory(job("dp=2,zero=3", rows=128), 0).workspace - alone
    assert units == pytest.approx(block * (2 * 2 + 2))
    for size in (1, 400):
        buckets = rank_memory(job(f"dp=2,zero=2,bucket_mb={size}", rows=128), 0).workspace - alone
        assert buckets == pytest.approx(2 * min(max(size * 1e6, 2 * block), model.parameters * 2 / 8))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("ep", "divided"), [(1, True), (2, False)])
def test_kept_of_experts_that_tp_does_not_cut(tp, ep, divided):
    """All of it is on every rank of tp; of what tp cuts a part."""
    model = named("mixtral-8x7b")
    dealt, (experts,) = model.dealt(ep), [module for module in model.block if module.experts]
    assert sum(dealt.kept()) == sum(model.kept()) and dealt.parameters == model.parameters
    found = activations(dealt, 1, 1) - activations(dealt, 1, tp)
    cut = model.kept().cut - (0 if divided else experts.kept[1])
    assert found == pytest.approx(cut * (1 - 1 / tp))
    assert sum(module.moved[1] for module in dealt.block) == sum(
        module.moved[1] for module in model.block if divided or not module.experts
    )
    assert all(p.cut is None for module in dealt.block if module.experts for p in module.products) != divided


@pytest.mark.parametrize(("name", "billions"), [("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39.1)])
def test_parameters_that_a_token_meets(name, billions):
    """As Mistral prints them; of a dense model all."""
    assert named(name).active_parameters / 1e9 == pytest.approx(billions, abs=0.07)
    assert named("llama-3-8b").active_parameters == named("llama-3-8b").parameters


@pytest.mark.parametrize("name", ["gpt3-1.3b", "llama-3-8b", "mixtral-8x7b"])
def test_a_sequence_and_scores_that_are_asked_for(name):
    usual, long, whole = named(name), named(name, sequence=123), named(name, fused=False)
    assert (long.sequence, usual.sequence > 123, whole.sequence) == (123, True, usual.sequence)
    assert long.block_flops().attention == 4 * 123 * usual.heads * usual.head_dim
    assert usual.kept().scores == 0 and whole.kept().scores == 5 * usual.heads * usual.sequence
    assert whole.kept()[:2] == usual.kept()[:2]


@pytest.mark.parametrize("name", known())
def test_a_machine_has_the_numbers_of_its_file(name):
    table, machine = tomllib.loads((FOLDER / f"{name}.toml").read_text()), load_machine(name)
    device, reached = table["device"], table["reached"]
    assert machine.name == table["name"]
    assert [machine.peak, machine.bandwidth, machine.host] == pytest.approx(
        [device["peak_tflops"] * 1e12, device["memory_gb_s"] * 1e9, device["host_gb_s"] * 1e9]
    )
    assert [machine.memory / GIB, machine.reserved / GIB] == [device["memory_gib"], device["reserved_gib"]]
    assert machine.usable == machine.memory - machine.reserved
    seconds = {"launch": reached.pop("launch_us") * 1e-6}
    assert machine.reached._asdict() == pytest.approx(reached | seconds)
    for link, given in zip(machine.links, table["link"], strict=True):
        sizes = [given["ranks"], given["gb_s"] * 1e9, given["latency_us"] * 1e-6, given.get("one_way", 1)]
        assert link.name == given["name"] and list(link[1:]) == pytest.approx(sizes)
    assert machine.node == (table["link"][0]["ranks"] or math.inf)


def test_every_number_of_a_machine_has_a_place_of_its_own():
    """Seventeen numbers that no two share; in the files of machines some are equal."""
    table = tomllib.loads((FOLDER / "h100-dgx.toml").read_text())
    device = {key: 101.0 + i for i, key in enumerate(table["device"])} | {"reserved_gib": 7}
    reached = {key: 0.3 + i / 100 for i, key in enumerate(table["reached"])}
    links = [
        {"name": "a", "ranks": 5, "gb_s": 11, "latency_us": 13, "one_way": 0.7},
        {"name": "b", "ranks": 0, "gb_s": 17, "latency_us": 19, "one_way": 0.9},
    ]
    found = from_toml({"device": device, "reached": reached, "link": links}, "here")
    assert found.name == "here" and found.node == 5 and found.reached.product == reached["product"]
    assert found.host == pytest.approx(device["host_gb_s"] * 1e9) != found.bandwidth
    assert found.reached.product_half == reached["product_half"]
    assert found.reached.launch == pytest.approx(reached["launch_us"] * 1e-6)
    assert [tuple(link) for link in found.links] == [
        ("a", 5, pytest.approx(11e9), pytest.approx(13e-6), 0.7),
        ("b", 0, pytest.approx(17e9), pytest.approx(19e-6), 0.9),
    ]


def test_a_machine_by_a_part_of_its_name_and_by_its_path(tmp_path):
    assert load_machine("H100") == load_machine("h100-dgx") == load_machine(FOLDER / "h100-dgx.toml")
    path = tmp_path / "h100.toml"
    path.write_text((FOLDER / "a100-selene.toml").read_text())
    assert load_machine(str(path)) == load_machine("a100") != load_machine("h100")


# --- what is sent ---------------------------------------------------------------------------------

LLAMA = named("llama-3-8b", sequence=1024)
TOKENS, HIDDEN = 4 * 1024, 4 * 1024 * 4096 * 2  # of a microbatch of 4 rows, on one rank; bytes of its state
QUERIES, KEYS = TOKENS * 4096 * 2, TOKENS * 1024 * 2
TABLE = [  # plan, recompute, axis, calls, bytes; 3 microbatches, 32 blocks
    ("tp=4", "none", "tp", 4 * 96, 8 * 3 / 4 * 96 * HIDDEN),
    ("tp=4", "full", "tp", 6 * 96, 12 * 3 / 4 * 96 * HIDDEN),
    ("tp=2,megatron_sp,pp=2", "none", "tp", 8 * 48, 8 / 2 * 48 * HIDDEN),
    ("tp=2,megatron_sp,pp=2", "none", "pp", 6, 6 * HIDDEN / 2),
    ("tp=2,pp=4,schedule=interleaved,chunks=2", "none", "pp", 12, 12 * HIDDEN),
    ("pp=4,schedule=zbv", "none", "pp", 12, 12 * HIDDEN),
    ("ulysses=4", "none", "ulysses", 4 * 96, 2 * 3 / 4 * 96 * (2 * QUERIES + 2 * KEYS) / 4),
    ("ulysses=2,tp=2", "full", "ulysses", 6 * 96, 3 / 2 * 96 * (2 * QUERIES + 2 * KEYS) / 4),
    ("ring=4", "none", "ring", 9 * 96, 9 * 96 * 2 * KEYS / 4),
    ("ring=2,ulysses=2", "none", "ring", 3 * 96, 3 * 96 * 2 * KEYS / 4 / 2),
    ("ring=2", "full", "ring", 4 * 96, 4 * 96 * 2 * KEYS / 2),
]


@pytest.mark.parametrize(("text", "recompute", "axis", "calls", "nbytes"), TABLE)
def test_what_an_axis_sends(text, recompute, axis, calls, nbytes):
    plan = Plan.parse(text)
    found = sent(job(text, LLAMA, 12 * plan.dp, 3, recompute))
    axes = {name for name in ("tp", "ulysses", "ring", "ep", "pp") if getattr(plan, name) > 1}
    assert set(found) - {"data"} == axes and ("data" in found) == (plan.dp * plan.ring * plan.ulysses > 1)
    assert found[axis] == pytest.approx((calls, nbytes))


@pytest.mark.parametrize(("text", "gather", "scatter", "calls"), [
    ("dp=8", 1, 1, 1),
    ("dp=4,ring=2,zero=1", 1, 1, 2),
    ("dp=8,zero=2", 1, 3, 4),
    ("dp=8,zero=3", 6, 3, 3 * 3 * 32),
    ("ulysses=8,zero=3", 6, 3, 3 * 3 * 32),
])  # fmt: skip
def test_what_data_ranks_send(text, gather, scatter, calls):
    """Halves of an all_reduce: values are gathered, gradients are summed."""
    found = sent(job(text, LLAMA, 12 * Plan.parse(text).dp, 3))["data"]
    assert found == pytest.approx((calls, 7 / 8 * 2 * LLAMA.parameters * (gather + scatter)))


def test_what_ranks_of_experts_send():
    """Dense gradients over all data ranks, expert gradients over every ep-th; rows there and back."""
    model = named("mixtral-8x7b", sequence=512)
    found = sent(job("ep=4,dp=2", model, 8 * 3, 3))
    experts = 2 * model.experts.parameters * 32
    dense = model.parameters - 4 * experts
    assert found["data"] == pytest.approx((1, 2 * 2 * (7 / 8 * dense + 1 / 2 * experts)))
    assert set(sent(job("dp=2", model, 8 * 3, 3))) == {"data"}
    rows = 512 * 2 * model.hidden * 2  # of two experts of a token
    assert found["ep"] == pytest.approx((5 * 96, 3 / 4 * 96 * (4 * rows + 8 * 8)))
    again = sent(job("ep=4,dp=2", model, 8 * 3, 3, "full"))["ep"]
    assert again == pytest.approx((8 * 96, 3 / 4 * 96 * (6 * rows + 2 * 8 * 8)))
