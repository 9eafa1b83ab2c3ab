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
from typing import NamedTuple

from pycomm.parallel.planning import collectives
from pycomm.parallel.planning.model import HALF

__all__ = ["BACKWARD", "BlockTime", "Cut", "block_time", "head_time", "product_time"]

BACKWARD = 1.5
SCORES = 9  # bytes of a score that is kept, moved in a forward


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
    """Seconds of one block and one microbatch. input, weight: the two halves of backward; core: of a
    forward of the attention alone, which selective recomputation repeats. tp: what of forward, and of
    backward, is collectives of tp.
    """

    forward: float
    input: float
    weight: float
    core: float
    tp: tuple[float, float]


def product_time(machine, m, n, k, *, extra=0.0, item=HALF, batch=1, launches=1):
    """Seconds of `batch` products of (m, k) by (k, n). extra: bytes beside operands and result."""
    reached = machine.reached
    e = reached.product / (1 + reached.product_half * (1 / m + 1 / n + 1 / k))
    flops = 2.0 * m * n * k * batch / (machine.peak * e)
    moved = (item * (m * k + k * n + m * n) * batch + extra) / (machine.bandwidth * reached.memory)
    return max(flops, moved, launches * reached.launch)


def moved_time(machine, nbytes, kernels=1):
    if not nbytes:
        return 0.0
    return max(nbytes / (machine.bandwidth * machine.reached.memory), kernels * machine.reached.launch)


@functools.lru_cache(maxsize=65536)
def block_time(machine, model, cut, spans=None):
    """BlockTime. spans: pairs (axis, Span) of tp, ulysses, ring and ep where they have ranks."""
    spans, model = dict(spans or ()), model.dealt(cut.experts)
    tokens = cut.rows * model.sequence / cut.parts
    whole = tokens / cut.tp if cut.sequence_parallel else tokens  # of modules that tp does not divide
    forward = inputs = weights = 0.0
    for module in model.block:
        for product in module.products:
            here = tokens if product.cut or not product.experts else whole
            f, i, w = _product(machine, model, cut, product, here)
            forward, inputs, weights = forward + f, inputs + i, weights + w
        elements = moved_time(machine, whole * module.moved[0]) + moved_time(
            machine, tokens * module.moved[1] / cut.tp
        )
        forward, inputs = forward + elements, inputs + BACKWARD * elements
    core, core_backward = _attention(machine, model, cut, tokens)
    if "ring" in spans or "ulysses" in spans:
        sequence = _sequence_parallel(machine, model, cut, spans, tokens, core)
        core, core_backward = core + sequence, core_backward + 2 * sequence
    experts = _dispatch(model, spans, whole)
    tp = _tensor_parallel(machine, model, cut, spans, tokens)
    # Under sequence parallelism the gathers of what enters a backward come before all its products.
    hidden = min(tp / 2 if cut.sequence_parallel else tp, weights) if cut.tp_hidden else 0.0
    return BlockTime(
        forward + core + experts + tp,
        inputs + core_backward + experts + tp - hidden,
        weights,
        core,
        (tp, tp - hidden),
    )


def _product(machine, model, cut, product, tokens):
    """(forward, gradient of the input, of the weight) of one product."""
    batch = launches = 1
    rows = tokens * product.times
    if product.experts:
        batch = model.held(cut.experts)
        launches = 1 if model.experts.stacked else batch
        rows *= cut.experts / model.experts.count  # of one expert: its part of what all ranks of ep send
    m = max(rows, 1)
    n = product.n / cut.tp if product.cut == "n" else product.n
    k = product.k / cut.tp if product.cut == "k" else product.k
    item = model.item
    sums = (2 * cut.gradient - item if cut.fused_sums else 2 * cut.gradient + item) * n * k
    times = functools.partial(product_time, machine, item=item, batch=batch, launches=launches)
    return times(m, n, k), times(m, k, n), times(n, k, m, extra=max(sums * batch, 0))


def _attention(machine, model, cut, tokens):
    """(forward, backward) of scores, softmax and the sum of values, on one rank."""
    heads, s, d = model.heads / cut.tp, model.sequence, model.head_dim
    batch = heads * tokens / s  # heads of whole sequences, spread over the ranks of ring and ulysses
    if model.fused:
        half = batch / 2  # causal
        moved = moved_time(machine, model.item * tokens * 2 * (model.heads + model.kv_heads) * d / cut.tp)
        forward = 2 * product_time(
            machine, s, s, d, extra=-model.item * s * s * half, item=model.item, batch=half
        )
        forward /= machine.reached.attention
        return max(forward, moved), 2.5 * max(forward, moved)
    products = product_time(machine, s, s, d, batch=batch) + product_time(machine, s, d, s, batch=batch)
    elements = moved_time(machine, SCORES * batch * s * s, 2)
    return products + elements, 2 * products + BACKWARD * elements


def _sequence_parallel(machine, model, cut, spans, tokens, core):
    """Seconds that a forward waits for ulysses and ring. Keys and values go around behind the attention of
    those before; what is not hidden remains.
    """
    q, kv = model.heads * model.head_dim / cut.tp, 2 * model.kv_heads * model.head_dim / cut.tp
    time = 0.0
    if "ulysses" in spans:
        where = spans["ulysses"]
        time += collectives.all_to_all(where, model.item * tokens * (q + kv))
        time += collectives.all_to_all(where, model.item * tokens * q)
        kv, tokens = kv / where.ranks, tokens * where.ranks
    if "ring" in spans:
        where = spans["ring"]
        hop = collectives.message(where, model.item * tokens * kv)
        share = core / where.ranks  # of the attention, beside which a hop goes
        time += (where.ranks - 1) * (machine.reached.both(share, hop) - share)
    return time


def _dispatch(model, spans, tokens):
    """Rows to their experts and back, forward."""
    if model.experts is None or "ep" not in spans:
        return 0.0
    nbytes = model.item * tokens * model.experts.top_k * model.hidden
    return 2 * collectives.all_to_all(spans["ep"], nbytes)


def _tensor_parallel(machine, model, cut, spans, tokens):
    """Two sums of the hidden state; with sequence parallelism as reduce_scatter and all_gather. Beside each
    the copies that change its layout.
    """
    if "tp" not in spans:
        return 0.0
    nbytes = model.item * tokens * model.hidden
    plain, pieces = (moved_time(machine, each * nbytes) for each in cut.copies)
    if cut.sequence_parallel:
        return 4 * (collectives.all_gather(spans["tp"], nbytes) + pieces)
    return 2 * (collectives.all_reduce(spans["tp"], nbytes) + plain)


def head_time(machine, model, cut):
    """(forward, input, weight) of the last norm, the logits and the loss, in fp32 as the runtime takes it."""
    tokens = cut.rows * model.sequence / cut.parts
    v = model.vocab / cut.tp
    loss = moved_time(machine, 4 * tokens * v * 3)
    forward = product_time(machine, tokens, v, model.hidden, item=model.item) + loss
    inputs = product_time(machine, tokens, model.hidden, v, item=model.item) + loss
    return forward, inputs, product_time(machine, v, model.hidden, tokens, item=model.item)
