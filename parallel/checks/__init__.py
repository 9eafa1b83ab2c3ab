"""What a plan takes for granted of a model, a loss and the ranks, and how pycomm checks it.

TABLE below lists every assumption; docs/limits.md shows it. What was found of an experiment is a State
(ground/answers.py), and describe() shows it:

    HELD         the runs agree
    BROKEN       all ranks raise ValueError, with the numbers that show it, before a parameter changes
    NOT_TRIED    one WARNING on rank 0 says why; the plan trains
    TRUSTED      the user has answered: Plan(trust=NAME)

    experiments   run the model or its loss aside, with few rows, before the first passes
        cut.py            may this batch be cut: "rows" and "loss"
          choice.py       which rows and positions such a run takes; taken() copies rows
          exchange.py     the five runs for them, and what all ranks found
          measures.py     losses of few rows, with what counts and their gradients
          rows.py         compares outputs
          means.py        compares losses
        positions.py      a piece of a sequence gives what the whole gives: "positions"
        runs.py           what a run takes and gives
        run/aside.py      Aside: such a run, through the plan's own passes
        kept.py           it leaves no trace in the model
        run/questions.py  when they are asked, in a step, an evaluation and a prediction
    guards        look at what happens anyway, run nothing, and cannot be trusted: the other rows of TABLE
                  but "sublayers" and "optimizer", which parallelize() tries; column `how` names their files

    optimizers.py   does an optimizer take a number over all parameters: tried by parallelize(), noted there
    gradient_hooks.py  is a hook of a parameter linear: tried by the step that meets it first
    copied.py       copies of what a user has made, which are tried in its place
    before.py       what does not fit together in a model, an optimizer and a plan: refused before anything
                  is changed, and not in TABLE
    agree.py        how ranks agree, and raise alike
    outputs.py      what a model returns, as a tree of tensors
    tolerances.py   how far apart numbers may be that are the same

To add an experiment NAME, copy "positions", which lies in one file:

    1 TABLE                  a row; ground/plan.py: NAME in TRUSTED and in the docstring of Plan. A row whose
                             name is not in TRUSTED counts as a guard
    2 checks/NAME.py         try_NAME(parts, microbatch, run, ...) -> Answer of ground/answers.py; run: an
                             Aside, given as an argument, as checks/ may not use run/. Call it as Runs says.
                             Whatever decides the State goes through agreed() first, so that all ranks answer
                             alike: agreed(parts, ran.error is not None, differs, error=ran.error) gives the
                             largest of each number on any rank. A line for the file in the list above
    3 run/questions.py       Questions.ask() calls _ask_NAME(), as _ask_positions(): it returns if the plan
                             does not need it, if not parts.checks.asks, or if there is an answer already
                             (parts.checks.of); notes TRUSTED; else tries, raise_together() where BROKEN, or
                             parts.checks.note(NAME, state, why, rank, advice). A step, an evaluation and a
                             prediction then ask it
    4 tests                  HELD, BROKEN (on each rank), NOT_TRIED and TRUSTED, in processes of spawn(), as
                             tests/parallel/test_positions.py; test_checks_change_nothing.py, which
                             compares trainings with and without checks to the bit, must still pass
    5 docs/limits.md         python tests/parallel/test_checks_table.py writes the table into it

To add a guard: a row, and an error where the thing happens. Nothing is noted: describe() shows its `when`.

What goes wrong most easily: where a forward is collective (tp, pp, ep, ring, ulysses, zero=3) a rank that
makes one run less than the others leaves them waiting, see cut.py, [Note: equal rows]. The state of a model
is put back after each run, so two runs begin alike: what a run leaves for the next cannot be found so.
"""

from collections.abc import Callable
from typing import NamedTuple

from pycomm.parallel.ground.plan import TRUSTED, Plan
from pycomm.parallel.zero.kinds import kind_of

__all__ = ["TABLE", "Assumption", "as_markdown", "assumptions_of"]


class Assumption(NamedTuple):
    """A row of the table. The texts are cells of docs/limits.md."""

    name: str  # also of the answer in describe(), and in Plan(trust=...) if it is an experiment
    what: str  # the assumption, as a sentence
    plans: str  # which plans make it, in words
    applies: Callable[[Plan], bool]  # the same as a function; True for more plans is allowed
    when: str  # it is checked
    how: str  # it is checked, and the files (folder/file.py)
    tolerance: str
    escapes: str  # what the check does not find

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
        "optimizer",
        "an optimizer takes no number over all parameters (a norm, a learning rate); under tp, none over the "
        "elements of one",
        "zero, pp, ep; tp",
        lambda plan: kind_of(plan).divided != "" or plan.pp * plan.ep * plan.tp > 1,
        "parallelize",
        "a copy of it takes 12 steps on small tensors, over all and over each half; torch's own are known "
        "(checks/optimizers.py). Under tp those of torch that are element-wise are known, and others refused "
        "(zero/optimizer.py)",
        "1e-7 of what a parameter has moved by",
        "what 12 steps on small tensors do not show; an optimizer without a copy, which raises for small "
        "tensors, or draws random numbers",
    ),
    Assumption(
        "gradient hooks",
        "a hook of a parameter's gradient gives for a sum of gradients the sum of what it gives for each; "
        "under tp, for a piece of a parameter that piece of what it gives",
        "all with dp, ep, ring, ulysses, tp, and several microbatches or calls",
        _always,
        "the first step with the hook",
        "a copy of the hook is given 7 random gradients (checks/gradient_hooks.py)",
        "1e-9, 1e-3, 5e-2 (fp64, fp32, 16 bits)",
        "hooks on other tensors and on modules; a hook without a copy",
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
