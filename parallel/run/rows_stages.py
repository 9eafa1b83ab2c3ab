"""A forward of a few rows through the stages of a pipeline, for the trials of prove_rows.py.

    all ranks of pp    one all_reduce: whether each stage knows what it will be handed for such rows
    stage by stage     a number (whether the stages before have run), then what they hand on

The model may raise for such rows, in one stage: those behind it are told and raise, too, those before it have
gone on. So nobody waits for what does not come. Without a pipeline the model is called, and nothing is sent.
"""

import contextlib
import functools

import torch
import torch.distributed as dist

from pycomm.parallel.ground import comm
from pycomm.parallel.run.passes import agree, find_input, forward_pass, handed_on, run_stage, shape_of_input
from pycomm.parallel.zero.units import Phase

__all__ = ["kept_stages", "run_rows", "some_stage"]


class _Elsewhere(Exception):
    """A stage before this one has not run."""


def run_rows(parts, microbatch, around):
    """The forwards of this rank's stages. around: (forward, whether it gives the model's output) -> (what it
    gives, ...), called inside of the pass of each stage. Returns [what around gave]. Raises what the model
    raises. Collective where forwards are, and over pp.
    """
    if parts.stage_model is None:
        with forward_pass(parts, Phase.EVALUATE, ("rows", 0), 0):
            return [around(lambda: microbatch.call(parts.model), True)]
    likes = _likes(parts, microbatch)
    stages, pp = parts.stages, parts.mesh.group("pp")
    found, handed, error = [], None, None
    for stage in stages.mine:
        if stage > 0 and stage - 1 not in stages.mine:
            handed = _receive(likes[stage], stages.placement[stage - 1], pp, parts.device)
            error = error or (_Elsewhere() if handed is None else None)
        if error is None:
            try:
                with forward_pass(parts, Phase.EVALUATE, ("rows", stage), 0):
                    run = functools.partial(run_stage, parts, stage, microbatch, handed)
                    found.append(around(run, stage == stages.last))
                    handed = found[-1][0] if stage == stages.last else handed_on(parts, found[-1][0])
            except dist.DistError:
                raise
            except Exception as raised:  # of the model, which does not take such rows
                error = raised
        if stage < stages.last and stage + 1 not in stages.mine:
            _send(None if error else handed, stages.placement[stage + 1], pp, parts.device)
    if error is not None:
        raise error
    return found


def _likes(parts, microbatch):
    """{stage of this rank: [(shape, dtype, device)] of what it is handed}. Raises on all ranks alike."""
    mine = [stage for stage in parts.stages.mine if stage > 0]
    try:
        for stage in mine:
            find_input(parts, stage, microbatch)
        fails = False
    except dist.DistError:
        raise
    except Exception:  # of the model
        fails = True
    if some_stage(parts, fails):
        raise _Elsewhere
    agree(parts, [microbatch])
    return {stage: shape_of_input(parts, stage, microbatch) for stage in mine}


def some_stage(parts, *flags):
    """Whether each is true on a rank of pp: one value or a list of them. Collective over these."""
    group = parts.mesh.group("pp")
    if group.size > 1:
        told = torch.tensor(flags, dtype=torch.float64, device=parts.device)
        comm.all_reduce(told, group, dist.ReduceOp.MAX)
        flags = [bool(each) for each in told.tolist()]
    return flags[0] if len(flags) == 1 else flags


def _receive(likes, src, pp, device):
    """The tensors, or None where the stage before has none."""
    runs = torch.empty(1, device=device)
    comm.irecv(runs, src, pp, 0).wait()
    if not runs:
        return None
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in likes]
    for work in [comm.irecv(tensor, src, pp, 1 + number) for number, tensor in enumerate(tensors)]:
        work.wait()
    return tensors


def _send(tensors, dst, pp, device):
    sent = [torch.full((1,), float(tensors is not None), device=device)]
    sent += [tensor.contiguous() for tensor in tensors or ()]
    for work in [comm.isend(tensor, dst, pp, number) for number, tensor in enumerate(sent)]:
        work.wait()


@contextlib.contextmanager
def kept_stages(parts):
    """What stages note of each other in their passes is afterwards as it was before."""
    if parts.stage_model is None:
        yield
        return
    noted = parts.stage_model.assumptions
    before = set(noted.seen), set(noted.looked_at)
    try:
        yield
    finally:
        noted.seen, noted.looked_at = before
