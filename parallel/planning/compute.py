"""Seconds of one block on one rank, for one microbatch: products by a roofline, the rest by bytes of memory.

    product    max(FLOPs / (peak e),  bytes / bandwidth),   e = product / (1 + half (1/m + 1/n + 1/k))
    others     bytes moved / bandwidth
    both       at least the launch of a kernel

e is that of a product whose dims are m, n, k: tiles at the edges and the start of the pipeline of a product
cost as much as `half` more rows, columns and steps. Backward of a product is two of them, of what is no
product BACKWARD times its forward (it reads the gradient too). Under a causal mask a fused attention
computes half of its scores; one that is not fused computes all, and moves them through memory: 9 bytes each
in a forward (softmax: read and write in 16 bits; dropout: read, write, mask), besides those of the two
products.
"""

import functools
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from pycomm.parallel.planning import collectives
from pycomm.parallel.planning.collectives import Span
from pycomm.parallel.planning.events import StageTime
from pycomm.parallel.planning.machine import Machine
from pycomm.parallel.planning.model import HALF, Model, Product
from pycomm.parallel.planning.quantities import MeanBytes, MeanTokens, Seconds

__all__ = ["BACKWARD", "BlockTime", "Cut", "block_time", "head_time", "product_time"]

BACKWARD = 1.5
SCORES = 9  # bytes of a score that is kept, moved in a forward
NOTHING = MeanBytes(0.0)
InnerAxis: TypeAlias = Literal["tp", "ulysses", "ring", "ep"]  # whose collectives are waited for in a block


class Cut(NamedTuple):
    """What one rank does of a block. rows: of a microbatch on one data rank; tokens of a rank: rows x
    sequence / parts. sequence_parallel: megatron_sp. tp_hidden: the sum over tp in backward is hidden
    behind the products for weights. fused_sums: gradients of weights are added to their sum, of `gradient`
    bytes each, inside of the product. experts: ranks of ep. copies: of Software.
    """

    rows: int
    tp: int = 1
    parts: int = 1  # ring x ulysses
    sequence_parallel: bool = False
    tp_hidden: bool = False
    fused_sums: bool = False
    gradient: int = 2
    experts: int = 1
    copies: tuple[float, float] = (0.0, 0.0)


class BlockTime(NamedTuple):
    """Of one block and one microbatch. input, weight: the two halves of backward; core: of a
    forward of the attention alone, which selective recomputation repeats. tp: what of forward, and of
    backward, is collectives of tp.
    """

    forward: Seconds
    input: Seconds
    weight: Seconds
    core: Seconds
    tp: tuple[Seconds, Seconds]


def product_time(
    machine: Machine,
    m: float,
    n: float,
    k: float,
    *,
    extra: MeanBytes = NOTHING,
    item: int = HALF,
    batch: float = 1,
    launches: int = 1,
) -> Seconds:
    """Of `batch` products of (m, k) by (k, n). extra: bytes beside operands and result."""
    reached = machine.reached
    e = reached.product / (1 + reached.product_half * (1 / m + 1 / n + 1 / k))
    flops = 2.0 * m * n * k * batch / (machine.peak * e)
    moved = (item * (m * k + k * n + m * n) * batch + extra) / (machine.bandwidth * reached.memory)
    return Seconds(max(flops, moved, launches * reached.launch))


def moved_time(machine: Machine, nbytes: MeanBytes, kernels: int = 1) -> Seconds:
    if not nbytes:
        return Seconds(0.0)
    return Seconds(
        max(nbytes / (machine.bandwidth * machine.reached.memory), kernels * machine.reached.launch)
    )


@functools.lru_cache(maxsize=65536)
def block_time(
    machine: Machine, model: Model, cut: Cut, pairs: tuple[tuple[InnerAxis, Span], ...] = ()
) -> BlockTime:
    """pairs: the spans of the axes that have ranks."""
    spans, model = dict(pairs), model.dealt(cut.experts)
    tokens = MeanTokens(cut.rows * model.sequence / cut.parts)
    # of modules that tp does not divide
    whole = MeanTokens(tokens / cut.tp) if cut.sequence_parallel else tokens
    forward = inputs = weights = 0.0
    for module in model.block:
        for product in module.products:
            here = tokens if product.cut or not product.experts else whole
            f, i, w = _product(machine, model, cut, product, here)
            forward, inputs, weights = forward + f, inputs + i, weights + w
        elements = moved_time(machine, MeanBytes(whole * module.moved[0])) + moved_time(
            machine, MeanBytes(tokens * module.moved[1] / cut.tp)
        )
        forward, inputs = forward + elements, inputs + BACKWARD * elements
    core, core_backward = _attention(machine, model, cut, tokens)
    if "ring" in spans or "ulysses" in spans:
        sequence = _sequence_parallel(machine, model, cut, spans, tokens, core)
        core, core_backward = Seconds(core + sequence), Seconds(core_backward + 2 * sequence)
    experts = _dispatch(model, spans, whole)
    tp = _tensor_parallel(machine, model, cut, spans, tokens)
    # Under sequence parallelism the gathers of what enters a backward come before all its products.
    hidden = min(tp / 2 if cut.sequence_parallel else tp, weights) if cut.tp_hidden else 0.0
    return BlockTime(
        Seconds(forward + core + experts + tp),
        Seconds(inputs + core_backward + experts + tp - hidden),
        Seconds(weights),
        core,
        (tp, Seconds(tp - hidden)),
    )


def _product(machine: Machine, model: Model, cut: Cut, product: Product, tokens: MeanTokens) -> StageTime:
    """Of one product."""
    batch = launches = 1
    rows = tokens * product.times
    if product.experts and model.experts is not None:
        batch = model.experts.held(cut.experts)
        launches = 1 if model.experts.stacked else batch
        rows *= cut.experts / model.experts.count  # of one expert: its part of what all ranks of ep send
    m = max(rows, 1)
    n = product.n / cut.tp if product.cut == "n" else product.n
    k = product.k / cut.tp if product.cut == "k" else product.k
    item = model.item
    sums = (2 * cut.gradient - item if cut.fused_sums else 2 * cut.gradient + item) * n * k
    times = functools.partial(product_time, machine, item=item, batch=batch, launches=launches)
    return StageTime(times(m, n, k), times(m, k, n), times(n, k, m, extra=MeanBytes(max(sums * batch, 0))))


def _attention(machine: Machine, model: Model, cut: Cut, tokens: MeanTokens) -> tuple[Seconds, Seconds]:
    """(forward, backward) of scores, softmax and the sum of values, on one rank."""
    heads, s, d = model.heads / cut.tp, model.sequence, model.head_dim
    batch = heads * tokens / s  # heads of whole sequences, spread over the ranks of ring and ulysses
    if model.fused:
        half = batch / 2  # causal
        nbytes = model.item * tokens * 2 * (model.heads + model.kv_heads) * d / cut.tp
        moved = moved_time(machine, MeanBytes(nbytes))
        scores = MeanBytes(-model.item * s * s * half)  # that stay inside
        forward = 2 * product_time(machine, s, s, d, extra=scores, item=model.item, batch=half)
        forward /= machine.reached.attention
        return Seconds(max(forward, moved)), Seconds(2.5 * max(forward, moved))
    products = product_time(machine, s, s, d, batch=batch) + product_time(machine, s, d, s, batch=batch)
    elements = moved_time(machine, MeanBytes(SCORES * batch * s * s), 2)
    return Seconds(products + elements), Seconds(2 * products + BACKWARD * elements)


def _sequence_parallel(
    machine: Machine,
    model: Model,
    cut: Cut,
    spans: Mapping[InnerAxis, Span],
    tokens: MeanTokens,
    core: Seconds,
) -> Seconds:
    """Seconds that a forward waits for ulysses and ring. Keys and values go around behind the attention of
    those before; what is not hidden remains.
    """
    q, kv = model.heads * model.head_dim / cut.tp, 2 * model.kv_heads * model.head_dim / cut.tp
    time = 0.0
    if "ulysses" in spans:
        where = spans["ulysses"]
        time += collectives.all_to_all(where, MeanBytes(model.item * tokens * (q + kv)))
        time += collectives.all_to_all(where, MeanBytes(model.item * tokens * q))
        kv, tokens = kv / where.ranks, MeanTokens(tokens * where.ranks)
    if "ring" in spans:
        where = spans["ring"]
        hop = collectives.message(where, MeanBytes(model.item * tokens * kv))
        share = Seconds(core / where.ranks)  # of the attention, beside which a hop goes
        time += (where.ranks - 1) * (machine.reached.both(share, hop) - share)
    return Seconds(time)


def _dispatch(model: Model, spans: Mapping[InnerAxis, Span], tokens: MeanTokens) -> Seconds:
    """Rows to their experts and back, forward."""
    if model.experts is None or "ep" not in spans:
        return Seconds(0.0)
    nbytes = model.item * tokens * model.experts.top_k * model.hidden
    return Seconds(2 * collectives.all_to_all(spans["ep"], MeanBytes(nbytes)))


def _tensor_parallel(
    machine: Machine, model: Model, cut: Cut, spans: Mapping[InnerAxis, Span], tokens: MeanTokens
) -> Seconds:
    """Two sums of the hidden state; with sequence parallelism as reduce_scatter and all_gather. Beside each
    the copies that change its layout.
    """
    if "tp" not in spans:
        return Seconds(0.0)
    nbytes = MeanBytes(model.item * tokens * model.hidden)
    plain, pieces = (moved_time(machine, MeanBytes(each * nbytes)) for each in cut.copies)
    if cut.sequence_parallel:
        return Seconds(4 * (collectives.all_gather(spans["tp"], nbytes) + pieces))
    return Seconds(2 * (collectives.all_reduce(spans["tp"], nbytes) + plain))


def head_time(machine: Machine, model: Model, cut: Cut) -> StageTime:
    """Of the last norm, the logits and the loss, in fp32 as the runtime takes it."""
    tokens = cut.rows * model.sequence / cut.parts
    v = model.vocab / cut.tp
    loss = moved_time(machine, MeanBytes(4 * tokens * v * 3))
    forward = product_time(machine, tokens, v, model.hidden, item=model.item) + loss
    inputs = product_time(machine, tokens, model.hidden, v, item=model.item) + loss
    weights = product_time(machine, v, model.hidden, tokens, item=model.item)
    return StageTime(Seconds(forward), Seconds(inputs), weights)
