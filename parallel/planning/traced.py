"""A Model of a torch module: its own forward is run once on fake tensors (recorded.py), and of what it
computes and keeps a Model is made.

    products      aten mm, addmm, bmm in the block that runs, with the module that called them
    attention     aten's scaled_dot_product_attention, or the batched products of one that is written out
    kept          what autograd saves for backward, each storage once, parameters not
    cut           by tensor/find.py, which says what tp will cut: columns "n", rows "k"
    experts       of a mixture, with the tokens dealt evenly over them (even_experts.py)

No memory is taken and nothing of the model is changed; modules on meta will do. The blocks are those of the
trunk (models/trunk.py); the largest stands for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pycomm.parallel.ground.batch import inputs_and_targets
from pycomm.parallel.models.trunk import Trunk, find_trunk
from pycomm.parallel.planning.even_experts import Mixture, mixtures_of
from pycomm.parallel.planning.model import CutDim, Experts, Model, Module, Product
from pycomm.parallel.planning.recorded import Attended, Entered, Recorded, Seen, run
from pycomm.parallel.tensor.find import find

if TYPE_CHECKING:
    from pycomm.parallel.given import Batch

__all__ = ["trace_model"]


class _Same(NamedTuple):
    """What the products of all experts share. module: its name in an expert."""

    module: str
    k: int
    n: int
    cut: CutDim | None


def trace_model(model: torch.nn.Module, batch: Batch, blocks: str | tuple[str, str] | None = None) -> Model:
    """batch: as par.step takes it; a row of it is enough. Raises ValueError where the model has no
    list of blocks, and for one that reads values, with the module and what it reads.
    """
    trunk = find_trunk(model, blocks)
    if trunk is None:
        raise ValueError(
            f"{type(model).__name__} has no list of blocks, at which a planner could cut it: name it with "
            "blocks="
        )
    inputs, _ = inputs_and_targets(batch)
    number = max(range(len(trunk.blocks)), key=lambda i: _size(trunk.blocks[i]))
    name = trunk.names[number]
    return _as_model(model, trunk, name, run(model, inputs, name, mixtures_of(model)))


def _size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _as_model(model: torch.nn.Module, trunk: Trunk, name: str, recorded: Recorded) -> Model:
    seen, (hidden, rows, positions), mixtures = recorded
    tokens = rows * positions
    # parallel.MoE is not cut by tp; what is stacked is, where ep does not deal it (building/cut.py).
    rules = {mixture.fqn: "tokens" for mixture in mixtures if not mixture.stacked}
    cuts = find(model, blocks=trunk.lists[0], rules=rules)
    cut_of: dict[str, CutDim] = {fqn: "n" for sublayer in cuts.sublayers for fqn in sublayer.columns}
    cut_of |= {sublayer.row: "k" for sublayer in cuts.sublayers}
    item = next((p.element_size() for p in model.parameters() if p.is_floating_point()), None)
    if item is None:
        raise ValueError(f"{type(model).__name__} has no parameters to train")
    here = [mixture for mixture in mixtures if f"{mixture.fqn}.".startswith(f"{name}.")]
    modules = _dense(model, name, seen, (tokens, cut_of), here)
    modules += [_mixture(mixture, seen, recorded.shape, item, cut_of) for mixture in here]
    dense_bytes = [nbytes for nbytes, at in seen.kept.values() if not _within(at, (m.fqn for m in here))]
    kept = sum(dense_bytes) / tokens
    # Between blocks and into products that tp cuts, values are whole; what cut layers make is cut.
    dense = [
        (cut_of.get(at), m, k, n) for at, m, k, n in seen.products if not _within(at, (m.fqn for m in here))
    ]
    inside = min(kept, sum(m * n for cut, m, k, n in dense if cut == "n") * item / tokens)
    inside = min(kept, inside + sum(m * k for cut, m, k, n in dense if cut == "k") * item / tokens)
    # norms and sums read and write the hidden state, activations what cut layers make
    modules.append(Module("attention", kept=(kept - inside, inside), moved=(8 * item * hidden, 2 * inside)))
    heads, kv_heads, _, width = _attention(seen, recorded.shape)
    outside = {id(p): p for p in model.parameters()}
    for each in trunk.blocks:
        for parameter in each.parameters():
            outside.pop(id(parameter), None)
    tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding) and id(m.weight) in outside]
    head = _head_of(model, trunk)
    vocab = head[1] if head else max((m.num_embeddings for m in tables), default=hidden)
    embedded = sum(p.numel() for p in {m.weight for m in tables})
    tied = head is not None and any(m.weight is head[0].weight for m in tables)
    rest = sum(p.numel() for p in outside.values()) - embedded
    of_head = head[0].weight.numel() if head and not tied else 0
    return Model(
        type(model).__name__,
        len(trunk.blocks),
        hidden,
        heads,
        kv_heads,
        width,
        vocab,
        positions,
        tuple(modules),
        embedded,
        of_head,
        rest - of_head,
        True,
        item=item,
        experts=_experts(model, here),
    )


def _dense(
    model: torch.nn.Module,
    name: str,
    seen: Seen,
    shape: tuple[int, Mapping[str, CutDim]],
    here: Sequence[Mixture],
) -> list[Module]:
    """Those of the block `name` that have parameters or products, without experts. shape: (tokens, which dim
    tp cuts).
    """
    (tokens, cut_of), modules = shape, list[Module]()
    for fqn, module in model.get_submodule(name).named_modules(prefix=name):
        if _within(fqn, (mixture.inside for mixture in here)):
            continue
        cut = cut_of.get(fqn)
        own = sum(p.numel() for p in module.parameters(recurse=False))
        bias = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() == 1) if cut == "k" else 0
        products = tuple(Product(k, n, cut, m / tokens) for at, m, k, n in seen.products if at == fqn)
        if own or products:
            parameters = (bias, own - bias) if cut else (own, 0)
            modules.append(Module(fqn[len(name) + 1 :] or "block", parameters, products))
    return modules


def _within(fqn: str, names: Iterable[str]) -> bool:
    return any(f"{fqn}.".startswith(f"{name}.") for name in names)


def _mixture(mixture: Mixture, seen: Seen, shape: Entered, item: int, cut_of: Mapping[str, CutDim]) -> Module:
    """The experts of one mixture: their products over all of them, and what goes there and back. item: bytes
    of a parameter.
    """
    hidden, tokens = shape.hidden, shape.rows * shape.positions
    rows: dict[_Same, int] = {}  # rows of all experts
    for at, m, k, n in seen.products:
        if _within(at, (mixture.inside,)):
            name = at[len(mixture.inside) + 1 :]
            name = name if mixture.stacked else name.partition(".")[2]
            key = _Same(name, k, n, cut_of.get(at))
            rows[key] = rows.get(key, 0) + m
    products = tuple(Product(k, n, cut, m / tokens, True) for (_, k, n, cut), m in rows.items())
    made = {True: 0.0, False: 0.0}  # by whether tp cuts it
    for p in products:
        made[p.cut is not None] += (
            item * p.times * ((p.n if p.k == hidden else 0) + (p.k if p.n == hidden else 0))
        )
    kept = sum(nbytes for nbytes, at in seen.kept.values() if _within(at, (mixture.fqn,))) / tokens
    inside = min(kept, made[True])
    assert mixture.top_k is not None  # the forward has run
    there_and_back = 4 * item * mixture.top_k * hidden
    moved = there_and_back + 2 * made[False], 2 * made[True]
    return Module(mixture.fqn, (0, 0), products, moved, (kept - inside, inside), True)


def _experts(model: torch.nn.Module, here: Sequence[Mixture]) -> Experts | None:
    """Those of a block."""
    if not here:
        return None
    first = here[0]
    if len({(mixture.count, mixture.top_k, mixture.stacked) for mixture in here}) > 1:
        raise ValueError(
            f"{type(model).__name__} has blocks with mixtures of two kinds, {here[0].fqn!r} and "
            f"{here[-1].fqn!r}: the planner knows blocks whose mixtures have as many experts and choices"
        )
    assert first.top_k is not None  # the forward has run
    return Experts(first.count, first.top_k, sum(mixture.parameters for mixture in here), first.stacked)


def _attention(seen: Seen, shape: Entered) -> Attended:
    """As it is seen, or of one head."""
    if seen.fused:
        return seen.fused[0]
    if seen.scores:
        batch, positions, width = seen.scores[0]
        heads = max(batch // shape.rows, 1)
        return Attended(heads, heads, positions, width)
    return Attended(1, 1, shape.positions, shape.hidden)


def _head_of(model: torch.nn.Module, trunk: Trunk) -> tuple[torch.nn.Linear, int] | None:
    """(the last Linear outside of the blocks, its outputs), or None."""
    inside = {id(m) for block in trunk.blocks for m in block.modules()}
    found = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and id(m) not in inside]
    return (found[-1], found[-1].out_features) if found else None
