"""Values of another kind."""

import torch

import pycomm

comm = pycomm.Communicator()
x = torch.ones(3)
comm.all_reduce([1.0, 2.0])  # wrong: No overload variant of "all_reduce" of "Reductions" matches
y: torch.Tensor = comm.all_reduce(x, async_op=True)  # wrong: Incompatible types in assignment
comm.gather(x).sum()  # wrong: Item "None" of "Tensor | None" has no attribute "sum"
comm.split(0).barrier()  # wrong: Item "None" of "Communicator | None" has no attribute "barrier"
comm.send(x, "1")  # wrong: No overload variant of "send" of "Communicator" matches
pycomm.premul_sum("half")  # wrong: Argument 1 to "premul_sum" has incompatible type "str"
