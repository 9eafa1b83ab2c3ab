"""The copies of the model, and what one process computes with one of them.

The batch of one process is the whole one, in one piece, and its loss is what loss_fn says of it: nothing here
knows of ranks. Where a module's result depends by design on all rows that run together (BatchNorm, the
balance of parallel.MoE) the rows of a microbatch run together instead, weighted like par.step does.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from pycomm.parallel.expert import MoE
from pycomm.parallel.ground.batch import Microbatch, count_targets
from pycomm.parallel.models.norms import batch_norms
from pycomm.parallel.run.router_loss import RouterLoss, plain_loss
from pycomm.parallel.tensor import cross_entropy
from pycomm.parallel.verification.pieces import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from pycomm.parallel.given import LossFunction, Tree
    from pycomm.parallel.run.router_loss import Loss

__all__ = [
    "Reference",
    "chunks_of",
    "copies_of",
    "double",
    "rows_of",
    "run_alone",
    "depends_on_rows",
    "without_dropout",
]


def copies_of(model: nn.Module | Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two models like `model`, a module or a function that makes one, with the same values."""
    if isinstance(model, torch.nn.Module):
        if "_parallel" in model.__dict__:
            raise ValueError(
                "verify takes a model as it was before parallelize(), which this one has been through"
            )
        try:
            return copy.deepcopy(model), copy.deepcopy(model)
        except Exception as error:
            raise ValueError(
                f"this {type(model).__name__} cannot be copied ({type(error).__name__}: {error}): give "
                "verify a function without arguments that makes it"
            ) from error
    made = model(), model()
    if not all(isinstance(one, torch.nn.Module) for one in made) or made[0] is made[1]:
        raise ValueError("verify takes a module, or a function that makes a new one at each call")
    with torch.no_grad():
        for one, other in zip(*([*m.parameters(), *m.buffers()] for m in made), strict=True):
            other.copy_(one)
    return made


def double(values: Tree) -> Tree:
    """Real numbers of a batch in fp64."""
    return tree_map(
        lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, values
    )


def without_dropout(model: nn.Module) -> list[str]:
    """Makes every rate of dropout zero, in modules and in their configurations (`config`), which are copied
    before. Returns the names of the modules that had one.
    """
    changed: list[str] = []
    configs: dict[int, tuple[object, object]] = {}  # id of a configuration -> it, its copy
    for name, module in model.named_modules():
        config = vars(module).get("config")
        if hasattr(config, "__dict__") and _rates(config, vars(config)):
            if id(config) not in configs:
                configs[id(config)] = config, copy.deepcopy(config)
            module.config = configs[id(config)][1]
        drops = isinstance(module, _DropoutNd) or "drop" in type(module).__name__.lower()
        drops = drops or type(module).__name__ == "StochasticDepth"
        rates = _rates(module, [key for key in vars(module) if key != "p" or drops], "p")
        for key in rates:
            setattr(module, key, 0.0)
        if rates:
            changed.append(name)
    for _, config in configs.values():
        for key in _rates(config, vars(config)):
            setattr(config, key, 0.0)
    return changed


def _rates(owner: object, keys: Iterable[str], *names: str) -> list[str]:
    """Those of the attributes that are rates of dropout, by their name and their value."""
    found = [(key, getattr(owner, key)) for key in keys if "drop" in key.lower() or key in names]
    return [
        key
        for key, value in found
        if isinstance(value, (int, float)) and 0 < value <= 1 and value is not True
    ]


def depends_on_rows(model: nn.Module, loss_fn: Loss) -> bool:
    """Whether a result depends by design on which rows run together."""
    experts = isinstance(loss_fn, RouterLoss) or any(isinstance(module, MoE) for module in model.modules())
    return experts or bool(batch_norms(model))


def chunks_of(
    pieces: Sequence[Sequence[Microbatch]], by_microbatch: bool
) -> tuple[list[Microbatch], list[list[Rows]]]:
    """The batch of one process as the chunks in which it is run, and which of their rows each data rank has.

    pieces: Microbatches, pieces[data rank][microbatch]. by_microbatch: a chunk for each, else one for all.
    Returns (Microbatches, rows): rows[microbatch][data rank] = Rows.
    """
    # The batch is in order of microbatches, then of data ranks.
    groups = [list(group) for group in zip(*pieces, strict=True)]
    if not by_microbatch:
        groups = [[piece for group in groups for piece in group]]
    rows = []
    for number, group in enumerate(groups):
        counts = [rows_of(piece) for piece in group]
        rows += [Rows(number, sum(counts), sum(counts[:at]), count) for at, count in enumerate(counts)]
    ranks = len(pieces)
    chunks = [Microbatch(_joined([p.inputs for p in g]), _joined([p.targets for p in g])) for g in groups]
    return chunks, [rows[start : start + ranks] for start in range(0, len(rows), ranks)]


def rows_of(piece: Microbatch) -> int:
    leaves = tree_leaves((piece.inputs, piece.targets))
    return next(leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor))


def _joined(trees: Sequence[Tree]) -> Tree:
    leaves, specs = zip(*(tree_flatten(tree) for tree in trees), strict=True)
    joined = []
    for some in zip(*leaves, strict=True):
        if isinstance(some[0], torch.Tensor) and len({leaf.shape[1:] for leaf in some}) > 1:
            raise ValueError(
                "verify joins the rows of all data ranks into the batch of one process, and their tensors "
                f"differ in shape: {sorted({tuple(leaf.shape) for leaf in some})}. Pad them alike"
            )
        joined.append(torch.cat(some) if isinstance(some[0], torch.Tensor) else some[0])
    return tree_unflatten(joined, specs[0])


# Name of a module -> for each chunk, for each call, its tensors, on the CPU.
Outputs: TypeAlias = dict[str, list[list[list[torch.Tensor]]]]


class Reference(NamedTuple):
    """What one process has computed."""

    loss: float
    outputs: Outputs
    gradients: dict[str, torch.Tensor]  # of the parameters that are trained, a tied one under its first name
    values: dict[str, torch.Tensor]  # of the same, before the step
    draws: bool  # whether it has drawn random numbers

    @property
    def order(self) -> list[str]:
        """Names of the modules in the order in which they end."""
        return list(self.outputs)


def run_alone(
    model: nn.Module,
    chunks: Sequence[Microbatch],
    loss_fn: Loss,
    count: Callable[[Tree], torch.Tensor | float] | None,
) -> Reference:
    """A Reference; the model keeps its gradients. chunks: Microbatches, whose losses are weighted with their
    counts. count: see par.step.
    """
    counter, hooks = count or count_targets, []
    outputs: Outputs = {}
    active: list[int | None] = [None]  # the chunk that runs
    model.zero_grad()
    for name, module in model.named_modules():
        hooks.append(module.register_forward_hook(_recorder(outputs, name, active)))
        if isinstance(module, MoE):
            module.aux_scale = 1.0 / len(chunks)
    counts = [float(counter(chunk.targets)) for chunk in chunks]
    loss, draws = 0.0, False
    for number, (chunk, targets) in enumerate(zip(chunks, counts, strict=True)):
        active[0] = number
        before = _random_state(model)
        result = chunk.call(model)
        draws = draws or not all(map(torch.equal, before, _random_state(model)))
        active[0] = None
        value = _loss(plain_loss(loss_fn), result, chunk.targets)
        if len(chunks) > 1:
            value = value * (targets / (sum(counts) or 1.0))
        if isinstance(loss_fn, RouterLoss):
            value = value + loss_fn.of_routers(result, chunk) / len(chunks)
        value.backward()
        loss += float(value.detach().double())
    for hook in hooks:
        hook.remove()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {
        name: _to_cpu(torch.zeros_like(p) if p.grad is None else p.grad) for name, p in trained.items()
    }
    values = {name: _to_cpu(parameter) for name, parameter in trained.items()}
    return Reference(loss, outputs, gradients, values, draws)


def _recorder(
    outputs: Outputs, name: str, active: list[int | None]
) -> Callable[[nn.Module, tuple[Tree, ...], Tree], None]:
    def record(module: nn.Module, args: tuple[Tree, ...], output: Tree) -> None:
        running = active[0]
        if running is None:
            return  # a recomputation in backward
        chunks = outputs.setdefault(name, [])
        while len(chunks) <= running:
            chunks.append([])
        chunks[-1].append([_to_cpu(leaf) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)])

    return record


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _loss(loss_fn: LossFunction, output: Tree, targets: Tree) -> torch.Tensor:
    if loss_fn is cross_entropy and not isinstance(output, torch.Tensor):
        output = output.logits
    value = loss_fn(output, targets)
    if not isinstance(value, torch.Tensor) or value.dim() > 0:
        raise ValueError(f"loss_fn must return a mean, a tensor without dimensions; got {value!r}")
    return value


def _random_state(model: nn.Module) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if any(parameter.is_cuda for parameter in model.parameters()):
        states.append(torch.cuda.get_rng_state())
    return states
