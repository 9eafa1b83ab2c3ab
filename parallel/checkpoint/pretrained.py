"""save_pretrained() of Hugging Face's models under a plan: the files of one process, written by one rank.

The method would look at this rank's part: shards, freed parameters, meta tensors. It is given the whole
values instead (whole.py), on rank 0; the others wait and hear how it went. Collective over all ranks.
"""

import functools

from pycomm.parallel.checkpoint.agree import together
from pycomm.parallel.checkpoint.whole import full_state_dict
from pycomm.parallel.parts import parts_of

__all__ = ["save_pretrained_whole"]


def save_pretrained_whole(model):
    """Changes model.save_pretrained, where there is one."""
    if callable(getattr(model, "save_pretrained", None)):
        model.save_pretrained = functools.partial(_save, model, model.save_pretrained)


def _save(model, save, directory, *args, state_dict=None, **options):
    """Arguments as the method's own. What it raises on rank 0 is raised on every rank."""
    parts = parts_of(model)
    whole = full_state_dict(model) if state_dict is None else state_dict

    def write():
        if parts.mesh.world.rank == 0:
            save(directory, *args, state_dict=_apart(whole), **options)

    together(parts, write)


def _apart(state):
    """The tensors in memory of their own, tied ones together, as the method tells ties by their memory."""
    copies = {}
    for tensor in state.values():
        copies.setdefault((tensor.data_ptr(), tensor.shape), tensor.clone())
    return {name: copies[tensor.data_ptr(), tensor.shape] for name, tensor in state.items()}
