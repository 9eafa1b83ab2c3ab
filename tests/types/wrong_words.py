"""Words that do not exist."""

import torch

import pycomm

comm = pycomm.Communicator()
x = torch.ones(3)
comm.all_reduce(x, "summ")  # wrong: No overload variant of "all_reduce" of "Reductions" matches
comm.all_gather(x, algorithm="rign")  # wrong: No overload variant of "all_gather" of "Exchanges" matches
comm.all_redcue(x)  # wrong: "Communicator" has no attribute "all_redcue"
pycomm.explain("all_reduce", 8, 2, device="gpu")  # wrong: Argument "device" to "explain" has incompatible
pycomm.Comunicator()  # wrong: Module has no attribute "Comunicator"
