"""Tensor parallelism for a plain model, in place: finds what can be cut (regions.py), checks it (probe.py), cuts it (cut_region.py), and
says what each rank now holds (layouts).

    per block, N ranks, B bytes of the hidden state        forward                             backward
    tp                                                     2 all_reduce of B                   2 all_reduce of B
    tp with sequence (Megatron sequence parallelism)       2 all_gather + 2 reduce_scatter     the same
    embedding cut by vocabulary                            1 all_reduce                        -
    head cut by vocabulary                                 gather of the logits, or nothing    1 all_reduce of B

[Note: sequence] With `sequence`, the hidden state in the trunk and after it is this rank's piece along dim 1; whoever calls cuts it at
block 0. Between regions each rank works on its own tokens, so a parameter there (a norm) gets a part of its gradient, to be summed over tp:
Layout.partial. Attention that is not cut, and what a rule says to replicate, is given the whole sequence and gives back its piece; a head
that is not cut is given the whole sequence. What is "after the trunk" is read from the order of registration, and checked in the first
forward.

No communication here: the result depends on the model, the rules and the rank alone. Sources: Shoeybi 2019, Korthikanti 2022.
"""

import torch
from torch import nn

from pycomm.parallel import comm, differentiable
from pycomm.parallel.layout import whole
from pycomm.parallel.tensor import regions
from pycomm.parallel.tensor.cut_region import cut_region, swap
from pycomm.parallel.tensor.heads import split_heads
from pycomm.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, check_piece, cut
from pycomm.parallel.tensor.probe import probe

__all__ = ["Head", "TensorParallel", "parallelize_tensor"]


class Head:
    """The head that is cut by vocabulary. sharded_output = True leaves its logits cut, for pycomm.parallel.cross_entropy."""

    def __init__(self, fqn, layer):
        self.fqn, self.layer = fqn, layer
        self.full_size, self.local_size = layer.full_size, layer.local_size

    @property
    def sharded_output(self):
        return not self.layer.gather_output

    @sharded_output.setter
    def sharded_output(self, value):
        self.layer.gather_output = not value


class TensorParallel:
    """What parallelize_tensor did: layouts (parameter name -> Layout, for every name), found (printable lines), head (Head or None)."""

    def __init__(self, layouts, found, head):
        self.layouts, self.found, self.head = layouts, found, head

    def __str__(self):
        return "\n".join(f"{line.fqn or '(the model)':40} {line.rule:10} {line.detail}" for line in self.found)


class WholeSequence:
    """Takes the place of a forward that needs all tokens: gathers its input, and gives back this rank's piece if `give_piece`."""

    def __init__(self, inner, group, sequence, give_piece):
        self.inner, self.group, self.sequence, self.give_piece = inner, group, sequence, give_piece

    def gather(self, x, known):
        if (
            not isinstance(x, torch.Tensor)
            or x.dim() != 3
            or not x.is_floating_point()
            or x.shape[1] != self.sequence.sizes[self.group.rank]
        ):
            return x
        if id(x) not in known:
            known[id(x)] = differentiable.gather_from(x, 1, self.sequence.sizes, self.group)
        return known[id(x)]

    def piece(self, out):
        if isinstance(out, tuple):
            return (self.piece(out[0]), *out[1:])
        return differentiable.scatter_to(out, 1, self.sequence.sizes, self.group)

    def __call__(self, *args, **kwargs):
        known = {}
        if not self.give_piece and args:
            check_piece(args[0], self.sequence, self.group, "the head")
        args = [self.gather(x, known) for x in args]
        kwargs = {name: self.gather(x, known) for name, x in kwargs.items()}
        out = self.inner(*args, **kwargs)
        return self.piece(out) if self.give_piece else out


class OrderCheck:
    """Raises in the first forward when a module outside of the trunk runs on the other side of it than its place in the model says."""

    def __init__(self, model, blocks, after):
        self.started, self.early, self.handles, self.forwards = False, [], [], 0
        trunk = model.get_submodule(blocks)
        self.watch(model, self.root)
        for block in trunk.children():
            self.watch(block, self.block)
        for fqn, module in model.named_modules():
            outside = not regions.within(fqn, blocks) and not blocks.startswith(fqn + ".") and fqn
            if outside and next(module.parameters(recurse=False), None) is not None:
                self.watch(module, self.late(fqn) if fqn in after else self.before(fqn))

    def watch(self, module, hook):
        self.handles.append(module.register_forward_pre_hook(hook))

    def root(self, module, args):
        self.forwards += 1
        if self.forwards > 1:
            for handle in self.handles:
                handle.remove()

    def block(self, module, args):
        self.started = True
        if self.early:
            self.fail(self.early[0], "after", "before")

    def before(self, fqn):
        def hook(module, args):
            if self.started and self.forwards == 1:
                self.fail(fqn, "before", "after")

        return hook

    def late(self, fqn):
        def hook(module, args):
            if not self.started:
                self.early.append(fqn)

        return hook

    @staticmethod
    def fail(fqn, place, use):
        raise ValueError(
            f"sequence parallelism: {fqn} is registered {place} the blocks but runs {use} them, so its gradient would be summed wrongly. "
            "Register modules in the order of their use, or use the model without megatron_sp"
        )


def after_trunk(model, blocks):
    """Names of the modules that are registered after the trunk; embeddings always come before it."""
    names = [fqn for fqn, _ in model.named_modules()]
    last = max(index for index, fqn in enumerate(names) if regions.within(fqn, blocks))
    return {fqn for fqn in names[last + 1 :] if not isinstance(model.get_submodule(fqn), nn.Embedding)}


class Applier:
    def __init__(self, model, group, blocks, sequence):
        self.model, self.group, self.blocks, self.sequence = model, group, blocks, sequence
        self.cuts = {}  # id of a parameter -> (that parameter, its layout, the part)
        self.partial, self.wholly, self.head = set(), set(), None
        self.after = after_trunk(model, blocks) if sequence is not None else set()

    def in_sequence(self, fqn):
        return self.sequence is not None and (fqn in self.after or regions.within(fqn, self.blocks))

    def sequence_of(self, fqn):
        return self.sequence if self.in_sequence(fqn) else None

    def take(self, parameter, layout):
        """Cuts a parameter once, however many modules share it."""
        known = self.cuts.get(id(parameter))
        if known is None:
            known = self.cuts[id(parameter)] = parameter, layout, cut(parameter, layout)
        if known[1] != layout:
            raise ValueError(
                f"tensor parallelism: tied parameters of shape {layout.full_shape} would be cut in two ways, {known[1]} and {layout}"
            )
        return known[2]

    def region(self, region):
        self.partial.update(region.inside)
        cut_region(self.model, region, self.group, self.sequence_of(region.owner), self.take)

    def single(self, fqn, rule):
        old, options = self.model.get_submodule(fqn), {"sequence": self.sequence_of(fqn), "take": self.take}
        if isinstance(old, nn.Embedding):
            new = VocabParallelEmbedding.from_module(old, self.group, take=self.take)
        elif rule == "row":
            if fqn in self.after:
                options["sequence"] = None  # given the whole sequence below, as a head that is not cut
            new = RowParallelLinear.from_module(old, self.group, **options)
        else:
            new = ColumnParallelLinear.from_module(old, self.group, **options)
            new.is_head = rule == "vocab" or fqn in self.after
            if rule == "vocab":
                self.head = self.head or Head(fqn, new)
        swap(self.model, old, new)
        if rule == "row" and fqn in self.after:
            self.whole(fqn)

    def whole(self, fqn):
        """With a sequence, gives a module all tokens; without, replicated modules have them anyway."""
        if not self.in_sequence(fqn) or any(fqn == above or fqn.startswith(above + ".") for above in self.wholly):
            return
        module = self.model.get_submodule(fqn)
        if fqn in self.after and not regions.is_linear(module) and not isinstance(module, RowParallelLinear):
            return  # works token by token; the head behind it gathers
        module.forward = WholeSequence(module.forward, self.group, self.sequence, fqn not in self.after)
        self.wholly.add(fqn)

    def heads(self):
        """Gives the whole sequence to Linears after the trunk that are not cut."""
        for fqn in self.after:
            if regions.is_linear(self.model.get_submodule(fqn)):
                self.whole(fqn)

    def layouts(self):
        parts = {id(part): (layout, parameter) for parameter, layout, part in self.cuts.values()}
        sliced = {id(parameter) for parameter, layout, part in self.cuts.values() if part is not parameter}
        layouts, owners = {}, {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if id(parameter) in sliced:
                raise ValueError(
                    f"tensor parallelism: {name} is tied to a parameter that is cut, but is not cut itself; replicate both by rules"
                )
            known = parts.get(id(parameter))
            layouts[name] = known[0] if known else whole(parameter, self.group.rank, self.is_partial(name))
            other = owners.setdefault(id(parameter), name)
            if layouts[other] != layouts[name]:
                raise ValueError(f"sequence parallelism: {other} and {name} are tied, and only one of them works on pieces of the sequence")
        return layouts

    def is_partial(self, name):
        owner = name.rpartition(".")[0]
        wholly = any(owner == fqn or owner.startswith(fqn + ".") for fqn in self.wholly)
        return name in self.partial or self.in_sequence(owner) and not wholly


def checked(model, plan, group):
    """The regions that compute the same in parts; the others join plan.whole and say why."""
    kinds, kept = {}, []
    for region in plan.regions:
        if region.counts is not None:
            split_heads(region.counts.q_heads, region.counts.kv_heads, group.size, region.owner)
        owner = model.get_submodule(region.owner)
        kind = type(owner), region.rule, len(region.columns), tuple((name, tuple(p.shape)) for name, p in owner.named_parameters())
        if kind not in kinds:
            kinds[kind] = probe(model, region, group.size)
        if kinds[kind] is None:
            kept.append(region)
            continue
        if (region.owner, region.rule) in plan.asked:
            raise ValueError(f"tensor-parallel rule {region.rule!r} for {region.owner!r}: it {kinds[kind]}")
        plan.found[:] = [line for line in plan.found if (line.fqn, line.rule) != (region.owner, region.rule)]
        plan.found.append(regions.Found(region.owner, "replicate", f"{region.rule}: {kinds[kind]}"))
        if region.rule == "attention":
            plan.whole.append(region.owner)
    return kept


def parallelize_tensor(model, group, *, rules=None, blocks=None, sequence=None):
    """Cuts a plain torch model over `group`, in place, and returns a TensorParallel.

    model: any nn.Module with full weights, equal on all ranks. group: comm.Group, torch process group or None (see comm.as_group).
    rules: {glob of module names: "column", "row", "vocab", "attention", "mlp", "tokens" or "replicate"}, before anything that is found.
    blocks: name of the trunk, a ModuleList or Sequential. sequence: object whose `.sizes`, set before each forward, are the lengths per
    rank along dim 1 of the hidden state from block 0 on (see [Note: sequence]); needs `blocks`. A group of one changes nothing.

    Raises ValueError for rules that do not fit, fewer query heads than ranks, and tied parameters that would be cut in two ways.
    """
    group = comm.as_group(group, "tp")
    if sequence is not None and blocks is None:
        raise ValueError("tensor parallelism with sequence= needs blocks=, the name of the trunk")
    plan = regions.find(model, rules=rules, blocks=blocks)
    if group.size == 1:
        return TensorParallel({name: whole(p) for name, p in model.named_parameters(remove_duplicate=False)}, plan.found, None)
    kept = checked(model, plan, group)
    applier = Applier(model, group, blocks, sequence)
    for region in kept:
        applier.region(region)
    for fqn, rule in plan.single.items():
        applier.single(fqn, rule)
    if sequence is not None:
        for fqn in sorted(plan.whole, key=len):
            applier.whole(fqn)
        applier.heads()
        OrderCheck(model, blocks, applier.after)
    return TensorParallel(applier.layouts(), plan.found, applier.head)
