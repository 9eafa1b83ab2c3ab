"""par.verify finds plans equal that are, leaves the user's model as it is, and takes what par.step takes."""

import contextlib
import copy
import io
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from odd_models import cross, numbers, tokens
from tiers import tier
from torch import nn
from torch_ranks import spawn
from transformers import GPT2Config, GPT2LMHeadModel
from verify_cases import data_for, error_of, make, text_rows, verify

import pycomm.parallel as par

PLANS = [  # model, plan, microbatches
    ("gpt", "dp=2", 1),
    ("llama", "dp=2", 3),
    ("gpt", "dp=2,zero=1", 1),
    ("gpt", "dp=2,zero=2,bucket_mb=0.004", 2),
    ("llama", "dp=2,zero=3", 2),
    ("gpt", "tp=2", 1),
    ("llama", "tp=2", 2),
    ("gpt", "tp=2,megatron_sp", 1),
    ("llama", "tp=2,megatron_sp", 2),
    ("gpt", "pp=2,schedule=gpipe", 3),
    ("tied", "pp=2,schedule=1f1b,checkpoint", 4),
    ("llama", "pp=2,schedule=interleaved", 2),
    ("gpt", "pp=2,schedule=zb-h1", 3),
    ("gpt", "pp=2,schedule=zbv", 3),
    ("gpt", "ring=2", 1),
    ("llama", "ring=2", 2),
    ("gpt", "ulysses=2", 2),
    ("llama", "ulysses=2", 1),
    ("gpt", "ring=2,tp=2,megatron_sp", 1),
    ("llama", "dp=2,pp=2,zero=3", 2),
    ("normed", "dp=2", 3),
    ("normed", "dp=2", 1),
    ("moe", "ep=2", 2),
    ("rows", "ulysses=2", 1),
]


@tier(quick=1 / 24, slow=1 / 2)
@pytest.mark.parametrize(("kind", "plan", "microbatches"), PLANS)
def test_equal(kind, plan, microbatches):
    """Nearly all modules are seen: not the insides of what tp cuts, nor what has no rows."""
    results = spawn(par.Plan.parse(plan).world_size, verify, kind, plan, microbatches)
    assert len(set(results)) == 1
    found, model = results[0], make(kind)
    names, blind = [name for name, _ in model.named_modules()], 9 if "tp" in plan else 3
    assert found.equal and bool(found) and found.largest < 1e-12, str(found)
    assert found.compared[0] >= len(names) - blind - 6 * (kind == "moe"), str(found)
    assert found.compared[1] == len(list(model.parameters())) and found.difference is None
    assert found.loss == pytest.approx(found.loss_alone, rel=1e-12)


# The user's model, and other options ------------------------------------------------------------


def everything_of(model):
    modules = {
        name: (module.training, len(module._forward_hooks), sorted(vars(module)))
        for name, module in model.named_modules()
    }
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return copy.deepcopy((modules, dict(model.state_dict()), gradients))


def untouched(rank, world_size, kind, plan):
    model, (batch, loss) = make(kind), data_for(kind)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    model.norm.eval() if kind == "gpt" else None
    before, groups = everything_of(model), dist.distributed_c10d._world.pg_map.copy()
    given = copy.deepcopy(batch)
    numbers_before = torch.get_rng_state(), random.getstate()
    assert par.verify(model, batch, par.Plan.parse(plan), loss, microbatches=2, show=False).equal
    assert dist.distributed_c10d._world.pg_map == groups
    assert torch.equal(torch.get_rng_state(), numbers_before[0]) and random.getstate() == numbers_before[1]
    after = everything_of(model)
    assert before[0] == after[0]
    for one, other in zip(before[1:], after[1:], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    for one, other in zip(*map(torch.utils._pytree.tree_leaves, (given, batch)), strict=True):
        assert torch.equal(one, other)
    model.zero_grad()
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), par.Plan.parse(plan))
    return [par.step(model, opt, batch, loss, microbatches=2).item() for _ in range(2)]


@tier(slow=1)
@pytest.mark.parametrize(
    ("kind", "plan"), [("gpt", "dp=2,tp=2"), ("normed", "dp=2"), ("llama", "pp=2,zero=1")]
)
def test_model_is_untouched(kind, plan):
    """Afterwards it trains under the plan as one process does."""
    model, (batch, loss) = make(kind), data_for(kind)
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    right = [par.step(model, opt, batch, loss, microbatches=2).item() for _ in range(2)]
    for losses in spawn(par.Plan.parse(plan).world_size, untouched, kind, plan):
        assert losses == pytest.approx(right, rel=1e-5)


def prints(rank, world_size):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        found = par.verify(make("gpt"), tokens(0), par.Plan(dp=2), cross)
    return out.getvalue(), f"{found}\n"


def test_rank_0_prints():
    (printed, report), (nothing, same) = spawn(2, prints)
    assert printed == report == same and nothing == ""
    assert report.startswith("verify Plan(dp=2): equal to one process. Loss ")


def with_dropout(rank, world_size, how):
    sizes = {"vocab_size": 29, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
    torch.manual_seed(rank)  # verify takes rank 0's values

    def model():
        return GPT2LMHeadModel(config)

    found = par.verify(model if how == "function" else model(), text_rows(), par.Plan(dp=2), show=False)
    return found, config.attn_pdrop


@pytest.mark.parametrize("how", ["function", "module"])
def test_dropout_is_left_out(how):
    for found, rate in spawn(2, with_dropout, how):
        assert found.equal and "dropout is zero here, in 7 modules" in str(found) and rate == 0.1


def own_rows(rank, world_size, lengths):
    x, y = tokens(0)
    rows = slice(0, 9) if rank == 0 else slice(9, 13)
    batch = x[rows, : lengths[rank]], y[rows, : lengths[rank]]
    found = [par.verify(make("gpt"), batch, par.Plan(dp=2), cross, microbatches=2, sharded=True, show=False)]
    return [*found, verify(rank, 2, "gpt", "dp=2", 1)]


def test_sharded_rows():
    for sharded, whole in spawn(2, own_rows, (7, 7)):
        assert sharded.equal and whole.equal and sharded.loss == pytest.approx(whole.loss, rel=1e-12)


def shapes_differ(rank, world_size):
    return error_of(own_rows, rank, world_size, (7, 6))


def test_sharded_rows_of_other_lengths():
    for kind, words in spawn(2, shapes_differ):
        assert kind == "ValueError" and "Pad them alike" in words


def aside(rank, world_size, plan):
    return verify(rank, world_size, "gpt", plan, 2)


@tier(quick=1 / 3)
@pytest.mark.parametrize(
    ("plan", "names"),
    [
        ("dp=2,precision=bf16,zero=1", ["precision"]),
        ("dp=2,compression=int8", ["compression"]),
        ("pp=2,schedule=pipedream", ["schedule"]),
    ],
)
def test_what_differs_on_purpose_is_left_aside(plan, names):
    for found in spawn(2, aside, plan):
        assert found.equal and [note.split()[0] for note in found.notes] == names


def in_fp32(rank, world_size):
    return [
        verify(rank, world_size, "gpt", "tp=2", 1, fp64=False, **more) for more in ({}, {"tolerance": 0.0})
    ]


def test_fp32_and_tolerance():
    for usual, strict in spawn(2, in_fp32):
        assert usual.equal and 1e-9 < usual.largest < 1e-4 and not strict.equal


def test_one_process():
    found = verify(0, 1, "gpt", "", 2)
    assert found.equal and found.plan == "Plan(single process)"


class Single(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.float(), torch.ones(9))


def test_model_that_cannot_run_in_fp64():
    model, batch = Single(9, 9), tuple(x.float() for x in numbers(0))
    with pytest.raises(ValueError, match=r"cannot run this model in fp64 \(RuntimeError.*fp64=False"):
        par.verify(model, batch, par.Plan(), F.mse_loss)
    assert par.verify(model, batch, par.Plan(), F.mse_loss, fp64=False).equal
