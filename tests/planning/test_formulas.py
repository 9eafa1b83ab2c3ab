"""The closed forms of the planner against the tables in the heads of their files, written once more and in
another way: collectives, groups of axes, products, memory, what a step waits for.
"""

import math
from itertools import product

import pytest

from pycomm.parallel import Plan
from pycomm.parallel.planning import collectives, load_machine, named
from pycomm.parallel.planning.compute import Cut, block_time, head_time, moved_time, product_time
from pycomm.parallel.planning.job import PYCOMM, Job
from pycomm.parallel.planning.machine import Link
from pycomm.parallel.planning.time import closed_form, spans_of, stage_times, step_time

H100 = load_machine("h100")
IN, OUT = Link("in", 8, 3e11, 5e-6, 0.8), Link("out", 0, 4e10, 2e-5, 0.6)
SPANS = [(1, 1), (2, 2), (3, 3), (8, 8), (2, 1), (7, 1), (16, 8), (12, 4), (24, 8), (10, 2), (6, 3)]


def where(n, k, inner=IN, outer=OUT):
    return collectives.Span(n, k, inner, None if n == k else outer)


def halves(n, k, nbytes, inner, outer):
    """Of a reduce_scatter or an all_gather, by algorithm."""
    a, w, A, W = (
        inner.latency,
        inner.bandwidth * inner.one_way,
        outer.latency,
        outer.bandwidth * outer.one_way,
    )
    if k == n:
        return {"two-shot": a + (n - 1) * nbytes / n / w}
    if k == 1:
        return {"ring": (n - 1) * A + (n - 1) * nbytes / n / W}
    nodes = n // k
    slower = max(1 / w, 1 / k / W)
    hierarchical = a + (k - 1) / k * nbytes / w + (nodes - 1) * (A + nbytes / k / nodes / W)
    return {
        "ring": nodes * (k - 1) * a + nodes * A + (n - 1) * nbytes / n * slower,
        "hierarchical": hierarchical,
    }


def sums(n, k, nbytes, inner, outer):
    """Of an all_reduce, by algorithm."""

    def flat(link, n, nbytes):
        moved = 2 * (n - 1) * nbytes / n / link.bandwidth
        steps = 2 * math.ceil(math.log2(n))
        return {
            "ring": 2 * (n - 1) * link.latency + moved,
            "tree": steps * link.latency + 2 * nbytes / link.bandwidth,
        }

    if k == n:
        moved = 2 * (n - 1) * nbytes / n / inner.bandwidth
        return {**flat(inner, n, nbytes), "two-shot": 2 * inner.latency + moved}
    if k == 1:
        return flat(outer, n, nbytes)
    nodes = n // k
    inside = inner.latency + (k - 1) / k * nbytes / (inner.bandwidth * inner.one_way)
    across = min(flat(outer, nodes, nbytes / k).values())
    slower = max(1 / inner.bandwidth, 1 / k / outer.bandwidth)
    return {
        "ring": 2 * nodes * ((k - 1) * inner.latency + outer.latency) + 2 * (n - 1) * nbytes / n * slower,
        "hierarchical": 2 * inside + across,
    }


@pytest.mark.parametrize(("name", "oracle"), [("all_gather", halves), ("all_reduce", sums)])
def test_the_best_algorithm_of_the_table(name, oracle):
    """Over one node and several, of links of several shapes; each algorithm is the best somewhere."""
    best = set()
    far = OUT._replace(bandwidth=1e10, latency=1e-3)
    for (n, k), inner, outer in product(SPANS, (IN, IN._replace(bandwidth=1e9)), (OUT, far)):
        for nbytes in (8, 1e4, 1e7, 1e9):
            took = getattr(collectives, name)(where(n, k, inner, outer), nbytes)
            if n == 1:
                assert took == 0.0
                continue
            times = oracle(n, k, nbytes, inner, outer)
            assert took == pytest.approx(min(times.values()), rel=1e-12), (n, k, nbytes, times)
            best.add((min(times, key=times.get), k == n, k == 1))
    hierarchical = {("hierarchical", False, False), ("ring", False, False)}
    tree = {("tree", False, True), ("ring", False, True)} if name == "all_reduce" else set()
    assert best >= hierarchical | tree, best


@pytest.mark.parametrize(("n", "k"), SPANS)
def test_parts_for_all_and_a_message(n, k):
    """all_to_all: each of n parts goes to its rank, by the link on its way, and the slower level decides.
    A message goes over the slowest boundary.
    """
    nbytes, span = 1e8, where(n, k)
    near = (k - 1) * nbytes / n / (IN.bandwidth * IN.one_way) + IN.latency
    far = (n - k) * nbytes / n / (OUT.bandwidth * OUT.one_way) + OUT.latency if n > k else 0.0
    assert collectives.all_to_all(span, nbytes) == pytest.approx(max(near, far) if n > 1 else 0.0)
    link = OUT if n > k else IN
    expected = link.latency + nbytes / link.bandwidth if n > 1 else 0.0
    assert collectives.message(span, nbytes) == pytest.approx(expected)
    calls = (collectives.all_to_all, collectives.all_gather, collectives.all_reduce)
    assert [call(span, 0) for call in calls] == [0.0] * 3


PLANS = [
    *("tp=4,pp=2", "tp=2,dp=8", "dp=16", "tp=8,dp=3", "tp=2,ep=4,dp=4", "ep=8,dp=2", "ulysses=4,dp=4"),
    *("tp=2,ring=4,dp=2", "ulysses=2,ring=2,ep=1,dp=4,pp=2", "tp=16", "tp=4,dp=2,pp=8", "ep=2,dp=2,tp=4"),
]
AXES = ("tp", "ulysses", "ring", "ep", "dp", "pp")  # inner to outer
GROUPS = {**{axis: (axis,) for axis in AXES}, "data": AXES[1:5], "expert": ("ulysses", "ring", "dp")}


@pytest.mark.parametrize("text", PLANS)
def test_groups_of_a_plan_by_their_ranks(text):
    """Every rank's place is counted: the group of rank 0 on each axis, and how many of it are in its node."""
    plan = Plan.parse(text)
    places = {}
    for rank in range(plan.world_size):
        rest = rank
        for axis in AXES:
            places.setdefault(axis, []).append(rest % getattr(plan, axis))
            rest //= getattr(plan, axis)
    found = spans_of(H100, plan)
    for name, inside in GROUPS.items():
        others = [axis for axis in AXES if axis not in inside]
        members = [r for r in range(plan.world_size) if not any(places[axis][r] for axis in others)]
        near = sum(rank < 8 for rank in members)
        if len(members) == 1:
            assert name not in found
            continue
        assert (found[name].ranks, found[name].inside) == (len(members), near), name
        assert (found[name].outer is None) == (near == len(members)), name


def test_ranks_that_do_not_divide_a_node():
    """Equal shares on each node, in as few nodes as that allows; a flat machine is one node."""
    for ranks, stride, inside in ((6, 2, 2), (12, 1, 4), (3, 3, 1), (5, 1, 1), (32, 16, 1)):
        found = collectives.span(H100, ranks, stride)
        assert (found.inside, found.nodes * found.inside) == (inside, ranks)
    flat = H100._replace(links=H100.links[-1:])
    assert collectives.span(flat, 100, 7) == (100, 100, flat.links[0], None)


@pytest.mark.parametrize("sizes", [(4096, 4096, 4096), (1, 8192, 8192), (3, 2, 5), (333, 1, 70)])
@pytest.mark.parametrize(("item", "batch", "launches"), [(2, 1, 1), (4, 3, 3), (2, 7.5, 1)])
def test_a_product_is_a_roofline(sizes, item, batch, launches):
    m, n, k = sizes
    reached = H100.reached
    smallest = sum(1 / size for size in sizes)
    compute = 2 * m * n * k * batch / H100.peak * (1 + reached.product_half * smallest) / reached.product
    nbytes = item * batch * (m * k + k * n + m * n)
    memory = (nbytes + 1e5) / (H100.bandwidth * reached.memory)
    took = product_time(H100, m, n, k, extra=1e5, item=item, batch=batch, launches=launches)
    assert took == pytest.approx(max(compute, memory, launches * reached.launch))
    assert moved_time(H100, nbytes, 2) == pytest.approx(
        max(nbytes / H100.bandwidth / reached.memory, 2 * reached.launch)
    )
    assert moved_time(H100, 0.0) == 0.0


def overlapping(overlap, name="h100"):
    machine = load_machine(name)
    return machine._replace(reached=machine.reached._replace(overlap=overlap))


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt3-1.3b"])
@pytest.mark.parametrize(("tp", "ulysses", "ring"), [(1, 1, 4), (2, 1, 2), (1, 2, 1), (2, 4, 1), (2, 2, 3)])
def test_what_sequence_parallelism_waits_for(name, tp, ulysses, ring):
    """Without overlap: n - 1 hops with keys and values, of which ulysses leaves a rank as many; queries,
    keys and values to the heads, and back what the queries became. Three times as much with backward.
    """
    machine, model = overlapping(0.0), named(name)
    cut = Cut(3, tp, ulysses * ring)
    sizes = {"ulysses": ulysses, "ring": ring}
    spans = tuple((axis, collectives.span(machine, n, tp)) for axis, n in sizes.items() if n > 1)
    waits, alone = block_time(machine, model, cut, spans), block_time(machine, model, cut)
    tokens = 3 * model.sequence / (ulysses * ring)
    of_head = 2 * tokens * model.head_dim / tp  # bytes
    q, kv = of_head * model.heads, 2 * of_head * model.kv_heads
    expected, spans = 0.0, dict(spans)
    if ulysses > 1:
        expected += sum(collectives.all_to_all(spans["ulysses"], nbytes) for nbytes in (q + kv, q))
    if ring > 1:
        expected += (ring - 1) * collectives.message(spans["ring"], kv)
    assert waits.forward - alone.forward == pytest.approx(expected)
    assert waits.input - alone.input == pytest.approx(2 * expected)
    assert waits.weight == alone.weight


@pytest.mark.parametrize("name", ["gpt3-1.3b", "llama-3-8b"])
def test_tensor_parallelism_sends_two_sums_or_four_pairs(name):
    model = named(name)
    span = (("tp", collectives.span(H100, 4, 1)),)
    hidden = 2 * 5 * model.sequence * model.hidden
    for pieces, once, calls in ((False, "all_reduce", 2), (True, "all_gather", 4)):
        cut = Cut(5, 4, sequence_parallel=pieces)
        waits, alone = block_time(H100, model, cut, span), block_time(H100, model, cut)
        took = calls * getattr(collectives, once)(span[0][1], hidden)
        assert waits.tp == pytest.approx((took, took))
        assert waits.forward - alone.forward == pytest.approx(took)
        assert waits.input - alone.input == pytest.approx(took)
        hidden_ones = block_time(H100, model, cut._replace(tp_hidden=True), span)
        hides = min(took / (2 if pieces else 1), waits.weight)
        assert waits.input - hidden_ones.input == pytest.approx(hides)


def test_a_head_is_its_products_and_its_loss():
    """The logits in fp32 are read or written three times in each direction."""
    model, cut = named("gpt3-1.3b"), Cut(3, 2)
    tokens, vocab = 3 * model.sequence, model.vocab / 2
    loss = moved_time(H100, 12 * tokens * vocab)
    found = head_time(H100, model, cut)
    sizes = {"forward": (tokens, vocab, model.hidden), "input": (tokens, model.hidden, vocab)}
    for part, given in sizes.items():
        assert getattr(found, part) == pytest.approx(product_time(H100, *given) + loss)
    assert found.weight == pytest.approx(product_time(H100, vocab, model.hidden, tokens))


# --- a step ---------------------------------------------------------------------------------------


def job(text, microbatches=4, rows=64, model="gpt3-1.3b", machine=H100, recompute="none", **software):
    plan = Plan.parse(text)
    described = named(model) if isinstance(model, str) else model
    return Job(described, machine, plan, rows, microbatches, recompute, PYCOMM._replace(**software))


@pytest.mark.parametrize("text", ["dp=2", "pp=4", "pp=2,schedule=zbv", "tp=2,pp=3,schedule=interleaved"])
def test_stages_are_all_of_the_model(text):
    """One process has what all stages have together, but for the collectives."""
    plan = Plan.parse(text)
    times, _ = stage_times(job(text, machine=overlapping(1.0)))
    alone = job(f"tp={plan.tp}", rows=64 // plan.dp, machine=overlapping(1.0))
    (whole,), _ = stage_times(alone)
    assert len(times) == plan.virtual_stages
    assert [sum(part) for part in zip(*times, strict=True)] == pytest.approx(list(whole))


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("full", 3)])
def test_collectives_inside_of_blocks_are_told(recompute, passes):
    """Of all blocks of a rank and all microbatches; more of them where a forward is repeated."""
    given = job("tp=4,pp=2", 4, recompute=recompute, copies=(0.0, 0.0))
    hidden = 2 * 16 * given.model.sequence * given.model.hidden
    once = 2 * collectives.all_reduce(spans_of(H100, given.plan)["tp"], hidden)
    step = step_time(given)
    assert step.inside == pytest.approx(4 * 12 * passes * once)
    assert step.parts()["collectives in blocks"] == step.inside and step.parts()["bubble"] == step.bubble
    assert step.bubble == pytest.approx(step.pipeline.makespan - max(step.pipeline.busy))
    assert step_time(job("dp=2")).inside == 0.0 <= step_time(job("pp=2")).inside < 1e-9  # but for rounding


def test_a_message_occupies_both_where_nothing_overlaps():
    shown, hidden = (stage_times(job("pp=4", machine=overlapping(overlap)))[0] for overlap in (0.25, 1.0))
    model = named("gpt3-1.3b")
    nbytes = 2 * 16 * model.sequence * model.hidden
    once = 0.75 * collectives.message(spans_of(H100, Plan(pp=4))["pp"], nbytes)
    for a, b in zip(shown, hidden, strict=True):
        assert [x - y for x, y in zip(a, b, strict=True)] == pytest.approx([once, once, 0.0])


@pytest.mark.parametrize(("recompute", "part"), [("none", None), ("selective", "core"), ("full", "forward")])
def test_recomputation_repeats_a_part_in_backward(recompute, part):
    block = block_time(H100, named("gpt3-1.3b"), Cut(16))
    (plain,), _ = stage_times(job("", rows=64))
    (again,), _ = stage_times(job("", rows=64, recompute=recompute))
    extra = 24 * getattr(block, part) if part else 0.0
    assert [a - p for a, p in zip(again, plain, strict=True)] == pytest.approx([0.0, extra, 0.0])


def test_the_rest_of_a_step_by_zero():
    """Nothing hidden, one microbatch: a sum is a reduce_scatter and a gather; zero=1 and 2 gather values at
    the end; zero=2 and 3 sum inside of the passes, and the last block is left.
    """
    machine, model = overlapping(0.0), named("gpt3-1.3b")
    steps = [step_time(job(f"dp=8,zero={zero}", 1, machine=machine)) for zero in range(4)]
    span = spans_of(machine, Plan(dp=8))["data"]
    nbytes = 2 * model.parameters
    norm = collectives.all_reduce(collectives.span(machine, 8, 1), 8)
    half = collectives.all_gather(span, nbytes)
    sums = [collectives.all_reduce(span, nbytes), half, half / 24, half / 24]
    assert [step.gradients - norm for step in steps] == pytest.approx(sums)
    assert [step.values for step in steps] == pytest.approx([0.0, half, half, 0.0])
    updates = [moved_time(machine, model.parameters * PYCOMM.update / n) for n in (1, 8, 8, 8)]
    assert [step.optimizer for step in steps] == pytest.approx(updates)
    for step in steps:
        assert sum(step.parts().values()) == pytest.approx(step.total)
        assert step.total == pytest.approx(step.passes + step.gradients + step.optimizer + step.values)


def test_sums_of_gradients_hide_behind_one_backward():
    """All but the last bucket, and of a program that sums at the end nothing."""
    given = job("dp=8,bucket_mb=100", 4, machine=overlapping(1.0))
    step, (times,) = step_time(given), stage_times(given)[0]
    span = spans_of(H100, Plan(dp=8))["data"]
    sums = collectives.all_reduce(span, 2 * given.model.parameters)
    last = sums * 1e8 / (2 * given.model.parameters)
    left = last + max(sums - last - times.input - times.weight, 0.0)
    norm = collectives.all_reduce(collectives.span(H100, 8, 1), 8)
    assert step.gradients - norm == pytest.approx(left)
    assert step_time(job("dp=8", 4, hides_dp=False)).gradients - norm == pytest.approx(sums)


def test_an_offloaded_optimizer_fetches_gradients_and_sends_values():
    steps = [step_time(job(f"dp=4,zero=2{more}")).optimizer for more in ("", ",offload=optimizer")]
    elements = named("gpt3-1.3b").parameters / 4
    assert steps[1] - steps[0] == pytest.approx(elements * (2 + 2) / H100.host)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_experts_are_summed_over_their_own_ranks(ep):
    """Experts of a rank of ep are on every ep-th data rank alone; dense parameters on all."""
    machine, model = overlapping(0.0), named("mixtral-8x7b")
    text = f"ep={ep},dp={16 // ep}"
    found = step_time(job(text, 1, model=model, machine=machine, hides_dp=False))
    spans, experts = spans_of(machine, Plan.parse(text)), 8 // ep * model.experts.parameters * model.layers
    dense = model.parameters - 8 * model.experts.parameters * model.layers
    norm = collectives.all_reduce(collectives.span(machine, 16, 1), 8)
    sums = collectives.all_reduce(spans["data"], 2 * dense)
    sums += collectives.all_reduce(spans["expert"], 2 * experts)
    assert spans["expert"].ranks == 16 // ep and found.gradients - norm == pytest.approx(sums)


SCHEDULES = [
    ("1f1b", 1, 0.0),
    ("gpipe", 1, 0.0),
    ("interleaved", 2, 0.01),
    ("zb-h1", 1, 0.01),
    ("zbv", 2, 0.1),
]


@pytest.mark.parametrize(("name", "chunks", "tolerance"), SCHEDULES)
@pytest.mark.parametrize("message", [0.0, 1e-3])
def test_the_closed_form_of_a_pipeline_is_that_of_its_events(name, chunks, tolerance, message):
    from pycomm.parallel.planning.events import StageTime, run_pipeline

    for pp, m in ((2, 8), (4, 16), (3, 9)):
        plan = Plan(pp=pp, schedule=name, chunks=2 if name == "interleaved" else None)
        times = (StageTime(1.0, 1.25, 0.75),) * plan.virtual_stages
        ran = run_pipeline(name, pp, m, chunks, times, message)
        found = closed_form(plan, m, times, message)
        assert found == pytest.approx(ran.makespan, rel=max(tolerance, 20 * message)), (pp, m)
    assert closed_form(plan, m, times, 0.5) > closed_form(plan, m, times, 0.0)
