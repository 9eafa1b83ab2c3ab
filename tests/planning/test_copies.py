"""What tensor parallelism reads and writes beside its collectives: counted in steps of two ranks, against the
numbers of planning/job.py. And what one direction of a link is worth.
"""

import sys
from pathlib import Path

import pytest
import torch
from tiers import tier
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path[:0] = [str(Path(__file__).parents[1] / "parallel")]

from torch_ranks import spawn  # noqa: E402

import pycomm.parallel as par  # noqa: E402
from pycomm.benchmarks.planned import SIZE  # noqa: E402
from pycomm.benchmarks.strategies.model import loss_of, make_batch, make_model, make_optimizer  # noqa: E402
from pycomm.parallel.planning import collectives, load_machine, named  # noqa: E402
from pycomm.parallel.planning.compute import Cut, block_time, moved_time  # noqa: E402
from pycomm.parallel.planning.job import MEGATRON_2021, MEGATRON_2022, PYCOMM  # noqa: E402
from pycomm.parallel.planning.machine import FOLDER, from_toml, tomllib  # noqa: E402

SMALL = SIZE._replace(rows=8, vocab=64)  # products are still large enough for pycomm.fused
HIDDEN = SMALL.rows * SMALL.length * SMALL.dim * 4  # bytes of the hidden state
CALLS = {"tp=2": 4, "tp=2,megatron_sp": 8}  # of a block and step
COPIES = {"aten.clone.default", "aten.copy_.default", "aten.cat.default"}


class Copies(TorchDispatchMode):
    """Bytes that copies read and write, and additions of a vector to a hidden state."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
        bias = str(func) == "aten.add.Tensor" and given[-1].dim() == 1 < given[0].dim()
        if bias or str(func) in COPIES:
            made = [] if "copy_" in str(func) else [out]
            self.nbytes += sum(each.numel() * each.element_size() for each in given + made)
        return out


def copied(rank, world_size, text, layers):
    size = SMALL._replace(layers=layers)
    model = make_model(size)
    model, opt = par.parallelize(model, make_optimizer(model.parameters()), par.Plan.parse(text))
    batch = make_batch(size, 0)
    par.step(model, opt, batch, loss_of)
    with Copies() as found:
        par.step(model, opt, batch, loss_of)
    return found.nbytes


@tier(quick=1 / 2)
@pytest.mark.parametrize("text", CALLS)
def test_copies_of_a_block_are_counted(text):
    one, two = (spawn(2, copied, text, layers)[0] for layers in (2, 3))
    expected = PYCOMM.copies[par.Plan.parse(text).megatron_sp]
    assert (two - one) / HIDDEN / CALLS[text] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("software", [PYCOMM, MEGATRON_2021, MEGATRON_2022], ids=lambda s: s.name)
@pytest.mark.parametrize("pieces", [False, True])
def test_copies_take_time(software, pieces):
    machine, model = load_machine("cpu"), named("gpt3-125m")
    spans = (("tp", collectives.span(machine, 2, 1)),)
    cut = Cut(4, 2, sequence_parallel=pieces)
    plain, with_copies = (
        block_time(machine, model, cut._replace(copies=copies), spans)
        for copies in ((0.0, 0.0), software.copies)
    )
    hidden = 2 * 4 * model.sequence * model.hidden
    once = moved_time(machine, software.copies[pieces] * hidden)
    assert with_copies.forward - plain.forward == pytest.approx((4 if pieces else 2) * once)
    assert bool(once) == (software is PYCOMM)


def test_a_link_of_one_way():
    """all_reduce keeps its bandwidth; what goes one way reaches a share of it."""
    table = (FOLDER / "cpu-2core.toml").read_text()
    line = next(line for line in table.splitlines() if line.startswith("one_way"))
    half, full = (from_toml(tomllib.loads(table.replace(line, new))) for new in ("one_way = 0.5", ""))
    a, b = collectives.span(half, 2, 1), collectives.span(full, 2, 1)
    for call in (collectives.all_gather, collectives.all_to_all):
        latency = a.inner.latency
        assert call(a, 1e6) - latency == pytest.approx(2 * (call(b, 1e6) - latency))
    assert collectives.all_reduce(a, 1e6) == collectives.all_reduce(b, 1e6)
    for wrong in ("one_way = 0", "one_way = 1.5", "one_way = nan"):
        with pytest.raises(ValueError, match="one_way"):
            from_toml(tomllib.loads(table.replace(line, wrong)))
