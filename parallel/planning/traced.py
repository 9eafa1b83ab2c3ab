"""A Model of a torch module: its own forward is run once on fake tensors, which have shapes and no values,
and what it computes and keeps is written down.

    products      aten mm, addmm, bmm in the block that runs, with the module that called them
    attention     aten's scaled_dot_product_attention, or the batched products of one that is written out
    kept          what autograd saves for backward, each storage once, parameters not
    cut           by tensor/find.py, which says what tp will cut: columns "n", rows "k"

No memory is taken and nothing of the model is changed; modules on meta will do. The blocks are those of the
trunk (ground/trunk.py); the largest stands for all.
"""

import copy
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from pycomm.parallel.ground.batch import Microbatch, inputs_and_targets
from pycomm.parallel.ground.trunk import find_trunk
from pycomm.parallel.planning.model import Model, Module, Product
from pycomm.parallel.tensor.find import find

__all__ = ["trace_model"]

aten = torch.ops.aten
PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}  # operation -> place of its first matrix
BATCHED = {aten.bmm.default, aten.baddbmm.default}


class _Seen(NamedTuple):
    """products: (module, m, k, n); scores: (batch x heads, positions, width) of attention; fused: it kept
    none.
    """

    products: list
    scores: list
    fused: list
    kept: dict


class _Recorder(TorchDispatchMode):
    def __init__(self, stack):
        super().__init__()
        self.stack, self.seen = stack, _Seen([], [], [], {})

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.stack:
            if func in PRODUCTS:
                a, b = args[PRODUCTS[func] : PRODUCTS[func] + 2]
                self.seen.products.append((self.stack[-1], a.shape[0], a.shape[1], b.shape[1]))
            elif func in BATCHED:
                a, b = args[-2:]
                self.seen.scores.append((a.shape[0], a.shape[1], min(a.shape[2], b.shape[2])))
            elif "scaled_dot_product" in str(func):
                q, k = args[0], args[1]
                self.seen.fused.append((q.shape[1], k.shape[1], q.shape[2], q.shape[3]))
        return func(*args, **(kwargs or {}))


def trace_model(model, batch, blocks=None):
    """Model. batch: as par.step takes it; a row of it is enough. Raises ValueError where the model has no
    list of blocks.
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
    seen, hidden, rows, positions = _run(model, inputs, name)
    return _as_model(model, trunk, name, seen, (hidden, rows, positions))


def _size(module):
    return sum(parameter.numel() for parameter in module.parameters())


def _run(model, inputs, name):
    """(_Seen of the block `name`, shape of the hidden state) by one forward of a fake copy."""
    stack, shape = [], []
    with FakeTensorMode() as fake:
        known = {id(p): torch.nn.Parameter(_empty(p), p.requires_grad) for p in model.parameters()}
        known |= {id(b): _empty(b) for b in model.buffers()}
        own = {value.untyped_storage()._cdata for value in known.values()}
        shadow = copy.deepcopy(model, known)
        recorder = _Recorder(stack)
        block = shadow.get_submodule(name)

        def keep(tensor):
            storage = tensor.untyped_storage()
            if stack and storage._cdata not in own:
                recorder.seen.kept[storage._cdata] = storage.nbytes()
            return tensor

        def enter(module, args, kwargs, fqn):
            stack.append(fqn)
            if fqn == name:
                tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
                shape.extend(t.shape for t in tensors if t.dim() >= 2)

        for inner, module in block.named_modules():
            fqn = f"{name}.{inner}".rstrip(".")
            module.register_forward_pre_hook(
                lambda m, args, kwargs, fqn=fqn: enter(m, args, kwargs, fqn), with_kwargs=True
            )
            module.register_forward_hook(lambda *_: stack.pop() and None)
        given = tree_map_only(
            torch.Tensor, lambda t: fake.from_tensor(t) if not t.is_meta else _empty(t), inputs
        )
        with recorder, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            try:
                Microbatch(given, None).call(shadow)
            except Exception as error:
                first = (str(error).splitlines() or [""])[0]
                raise ValueError(
                    f"the forward of {type(model).__name__} does not run on fake tensors, which have shapes "
                    f"and no values ({type(error).__name__}: {first}). It must not read values (.item(), if, "
                    "nonzero), and the batch must fit the model"
                ) from error
    if not shape:
        raise ValueError(f"the forward did not call {name!r}, or without a tensor of two dimensions or more")
    hidden = shape[0]
    return recorder.seen, hidden[-1], hidden[0], hidden[1] if len(hidden) > 2 else 1


def _empty(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _as_model(model, trunk, name, seen, shape):
    hidden, rows, positions = shape
    tokens = rows * positions
    block, cuts = model.get_submodule(name), find(model, blocks=trunk.lists[0])
    cut_of = {fqn: "n" for sublayer in cuts.sublayers for fqn in sublayer.columns}
    cut_of |= {sublayer.row: "k" for sublayer in cuts.sublayers}
    item = next((p.element_size() for p in model.parameters() if p.is_floating_point()), None)
    if item is None:
        raise ValueError(f"{type(model).__name__} has no parameters to train")
    modules, counted = [], 0
    for inner, module in block.named_modules():
        fqn = f"{name}.{inner}".rstrip(".")
        cut = cut_of.get(fqn)
        own = sum(p.numel() for p in module.parameters(recurse=False))
        bias = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() == 1) if cut == "k" else 0
        products = tuple(Product(k, n, cut, m / tokens) for at, m, k, n in seen.products if at == fqn)
        if own or products:
            counted += own
            parameters = (bias, own - bias) if cut else (own, 0)
            modules.append(Module(inner or "block", parameters, products))
    kept = sum(seen.kept.values()) / tokens
    # Between blocks and into products that tp cuts, values are whole; what cut layers make is cut.
    inside = sum(n for at, m, k, n in seen.products if cut_of.get(at) == "n") * item
    inside = min(kept, inside + sum(k for at, m, k, n in seen.products if cut_of.get(at) == "k") * item)
    # norms and sums read and write the hidden state, activations what cut layers make
    modules.append(Module("attention", kept=(kept - inside, inside), moved=(8 * item * hidden, 2 * inside)))
    heads, kv_heads, width = _heads(seen, rows, hidden)
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
        None,
        item,
    )


def _heads(seen, rows, hidden):
    if seen.fused:
        heads, kv_heads, _, width = seen.fused[0]
        return heads, kv_heads, width
    if seen.scores:
        batch, _, width = seen.scores[0]
        return max(batch // rows, 1), max(batch // rows, 1), width
    return 1, 1, hidden


def _head_of(model, trunk):
    """(the last Linear outside of the blocks, its outputs), or None."""
    inside = {id(m) for block in trunk.blocks for m in block.modules()}
    found = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and id(m) not in inside]
    return (found[-1], found[-1].out_features) if found else None
