"""Bytes of one rank, and where their peak is.

states, per parameter (Rajbhandari et al. 2020, figure 1; d: ranks that share them)

    zero    parameters   gradients   optimizer
    0       p            g           o              p = 2, g = 2, o = 12 with fp32 masters and Adam:
    1       p            g           o / d          the paper's 16, and 4 + 12/d, 2 + 14/d, 16/d
    2       p            g / d       o / d
    3       p / d        g / d       o / d

activations, per block and microbatch (Korthikanti et al. 2022, table 2; T: tokens of the microbatch, the
bytes of a token are those of model.py, t: tp)

    recompute    plain                              sequence parallel
    none         T (whole + (cut + scores) / t)     T (whole + cut + scores) / t
    selective    the same without scores
    full         T 2 h: its input alone             T 2 h / t (the paper keeps 2 h)

times the (virtual stage, microbatch) pairs that the runtime's own schedule keeps (events.in_flight). For
Megatron's interleaved schedule these are p v + p - 1 pairs of L / (p v) blocks: the paper's factor 1 + (p -
1) / (p v).

    peak in            holds beside parameters, gradients and optimizer
    backward           activations; one block more while it is recomputed; logits in the last stage; zero=3:
                       values of two units and one gradient of a unit; of zero=2 the buckets under way
    update             gradients in fp32, where masters are kept
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.planning.events import in_flight
from pycomm.parallel.planning.job import Job, Recompute
from pycomm.parallel.planning.model import Model
from pycomm.parallel.planning.quantities import MeanBytes, MeanElements, MeanTokens

__all__ = ["Memory", "activations", "owned_parameters", "rank_memory", "states", "worst_rank"]

MASTER = 4
LOGITS = 4 + 4  # bytes of a logit while the loss runs, beside itself: in fp32, its gradient


class States(NamedTuple):
    """In bytes."""

    parameters: float
    gradients: float
    optimizer: float


class Owned(NamedTuple):
    """Parameters of a rank of the pipeline after tp, pp and ep, before zero."""

    dense: MeanElements
    experts: MeanElements


class Memory(NamedTuple):
    """Of one rank of the pipeline."""

    rank: int
    parameters: MeanBytes
    gradients: MeanBytes
    optimizer: MeanBytes
    activations: MeanBytes
    workspace: MeanBytes
    update: MeanBytes
    host: MeanBytes

    @property
    def states(self) -> MeanBytes:
        return MeanBytes(self.parameters + self.gradients + self.optimizer)

    @property
    def peak(self) -> MeanBytes:
        return MeanBytes(self.states + max(self.activations + self.workspace, self.update))

    @property
    def where(self) -> Literal["backward", "update"]:
        """Of the peak."""
        return "backward" if self.activations + self.workspace >= self.update else "update"

    def parts(self) -> dict[str, MeanBytes]:
        found = {name: getattr(self, name) for name in ("parameters", "gradients", "optimizer")}
        if self.where == "backward":
            return {**found, "activations": self.activations, "workspace": self.workspace}
        return {**found, "gradients in fp32": self.update}


def states(
    count: MeanElements,
    zero: int = 0,
    ranks: int = 1,
    *,
    parameter: int = 2,
    gradient: int = 2,
    optimizer: int = 12,
) -> States:
    """Of `count` parameters that `ranks` would hold several times. parameter, gradient, optimizer: bytes of
    each.
    """
    shared = 1 / ranks
    return States(
        count * parameter * (shared if zero >= 3 else 1),
        count * gradient * (shared if zero >= 2 else 1),
        count * optimizer * (shared if zero >= 1 else 1),
    )


def activations(
    model: Model,
    tokens: MeanTokens,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> MeanBytes:
    """What one block keeps from forward to backward for a microbatch of `tokens` on this rank."""
    whole, cut, scores = model.kept()
    share = tp if sequence_parallel else 1
    if recompute == "full":
        return MeanBytes(tokens * model.item * model.hidden / share)
    inside = scores if recompute == "none" else 0
    return MeanBytes(tokens * (whole / share + (cut + inside) / tp))


def owned_parameters(job: Job, rank: int) -> Owned:
    model, plan = job.model, job.plan
    whole, cut, _ = model.block_parameters()
    bounds, stages = job.bounds(), _stages_of(plan, rank)
    blocks = sum(bounds[stage][1] - bounds[stage][0] for stage in stages)
    dense = blocks * (whole + cut / plan.tp)
    first, last = 0 in stages, plan.virtual_stages - 1 in stages
    if first:
        dense += model.embedding / plan.tp
    if last:
        dense += model.last + (model.vocab * model.hidden if model.tied else model.head) / plan.tp
    if first and last and model.tied:
        dense -= model.vocab * model.hidden / plan.tp
    return Owned(MeanElements(dense), MeanElements(blocks * model.expert_parameters(plan.tp, plan.ep)))


def _stages_of(plan: Plan, rank: int) -> list[int]:
    """The virtual stages of a rank, as the schedule places them."""
    if plan.pp == 1:
        return [0]
    if plan.schedule == "zbv":
        return [rank, 2 * plan.pp - 1 - rank]
    return list(range(rank, plan.virtual_stages, plan.pp))


def rank_memory(job: Job, rank: int) -> Memory:
    """Memory of the ranks at place `rank` of the pipeline."""
    model, plan, software = job.model, job.plan, job.software
    dense, experts = owned_parameters(job, rank)
    sharing = plan.dp * plan.ep * plan.ring * plan.ulysses
    bytes_of = {
        "parameter": model.item,
        "gradient": software.gradient,
        "optimizer": software.state,
    }
    parameters, gradients, optimizer = (
        a + b
        for a, b in zip(
            states(dense, plan.zero, sharing, **bytes_of),
            states(experts, plan.zero, sharing // plan.ep, **bytes_of),
            strict=True,
        )
    )
    owned = optimizer / software.state if software.state else 0.0
    update = owned * MASTER if software.gradient < MASTER <= software.state - 8 else 0.0
    host = 0.0
    if plan.offload:
        host, optimizer = optimizer, 0.0
        if plan.offload == "parameters":
            host, parameters, update = host + parameters, 0.0, 0.0
    workspace = _workspace(job, rank, MeanElements(dense + experts))
    return Memory(
        rank,
        MeanBytes(parameters),
        MeanBytes(gradients),
        MeanBytes(optimizer),
        _kept(job, rank),
        workspace,
        MeanBytes(update),
        MeanBytes(host),
    )


def _kept(job: Job, rank: int) -> MeanBytes:
    model, plan = job.model, job.plan
    tokens = MeanTokens(job.microbatch_rows * model.sequence / job.parts)
    one = activations(model.dealt(plan.ep), tokens, plan.tp, plan.megatron_sp, job.recompute)
    bounds = job.bounds()
    if plan.pp == 1:
        return MeanBytes(one * model.layers)
    longest = max(end - first for first, end in (bounds[stage] for stage in _stages_of(plan, rank)))
    pairs = in_flight(plan.schedule, plan.pp, job.microbatches, plan.chunks_per_rank)[rank]
    return MeanBytes(one * longest * pairs)


def _workspace(job: Job, rank: int, count: MeanElements) -> MeanBytes:
    """What backward holds beside: see the table at the top."""
    model, plan = job.model, job.plan
    tokens = MeanTokens(job.microbatch_rows * model.sequence / job.parts)
    found = 0.0
    if job.recompute == "full":
        found += activations(model.dealt(plan.ep), tokens, plan.tp, plan.megatron_sp)
    if plan.virtual_stages - 1 in _stages_of(plan, rank):
        found += tokens * model.vocab / plan.tp * (LOGITS + model.item)
    found += 4 * tokens * model.item * model.hidden  # gradients between modules, and a message each way
    block = sum(model.block_parameters()[:2]) / plan.tp
    block += model.expert_parameters(plan.tp, plan.ep)
    if plan.zero == 3:
        found += block * (2 * model.item + job.software.gradient)
    if plan.zero == 2:
        found += 2 * min(max(plan.bucket_mb * 1e6, 2 * block), count * job.software.gradient / 8)
    return MeanBytes(found)


def worst_rank(job: Job) -> Memory:
    """The Memory of the pipeline rank with the largest peak. Only the first two and the last can have it,
    where stages are alike.
    """
    pp = job.plan.pp
    ranks: Iterable[int] = {0, min(1, pp - 1), pp // 2, pp - 1} if job.plan.stages is None else range(pp)
    return max((rank_memory(job, rank) for rank in ranks), key=lambda memory: memory.peak)
