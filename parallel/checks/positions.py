"""Whether a model computes from pieces of the sequence what it computes from the whole: the sequence axis off
against on, in the same model.

    off    nothing is cut (SequenceSplit.whole)    this rank's positions of the output, and their loss
    on     as in training                          the output, and its loss: must be equal

Two rows and 4 n + 1 positions, where n ranks share a sequence, so that pieces are uneven; more, up to
MOST_WHOLE, for a model that does not take so few. All else takes part as it does in a step: stages, cut
layers, gathered parameters, autocast. All is in eval mode, without gradients, with equal random numbers.

    outputs    tensors of real numbers with the positions as dim 1, or rows and positions as dim 0; and what
               stages hand on. The largest difference of a position, beside the mean size of them
    loss       summed over the pieces with what counts there: so a number is found that a block keeps of its
               piece and the loss reads (`self.aux = x.square().mean()`)

Weights that are all zero would hide what their branch does, so they have other values here. After a finding
the run without the axis is made again, with other random numbers and a hidden state that is changed as
rounding changes it. Where this moves a third of what was found (draws, experts chosen by narrow margins),
nothing is said.

Not seen: what few positions do not show (windows and lengths beyond them), what a model does in training mode
alone, less than 5% of a position in 16 bits, numbers that the loss of the first call does not read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch.utils._pytree import tree_leaves, tree_map

from pycomm.parallel.checks.agree import agreed
from pycomm.parallel.checks.outputs import tensors_in
from pycomm.parallel.checks.runs import Runs
from pycomm.parallel.checks.tolerances import of_positions
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.answers import Answer, State
from pycomm.parallel.ground.batch import Microbatch
from pycomm.parallel.ground.same_batch import mark_of
from pycomm.parallel.parts import Parallelized
from pycomm.parallel.pipeline.absent import is_absent
from pycomm.parallel.sequence.sequence_split import MOST_WHOLE, SequenceSplit
from pycomm.parallel.sequence.split import positions

if TYPE_CHECKING:
    from pycomm.parallel.given import Tree

__all__ = ["check_whole", "try_positions"]

Loss: TypeAlias = (
    "Callable[[Tree, Microbatch], torch.Tensor]"  # of (output, microbatch): its part of the mean
)

ROWS, FIRST_ROWS = 2, 8
_ELSEWHERE = "on another rank"
ADVICE = "Use a plan without ring, ulysses and megatron_sp"
BROKEN = "the model does not compute from pieces of the sequence what it computes from the whole"
RETURNS_PIECE = (
    "what the model returns comes from a piece of the sequence: behind its blocks there is no Linear that "
    "the plan knows as its head, where the sequence would be gathered. Use an nn.Linear, or a plan without "
    "megatron_sp"
)


class _Seen(NamedTuple):
    given: tuple[Tree, ...]  # what each stage of this rank gave
    loss: torch.Tensor | None  # of this rank's positions; on the ranks of the last stage


def check_whole(split: SequenceSplit | None, output: Tree) -> None:
    """Not part of the experiment: run/loss.py calls it after loss_fn has raised. Raises ValueError if the
    output is that of a piece.
    """
    if split is None or not split.megatron:
        return
    local, length = split.sizes[split.tp.rank], sum(split.sizes)
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.dim() > 1]
    if local != length and any(leaf.shape[1] == local for leaf in leaves):
        raise ValueError(RETURNS_PIECE)


def try_positions(parts: Parallelized, microbatch: Microbatch, run: Runs, loss: Loss | None) -> Answer:
    """loss: None in a prediction. The state is alike on all ranks; its `why` is this rank's sentence, empty
    where it held, or where only other ranks have one. Collective over all ranks. run/questions.py calls it,
    notes the answer, and raises if it is BROKEN.
    """
    split, length = parts.split, _length_of(microbatch)
    assert split is not None  # else nobody asks
    few = 4 * split.degree * (split.tp.size if split.megatron else 1) + 1
    while True:
        is_more = few < min(length, MOST_WHOLE)
        batch = _small(microbatch, min(few, length, MOST_WHOLE), length)
        trial = _Trial(parts, split, batch, run, loss)
        error = trial.run_off()
        fails, more, *marks = agreed(parts, error is not None, is_more, *trial.marks(), error=error)
        if any(high != -low for high, low in zip(marks[::2], marks[1::2], strict=True)):
            return Answer(State.NOT_TRIED, "the ranks that share a sequence were given different batches")
        if not fails:
            error = trial.run_on()
            fails, more = agreed(parts, error is not None, is_more, error=error)
            if not fails:
                return trial.judged()
            if not more:
                return Answer(State.BROKEN, _does_not_run(error))
        elif not more:
            return Answer(State.NOT_TRIED, f"it does not run on few whole rows ({error or _ELSEWHERE})")
        few *= 2


class _Trial:
    """batch: of few rows and positions."""

    off: _Seen  # from run_off() on
    on: _Seen  # from run_on() on

    def __init__(
        self, parts: Parallelized, split: SequenceSplit, batch: Microbatch, run: Runs, loss: Loss | None
    ) -> None:
        self.parts, self.split, self.batch = parts, split, batch
        self.run, self.loss = run, loss  # None from an error of it on
        self.loss_error: Exception | None = None
        self.rows = len(tensors_in(batch.inputs)[0])
        kinds = {p.dtype for p in parts.model.parameters() if p.is_floating_point()}
        if torch.is_autocast_enabled(parts.device.type):
            kinds.add(torch.get_autocast_dtype(parts.device.type))
        self.most = max(map(of_positions, kinds), default=of_positions(torch.bfloat16))
        self.noise = max((torch.finfo(kind).eps for kind in kinds), default=0.0)

    def marks(self) -> list[float]:
        """Numbers whose largest on all ranks tell whether all ranks of a sequence have the same batch."""
        of, which = self.parts.mesh.rows
        mark, numbers = mark_of((self.batch.inputs, self.batch.targets)), [-torch.inf] * (2 * of)
        numbers[2 * which : 2 * which + 2] = mark, -mark
        return numbers

    def run_off(self, number: int = 0) -> Exception | None:
        """Without the axis; returns what the model has raised. number: of the random numbers."""
        losses: list[torch.Tensor | None] = []

        def take(output: Tree) -> None:
            targets = tree_map(self._here, self.batch.targets)
            try:
                losses.append(self._loss(tree_map(self._here, output), targets))
            except Exception as raised:  # of a loss that does not take such rows, or such an output
                self.loss, self.loss_error = None, raised

        with self.split.whole(self.noise if number else 0.0):
            given, error = self._run(number, take)
        self.off = _Seen(given, losses[0] if losses else None)
        return error

    def run_on(self) -> Exception | None:
        """With the axis; the same."""
        losses: list[torch.Tensor | None] = []
        given, error = self._run(0, lambda output: losses.append(self._loss(output, self.batch.targets)))
        self.on = _Seen(given, losses[0] if losses else None)
        return error

    def _run(self, number: int, take: Callable[[Tree], None]) -> tuple[tuple[Tree, ...], Exception | None]:
        with torch.no_grad(), _awake(self.parts):
            ran = self.run(self.batch.inputs, take, number, in_eval=True)
        return ran.given, ran.error

    def _loss(self, output: Tree, targets: Tree) -> torch.Tensor | None:
        if self.loss is None:
            return None
        total = float(self.batch.count_of(self.batch.targets)) or 1.0
        return self.loss(output, dataclasses.replace(self.batch, targets=targets, total=total))

    def judged(self) -> Answer:
        """After both runs. Collective over all ranks."""
        found, off = self._largest(self.off, self.on), self.off
        told = found[1] > self.most, found[1] >= 0, self._returns_piece(), self.loss_error is not None
        is_found, is_seen, returns_piece, no_loss = agreed(self.parts, *told)
        if returns_piece:
            return Answer(State.BROKEN, RETURNS_PIECE)
        if not is_seen:
            return Answer(State.NOT_TRIED, "it gives no tensor in which its positions are known")
        if not is_found:
            why = f"its loss does not run for few rows ({self.loss_error or _ELSEWHERE})"
            return Answer(State.NOT_TRIED, why) if no_loss else Answer(State.HELD)
        fails = self.run_off(1) is not None
        moved = torch.inf if fails else max(self._largest(off, self.off)[1], 0.0)
        is_sure = found[1] > self.most and not found[1] <= 3 * moved
        is_found, some_fail = agreed(self.parts, is_sure, fails)
        if is_found and not some_fail:
            return Answer(State.BROKEN, _differs(self.split, *found) if found[1] > self.most else "")
        return Answer(State.NOT_TRIED, "it draws random numbers in eval mode, or chooses by narrow margins")

    def _largest(self, one: _Seen, other: _Seen) -> tuple[str, float]:
        """(where, relative difference), -1 where nothing is compared. Collective over ring and ulysses."""
        found, last = [("", -1.0)], self.parts.stages.last
        for stage, a, b in zip(self.parts.stages.mine, one.given, other.given, strict=True):
            where = "what it returns" if stage == last else f"what stage {stage} hands on"
            found += [(where, _apart(*pair)) for pair in self._pairs(a, b)]
        if self.loss is not None:
            values = [0.0 if each.loss is None else float(each.loss) for each in (one, other)]
            sums = torch.tensor(values, dtype=torch.float64, device=self.parts.device)
            for group in (self.split.ring, self.split.ulysses):
                comm.all_reduce(sums, group)
            off, on = sums[:, None, None]
            found.append(("the loss", _apart(off, on)))
        return max(found, key=lambda each: each[1])

    def _returns_piece(self) -> bool:
        """Whether all that the model returns for positions is a piece over tp."""
        if not self.split.megatron or self.parts.stages.last not in self.parts.stages.mine:
            return False
        pairs = self._pairs(self.off.given[-1], self.on.given[-1])
        return bool(pairs) and all(piece.shape[1] != sum(self.split.sizes) for _, piece in pairs)

    def _pairs(self, whole: Tree, pieces: Tree) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(expected, found) of the tensors that have positions, these as dim 1."""
        both = zip(tensors_in(whole), tensors_in(pieces), strict=False)
        pairs = [self._aligned(*pair) for pair in both if pair[0].is_floating_point()]
        return [pair for pair in pairs if pair is not None]

    def _aligned(self, whole: torch.Tensor, piece: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of this rank's positions; None where it is not known where they are."""
        if whole.dim() == 0 or whole.dim() != piece.dim() or len(piece) % self.rows:
            return None
        if len(whole) == self.rows * self.split.length > self.rows:
            whole, piece = (each.unflatten(0, (self.rows, -1)) for each in (whole, piece))
        if whole.dim() < 2 or whole.shape[1] != self.split.length:
            return None
        here = self._here(whole)
        if piece.shape in (whole.shape, here.shape):
            return (whole if piece.shape == whole.shape else here), piece
        if self.split.megatron:
            here = comm.split_dim(here, 1, self.split.sizes, self.split.tp)
        return (here, piece) if piece.shape == here.shape else None

    def _here(self, leaf: Tree) -> Tree:
        """This rank's positions, of ring and ulysses, of a tensor of the whole."""
        split, length = self.split, self.split.length
        if not isinstance(leaf, torch.Tensor) or split.ring.size * split.ulysses.size == 1:
            return leaf
        held = positions(length, split.ring, split.ulysses, split.zigzag, device=leaf.device)
        if leaf.dim() > 1 and leaf.shape[1] == length:
            return leaf.index_select(1, held)
        if leaf.dim() > 0 and len(leaf) == self.rows * length:
            return leaf.unflatten(0, (-1, length)).index_select(1, held).flatten(0, 1)
        return leaf


def _apart(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference of a position, relative to their mean size. (rows, positions, ...)"""
    same = (found == expected) | (found.isnan() & expected.isnan())
    change = (found - expected).masked_fill_(same, 0.0).nan_to_num_(torch.inf, torch.inf, torch.inf)
    size = expected.nan_to_num(0.0, 0.0, 0.0)
    change, size = (
        torch.linalg.vector_norm(
            each.flatten(2) if each.dim() > 2 else each[:, :, None], dim=2, dtype=torch.float64
        )
        for each in (change, size)
    )
    if not change.numel() or not change.any():
        return 0.0
    return float(change.max() / size.square().mean().sqrt())


@contextlib.contextmanager
def _awake(parts: Parallelized) -> Iterator[None]:
    """Parameters of this rank that are all zero have values up to 0.1 inside, which differ, as a norm removes
    equal ones. Under zero=3 they get them when they are gathered.
    """
    units = parts.units.units if parts.units is not None else ()
    before = [(parameter, parameter.data) for parameter in parts.model.parameters()] if not units else ()
    try:
        for unit in units:
            unit.after_gather = _wake
        _wake([parameter for parameter, _ in before])
        yield
    finally:
        for unit in units:
            unit.after_gather = None
        for parameter, values in before:
            parameter.data = values


def _wake(parameters: list[torch.nn.Parameter]) -> None:
    with torch._C.DisableTorchFunction():  # else parameters are read beside their modules (tensor/reads.py)
        for each in parameters:
            if not is_absent(each) and each.is_floating_point() and each.numel() and not each.any():
                values = torch.arange(each.numel(), dtype=torch.float32, device=each.device)
                each.data = values.cos_().mul_(0.1).view(each.shape).to(each.dtype)


# The batch -----------------------------------------------------------------------


def _length_of(batch: Microbatch) -> int:
    leaves = [*tensors_in(batch.targets), *tensors_in(batch.inputs)]
    return next((leaf.shape[1] for leaf in leaves if leaf.dim() > 1), 1)


def _small(batch: Microbatch, few: int, length: int) -> Microbatch:
    """Two of the first rows, those with the most targets that count, and few of the positions."""

    def cut(leaf: Tree) -> Tree:
        if isinstance(leaf, torch.Tensor):
            for dim in range(1, leaf.dim()):
                leaf = leaf.narrow(dim, 0, few) if leaf.shape[dim] == length else leaf
            leaf = leaf[rows].contiguous()
        return leaf

    rows = list(range(min(len(tensors_in(batch.inputs)[0]), FIRST_ROWS)))
    if len(rows) > ROWS:
        targets = tree_map(cut, batch.targets)
        counts = [
            float(batch.count_of(tree_map(lambda leaf, row=row: _row(leaf, row), targets))) for row in rows
        ]
        rows = sorted(sorted(rows, key=lambda row: -counts[row])[:ROWS])
    return dataclasses.replace(
        batch, inputs=tree_map(cut, batch.inputs), targets=tree_map(cut, batch.targets)
    )


def _row(leaf: Tree, row: int) -> Tree:
    return leaf[row : row + 1] if isinstance(leaf, torch.Tensor) else leaf


# The words -----------------------------------------------------------------------


def _does_not_run(error: Exception | None) -> str:
    """Of what this rank's model has raised on pieces; what pycomm has raised says itself what to do."""
    text = re.sub(r"^\[rank [^\]]*\] ", "", str(error or ""))
    return text if isinstance(error, ValueError) or not text else f"{BROKEN}: it fails ({text}). {ADVICE}"


def _differs(split: SequenceSplit, where: str, how_much: float) -> str:
    attention = "attention under a name that is not known: name it in Plan(rules=...)"
    if split.degree > 1:
        attention = (
            "attention written out: let it call F.scaled_dot_product_attention, which models of transformers "
            'do that know attn_implementation="sdpa"'
        )
    return (
        f"{BROKEN}: {where} differs by {how_much:.1e} of its size. Something in it looks at other positions "
        "or at their number (a convolution, a shift, a mean, positions worked out from the length, a number "
        f"that a block keeps, {attention}). {ADVICE}"
    )
