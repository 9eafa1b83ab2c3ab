"""What each strategy costs, next to each other: bytes and messages of a rank in a step, memory and time.

Sent by one rank in a step, as ground/comm.py counts it (n: ranks of the axis; m: microbatches; L: blocks of
the rank; H: bytes of the hidden state of a microbatch; P: bytes of the rank's parameters before zero, G: of
their gradients)

    axis       calls                    bytes
    dp         1                        2 (n-1)/n G
    zero 1     2                        (n-1)/n (G + P)
    zero 2     m + 1                    (n-1)/n (m G + P)
    zero 3     3 m L                    (n-1)/n m (G + 2 P)
    tp         4 m L                    8 (n-1)/n m L H
    with sp    8 m L                    the same
    pp         2 m v                    2 m v H               of a rank in the middle; v: its virtual stages
    ulysses    4 m L                    2 (n-1)/n m L (Q + 2 K + Q)     Q, K: bytes of queries, of keys
    ring       3 (n-1) m L              3 (n-1) m L 2 K
    ep         5 m L                    4 (n-1)/n m L k H + 8 (n-1)/n m L E
                                        k of E experts for a token, tokens dealt evenly; the rest are counts

Recomputation adds the forward's half once more to tp, ulysses, ring and ep (of ep's calls three). Left out:
the sums of a few numbers at the end of a step and of balance losses, vocabulary and loss under tp, and that
parameters lie in several buckets. dry_run has all of it.
"""

from pycomm.parallel.ground.plan import Plan, Zero
from pycomm.parallel.planning.asked import check_request
from pycomm.parallel.planning.job import Job
from pycomm.parallel.planning.memory import owned_parameters
from pycomm.parallel.planning.quantities import MeanBytes
from pycomm.parallel.planning.search import Request, predict

__all__ = ["sent", "strategies", "table"]

ZEROS: tuple[Zero, ...] = (0, 1, 2, 3)


def sent(job: Job) -> dict[str, tuple[float, MeanBytes]]:
    """{axis: (calls, bytes)} of a rank in the middle of the pipeline; see the table."""
    model, plan, m = job.model, job.plan, job.microbatches
    tokens = job.microbatch_rows * model.sequence / job.parts
    blocks, again = m * model.layers / plan.pp, 1.5 if job.recompute == "full" else 1.0
    hidden = tokens * model.hidden * model.item
    queries = tokens * model.heads * model.head_dim * model.item / plan.tp
    keys = tokens * model.kv_heads * model.head_dim * model.item / plan.tp
    found: dict[str, tuple[float, MeanBytes]] = {}
    calls: float
    if plan.tp > 1:
        calls = 8 if plan.megatron_sp else 4
        found["tp"] = calls * blocks * again, MeanBytes(8 * _share(plan.tp) * blocks * hidden * again)
    if plan.ulysses > 1:
        nbytes = 2 * _share(plan.ulysses) * blocks * (2 * queries + 2 * keys)
        found["ulysses"] = 4 * blocks * again, MeanBytes(nbytes * again)
    if plan.ring > 1:
        calls = (2 + again * 2 - 1) * (plan.ring - 1) * blocks
        found["ring"] = calls, MeanBytes(calls * 2 * keys / plan.ulysses)
    if plan.ep > 1 and model.experts:
        rows = 4 * blocks * model.experts.top_k * hidden / (plan.tp if plan.megatron_sp else 1)
        forwards = 2 * again - 1  # 1, or 2 with recomputation
        counts = 8 * model.experts.count * blocks * forwards
        nbytes = _share(plan.ep) * (rows * again + counts)
        found["ep"] = (3 * forwards + 2) * blocks, MeanBytes(nbytes)
    if plan.pp > 1:
        calls = 2 * m * plan.chunks_per_rank
        found["pp"] = calls, MeanBytes(calls * hidden / (plan.tp if plan.megatron_sp else 1))
    data = plan.dp * plan.ep * job.parts
    if data > 1:
        found["data"] = _data(job, data)
    return found


def _share(n: int) -> float:
    return (n - 1) / n


def _data(job: Job, data: int) -> tuple[float, MeanBytes]:
    plan, m = job.plan, job.microbatches
    dense, experts = owned_parameters(job, plan.pp // 2)
    count = _share(data) * dense + _share(data // plan.ep) * experts  # a rank of ep has its experts alone
    values, gradients = count * job.model.item, count * job.software.summed
    if plan.zero == 0:
        return 1, MeanBytes(2 * gradients)
    if plan.zero == 1:
        return 2, MeanBytes(gradients + values)
    if plan.zero == 2:
        return m + 1, MeanBytes(m * gradients + values)
    return 3 * m * job.model.layers / plan.pp, MeanBytes(m * (gradients + 2 * values))


def strategies(n: int, long: bool = False, experts: bool = False) -> list[tuple[str, Plan]]:
    """Each strategy alone on n ranks, with its name."""
    found = [(f"dp, zero {zero}" if zero else "dp", Plan(dp=n, zero=zero)) for zero in ZEROS]
    found += [("tp", Plan(tp=n)), ("tp, sequence parallel", Plan(tp=n, megatron_sp=True))]
    for name in ("gpipe", "1f1b", "zb-h1", "zbv"):
        found.append((f"pp, {name}", Plan(pp=n, schedule=name)))
    found.append(("pp, interleaved 2", Plan(pp=n, schedule="interleaved", chunks=2)))
    found += [("ulysses, zero 3", Plan(ulysses=n, zero=3)), ("ring, zero 3", Plan(ring=n, zero=3))] * long
    found += [("ep", Plan(ep=n))] * experts
    return found


def table(request: Request, n: int | None = None) -> list[str]:
    """Markdown lines: every strategy alone on n ranks (a node), for batches of the request's rows."""
    check_request(request)
    n = n or int(min(request.machine.node, request.world))
    if n == 1:
        raise ValueError("a table of strategies needs a node with two ranks or more")
    model = request.model
    lines = [
        "| strategy | calls | GB sent | GiB of a rank | s | tokens/s/rank |",
        "|---|---|---|---|---|---|",
    ]
    for name, plan in strategies(n, True, model.experts is not None):
        if plan.virtual_stages > model.layers or model.heads % (plan.tp * plan.ulysses):
            continue
        share = request.rows // (plan.dp * plan.ep)
        if not share:
            continue
        job = Job(model, request.machine, plan, request.rows, share, "none", request.software)
        found, moved = predict(job), sent(job)
        calls, nbytes = (sum(part) for part in zip(*moved.values(), strict=True))
        lines.append(
            f"| {name} | {calls:,.0f} | {nbytes / 1e9:,.1f} | {found.memory.peak / 2**30:,.1f} | "
            f"{found.seconds:.2f} | {found.tokens:,.0f} |"
        )
    return lines
