"""The trial of sequence/glue.py, after the first forward of a stage."""

import contextlib
import dataclasses
import math

import torch

from pycomm.parallel.ground import comm
from pycomm.parallel.ground.modes import eager, without_modes
from pycomm.parallel.pipeline.stage import run_glue
from pycomm.parallel.run.passes import forward_pass
from pycomm.parallel.sequence.glue import RETURNS_PIECE
from pycomm.parallel.zero.units import Phase

__all__ = ["prove_glue"]


def prove_glue(parts, microbatch):
    """For the stages of this rank, once; collective over all ranks. Raises ValueError on all of them where
    pieces give something else.
    """
    glue = parts.stage_model.glue if parts.stage_model is not None else None
    if glue is None or not glue.left:
        return
    stages, glue.left, glue.returns = sorted(glue.left), set(), False
    found = [_difference(parts, glue, stage, microbatch) for stage in stages if glue.is_known]
    found = [each for each in found if each is not None]
    if not _all_agree(parts, not glue.returns, (parts.mesh.world,)):
        raise ValueError(RETURNS_PIECE)
    if not _all_agree(parts, not found, (parts.mesh.world,)):
        how = "{} differs by {:.1e} of its size".format(*found[0]) if found else "another rank has found it"
        raise ValueError(
            "what the model does between its blocks, or behind them, does not give for pieces of the "
            f"sequence what it gives for the whole: {how}. It looks at other positions or at their number "
            "there (a mean, a shift, a division by the length). Do that in front of the blocks, or use a "
            "plan without ring, ulysses and megatron_sp"
        )


def _difference(parts, glue, stage, microbatch):
    """(where, how much), or None for no difference. Collective over the ranks of data and tp, as what runs
    here may gather over them.
    """
    small = dataclasses.replace(microbatch, inputs=glue.small(microbatch.inputs))
    whole, again = (_run(parts, stage, small, in_pieces=False) for _ in range(2))
    same = whole is not None and again is not None and _equal(whole, again)
    if not _all_agree(parts, same, (parts.mesh.data, parts.mesh.group("tp"))):
        return None
    pieces = _run(parts, stage, small, in_pieces=True)
    return ("the result", math.inf) if pieces is None else glue.difference(whole, pieces)


def _all_agree(parts, value, groups):
    """Whether it is true on all ranks of the groups."""
    number = torch.tensor(float(not value), device=parts.device)
    for group in groups:
        comm.all_reduce(number, group)
    return not number


def _run(parts, stage, microbatch, in_pieces):
    """What was seen, or None where the model does not run in this way."""
    model, glue = parts.stage_model, parts.stage_model.glue
    modes = contextlib.nullcontext() if in_pieces else without_modes()
    training = [module for module in parts.model.modules() if module.training is True]
    parts.model.eval()
    glue.begin(in_pieces)
    parts.split.note_inputs(microbatch.inputs)
    try:
        with (
            torch.no_grad(),
            parts.streams.kept(),
            eager(),
            forward_pass(parts, Phase.EVALUATE, ("glue", stage), in_pieces),
            modes,
        ):
            run_glue(model, stage, lambda: microbatch.call(parts.model))
        return glue.end()
    except Exception:  # the model's own code may ask for anything that blocks would have left
        glue.end()
        return None
    finally:
        for module in training:
            module.training = True


def _equal(one, other):
    return len(one) == len(other) and all(
        where == again and torch.equal(a, b) for (where, a), (again, b) in zip(one, other, strict=True)
    )
