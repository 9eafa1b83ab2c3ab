"""Checkpoints that any plan writes and any plan reads, bit-exactly, through torch.distributed.checkpoint.

What is saved is the original model: parameters under their first names and in their whole shapes, buffers,
and the optimizer's state by parameter. A rank writes the boxes (boxes.py) that it counts and reads the boxes
that it holds, straight into its own memory; nothing is gathered but the list of boxes.

    key in the checkpoint     what                                               written by
    model/<parameter>         values at full precision (fp32 master copies)      whoever counts the element
    model/<buffer>            persistent buffers                                 one rank that uses it
    optim/<parameter>/<key>   state with the parameter's shape: cut like it      whoever counts the element
                              other state (step; Adafactor's factors): whole     one of the holders
    ema/<average>/<name>      averages of parameters, and buffers: cut like them     as parameters, buffers
    about                     optimizer class, hyperparameters, groups           one rank
    extra                     what the caller gave                               one rank

saving.py        save(): writes this rank's part of a model
loading.py       load(): reads it
boxes.py         which piece of a parameter a rank holds, for torch.distributed.checkpoint
holdings.py      what a rank holds at full precision
state.py         keys and boxes that saving and loading share
files.py         the folder: how it is made, and what makes it readable
agree.py         small objects between ranks, and errors that all ranks learn of
whole.py         full_state_dict(), full_gradients()
dicts.py         state_dict() and load_state_dict() of the model, num_parameters()
optimizer_dicts.py  state_dict() and load_state_dict() of the optimizer
sharded_dicts.py    state_dict(): DTensors under every plan
sharded_loading.py  load_state_dict(): these, in any placement, or whole tensors
initial_state.py    the state of an optimizer before its first step
gathered.py      gathered(): whole parameters for a while
hub.py           weights in the layout of the Hugging Face hub
pretrained.py    save_pretrained() under a plan
ema.py           ema(): averages of the values over the updates
averages.py      what they are made of on a rank, and in a checkpoint

Order: see files.py for a save that fails, loading.py for a load that does.

Cost: each element is written once. A box is read from the chunks that it overlaps, each of which is read
whole; memory is one chunk more.

What can go wrong: the folder must be one that all ranks see. Not saved are the residuals of gradient
compression and the place in the random stream of dropout. Parameters frozen under precision="bf16" without
zero=3 exist in bfloat16 only, and are saved so. Of buffers that differ between ranks one rank's are saved.
Files are pickled: load only what you trust.

Other ways: DeepSpeed's universal checkpoints (Lian et al. 2024), where a second program converts; FSDP's
state dicts, where the optimizer's state is first made to look like tensors of the model. Here the planners
are given boxes, and neither is needed.
"""

from pycomm.parallel.checkpoint.dicts import num_parameters
from pycomm.parallel.checkpoint.ema import ema
from pycomm.parallel.checkpoint.gathered import gathered
from pycomm.parallel.checkpoint.loading import load
from pycomm.parallel.checkpoint.saving import save
from pycomm.parallel.checkpoint.sharded_dicts import state_dict
from pycomm.parallel.checkpoint.sharded_loading import load_state_dict
from pycomm.parallel.checkpoint.whole import full_gradients, full_state_dict

__all__ = [
    "ema",
    "full_gradients",
    "full_state_dict",
    "gathered",
    "load",
    "load_state_dict",
    "num_parameters",
    "save",
    "state_dict",
]
