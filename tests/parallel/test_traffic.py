"""Calls and bytes of one step against the closed forms of docs/strategies.md, and the counter against torch's
own.

What belongs to one block is the difference between models of 4 and 3 blocks; bytes are those that a rank
sends.
"""

import pytest
import torch
from models import GPT, Llama
from tiers import tier
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_ranks import spawn

import pycomm.parallel as par

ROWS, LENGTH, DIM, ITEM = 4, 8, 24, 4


class SeenByTorch(TorchDispatchMode):
    """Counts the c10d operations that torch dispatches."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def traffic_of_step(rank, world_size, make, text, microbatches=1):
    """[(op, group, bytes)] of the second step of this rank, and the number of parameters of the
    whole model.
    """
    torch.manual_seed(0)
    model = make()
    count = sum(parameter.numel() for parameter in model.parameters())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model, opt = par.parallelize(model, opt, par.Plan.parse(text))
    batch = torch.randint(0, 29, (ROWS, LENGTH)), torch.randint(0, 29, (ROWS, LENGTH))
    par.step(model, opt, batch, microbatches=microbatches)
    with SeenByTorch() as torch_counts, par.count_traffic() as traffic:
        par.step(model, opt, batch, microbatches=microbatches)
    return [tuple(call) for call in traffic.log], count, torch_counts.counts


def gpt(layers=4, heads=4, tied=False):
    return lambda: GPT(heads=heads, layers=layers, tied=tied)


def total(log, op, group=None):
    chosen = [nbytes for name, where, nbytes in log if name == op and group in (None, where)]
    return len(chosen), sum(chosen)


def padding(ranks, buckets):
    return ranks * buckets * ITEM


@tier(quick=1 / 2)
@pytest.mark.parametrize("ranks", [2, 3])
def test_data_parallel_sends_two_p(ranks):
    """2P (n-1)/n for DDP and for ZeRO 1 and 2, whatever the number of microbatches (ZeRO-2 reduces
    in each).
    """
    share = (ranks - 1) / ranks
    for microbatches in (1, 2):
        rows = lambda text, m=microbatches: spawn(ranks, traffic_of_step, gpt(), text, m)[1][:2]  # noqa: E731
        if ROWS < microbatches * ranks:
            continue
        log, count = rows(f"dp={ranks}")
        assert total(log, "all_reduce", "dp")[1] == pytest.approx(
            2 * share * count * ITEM, abs=padding(ranks, 9)
        )
        names = len(dict(gpt()().named_parameters()))
        # norm, loss, gradients that are not finite, marks of batch, call and lr, whether a rank refuses the
        # step or would lose a write, which parameters were used
        calls, nbytes = total(log, "all_reduce", "world")
        assert calls == 1 and nbytes == pytest.approx(2 * share * 8 * (names + 12), abs=1)
        assert len(log) == total(log, "all_reduce")[0]
        for zero, reduces in ((1, 1), (2, microbatches)):
            log, count = rows(f"dp={ranks},zero={zero}")
            assert total(log, "reduce_scatter")[1] == pytest.approx(
                reduces * share * count * ITEM, abs=padding(ranks, 9)
            )
            assert total(log, "all_gather")[1] == pytest.approx(share * count * ITEM, abs=padding(ranks, 9))


@pytest.mark.parametrize("ranks", [2, 3])
def test_zero_3_sends_three_p(ranks):
    log, count, _ = spawn(ranks, traffic_of_step, gpt(), f"dp={ranks},zero=3")[0]
    share = (ranks - 1) / ranks
    assert total(log, "all_gather")[1] == pytest.approx(2 * share * count * ITEM, abs=2 * padding(ranks, 9))
    assert total(log, "reduce_scatter")[1] == pytest.approx(share * count * ITEM, abs=padding(ranks, 9))


def test_buckets_are_calls():
    """One all_reduce per bucket: all parameters in one, or one each."""
    log, _, _ = spawn(2, traffic_of_step, gpt(), "dp=2")[0]
    assert total(log, "all_reduce", "dp")[0] == 1
    log, _, _ = spawn(2, traffic_of_step, gpt(), "dp=2,bucket_mb=0.000001")[0]
    assert total(log, "all_reduce", "dp")[0] == len(list(gpt()().parameters()))


def per_block(ranks, text, layers=(3, 4)):
    """{op: (calls, bytes)} that one more block adds, without the one all_reduce over all ranks."""
    few, many = (spawn(ranks, traffic_of_step, gpt(n), text)[0][0] for n in layers)
    few, many = ([call for call in log if call[1] != "world"] for log in (few, many))
    ops = {op for op, _, _ in many}
    return {op: tuple(b - a for a, b in zip(total(few, op), total(many, op), strict=True)) for op in ops}


@tier(quick=1 / 2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_two_and_two(ranks):
    """Megatron: 2 all_reduce forward and 2 backward per block, each of the whole hidden state."""
    hidden = ROWS * LENGTH * DIM * ITEM
    assert per_block(ranks, f"tp={ranks}")["all_reduce"] == (4, 4 * (2 * (ranks - 1) * hidden // ranks))


@tier(quick=1 / 2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_megatron_sequence_parallel_moves_the_same_bytes(ranks):
    """2 all_gather and 2 reduce_scatter forward, the same backward, in the place of 4 all_reduce; norms are
    summed with the gradients.
    """
    hidden, share = ROWS * LENGTH * DIM * ITEM, (ranks - 1) / ranks
    added = per_block(ranks, f"tp={ranks},megatron_sp")
    assert added["all_gather"] == (4, 4 * share * hidden)
    assert added["reduce_scatter"] == (4, 4 * share * hidden)
    partial = (4 * DIM + 2 * DIM) * ITEM  # two norms, two row biases
    assert added["all_reduce"] == (0, 2 * share * partial)


@tier(slow=1 / 2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ulysses_four_nh_over_p(ranks):
    """4 N h / P elements per rank and block forward (q, k, v, out), of which (P-1)/P go to others, and the
    same backward.
    """
    tokens = ROWS * LENGTH
    calls, nbytes = per_block(ranks, f"ulysses={ranks}")["all_to_all"]
    assert nbytes == 2 * 4 * tokens * DIM // ranks * (ranks - 1) // ranks * ITEM
    assert calls == 4  # q, k, v travel together: two calls forward, two backward


def test_ring_sends_keys_and_values_around():
    """k and v of a rank's positions n-1 times forward, and n-1 times backward with as many bytes of their
    gradients.
    """
    ranks = 2
    piece = 2 * ROWS * LENGTH // ranks * DIM * ITEM  # k and v
    assert per_block(ranks, f"ring={ranks}")["send"][1] == 3 * (ranks - 1) * piece


@tier(quick=1 / 6, slow=3 / 5)
@pytest.mark.parametrize(
    "text",
    [
        "pp=2",
        "pp=2,schedule=gpipe",
        "pp=2,schedule=zb-h1",
        "pp=4",
        "pp=2,schedule=interleaved",
        "pp=2,schedule=zbv",
    ],
)
def test_pipeline_sends_one_tensor_per_boundary(text):
    """One activation forward and one gradient back per microbatch and boundary between ranks; a tied weight's
    gradient once.
    """
    plan, microbatches = par.Plan.parse(text), 4
    logs = spawn(plan.pp, traffic_of_step, gpt(), text, microbatches)
    placement = par.pipeline.make_schedule(
        plan.schedule, plan.pp, microbatches, plan.chunks_per_rank
    ).placement
    crossings = sum(a != b for a, b in zip(placement, placement[1:], strict=False))
    assert sum(total(log, "send", "pp")[0] for log, _, _ in logs) == 2 * microbatches * crossings
    one = ROWS // microbatches * LENGTH * DIM * ITEM
    assert sum(total(log, "send", "pp")[1] for log, _, _ in logs) == 2 * microbatches * crossings * one
    tied = spawn(2, traffic_of_step, gpt(tied=True), "pp=2", microbatches)
    extra = [total(log, "send", "pp")[1] - microbatches * one for log, _, _ in tied]
    assert extra == [37 * DIM * ITEM] * 2


def test_experts_travel_twice_each_way():
    """Per layer 3 all_to_all forward (counts, rows out, rows back) and 2 backward."""

    def model():
        return Llama(layers=1, mlp=lambda: par.MoE(DIM, lambda: nn.Linear(DIM, DIM), 4, top_k=1))

    log, _, _ = spawn(2, traffic_of_step, model, "ep=2")[0]
    assert total(log, "all_to_all")[0] == 5


NAMES = {
    "allreduce_": "all_reduce",
    "_reduce_scatter_base_": "reduce_scatter",
    "_allgather_base_": "all_gather",
    "alltoall_base_": "all_to_all",
}


@tier(quick=1 / 6)
@pytest.mark.parametrize(
    "text", ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "tp=2,megatron_sp", "ulysses=2"]
)
def test_the_counter_agrees_with_torch(text):
    for log, _, seen in spawn(2, traffic_of_step, gpt(), text):
        ours = {}
        for op, _, _ in log:
            ours[op] = ours.get(op, 0) + 1
        assert ours == {NAMES[name]: number for name, number in seen.items()} and ours
