"""Finds what tensor parallelism can cut in a plain module graph. Reads modules; changes nothing, communicates nothing.

    rule        found as                                                                     cut
    attention   q, k, v and output Linears, or one fused qkv and an output, under their      heads: q, k, v by rows, output by columns
                common names; torch.nn.MultiheadAttention
    mlp         direct children Linear h->f (one or several) and f->h; Linear, activation,   f: the first by rows, the second by columns
                Linear in an nn.Sequential; the two of torch's Transformer layers
    vocab       an Embedding outside of the trunk, and the Linear that is tied to it or      rows of both
                has as many outputs as it has rows
    column,     only by the user's rules: {glob of the module's name: rule}                  rows (output gathered) / columns (input cut)
    row
    tokens      only by a rule: replicated, and with a sequence works on the rank's own      nothing
                tokens, as norms do (mixtures of experts)
    replicate   everything else

The user's rules win: a module (or what lies in it) with a rule is not part of anything found. A region that does not fit is left
replicated, with the reason in its detail, unless a rule asks for it: then ValueError. What makes a region unfit: parameters in it that are
neither cut nor known to be harmless (a norm over head_dim is, one over all heads is not), children between the Linears that are not
elementwise. Names and layouts of fused projections ([q | k | v]; others, such as per-head interleaving, are told apart by probe.py where
possible).
"""

import fnmatch
import re
from typing import NamedTuple

import torch
from torch import nn

from pycomm.parallel.tensor.layers import is_transposed, linear_sizes
from pycomm.parallel.tensor.narrow import HeadCounts, head_counts

__all__ = ["Found", "Plan", "Region", "find"]

RULES = ("attention", "column", "mlp", "replicate", "row", "tokens", "vocab")
SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("w_q", "w_k", "w_v"),
    ("W_q", "W_k", "W_v"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
)
OUTPUT = ("o_proj", "out_proj", "wo", "w_o", "W_o", "dense", "out", "to_out", "to_out.0", "out_lin", "c_proj", "proj", "o")
FUSED = (("c_attn", "c_proj"), ("qkv", "proj"), ("Wqkv", "out_proj"), ("in_proj", "out_proj"), ("qkv_proj", "o_proj"), ("to_qkv", "to_out"))
ELEMENTWISE = (
    nn.Dropout,
    nn.Identity,
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Mish,
    nn.ELU,
    nn.LeakyReLU,
    nn.Softplus,
    nn.ReLU6,
)
OF_QK = re.compile(r"(^|_|\.)(q|k|qk|query|key)(_|\.|$)|qnorm|knorm|qknorm")


def within(fqn, blocks):
    """Whether a module is the trunk or lies in it; the trunk of an nn.Sequential is the model itself, with the empty name."""
    return not blocks or fqn == blocks or fqn.startswith(blocks + ".")


class Found(NamedTuple):
    """One line of what was found: the module, its rule, and what that means."""

    fqn: str
    rule: str
    detail: str


class Region(NamedTuple):
    """Linears that are cut together. Names are full; owner: the module whose forward runs it."""

    rule: str  # attention, mlp, or multihead for torch.nn.MultiheadAttention
    owner: str
    columns: tuple[str, ...]
    row: str
    counts: HeadCounts | None = None
    per_head: tuple[str, ...] = ()  # vectors with one number per query head
    inside: tuple[str, ...] = ()  # parameters that all ranks hold and use for their own heads


class Plan(NamedTuple):
    regions: list[Region]
    single: dict[str, str]  # module -> "column", "row" or "vocab"
    whole: list[str]  # modules that must see the whole sequence: by a rule, or attention that cannot be cut
    found: list[Found]
    asked: set[tuple[str, str]]  # (module, rule) by the user


class Unfit(Exception):
    """Why a module is not cut."""


def is_linear(module):
    return type(module) in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear) or is_transposed(module)


def join(prefix, name):
    return f"{prefix}.{name}" if prefix and name else prefix or name


def child(module, path):
    for name in path.split("."):
        module = module._modules.get(name) if isinstance(module, nn.Module) else None
    return module


def is_elementwise(function):
    """Whether it works on each element alone: what it gives for a part of the input is the part of what it gives for the whole."""
    if isinstance(function, ELEMENTWISE):
        return True
    if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
        return False
    try:
        with torch.no_grad():
            x = torch.linspace(-2, 2, 12).reshape(1, 2, 6)
            return torch.allclose(function(x)[..., :3], function(x[..., :3])) and function(x).shape == x.shape
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False


class Finder:
    def __init__(self, model, rules, blocks):
        self.model, self.blocks = model, blocks
        self.modules = dict(model.named_modules())
        self.rules = {fqn: rule for fqn in self.modules if (rule := self.rule_of(fqn, rules)) is not None}
        unused = [glob for glob in rules if not any(fnmatch.fnmatchcase(fqn, glob) for fqn in self.modules)]
        wrong = {glob: rule for glob, rule in rules.items() if rule not in RULES}
        if unused or wrong:
            raise ValueError(f"tensor-parallel rules: {unused} match no module; {wrong} are not among {', '.join(RULES)}")
        if blocks is not None and blocks not in self.modules:
            raise ValueError(f"tensor parallelism: the model has no module {blocks!r} that blocks= names")
        self.taken = set()
        self.plan = Plan([], {}, [], [], set(self.rules.items()))

    @staticmethod
    def rule_of(fqn, rules):
        """The first rule whose glob matches the module, or a module that it lies in and that is not to be cut."""
        own = next((rule for glob, rule in rules.items() if fnmatch.fnmatchcase(fqn, glob)), None)
        if own is not None or not fqn:
            return own
        above = Finder.rule_of(fqn.rpartition(".")[0], rules)
        return above if above in ("replicate", "tokens") else None

    def free(self, *names):
        return not any(name in self.taken or name in self.rules for name in names)

    def in_trunk(self, fqn):
        if self.blocks is not None:
            return fqn != self.blocks and within(fqn, self.blocks)
        parts = fqn.split(".")
        return any(isinstance(self.modules.get(".".join(parts[:n])), nn.ModuleList) for n in range(1, len(parts)))

    def run(self):
        for fqn, module in self.modules.items():
            self.try_rule("attention", fqn, module, self.attention)
        self.vocabulary()
        for fqn, module in self.modules.items():
            self.try_rule("mlp", fqn, module, self.mlp)
        self.by_user()
        for fqn, module in self.modules.items():
            if is_linear(module) and self.free(fqn):
                self.plan.found.append(Found(fqn, "replicate", "a Linear layer of no region"))
        order = {fqn: index for index, fqn in enumerate(self.modules)}
        self.plan.found.sort(key=lambda line: order[line.fqn])
        return self.plan

    def try_rule(self, rule, fqn, module, finder):
        asked = self.rules.get(fqn) == rule
        if not asked and not self.free(fqn):
            return
        try:
            regions = finder(fqn, module)
        except Unfit as reason:
            if asked:
                raise ValueError(f"tensor-parallel rule {rule!r} for {fqn!r}: {reason}") from None
            self.plan.found.append(Found(fqn, "replicate", f"{rule}: {reason}"))
            if rule == "attention":
                self.plan.whole.append(fqn)
                self.taken.update(name for name in self.modules if name == fqn or name.startswith(fqn + "."))
            return
        if asked and not regions:
            raise ValueError(f"tensor-parallel rule {rule!r} for {fqn!r}: no Linear layers of the known forms in {type(module).__name__}")
        for region in regions:
            names = (*region.columns, region.row)
            if any(name in self.rules and self.rules[name] != rule for name in names):
                continue  # one of its layers has a rule of its own
            self.plan.regions.append(region)
            self.taken.update(names)
            if rule == "attention":
                self.taken.add(fqn)
                self.taken.update(name for name in self.modules if name.startswith(fqn + "."))
            columns = " + ".join(name.rpartition(".")[2] for name in region.columns)
            self.plan.found.append(
                Found(fqn, rule, f"{columns} by rows, {region.row.rpartition('.')[2]} by columns{self.describe(region)}")
            )

    @staticmethod
    def describe(region):
        counts = region.counts
        return "" if counts is None else f"; {counts.q_heads} heads of {counts.head_dim}, {counts.kv_heads} kv heads"

    # --- attention

    def attention(self, fqn, module):
        if isinstance(module, nn.MultiheadAttention):
            counts = HeadCounts(module.num_heads, module.num_heads, module.head_dim)
            return [Region("multihead", fqn, (fqn,), join(fqn, "out_proj"), counts)]
        for names in SEPARATE:
            if all(is_linear(child(module, name)) for name in names):
                return [self.heads_region(fqn, module, names, self.output(fqn, module, OUTPUT))]
        for name, out in FUSED:
            if is_linear(child(module, name)) and self.output(fqn, module, (out, out + ".0")) is not None:
                return [self.heads_region(fqn, module, (name,), self.output(fqn, module, (out, out + ".0")))]
        return []

    def output(self, fqn, module, names):
        """Name of the output Linear: a child, or for modules split in two (attention.self, attention.output.dense) one of the sibling."""
        for name in names:
            if is_linear(child(module, name)):
                return join(fqn, name)
        sibling = join(fqn.rpartition(".")[0], "output.dense")
        return sibling if fqn and is_linear(self.modules.get(sibling)) else None

    def heads_region(self, fqn, module, names, row):
        if row is None:
            raise Unfit(f"no output Linear found beside {', '.join(names)}")
        q_heads, kv_heads = head_counts(module)
        if q_heads is None:
            raise Unfit("its number of heads is not among its attributes")
        value_width, _ = linear_sizes(self.modules[row])
        outs = [linear_sizes(child(module, name))[1] for name in names]
        q_width = outs[0] if len(names) == 3 else value_width
        if q_width % q_heads or value_width != q_width:
            raise Unfit(f"widths {q_width} of queries and {value_width} into {row.rpartition('.')[2]} do not fit {q_heads} heads")
        head_dim = q_width // q_heads
        kv_width, rest = (outs[1], outs[1] - outs[2]) if len(names) == 3 else divmod(outs[0] - q_width, 2)
        if rest or kv_width % head_dim or kv_width < head_dim or kv_heads not in (None, kv_width // head_dim) and len(names) == 3:
            raise Unfit(f"widths {outs} do not fit {q_heads} query heads of {head_dim} and {kv_heads} kv heads")
        counts = HeadCounts(q_heads, kv_width // head_dim, head_dim)
        per_head, inside = self.others(fqn, module, {*names}, row, counts)
        return Region("attention", fqn, tuple(join(fqn, name) for name in names), row, counts, per_head, inside)

    def others(self, fqn, module, columns, row, counts):
        """Parameters of an attention that are not those of its Linears: (one number per head, held whole and used per head)."""
        per_head, inside = [], []
        hidden = linear_sizes(child(module, next(iter(columns))))[0]
        for name, parameter in module.named_parameters():
            owner = name.rpartition(".")[0]
            if owner in columns or join(fqn, owner) == row:
                continue
            of_qk, is_norm = OF_QK.search(name), "norm" in type(child(module, owner) if owner else module).__name__.lower()
            if not owner and tuple(parameter.shape) == (counts.q_heads,):
                per_head.append(join(fqn, name))
            elif is_norm and tuple(parameter.shape) == (counts.head_dim,) and (of_qk or counts.head_dim != hidden):
                inside.append(join(fqn, name))
            elif not (is_norm and tuple(parameter.shape) == (hidden,) and not of_qk):
                raise Unfit(f"parameter {name} of shape {tuple(parameter.shape)}: not known how ranks with few heads use it")
        for name, buffer in module.named_buffers():
            mask = buffer.dim() >= 2 and buffer.shape[-1] == buffer.shape[-2] and buffer.numel() == buffer.shape[-1] ** 2
            if counts.q_heads > 1 and counts.q_heads in buffer.shape and not mask and "inv_freq" not in name:
                raise Unfit(f"buffer {name} of shape {tuple(buffer.shape)} may hold one value per head")
        return tuple(per_head), tuple(inside)

    # --- mlp

    def mlp(self, fqn, module):
        if type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
            if not is_elementwise(module.activation):
                raise Unfit("its activation is not elementwise")
            pairs = [(("linear1",), "linear2")]
        elif type(module) is nn.Sequential:
            pairs = self.pairs(module)
        else:
            pairs = self.children(fqn, module)
        regions = [Region("mlp", fqn, tuple(join(fqn, up) for up in ups), join(fqn, down)) for ups, down in pairs]
        return [region for region in regions if not any(name in self.taken for name in (*region.columns, region.row))]

    @staticmethod
    def pairs(module):
        """Linear, elementwise ..., Linear in a Sequential, from the front."""
        pairs, up = [], None
        for name, layer in module.named_children():
            if is_linear(layer) and up is not None and linear_sizes(module._modules[up])[1] == linear_sizes(layer)[0]:
                pairs.append(((up,), name))
                up = None
            elif is_linear(layer):
                up = name
            elif up is not None and not is_elementwise(layer):
                up = None
        return pairs

    def children(self, fqn, module):
        linears = {name: linear_sizes(layer) for name, layer in module.named_children() if is_linear(layer)}
        if len(linears) < 2 or any(join(fqn, name) in self.taken for name in linears):
            return []
        for down in reversed(linears):
            f, h = linears[down]
            ups = tuple(name for name in linears if name != down)
            if all(linears[up] == (h, f) for up in ups):
                break
        else:
            return []
        if h == f and len(linears) > 2:
            raise Unfit("more than two square Linear layers: which comes last is not known")
        if next(module.parameters(recurse=False), None) is not None:
            raise Unfit("it has parameters of its own")
        for name, layer in module.named_children():
            shapes = {tuple(parameter.shape) for parameter in layer.parameters()}
            outside = "norm" in type(layer).__name__.lower() and shapes == {(h,)} and h != f
            if name not in linears and not outside and join(fqn, name) not in self.taken and not is_elementwise(layer):
                raise Unfit(f"{name} ({type(layer).__name__}) is not elementwise")
        return [(ups, down)]

    # --- embedding, head, rules

    def vocabulary(self):
        """One embedding outside of the trunk, and its head: a tied pair first, else the first embedding and the last Linear of its size."""
        tables = [(fqn, m) for fqn, m in self.modules.items() if type(m) is nn.Embedding and not self.in_trunk(fqn) and self.free(fqn)]
        tables = [(fqn, m) for fqn, m in tables if not (m.max_norm is not None or m.scale_grad_by_freq or m.sparse)]
        linears = [(fqn, m) for fqn, m in self.modules.items() if is_linear(m) and not self.in_trunk(fqn) and self.free(fqn)]
        heads = [(table, head, t.weight is m.weight) for table, t in tables for head, m in linears if self.is_head(t, m)]
        for table, head, tied in [found for found in heads if found[2]][:1] or [found for found in heads if found[0] == heads[0][0]][-1:]:
            rows = self.modules[table].num_embeddings
            for fqn in (table, head):
                self.plan.single[fqn] = "vocab"
                self.taken.add(fqn)
                self.plan.found.append(
                    Found(fqn, "vocab", f"{rows} rows" + (f", tied to {head if fqn == table else table}" if tied else ""))
                )

    @staticmethod
    def is_head(table, linear):
        return table.weight is linear.weight or linear_sizes(linear)[1] == table.num_embeddings and not is_transposed(linear)

    def by_user(self):
        for fqn, rule in self.rules.items():
            module = self.modules[fqn]
            above = self.rules.get(fqn.rpartition(".")[0]) if fqn else None
            if rule == "replicate" and above != "replicate":
                self.plan.whole.append(fqn)
                self.plan.found.append(Found(fqn, rule, "by rule"))
            elif rule == "tokens" and above != "tokens":
                self.plan.found.append(Found(fqn, rule, "by rule"))
            elif rule in ("column", "row", "vocab"):
                if not (is_linear(module) or rule == "vocab" and type(module) is nn.Embedding):
                    raise ValueError(f"tensor-parallel rule {rule!r} for {fqn!r}: it is a {type(module).__name__}, not a Linear layer")
                self.plan.single[fqn] = rule
                self.plan.found.append(Found(fqn, rule, "by rule"))


def find(model, *, rules=None, blocks=None):
    """What can be cut: a Plan. rules: {glob of module names: rule}; blocks: name of the trunk.

    Raises ValueError for rules that are unknown, match nothing or do not fit, and for a trunk that does not exist.
    """
    return Finder(model, rules or {}, blocks).run()
