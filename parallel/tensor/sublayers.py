"""The sublayers that tensor parallelism cuts: what find.py found of a plain model, for cut_sublayer.py.

    x ──> column layers (q, k, v; or up, gate) ──> the module's own forward ──> row layer (out; or down) ──> y
          cut by rows: this rank's heads or         sees fewer heads             cut by columns
          neurons                                   or neurons

The sum over the ranks of what their row layers give is the result.
"""

from typing import Literal, NamedTuple

from pycomm.parallel.tensor.narrow import HeadCounts

__all__ = ["Cuts", "Found", "FoundRule", "Rule", "SingleRule", "Sublayer", "Unfit"]

Rule = Literal["attention", "column", "experts", "mlp", "replicate", "row", "tokens", "vocab"]  # a user's
FoundRule = Literal["attention", "experts", "mlp"]  # of sublayers that are looked for
SingleRule = Literal["column", "row", "vocab"]  # of one layer


Rows = Literal["blocks", "heads"]  # see Sublayer


class Found(NamedTuple):
    """One line of what was found: the module, its rule, and what that means."""

    fqn: str
    rule: str
    detail: str


class Sublayer(NamedTuple):
    """Linears that are cut together. Names are full; owner: the module whose forward runs them.

    layouts: what the rows of a column layer may mean, the likeliest first; probe.py finds out which it is.
        blocks     those of q, then of k, then of v; or of gate, then of up
        heads      those of the first kv head and its query heads (q ... q k v), then of the second, ...
    is_known: the first of `layouts` is meant wherever these names are used, also where it cannot be tried.
    """

    rule: Literal["attention", "mlp", "experts", "multihead"]  # the last for torch.nn.MultiheadAttention
    owner: str
    columns: tuple[str, ...]
    row: str
    counts: HeadCounts | None = None
    per_head: tuple[str, ...] = ()  # vectors with one number per query head
    inside: tuple[str, ...] = ()  # parameters that all ranks hold and use for their own heads
    layouts: tuple[Rows, ...] = ("blocks",)
    is_known: bool = True

    @property
    def layout(self) -> Rows:
        return self.layouts[0]

    def describe(self) -> str:
        skip = len(self.owner) + 1 if self.owner and self.columns != (self.owner,) else 0
        columns = " + ".join(name[skip:] if skip else name.rpartition(".")[2] for name in self.columns)
        inside = self.owner and self.row.startswith(self.owner + ".")
        row = self.row[len(self.owner) + 1 :] if inside else self.row.rpartition(".")[2]
        text = f"{columns} by rows, {row} by columns"
        if self.counts is None:
            return text
        counts = self.counts
        return f"{text}; {counts.q_heads} heads of {counts.head_dim}, {counts.kv_heads} kv heads"


class Cuts(NamedTuple):
    """All that is to be cut of a model."""

    sublayers: list[Sublayer]
    single: dict[str, SingleRule]  # of modules
    whole: list[str]  # modules that must see the whole sequence: by a rule, or attention that cannot be cut
    found: list[Found]  # in the order of the model
    asked: set[tuple[str, str]]  # (module, rule) by the user
    followers: list[tuple[str, str]]  # (module, name) of vectors tied to a bias that is cut


class Unfit(Exception):
    """Why a module is not cut."""
