"""What a plan takes for granted of a model, a loss and the ranks, and how that is looked at.

TABLE below is the whole of it: docs/limits.md has it, made from here. An assumption has one of three answers:
held, broken (refused, with the numbers that show it), not tried (and why, by one WARNING). They belong to the
parallelized model (ground/answers.py); describe() shows them.

    before.py     what does not fit together in a model, an optimizer and a plan: refused before anything
                  is changed, and not in TABLE
    experiments   run the model or its loss aside, with few rows, before the first passes
        cut.py            may this batch be cut: "rows" and "loss"
          choice.py       which rows and positions
          exchange.py     one asking: the runs, and what all ranks found
          measures.py     losses of few rows, with what counts and their gradients
          rows.py         the relation, for outputs
          means.py        the relation, for losses
        positions.py      pieces of a sequence give what the whole gives: "positions"
        kept.py           such a run leaves no trace in the model
        run/aside.py      the run: through the plan's own passes
    guards        look at what happens anyway, and run nothing
    finders       find what to cut, and lie where it is cut

    agree.py        how ranks agree, and raise alike
    outputs.py      what a model returns, as a tree of tensors
    tolerances.py   how far apart numbers may be that are the same

To add one: a line in TABLE; for an experiment a relation between runs of Aside (run/aside.py), flags that go
through agreed(), and parts.checks.note(name, State...). A check never changes what it checks: what it runs
leaves no trace, and tests/parallel/test_checks_change_nothing.py compares trainings with and without.
"""

from collections.abc import Callable
from typing import NamedTuple

from pycomm.parallel.ground.plan import TRUSTED, Plan

__all__ = ["TABLE", "Assumption", "as_markdown", "assumptions_of"]


class Assumption(NamedTuple):
    """name: of Plan(trust=...), where the user may answer. plans: which plans take it for granted."""

    name: str
    what: str
    plans: str
    applies: Callable[[Plan], bool]
    when: str
    how: str
    tolerance: str
    escapes: str

    @property
    def is_experiment(self) -> bool:
        return self.name in TRUSTED


def _always(plan: Plan) -> bool:
    return True


TABLE = (
    Assumption(
        "rows",
        "each row of the output is computed from its own row of the batch",
        "where the batch is cut: dp, ep, zero, several microbatches or calls",
        _always,
        "first step, evaluate, predict in each mode",
        "5 forwards of 4 or 8 rows, of which two groups exchange every second row (checks/rows.py)",
        "1e-6; where a model works on other shapes for other values, and for other numbers of rows, 1e-5, "
        "1e-3, 0.1 (fp64, fp32, 16 bits)",
        "decisions that these rows do not show; BatchNorm and parallel.MoE, which are over the rows of all "
        "ranks",
    ),
    Assumption(
        "loss",
        "the loss, and each metric, is a mean over the targets that count",
        "as rows, and ring, ulysses",
        _always,
        "as rows; again with the first batch whose rows differ in how many targets count; for each loss",
        "the same forwards: values and gradients of the loss before and after the exchange, and of all these "
        "rows. What counts is found: targets, targets without the first of each row, rows (checks/means.py)",
        "1e-6 where the loss is computed in fp64, else 1e-4; half of a loss of more rows for a model that "
        "draws random numbers",
        "a loss that reads more than the output and the targets; what these rows do not show",
    ),
    Assumption(
        "positions",
        "a piece of a sequence gives what the whole gives",
        "ring, ulysses, megatron_sp",
        lambda plan: plan.cuts_sequence,
        "first step, evaluate or predict",
        "2 forwards of 2 rows and 4 n + 1 positions for n ranks, in eval mode: outputs and the loss with the "
        "sequence whole against cut (checks/positions.py)",
        "1e-5, 1e-4, 5e-2 of a position (fp64, fp32, 16 bits)",
        "what few positions do not show (windows, lengths); what a model does in training mode alone",
    ),
    Assumption(
        "same batch",
        "all ranks were given the same batch, and call step alike",
        "all, but for sharded=True",
        _always,
        "every step",
        "a mark of its bits, in a sum that is sent anyway (ground/same_batch.py)",
        "none",
        "a mark of 20 bits: one in a million",
    ),
    Assumption(
        "written buffers",
        "what a forward writes into buffers is the same on all ranks",
        "dp, ep, ring, ulysses, and all with clip",
        _always,
        "every step",
        "numbers of buffers that were written, in a sum that is sent anyway (run/written_buffers.py)",
        "none",
        "what is wrong alike on all ranks; tensors that are no buffers; tp and pp alone",
    ),
    Assumption(
        "reads",
        "a parameter that is cut is read in its own layer only",
        "tp, ep, pp",
        lambda plan: plan.tp * plan.ep * plan.pp > 1,
        "every forward",
        "torch functions that are given one elsewhere are refused (tensor/reads.py)",
        "none",
        "megatron_sp: a block that reads a parameter of its own",
    ),
    Assumption(
        "stages",
        "what a stage runs gives what later stages take it for, and writes nothing beside its modules",
        "pp",
        lambda plan: plan.pp > 1,
        "every pass",
        "shapes and numbers of blocks, tokens of globals, classes and shared objects "
        "(pipeline/assumptions.py, outer_state.py, models/shared_state.py)",
        "none",
        "names made up at run time (setattr, globals()[...]); what lies more than two containers deep",
    ),
    Assumption(
        "sublayers",
        "what is cut by heads and features is attention, an MLP, a table, stacked experts",
        "tp, ep",
        lambda plan: plan.tp * plan.ep > 1,
        "parallelize",
        "each is run whole and in parts (tensor/probe.py, tables.py, experts.py, expert/stacked.py)",
        "1e-3 of what it adds",
        "what a rule names is cut as it says",
    ),
    Assumption(
        "router loss",
        "the loss of a mixture's routers is the known one",
        "models of transformers with output_router_logits",
        _always,
        "every step",
        "the formula, against the number of the class (run/router_loss.py)",
        "1e-2",
        "other losses that a class of transformers adds to its own",
    ),
)


def assumptions_of(plan: Plan) -> list[Assumption]:
    return [each for each in TABLE if each.applies(plan)]


def as_markdown() -> str:
    """The table of docs/limits.md."""
    heads = ("assumption", "plans", "when", "how", "tolerance, relative", "what escapes")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for each in TABLE:
        name = f'`trust="{each.name}"`' if each.is_experiment else f"({each.name})"
        cells = (f"{each.what} {name}", each.plans, each.when, each.how, each.tolerance, each.escapes)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
