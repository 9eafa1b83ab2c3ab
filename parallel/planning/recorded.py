"""One forward of a fake copy of a model, whose tensors have shapes and no values, and what of it is written
down. traced.py makes a Model of it.

Each module is known by its name while it runs, so a forward that reads a value can be refused with the name
of the module that does.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from pycomm.parallel.ground.batch import Microbatch
from pycomm.parallel.planning.even_experts import Mixture, deal_evenly

if TYPE_CHECKING:
    from pycomm.parallel.given import Tree

__all__ = ["Attended", "Entered", "Multiplied", "Recorded", "Scored", "Seen", "run"]

DATA_DEPENDENT = DataDependentOutputException, DynamicOutputShapeException

aten = torch.ops.aten
PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}  # operation -> place of its first matrix
BATCHED = {aten.bmm.default, aten.baddbmm.default}


class Multiplied(NamedTuple):
    """(m, k) by (k, n)."""

    module: str
    m: int
    k: int
    n: int


class Scored(NamedTuple):
    """Of attention that is written out."""

    batch: int  # x heads
    positions: int
    width: int


class Attended(NamedTuple):
    """By a fused attention, which keeps no scores."""

    heads: int
    kv_heads: int
    positions: int
    width: int


class Held(NamedTuple):
    nbytes: int
    module: str


class Seen(NamedTuple):
    """kept: by storage."""

    products: list[Multiplied]
    scores: list[Scored]
    fused: list[Attended]
    kept: dict[int, Held]


class Entered(NamedTuple):
    """The shape of what enters a block."""

    hidden: int
    rows: int
    positions: int


class Recorded(NamedTuple):
    """mixtures: with the top_k that they are called with."""

    seen: Seen
    shape: Entered
    mixtures: list[Mixture]


class _Recorder(TorchDispatchMode):
    """stack: names of the modules that run. Inside of `name`, the block, what they do is written down."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.seen = name, Seen([], [], [], {})
        self.stack: list[str] = []

    @property
    def recording(self) -> bool:
        return self.name in self.stack

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self.recording:
            if func in PRODUCTS:
                a, b = args[PRODUCTS[func] : PRODUCTS[func] + 2]
                self.seen.products.append(Multiplied(self.stack[-1], a.shape[0], a.shape[1], b.shape[1]))
            elif func in BATCHED:
                a, b = args[-2:]
                self.seen.scores.append(Scored(a.shape[0], a.shape[1], min(a.shape[2], b.shape[2])))
            elif "scaled_dot_product" in str(func):
                q, k = args[0], args[1]
                self.seen.fused.append(Attended(q.shape[1], k.shape[1], q.shape[2], q.shape[3]))
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        self.stack.append(name)
        yield
        self.stack.pop()  # not where it raised: then the last name says where


def run(model: torch.nn.Module, inputs: Tree, name: str, mixtures: Sequence[Mixture]) -> Recorded:
    """What the block `name` does in one forward of a fake copy."""
    shape, recorder = list[torch.Size](), _Recorder(name)
    with FakeTensorMode() as fake:
        known: dict[int, torch.Tensor]
        known = {id(p): torch.nn.Parameter(_empty(p), p.requires_grad) for p in model.parameters()}
        known |= {id(b): _empty(b) for b in model.buffers()}
        own = {value.untyped_storage()._cdata for value in known.values()}
        shadow = copy.deepcopy(model, known)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if recorder.recording and storage._cdata not in own:
                recorder.seen.kept.setdefault(storage._cdata, Held(storage.nbytes(), recorder.stack[-1]))
            return tensor

        def enter(given: Iterable[object], fqn: str) -> None:
            recorder.stack.append(fqn)
            if fqn == name:
                tensors = [t for t in given if isinstance(t, torch.Tensor)]
                shape.extend(t.shape for t in tensors if t.dim() >= 2)

        def leave(*_: object) -> None:
            recorder.stack.pop()

        for fqn, module in shadow.named_modules():
            module.register_forward_pre_hook(
                lambda _, args, kwargs, fqn=fqn: enter((*args, *kwargs.values()), fqn), with_kwargs=True
            )
            module.register_forward_hook(leave)
        dealt = deal_evenly(shadow, mixtures, recorder.inside)
        given = tree_map_only(
            torch.Tensor, lambda t: fake.from_tensor(t) if not t.is_meta else _empty(t), inputs
        )
        with recorder, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            try:
                Microbatch(given, None).call(shadow)
            except Exception as error:
                raise ValueError(_why(model, recorder.stack, error)) from error
    if not shape:
        raise ValueError(f"the forward did not call {name!r}, or without a tensor of two dimensions or more")
    hidden = shape[0]
    called = [m._replace(top_k=dealt[m.fqn].top_k) if m.fqn in dealt else m for m in mixtures]
    entered = Entered(hidden[-1], hidden[0], hidden[1] if len(hidden) > 2 else 1)
    return Recorded(recorder.seen, entered, called)


READ = {
    "_local_scalar_dense": "one value of a tensor (.item(), float(), or if and while on it)",
    "equal": "whether two tensors are equal (torch.equal)",
    "nonzero": "where a tensor is not zero (nonzero(), torch.where() of one tensor, x[mask])",
    "masked_select": "the values under a mask (masked_select, x[mask])",
}


def _why(model: torch.nn.Module, stack: Sequence[str], error: Exception) -> str:
    """What to say of a forward that raised `error` in the last module of the stack."""
    where = f"{stack[-1]!r} ({type(model.get_submodule(stack[-1])).__name__})" if any(stack) else "it"
    if isinstance(error, DATA_DEPENDENT):
        op = str(error.func).removeprefix("aten.").partition(".")[0]
        return (
            f"the forward of {type(model).__name__} cannot be traced: {where} reads "
            f"{READ.get(op, f'what only values tell ({op})')}, and what is traced has shapes and no values. "
            "Of what depends on values only parallel.MoE and experts stacked in parameters, as in "
            "transformers, are known; describe others by a planning.model.Model"
        )
    first = (str(error).splitlines() or [""])[0]
    return (
        f"the forward of {type(model).__name__} does not run on fake tensors, which have shapes and no "
        f"values: {where} raised {type(error).__name__}: {first}. It must not read values (.item(), if, "
        "nonzero), and the batch must fit the model"
    )


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
