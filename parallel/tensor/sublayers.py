"""The sublayers that tensor parallelism cuts: what find.py found of a plain model, for cut_sublayer.py.

    x ──> column layers (q, k, v; or up, gate) ──> the module's own forward ──> row layer (out; or down) ──> y
          cut by rows: this rank's heads or         sees fewer heads             cut by columns
          neurons                                   or neurons

The sum over the ranks of what their row layers give is the result.
"""

from typing import NamedTuple

from pycomm.parallel.tensor.narrow import HeadCounts

__all__ = ["Cuts", "Found", "Sublayer", "Unfit"]


class Found(NamedTuple):
    """One line of what was found: the module, its rule, and what that means."""

    fqn: str
    rule: str
    detail: str


class Sublayer(NamedTuple):
    """Linears that are cut together. Names are full; owner: the module whose forward runs them."""

    rule: str  # attention, mlp, or multihead for torch.nn.MultiheadAttention
    owner: str
    columns: tuple[str, ...]
    row: str
    counts: HeadCounts | None = None
    per_head: tuple[str, ...] = ()  # vectors with one number per query head
    inside: tuple[str, ...] = ()  # parameters that all ranks hold and use for their own heads

    def describe(self):
        columns = " + ".join(name.rpartition(".")[2] for name in self.columns)
        text = f"{columns} by rows, {self.row.rpartition('.')[2]} by columns"
        if self.counts is None:
            return text
        counts = self.counts
        return f"{text}; {counts.q_heads} heads of {counts.head_dim}, {counts.kv_heads} kv heads"


class Cuts(NamedTuple):
    """All that is to be cut of a model."""

    sublayers: list[Sublayer]
    single: dict[str, str]  # module -> "column", "row" or "vocab"
    whole: list[str]  # modules that must see the whole sequence: by a rule, or attention that cannot be cut
    found: list[Found]  # in the order of the model
    asked: set[tuple[str, str]]  # (module, rule) by the user


class Unfit(Exception):
    """Why a module is not cut."""
