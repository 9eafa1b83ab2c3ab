"""How an attention module's own forward runs unchanged on fewer heads: the module is made to see itself as a
narrower attention.

    what the forward reads                    one process      2 of 5 heads of 4
    self.n_head, config.num_attention_heads   5                2                   narrow_attributes,
                                                                                   ConfigView
    self.n_embd, split_size, embed_dim        20               8
    B, T, C = x.size()                        C = 20           C = 8               NarrowView
    self.c_attn(x), any operation on x        the data         the data, all 20 columns

so that `q, k, v = self.c_attn(x).split(self.n_embd, 2)`, `k.view(B, T, self.n_head, C // self.n_head)` and
`y.view(B, T, C)` fit, also with uneven heads. With sequence parallelism x holds a piece of the sequence, and
T reads as the whole, which the column layers return.

Nothing is computed here, and nothing is communicated. What can go wrong: a forward that uses a width for
something else than a shape (a scale C ** -0.5), or that reads a shape from something derived from x. The
first is found by probe.py where the module can be run alone; the second ends in a shape error, which
SublayerForward turns into one that names the module and the way out. Alternative that lost: rewriting the
forward (torch.fx), which fails on the data-dependent Python that attention modules are full of.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard, TypeVar

import torch

from pycomm.parallel.models.config_view import ConfigView, values_of
from pycomm.parallel.tensor.heads import RankHeads

if TYPE_CHECKING:
    from torch import nn

    from pycomm.parallel.given import Tree
    from pycomm.parallel.tensor.edges import SublayerInput

__all__ = [
    "OF_EACH_HEAD",
    "NarrowView",
    "Narrowed",
    "SublayerForward",
    "head_counts",
    "narrow_attributes",
    "plain",
]

T = TypeVar("T")

Q_HEADS = re.compile(
    r"^_?(n_?heads?|num_heads|num_attention_heads|nhead|heads|"
    r"n_q_heads|num_q_heads|num_query_heads|n_local_heads)$"
)
KV_HEADS = re.compile(r"^_?(n_kv_heads?|num_key_value_heads|num_kv_heads|kv_heads|n_local_kv_heads)$")
GROUPS = re.compile(
    r"^_?(num_key_value_groups|n_rep|n_groups|num_groups|num_queries_per_kv|kv_groups|q_per_kv)$"
)
KV_WIDTH = re.compile(r"^_?(kv|k|v|key|value|key_value)_(dim|size|width|channels|embed_dim)$")
WIDTH = re.compile(
    r"^_?(n_embd|n_embed|embd|embed_dim|embedding_dim|emb_dim|split_size|all_head_size|"
    r"hidden_size|hidden_dim|d_model|dim|inner_dim|width|"
    r"model_dim|attn_dim|op_size|(q|query)_(dim|size|width|channels))$"
)

OF_EACH_HEAD = ("alibi",)  # arguments of a forward with values for each head: (batch x heads, ...)

SHAPE = operator.attrgetter("shape.__get__")(
    torch.Tensor
)  # a new object at each access, so compared and not identified


class HeadCounts(NamedTuple):
    """Heads and widths of a whole attention and of this rank's part: what an attribute that counts them is
    set to.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    mine: RankHeads | None = None  # None: not cut yet

    def local(self, name: str, value: int) -> int | None:
        """The local value of an attribute, or None when it does not count heads or widths of this
        attention.
        """
        assert self.mine is not None  # it has been cut
        q, kv = self.mine.q_count, self.mine.kv_count
        rules = (
            (Q_HEADS, self.q_heads, q),
            (KV_HEADS, self.kv_heads, kv),
            (GROUPS, self.q_heads // self.kv_heads, q // kv),
            (KV_WIDTH, self.kv_heads * self.head_dim, kv * self.head_dim),
            (WIDTH, self.q_heads * self.head_dim, q * self.head_dim),
        )
        return next((local for pattern, full, local in rules if pattern.match(name) and value == full), None)


class Heads(NamedTuple):
    q: int | None
    kv: int | None


def is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def configs(module: nn.Module) -> list[tuple[str, object]]:
    """(attribute name, object) of the configurations that a module keeps."""
    kept = ((name, module.__dict__.get(name)) for name in ("config", "cfg", "args"))
    return [
        (name, value)
        for name, value in kept
        if value is not None and not isinstance(value, (dict, torch.nn.Module))
    ]


def head_counts(module: nn.Module) -> Heads:
    """As the attributes of a module, then of its configuration, say."""
    found = []
    for pattern in (Q_HEADS, KV_HEADS):
        places = [module.__dict__] + [attributes(config) for _, config in configs(module)]
        values = [
            value
            for place in places
            for name, value in place.items()
            if pattern.match(name) and is_int(value)
        ]
        found.append(values[0] if values else None)
    return Heads(*found)


def attributes(config: object) -> dict[str, int]:
    """Plain attributes of a configuration, with the common names that its class only maps (transformers'
    attribute_map).
    """
    values = {name: value for name, value in values_of(config).items() if is_int(value)}
    for name in ("num_attention_heads", "num_key_value_heads"):
        if name not in values and is_int(getattr(config, name, None)):
            values[name] = getattr(config, name)
    return values


def narrow_attributes(module: nn.Module, counts: HeadCounts) -> dict[str, object]:
    """Sets the attributes of `module`, and those of its configuration as it sees it, to the local values.
    Returns {name: value before} of those that it has changed.
    """
    before = dict(module.__dict__)
    for name, value in before.items():
        local = counts.local(name, value) if is_int(value) else None
        if local is not None:
            setattr(module, name, local)
    for name, config in configs(module):
        names = set(attributes(config)) | {
            n for n in ("n_head", "n_embd", "hidden_size") if is_int(getattr(config, n, None))
        }
        found = {n: counts.local(n, getattr(config, n)) for n in names}
        values: dict[str, object] = {n: value for n, value in found.items() if value is not None}
        if values:
            module.__dict__[name] = ConfigView(config, values)
    return {name: value for name, value in before.items() if module.__dict__[name] is not value}


N = TypeVar("N", bound="NarrowView")
Views = dict[int, "NarrowView"]  # id of a tensor -> it


class NarrowView(torch.Tensor):
    """A tensor that says another shape than it has; every operation uses the tensor itself."""

    plain: torch.Tensor
    told: torch.Size

    @classmethod
    def of(cls: type[N], x: torch.Tensor, shape: Iterable[int]) -> N:
        own = type(x) in (torch.Tensor, torch.nn.Parameter)  # of other kinds only `plain` is looked at
        view = (x if own else torch.empty(0, dtype=x.dtype, device=x.device)).as_subclass(cls)
        view.plain, view.told = x, torch.Size(shape)
        return view

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Tree],
        types: Collection[type[torch.Tensor]],
        args: tuple[Tree, ...] = (),
        kwargs: dict[str, Tree] | None = None,
    ) -> Tree:
        if func == SHAPE:
            return args[0].told
        if func is torch.Tensor.size:
            dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim")
            return args[0].told if dim is None else args[0].told[dim]
        return func(*plain(args), **plain(kwargs or {}))


def plain(value: T) -> T:
    """`value` with the tensors themselves in place of narrow views, in tuples, lists and dicts too."""
    given: Tree = value
    if isinstance(given, NarrowView):
        return given.__dict__["plain"]
    if type(given) in (tuple, list):
        return type(given)(plain(item) for item in given)
    if type(given) is dict:
        given = {key: plain(item) for key, item in given.items()}
    return given


class Narrowed(NamedTuple):
    """What a rank's part of an attention is given."""

    full: int  # the last dimension of inputs that are to look narrow
    local: int  # how wide they look
    q_heads: int
    mine: tuple[int, int]  # this rank's query heads
    before: dict[str, object]  # attributes of the module as they were

    def of_heads(self, x: Tree) -> Tree:
        """This rank's part of an argument of OF_EACH_HEAD."""
        if not isinstance(x, torch.Tensor):
            return x
        x = x.unflatten(0, (-1, self.q_heads))
        return x[:, slice(*self.mine)].flatten(0, 1)


class SublayerForward:
    """Takes the place of the forward of a sublayer's owner: shows it narrow inputs, and names the module when
    it does not fit.

    narrow: None where inputs are not to look narrow.
    """

    def __init__(
        self, owner: nn.Module, fqn: str, source: SublayerInput, narrow: Narrowed | None = None
    ) -> None:
        self.owner, self.inner = owner, owner.forward
        self.fqn, self.source, self.narrow = fqn, source, narrow
        self.is_passed_over: Callable[[], bool] = bool  # false
        self.names = tuple(inspect.signature(self.inner).parameters)
        self.running = False

    def run_whole_while(self, is_passed_over: Callable[[], bool]) -> None:
        """is_passed_over: whether a pipeline stage runs that does not have these layers. The stand-ins for
        their results have all heads and features there.
        """
        self.is_passed_over = is_passed_over

    def view(self, name: str | None, x: Tree, views: Views) -> Tree:
        if self.narrow is None:
            return x
        if name in OF_EACH_HEAD:
            return self.narrow.of_heads(x)
        if (
            not isinstance(x, torch.Tensor)
            or x.dim() != 3
            or not x.is_floating_point()
            or x.shape[2] != self.narrow.full
        ):
            return x
        if id(x) not in views:  # the same tensor must stay the same: attention(x, x, x)
            length = x.shape[1] if self.source.sequence is None else sum(self.source.sequence.sizes)
            views[id(x)] = NarrowView.of(x, (x.shape[0], length, self.narrow.local))
        return views[id(x)]

    def as_whole(self, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> Tree:
        """The forward as in one process."""
        if self.narrow is None:
            return self.inner(*args, **kwargs)
        seen = self.owner.__dict__
        narrowed = {name: seen[name] for name in self.narrow.before}
        seen.update(self.narrow.before)
        try:
            return self.inner(*args, **kwargs)
        finally:
            seen.update(narrowed)

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        if self.is_passed_over():
            return self.as_whole(args, kwargs)
        self.source.clear()
        views: Views = {}
        names = (*self.names, *[None] * len(args))
        seen = [self.view(name, x, views) for name, x in zip(names, args, strict=False)]
        named = {name: self.view(name, x, views) for name, x in kwargs.items()}
        outer, self.running = self.running, True
        try:
            return self.inner(*seen, **named)
        except (RuntimeError, ValueError, AssertionError) as error:
            of_communication = type(error) not in (RuntimeError, ValueError, AssertionError)
            if of_communication or str(error).startswith("[rank"):  # the latter says already what is wrong
                raise
            group = self.source.group
            raise ValueError(
                f"[rank {group.rank}/{group.size}] {self.fqn} does not run on its part of the heads or "
                f"features: {error}. If it runs without tp, "
                f"pass rules={{{self.fqn!r}: 'replicate'}}, or 'column' for its Linear layers"
            ) from error
        finally:
            self.running = outer
