"""The trial of loss_trial.py in the steps of a plan: before the first update with a loss_fn, and again
before the first whose rows differ in how many targets count.

    all ranks            the same loss_fn as before, and rows that are alike or a trial with others: none
    of the last stage    two rows of the output of the first microbatch are kept; after the passes the trial
    all ranks            one all_reduce: whether a rank has found it to be no mean, whether rows were uneven

Where one part is the whole batch any loss is right, and parallel.cross_entropy is known. Cost: loss_fn is
called some ten times for few rows.
"""

import functools
import types
import weakref

import torch
import torch.distributed as dist

from pycomm.parallel.ground import comm
from pycomm.parallel.ground.batch import count_targets
from pycomm.parallel.run.loss_trial import Verdict, numbers_in, scores_of_rows, some_rows, try_loss
from pycomm.parallel.run.passes import forward_pass
from pycomm.parallel.run.router_loss import plain_loss
from pycomm.parallel.run.rows_layout import layouts_of, named_tensors
from pycomm.parallel.tensor import cross_entropy
from pycomm.parallel.zero.units import Phase

__all__ = ["LossProof", "faults_of", "kept_rows", "numbers_of", "raise_together", "refuse_no_mean"]

MOST_BYTES = 1024  # of a sentence
MOST_OF_SQUARES = 1e-9  # relative: what rounding makes of counts that are fractions and alike
MOST_OF_NUMBERS = 1e-6  # relative difference of numbers that are the same for all parts of a batch

_proven = weakref.WeakKeyDictionary()  # Parallelized -> (loss_fn, count, whether with rows that differ)


class LossProof:
    """Of one step. parts: Parallelized. options: of the step. targets: of the whole batch, or of this rank's
    rows. Collective over all ranks where the step is sharded.
    """

    def __init__(self, parts, options, targets):
        self.parts, self.loss_fn, self.targets = parts, options.loss_fn, targets
        self.counter = options.count or count_targets
        self.rows = None  # of the first microbatch
        self.numbers = []  # in the outputs of the microbatches
        self.is_wanted = plain_loss(self.loss_fn) is not cross_entropy and self._is_cut(options)
        known, counter, with_uneven = _proven.get(parts, (None, None, False))
        is_known = _is_same(known, self.loss_fn) and _is_same(counter, self.counter)
        self.is_wanted = self.is_wanted and not (is_known and with_uneven)
        self.is_uneven = self.is_wanted and self._is_uneven(options.sharded)
        self.is_wanted = self.is_wanted and (self.is_uneven or not is_known)

    def _is_cut(self, options):
        """Whether the loss is put together from several."""
        several = self.parts.mesh.data.size * options.microbatches > 1
        return several or not options.update or not self.parts.window.is_empty

    def _is_uneven(self, sharded):
        """Whether rows of the batch differ in scores: n rows are alike where n * sum(c^2) = sum(c)^2."""
        scores = torch.tensor(scores_of_rows(self.targets, self.counter), dtype=torch.float64)
        rows = torch.full((3,), len(scores), dtype=torch.float64)
        sums = torch.stack([rows, scores.sum(0), scores.square().sum(0)])
        if sharded:
            sums = sums.to(self.parts.device)
            comm.all_reduce(sums, self.parts.mesh.data)
        rows, total, squares = sums.cpu()
        return bool((rows * squares - total.square() > MOST_OF_SQUARES * total.square()).any())

    def note(self, output, microbatch):
        """What the model gave for a microbatch; two rows of the first are kept."""
        if self.is_wanted:
            self.numbers.append(numbers_of(self.parts, output, microbatch))
            self.rows = self.rows or kept_rows(self.parts, output, microbatch)

    def end(self):
        """After the passes. Collective over all ranks. Raises ValueError on all of them where loss_fn is no
        mean over the targets that count.
        """
        if not self.is_wanted:
            return
        parts, found = self.parts, Verdict()
        if self.rows is not None:
            with parts.streams.kept(), forward_pass(parts, Phase.EVALUATE, ("loss", parts.stages.last), 0):
                found = try_loss(self.loss_fn, self.rows, self.targets, self.counter, differ=self.is_uneven)
        counts = torch.tensor([*faults_of(found), found.uneven], dtype=torch.float64, device=parts.device)
        comm.all_reduce(counts, parts.mesh.world)
        *faults, uneven = counts.tolist()
        refuse_no_mean(parts, found, faults, self.numbers)
        _proven[parts] = self.loss_fn, self.counter, uneven > 0


def numbers_of(parts, output, microbatch):
    """Those that the model computed from all rows of a microbatch."""
    return numbers_in(output, _targets(parts, microbatch), layouts_of(parts))


def kept_rows(parts, output, microbatch):
    """Rows of a microbatch, or None where its output is an object whose tensors are not known."""
    if not named_tensors(output):
        return None
    split = parts.split
    is_cut = split is not None and split.degree > 1
    return some_rows(output, _targets(parts, microbatch), is_cut, layouts_of(parts))


def _targets(parts, microbatch):
    return microbatch.targets if parts.split is None else parts.split.cut_targets(microbatch.targets)


def faults_of(found):
    """[whether there is a fault, whether there is one of a number] in a Verdict, to be summed over ranks."""
    has_fault = found.fault is not None
    return [has_fault and not found.of_number, has_fault and found.of_number]


def refuse_no_mean(parts, found, faults, numbers):
    """Raises ValueError on all ranks, with the sentence of the first that has one. found: Verdict of this
    rank. faults: the sums of faults_of. numbers: in the outputs of this rank's microbatches, one list for
    each. Collective over all ranks where there are faults.
    """
    plain, of_number = faults
    if not plain and (not of_number or _are_equal(parts, numbers)):
        return
    raise_together(parts, found.fault)


def raise_together(parts, sentence):
    """Raises ValueError on all ranks, with the sentence of the first that has one, not None. Collective over
    all ranks.
    """
    world = parts.mesh.world
    first = torch.tensor(world.rank if sentence else world.size, device=parts.device)
    comm.all_reduce(first, world, dist.ReduceOp.MIN)
    text = (sentence or "").encode()[:MOST_BYTES].ljust(MOST_BYTES)
    text = torch.tensor(list(text), dtype=torch.uint8, device=parts.device)
    comm.broadcast(text, int(first), world)
    raise ValueError(f"[rank {world.rank}] {bytes(text.tolist()).decode(errors='ignore').rstrip()}")


def _are_equal(parts, numbers):
    """Whether all microbatches on all ranks that have outputs have the same numbers. Collective over all."""
    sums = [sum(each) for each in numbers]
    ends = [min(sums), -max(sums)] if sums else [torch.inf, torch.inf]
    ends = torch.tensor(ends, dtype=torch.float64, device=parts.device)
    comm.all_reduce(ends, parts.mesh.world, dist.ReduceOp.MIN)
    low, high = ends[0].item(), -ends[1].item()
    return high - low <= MOST_OF_NUMBERS * max(abs(low), abs(high))


def _is_same(one, other):
    """Also a function or partial that was made anew, from the same source with the same values in it."""
    if isinstance(one, functools.partial) and isinstance(other, functools.partial):
        values = [[*each.args, *each.keywords.values()] for each in (one, other)]
        return (
            _is_same(one.func, other.func)
            and list(one.keywords) == list(other.keywords)
            and len(values[0]) == len(values[1])
            and all(a is b for a, b in zip(*values, strict=True))
        )
    if one is other or not all(isinstance(each, types.FunctionType) for each in (one, other)):
        return one is other

    def held(function):
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]

    same_code = one.__code__ is other.__code__
    return same_code and all(a is b for a, b in zip(held(one), held(other), strict=True))
