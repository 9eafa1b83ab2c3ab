"""Finds what tensor parallelism can cut in a plain module graph. Reads modules; changes nothing, communicates
nothing.

    rule        found as                                                 cut
    attention   q, k, v and output Linears, or one fused qkv and an      heads: q, k, v by rows, output by
                output, under their common names;                        columns
                torch.nn.MultiheadAttention
    mlp         direct children Linear h->f (one or several) and f->h;   f: the first by rows, the second by
                Linear, activation, Linear in an nn.Sequential; the      columns
                two of torch's Transformer layers
    experts     gate_up_proj and down_proj of all experts in one      features of each: gates by rows, down
                parameter each, as in transformers                    by columns
    vocab       an Embedding outside of the trunk, and the Linear that   rows of both, and of all that
                is tied to it or has as many outputs as it has rows      share a weight with them
    column      only by the user's rules: {glob of the name: rule}       rows, output gathered
    row         only by a rule                                           columns, input cut
    tokens      only by a rule: replicated, and with a sequence works    nothing
                on the rank's own tokens, as norms do (mixtures of
                experts)
    replicate   everything else                                          nothing

The user's rules win: a module (or what lies in it) with a rule is not part of anything found. A sublayer that
does not fit is left replicated, with the reason in its detail, unless a rule asks for it: then ValueError.

What makes a sublayer unfit: parameters in it that are neither cut nor known to be harmless (a norm over
head_dim is harmless, one over all heads is not); children between the Linears that are not elementwise; names
and layouts of fused projections that are not known ([q | k | v] is; others, such as per-head interleaving,
are told apart by probe.py where possible).
"""

import fnmatch
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast, get_args

from torch import nn

from pycomm.parallel.tensor.find_attention import find_attention
from pycomm.parallel.tensor.find_experts import find_experts
from pycomm.parallel.tensor.find_mlp import find_mlp
from pycomm.parallel.tensor.modules import is_linear, is_transposed, join, linear_sizes, reads, within
from pycomm.parallel.tensor.sublayers import Cuts, Found, FoundRule, Rule, Sublayer, Unfit
from pycomm.parallel.tensor.tables import is_table

__all__ = ["find"]

RULES: tuple[Rule, ...] = get_args(Rule)
Ties = Mapping[str, str | int]  # name of a parameter -> what is equal for names of one parameter


def find(
    model: nn.Module,
    *,
    rules: Mapping[str, str] | None = None,
    blocks: str | None = None,
    ties: Ties | None = None,
) -> Cuts:
    """What can be cut. rules: {glob of module names: rule}; blocks: name of the trunk; ties: {name of a
    parameter: first name of the same one}, or None to compare the parameters themselves.

    Raises ValueError for rules that are unknown, match nothing or do not fit, and for a trunk that does not
    exist.
    """
    ties = ties or {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    return Finder(dict(model.named_modules()), rules or {}, blocks, ties).run()


def known_rules(modules: Mapping[str, nn.Module], rules: Mapping[str, str]) -> Mapping[str, Rule]:
    """The rules that a user gives. Raises ValueError."""
    unused = [glob for glob in rules if not any(fnmatch.fnmatchcase(fqn, glob) for fqn in modules)]
    wrong = {glob: rule for glob, rule in rules.items() if rule not in RULES}
    if unused or wrong:
        raise ValueError(
            f"tensor-parallel rules: {unused} match no module; {wrong} are not among {', '.join(RULES)}"
        )
    return cast("Mapping[str, Rule]", rules)


def rule_of(fqn: str, rules: Mapping[str, Rule]) -> Rule | None:
    """The first rule whose glob matches the module, or a module that it lies in and that is not to be cut."""
    own = next((rule for glob, rule in rules.items() if fnmatch.fnmatchcase(fqn, glob)), None)
    if own is not None or not fqn:
        return own
    above = rule_of(fqn.rpartition(".")[0], rules)
    return above if above in ("replicate", "tokens") else None


def is_head(table: nn.Embedding, linear: nn.Module) -> bool:
    """Whether a Linear that is not tied to an Embedding may give the logits of its vocabulary."""
    return linear_sizes(linear)[1] == table.num_embeddings and not is_transposed(linear)


class _Pair(NamedTuple):
    """Names."""

    table: str
    head: str
    is_tied: bool


class Finder:
    """Goes through a model once per rule: attention takes its layers first, then the vocabulary, then mlp."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        rules: Mapping[str, str],
        blocks: str | None,
        ties: Ties,
    ) -> None:
        known = known_rules(modules, rules)
        if blocks is not None and blocks not in modules:
            raise ValueError(f"tensor parallelism: the model has no module {blocks!r} that blocks= names")
        self.modules = modules  # by name
        self.blocks = blocks  # name of the trunk
        self.ties = ties
        self.rules = {fqn: rule for fqn in modules if (rule := rule_of(fqn, known)) is not None}
        self.taken: set[str] = set()  # modules that are part of what was found
        self.cuts = Cuts([], {}, [], [], set(self.rules.items()), [])

    def run(self) -> Cuts:
        for fqn in self.modules:
            self._try_rule("attention", fqn, lambda fqn: find_attention(self.modules, fqn))
        self._find_vocabulary()
        for fqn in self.modules:
            self._try_rule("experts", fqn, lambda fqn: find_experts(self.modules, fqn))
        for fqn in self.modules:
            self._try_rule("mlp", fqn, lambda fqn: find_mlp(self.modules, fqn, self.taken))
        self._follow_rules()
        for fqn, module in self.modules.items():
            if is_linear(module) and self._is_free(fqn):
                self._note(fqn, "replicate", "a Linear layer of no sublayer")
        order = {fqn: index for index, fqn in enumerate(self.modules)}
        self.cuts.found.sort(key=lambda line: order[line.fqn])
        return self.cuts

    def _note(self, fqn: str, rule: Rule, detail: str) -> None:
        self.cuts.found.append(Found(fqn, rule, detail))

    def _is_free(self, name: str) -> bool:
        return name not in self.taken and name not in self.rules

    def _take_all(self, fqn: str) -> None:
        """A module and what lies in it."""
        self.taken.update(name for name in self.modules if name == fqn or name.startswith(fqn + "."))

    def _try_rule(self, rule: FoundRule, fqn: str, finder: Callable[[str], list[Sublayer]]) -> None:
        asked = self.rules.get(fqn) == rule
        if not asked and not self._is_free(fqn):
            return
        try:
            sublayers = finder(fqn)
        except Unfit as reason:
            if asked:
                raise ValueError(f"tensor-parallel rule {rule!r} for {fqn!r}: {reason}") from None
            self._note(fqn, "replicate", f"{rule}: {reason}")
            if rule == "attention":
                self.cuts.whole.append(fqn)
                self._take_all(fqn)
            return
        if asked and not sublayers:
            raise ValueError(
                f"tensor-parallel rule {rule!r} for {fqn!r}: no Linear layers of the known forms in "
                f"{type(self.modules[fqn]).__name__}"
            )
        for sublayer in sublayers:
            self._add(rule, fqn, sublayer)

    def _add(self, rule: FoundRule, fqn: str, sublayer: Sublayer) -> None:
        names = (*sublayer.columns, sublayer.row) if rule != "experts" else ()
        if any(name in self.rules and self.rules[name] != rule for name in names):
            return  # one of its layers has a rule of its own
        self.cuts.sublayers.append(sublayer)
        for name in names:
            self._take_all(name)
        if rule in ("attention", "experts"):
            self._take_all(fqn)
        self._note(fqn, rule, sublayer.describe())

    # The vocabulary: one embedding outside of the trunk, and its head. A tied pair first, else the first
    # embedding and the last Linear of its size.

    def _find_vocabulary(self) -> None:
        outside = [
            (fqn, m) for fqn, m in self.modules.items() if not self._in_trunk(fqn) and self._is_free(fqn)
        ]
        heads = [
            _Pair(table, head, tied)
            for table, t in outside
            if is_table(t)
            for head, m in outside
            if is_linear(m)
            and ((tied := self._is_tied(join(table, "weight"), join(head, "weight"))) or is_head(t, m))
        ]
        tied_pairs = [pair for pair in heads if pair.is_tied]
        of_first_table = [pair for pair in heads if pair.table == heads[0].table]
        for table, head, _ in tied_pairs[:1] or of_first_table[-1:]:
            self._cut_vocabulary(table, head, {fqn for fqn, _ in outside})

    def _cut_vocabulary(self, table: str, head: str, outside: set[str]) -> None:
        """A table, its head, and the tables and heads that share a weight with one of them: all or none."""
        shared = {self.ties[name] for fqn in (table, head) for name in self._parameters_of(fqn)}
        holders: dict[str, set[str | int]] = {}  # module -> which of these it has
        for fqn in self.modules:
            if found := {self.ties[name] for name in self._parameters_of(fqn)} & shared:
                holders[fqn] = found
        follow = self._followers(holders, head, outside)
        other = [fqn for fqn in holders if fqn not in outside or not self._has_rows(fqn)]
        other = [fqn for fqn in other if fqn not in dict(follow)]
        for fqn in [fqn for fqn in holders if fqn in outside and self._has_rows(fqn)]:
            tied = [each for each in holders if each != fqn and holders[each] & holders[fqn]]
            self.taken.add(fqn)
            if other:
                what = f"{other[0] or 'the model'!r} has a parameter of the vocabulary too, and cannot be cut"
                self._note(fqn, "replicate", f"vocab: {what}")
            else:
                self.cuts.followers[:] = follow
                self.cuts.single[fqn] = "vocab"
                rows = f"{self.modules[table].num_embeddings} rows"
                self._note(fqn, "vocab", rows + (f", tied to {', '.join(tied)}" if tied else ""))

    def _followers(
        self, holders: Mapping[str, set[str | int]], head: str, outside: set[str]
    ) -> list[tuple[str, str]]:
        """(module, name) of vectors that are the head's bias too, in modules that only hold them (BERT)."""
        bias = self.ties.get(join(head, "bias"))
        return [
            (fqn, name.rpartition(".")[2])
            for fqn in holders
            if fqn in outside and not self._has_rows(fqn) and holders[fqn] == {bias}
            for name in self._parameters_of(fqn)
            if self.ties[name] == bias and not reads(self.modules[fqn], name.rpartition(".")[2])
        ]

    def _parameters_of(self, fqn: str) -> list[str]:
        own = self.modules[fqn]._parameters
        return [join(fqn, name) for name in own if join(fqn, name) in self.ties]

    def _has_rows(self, fqn: str) -> bool:
        return is_linear(self.modules[fqn]) or is_table(self.modules[fqn])

    def _is_tied(self, one: str, other: str) -> bool:
        return self.ties[one] == self.ties[other]

    def _in_trunk(self, fqn: str) -> bool:
        if self.blocks is not None:
            return fqn != self.blocks and within(fqn, self.blocks)
        parts = fqn.split(".")
        above = (self.modules.get(".".join(parts[:n])) for n in range(1, len(parts)))
        return any(isinstance(module, nn.ModuleList) for module in above)

    def _follow_rules(self) -> None:
        """Rules that name a layer or say that nothing is cut."""
        for fqn, rule in self.rules.items():
            module = self.modules[fqn]
            above = self.rules.get(fqn.rpartition(".")[0]) if fqn else None
            if rule in ("column", "row", "vocab"):
                if not (is_linear(module) or rule == "vocab" and is_table(module)):
                    raise ValueError(
                        f"tensor-parallel rule {rule!r} for {fqn!r}: it is a {type(module).__name__}, not a "
                        "Linear layer"
                    )
                self.cuts.single[fqn] = rule
            elif rule not in ("replicate", "tokens") or above == rule:
                continue  # done by _try_rule, or said already for the module that this one lies in
            elif rule == "replicate":
                self.cuts.whole.append(fqn)
            self._note(fqn, rule, "by rule")
