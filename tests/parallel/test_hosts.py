"""Plans over simulated hosts: where ranks take their places, zero inside hosts, equality with one process.

Ranks are processes on hosts that are only said to be several (PYCOMM_HOST_ID); pycomm sends between them by
loopback.
"""

import logging
import random
import traceback
from math import prod

import checkpoint_cases
import equality
import odd_models
import pytest
import torch
import torch._dynamo  # the first optimizer imports it, which would take seconds in each forked rank
import torch.nn.functional as F
from checkpoint_cases import compare, held, same
from halves import quick
from tiers import tier

import pycomm
import pycomm.parallel as par
from pycomm.groups import hosts_of, numbered, show_hosts
from pycomm.parallel import full_state_dict
from pycomm.parallel.ground import hosts as places
from pycomm.parallel.parts import parts_of
from pycomm.testing import run_ranks

STEPS = equality.FEW_STEPS
LIMIT = 90  # seconds of the ranks of one test


def spawn(hosts, body, *args, backend="pycomm", world_size=None):
    """Runs body(rank, world_size, *args) on these hosts; fails with the tracebacks of all that raised."""
    n = world_size or len(hosts)
    options = {"backend": backend, "hosts": hosts, "timeout": LIMIT, "operation_timeout": 30.0, "fail": False}
    results = run_ranks(n, body, n, *args, mode="processes", **options)
    failed = [
        "".join(traceback.format_exception(result)) for result in results if isinstance(result, BaseException)
    ]
    assert not failed, "\n".join(failed)
    return results


# --- places --------------------------------------------------------------------------------------


ARRANGED = [  # hosts, sizes of the axes, ranks by place, groups of each axis across hosts
    ("0000", (2, 2), "0123", (0, 0)),
    ("0011", (2, 2), "0123", (2, 0)),
    ("0101", (2, 2), "0213", (2, 0)),
    ("0101", (4,), "0123", (1,)),
    ("0110", (2, 2), "0123", (2, 2)),  # no way in which ranks rise along both axes
    ("00011111", (4, 2), "01234567", (2, 1)),
    ("01010101", (2, 2, 2), "02461357", (4, 0, 0)),
    ("01010101", (4, 2), "02134657", (2, 0)),
    ("010101010101", (3, 2, 2), None, (4, 2, 0)),
    ("01201201", (4, 2), None, (2, 1)),
    ("01230123", (2, 2, 2), "04152637", (4, 4, 0)),
    ("00110011", (2, 4), "01452367", (4, 0)),
    ("012012012012", (3, 2, 2), None, (4, 0, 0)),
]


@pytest.mark.parametrize("hosts, sizes, order, crossing", ARRANGED)
def test_inner_axes_stay_inside(hosts, sizes, order, crossing):
    hosts = hosts_of(hosts, len(hosts))
    mesh = places.arrange(hosts, sizes, [tuple(range(len(sizes)))])
    if order is not None:
        assert "".join(map(str, mesh.flatten().tolist())) == order
    assert tuple(places.crossings(mesh, (axis,), hosts) for axis in range(len(sizes))) == crossing


def test_any_placement_gives_groups_in_the_order_that_torch_has():
    """Every rank has a place; ranks rise along axes; joined axes are sorted alike; the plain order is never
    better for the innermost axis.
    """
    draw, shapes = random.Random(0), [(2, 2), (4, 2), (2, 2, 2), (3, 2), (2, 3, 2), (12,), (2, 6)]
    for _ in range(300):
        sizes = draw.choice(shapes)
        hosts = numbered([draw.randrange(3) for _ in range(prod(sizes))])
        axes = tuple(range(len(sizes)))
        mesh = places.arrange(hosts, sizes, [axes[-2:], axes])
        assert sorted(mesh.flatten().tolist()) == list(range(len(hosts)))
        for axis in axes:
            assert (places.lines(mesh, (axis,)).diff(dim=1) > 0).all()
        orders = places.lines(mesh, axes[-2:]).argsort(dim=1)
        assert (orders == orders[0]).all()
        plain = torch.arange(len(hosts)).view(sizes)
        assert places.crossings(mesh, axes[-1:], hosts) <= places.crossings(plain, axes[-1:], hosts)


def test_groups_are_divided_by_host():
    def divide(hosts, sizes, axes):
        return places.divide(torch.arange(len(hosts)).view(sizes), axes, hosts)

    assert divide([0, 1, 0, 1], (4,), (0,)) == [([[0, 2], [1, 3]], [[0, 1], [2, 3]])]
    assert divide([0, 0, 1, 1], (2, 2), (0,)) == [([[0], [2]], [[0, 2]]), ([[1], [3]], [[1, 3]])]
    assert divide([0, 0, 0, 0], (4,), (0,)) == [([[0, 1, 2, 3]], [[0], [1], [2], [3]])]
    assert divide([0, 1, 1], (3,), (0,)) is None
    assert divide([0, 0, 1, 1, 0, 1, 0, 1], (2, 4), (1,)) is None  # unlike in the two groups


def test_hosts_in_words():
    assert hosts_of("3+1", 4) == [0, 0, 0, 1] == hosts_of([0, 0, 0, 1], 4)
    assert show_hosts([0, 1, 0, 1]) == "2 hosts x 2" and show_hosts([0, 0, 0, 1]) == "hosts of 3 + 1"
    assert numbered("bbab") == [0, 0, 1, 0]


# --- equality ------------------------------------------------------------------------------------


CASES = [
    ("gpt", "dp=2,tp=2", "0011"),
    ("gpt", "dp=2,tp=2,zero=2,megatron_sp", "0101"),
    ("gpt", "dp=2,tp=2,zero=3,zero_group=host", "0110"),  # tp crosses hosts
    ("gpt", "dp=4,zero=1,zero_group=host", "0011"),
    ("gpt", "dp=4,zero=2,zero_group=host,bucket_mb=0.004", "0101"),
    ("gpt", "dp=4,zero=3,zero_group=host", "0011"),
    ("gpt", "dp=4,zero=3,zero_group=host,checkpoint", "0110"),
    ("gpt", "dp=2,zero=3,zero_group=host", "01"),  # nothing to divide
    ("gpt", "dp=4,zero=3,zero_group=host", "0000"),
    ("gpt", "dp=2,pp=2,zero=1", "0011"),
    ("gpt", "pp=2,tp=2", "0101"),
    ("gpt", "pp=4,schedule=1f1b", "0101"),
    ("llama", "dp=2,ulysses=2,zero=1", "0101"),
    ("llama", "dp=2,ulysses=2,zero=3,zero_group=host", "0011"),
    ("llama", "ring=2,ulysses=2", "0101"),
    ("moe", "dp=2,ep=2,zero=3,zero_group=host", "0101"),
    ("gpt", "pp=2,dp=2,tp=2,zero=3,zero_group=host", "01010101"),
    ("gpt", "pp=2,dp=4,zero=2,zero_group=host,schedule=zb-h1", "00110011"),
    ("llama", "dp=3,ulysses=2,zero=1,zero_group=host", "012012"),
    ("moe", "dp=2,ep=2,tp=2,zero=2,zero_group=host", "00001111"),
    ("llama", "dp=2,ulysses=2,tp=2,zero=3,zero_group=host,megatron_sp", "01010101"),
]


@tier(quick=1 / 6, slow=1 / 14)
@pytest.mark.parametrize("case", quick(CASES, *CASES[1:4], CASES[5], CASES[9], CASES[13]), ids=" ".join)
@pytest.mark.parametrize("dtype", quick([torch.float32, torch.float64], torch.float64))
def test_equal_to_one_process(case, dtype):
    """Some steps with clipping: losses, norms, gradients and parameters."""
    kind, text, hosts = case
    losses, norms, gradients, parameters = equality.reference(kind, dtype, STEPS)
    for result in spawn(hosts, equality.run_plan, kind, dtype, par.Plan.parse(text), STEPS):
        pairs = [*zip(result[0], losses, strict=True), *zip(result[1], norms, strict=True)]
        for found, expected in zip(result[2:], (gradients, parameters), strict=True):
            pairs += [(found[name], value) for name, value in expected.items()] if found is not None else []
        assert max(equality.relative(*pair) for pair in pairs) < equality.LIMITS[dtype]


@tier(slow=1)
def test_gloo_alone():
    """Hosts are found whatever the backend is."""
    text = "dp=2,tp=2,zero=3,zero_group=host"
    losses, norms, _, _ = equality.reference("gpt", torch.float64, STEPS)
    for result in spawn(
        "0101", equality.run_plan, "gpt", torch.float64, par.Plan.parse(text), STEPS, backend="gloo"
    ):
        assert max(map(equality.relative, result[0], losses)) < 1e-12
        assert max(map(equality.relative, result[1], norms)) < 1e-12


def accumulated(rank, world_size, zero):
    """Two calls, of which the second updates, and one over the rows of both: (norm, parameters, calls)"""
    inputs, targets = next(equality.batches(1))
    found = []
    for calls in (2, 1):
        model = equality.make_model("gpt", torch.float64)
        opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        model, opt = par.parallelize(model, opt, par.Plan(dp=4, zero=zero, zero_group="host"))
        with par.count_traffic() as traffic:
            for number, (x, y) in enumerate(zip(inputs.chunk(calls), targets.chunk(calls), strict=True)):
                update = number == calls - 1
                par.step(model, opt, (x, y), microbatches=1, clip=0.5, update=update)
        across = traffic.calls("all_reduce", "dp across hosts")
        found.append((par.grad_norm(model).item(), full_state_dict(model), across))
    return found


@tier(slow=1 / 3)
@pytest.mark.parametrize("zero", quick([1, 2, 3], 2))
def test_calls_that_wait(zero):
    """Their gradients go across once, with the call that updates."""
    for (norm, state, calls), (its_norm, its_state, its_calls) in spawn("0101", accumulated, zero):
        assert norm == pytest.approx(its_norm, rel=1e-12) and calls == its_calls > 0
        for name, value in state.items():
            assert equality.relative(its_state[name], value) < 1e-12, name


# --- what is sent --------------------------------------------------------------------------------


def calls_of_a_step(rank, world_size, text, microbatches):
    """([(op, group, bytes)] of parallelize, of the second step, what describe() says, elements of the model
    that this rank's optimizer has)
    """
    model = equality.make_model("gpt", torch.float32)
    batch = torch.zeros(8, 11, dtype=torch.long), torch.zeros(8, 11, dtype=torch.long)
    with par.count_traffic() as making:
        model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), par.Plan.parse(text))
    before = par.describe(model)
    par.step(model, opt, batch, microbatches=microbatches)
    with par.count_traffic() as traffic:
        par.step(model, opt, batch, microbatches=microbatches)
    owned = sum(p.numel() for group in opt.param_groups for p in group["params"])
    return making.log, traffic.log, (before, par.describe(model)), owned


def total(log, op, group):
    chosen = [call.nbytes for call in log if (call.op, call.group) == (op, group)]
    return len(chosen), sum(chosen)


@tier(quick=1 / 3)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_zero_sends_over_hosts(zero):
    """2(H-1)/H P/k across, once a step; inside what zero sends on k ranks. Nothing else."""
    size = 4 * sum(p.numel() for p in equality.make_model("gpt", torch.float32).parameters())
    for _, log, (before, after), owned in spawn(
        "0011", calls_of_a_step, f"dp=4,zero={zero},zero_group=host", 2
    ):
        buckets, nbytes = total(log, "all_reduce", "dp across hosts")
        assert nbytes == pytest.approx(size / 2, rel=0.01) and owned == pytest.approx(size / 8, rel=0.01)
        sums, nbytes = total(log, "reduce_scatter", "dp inside hosts")
        microbatches = 1 if zero == 1 else 2
        assert sums == microbatches * buckets and nbytes == pytest.approx(microbatches * size / 2, rel=0.01)
        assert {call.group for call in log} == {"dp inside hosts", "dp across hosts", "world"}
        assert "dp crosses hosts in 1 of 1 groups" in str(before) and "after a step" in str(before)
        assert "among the 2 of a host" in str(before) and before.hosts == "2 hosts x 2: no axis inside"
        [sentence] = after.crossing
        sent = sum(call.nbytes for call in log if call.group == "dp across hosts")
        assert f"this rank sent {sent:,} bytes" in sentence


def test_one_host_is_as_before():
    """No call more in a step, one in making the mesh, and not a word."""
    plain = [spawn("000", calls_of_a_step, f"dp=3,zero=3{more}", 1) for more in ("", ",zero_group=host")]
    for (making, log, descriptions, _), (its_making, its_log, _, _) in zip(*plain, strict=True):
        assert log == its_log and making == its_making
        assert making[0] == ("all_gather", "world", 32) and making.count(making[0]) == 1
        assert all(text.hosts is None and "host" not in str(text) for text in descriptions)


# --- checkpoints, BatchNorm, verify --------------------------------------------------------------


def saved(rank, world_size, plan, folder):
    model, opt = checkpoint_cases.make(plan, 1)
    checkpoint_cases.train(model, opt, [0, 1])
    par.save(model, opt, folder)
    return held(model, opt), full_state_dict(model)


def loaded(rank, world_size, plan, folder, reference, after):
    """Loads, compares bits, and takes the next step."""
    model, opt = checkpoint_cases.make(plan, 2)
    par.load(model, opt, folder)
    compare(held(model, opt), reference, plan)
    checkpoint_cases.train(model, opt, [2])
    for name, value in full_state_dict(model).items():
        assert torch.allclose(value, after[name], rtol=1e-11, atol=1e-12), (plan, name)


def by_one_process(folder):
    """(values and state, state_dict, state_dict after the next step) of a plain model that has loaded it."""
    model, opt = checkpoint_cases.make("", 2)
    par.load(model, opt, folder)
    reference = {
        name: (values, {key: value.clone() for key, value in state.items()})
        for name, (values, state) in checkpoint_cases.reference_of(model, opt).items()
    }
    full = {name: value.clone() for name, value in model.state_dict().items()}
    checkpoint_cases.train(model, opt, [2])
    return reference, full, {name: value.clone() for name, value in model.state_dict().items()}


HSDP = "dp=4,zero=3,zero_group=host"


@tier(slow=1 / 3)
@pytest.mark.parametrize("zero", quick([1, 2, 3], 2))
def test_checkpoints_go_from_and_to_other_plans(zero, tmp_path):
    hsdp = f"dp=4,zero={zero},zero_group=host"
    others = [(hsdp, "0101"), ("dp=2,zero=1", "00"), ("tp=2,dp=2,zero=3,zero_group=host", "0011")]
    for number, (source, hosts) in enumerate([(hsdp, "0011"), ("dp=3,zero=2", "000")]):
        folder = tmp_path / str(number)
        found = spawn(hosts, saved, source, folder)
        reference, full, after = by_one_process(folder)
        for pieces, state in found:
            compare(pieces, reference, source)
            for name, value in state.items():
                same(value, full[name])
        for plan, its_hosts in others:
            spawn(its_hosts, loaded, plan, folder, reference, after)


def with_frozen(rank, world_size, text):
    torch.manual_seed(0)
    model = Normed()
    model.first.weight.requires_grad_(False)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    model, _ = par.parallelize(model, None, text)
    return [torch.equal(value, start[name]) for name, value in full_state_dict(model).items()]


def test_what_is_frozen_is_counted_on_one_host():
    for found in spawn("0101", with_frozen, "dp=4,zero=1,zero_group=host"):
        assert all(found) and len(found) == 9


def verified(rank, world_size, text, make, inputs):
    torch.manual_seed(0)
    targets = torch.randint(0, 5, (len(inputs),), generator=torch.Generator().manual_seed(0))
    found = par.verify(make(), (inputs, targets), par.Plan.parse(text), F.cross_entropy, steps=2, show=False)
    return found.equal, str(found)


class Normed(torch.nn.Module):
    """across: whether rows see each other by a mean that no plan knows."""

    def __init__(self, across=False):
        super().__init__()
        self.first, self.last = torch.nn.Linear(7, 6), torch.nn.Linear(6, 5)
        self.norm = torch.nn.BatchNorm1d(6)
        self.across = across

    def forward(self, x):
        x = self.norm(self.first(x)).tanh()
        return self.last(x - x.mean(0) if self.across else x)


@pytest.mark.parametrize("zero", quick([1, 2, 3], 2))
def test_batch_norm_is_over_the_rows_of_all_hosts(zero):
    inputs = torch.randn(9, 7, generator=torch.Generator().manual_seed(1))
    for equal, text in spawn("0101", verified, f"dp=4,zero={zero},zero_group=host", Normed, inputs):
        assert equal, text


def test_verify_finds_what_differs():
    inputs = torch.randn(9, 7, generator=torch.Generator().manual_seed(1))
    for equal, text in spawn("0011", verified, HSDP, lambda: Normed(across=True), inputs):
        assert not equal and "NOT equal" in text


# --- what is refused or warned of ----------------------------------------------------------------


def test_plans_that_contradict_themselves():
    for values, words in (({"dp": 2}, "zero=0 divides nothing"), ({"dp": 2, "zero": 1}, None)):
        if words is None:
            assert par.Plan.parse("dp=2,zero=1,zero_group=host") == par.Plan(**values, zero_group="host")
            continue
        with pytest.raises(ValueError, match=words):
            par.Plan(**values, zero_group="host")
    with pytest.raises(ValueError, match="must be one of 'all', 'host'"):
        par.Plan(dp=2, zero=1, zero_group="node")


def refused(rank, world_size, text):
    with pytest.raises(ValueError) as caught:
        par.parallelize(odd_models.Plain(), None, par.Plan.parse(text))
    model, _ = par.parallelize(odd_models.Plain(), None, par.Plan(dp=world_size))  # groups work as before
    return str(caught.value), parts_of(model).mesh.hosts


def test_unequal_hosts():
    for text, hosts in spawn("001", refused, "dp=3,zero=2,zero_group=host"):
        assert "as many ranks of dp on each host" in text and "hosts of 2 + 1" in text and "0 0 1" in text
        assert hosts == [0, 0, 1]


def warned(rank, world_size, text):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("pycomm.parallel").addHandler(handler)
    model, _ = par.parallelize(odd_models.Plain(), None, par.Plan.parse(text))
    mesh = parts_of(model).mesh
    return [record.getMessage() for record in records], [mesh.coordinate(axis) for axis in ("dp", "tp")]


def test_an_axis_that_crosses_hosts_is_told():
    """By rank 0 alone, with the way out."""
    uneven, turned, inside = (spawn(hosts, warned, "dp=2,tp=2") for hosts in ("0001", "0110", "0101"))
    assert "tp crosses hosts in 1 of 2 groups: every layer" in uneven[0][0][0]
    assert "if tp=2 divided the ranks of each host (hosts of 3 + 1)" in uneven[0][0][0]
    assert "if the ranks of a host followed each other; they are on hosts 0 1 1 0" in turned[0][0][0]
    assert all(not messages for messages, _ in [*inside, *uneven[1:], *turned[1:]])
    assert [place for _, place in inside] == [[0, 0], [1, 0], [0, 1], [1, 1]]


# --- explain -------------------------------------------------------------------------------------


EXPLAINED = [  # op, bytes, hosts, what it says
    ("all_reduce", 1 << 24, "2x4", ["8 ranks, two levels: 2 hosts x 4", f"direction: {1 << 24} bytes"]),
    ("all_reduce", 3 << 20, "0120", ["hosts of 2 + 1 + 1", f"direction: {4 << 20} bytes"]),
    ("all_reduce", 8, "2x4", ["the payload goes with the headers"]),
    ("broadcast", 4096, "1+2+2", ["direction: 8192 bytes"]),
    ("all_gather", 4096, "3+5", ["hosts of 3 + 5", f"direction: {5 * 4096} bytes"]),
    ("reduce_scatter", 4096, "2x4", [f"direction: {4 * 4096} bytes", "adds up the blocks"]),
    ("all_to_all", 10, "2x2", ["direction: 40 bytes"]),
    ("gather", 4096, "3+1", [f"direction: {3 * 4096} bytes"]),
    ("barrier", 0, "2x2", ["leaders exchange one message"]),
]


@pytest.mark.parametrize("op, size, hosts, words", EXPLAINED)
def test_explain_over_hosts(op, size, hosts, words):
    world_size = {"2x4": 8, "0120": 4, "1+2+2": 5, "3+5": 8, "2x2": 4, "3+1": 4}[hosts]
    text = pycomm.explain(op, size, world_size, hosts=hosts)
    assert all(word in text for word in words), text
    assert "\n" not in text


def test_explain_of_hosts_that_are_none():
    assert pycomm.explain("all_reduce", 64, 4, hosts="1x4") == pycomm.explain("all_reduce", 64, 4)
    for hosts, options in (("2x3", {}), ("two", {}), ("2x2", {"device": "cuda"})):
        with pytest.raises(ValueError, match="hosts="):
            pycomm.explain("all_reduce", 64, 4, hosts=hosts, **options)
