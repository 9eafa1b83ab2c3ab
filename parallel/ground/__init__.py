"""What every strategy stands on. Nothing here knows a strategy.

plan.py             how many ranks each axis has, and how each strategy is to work
comm.py             groups of ranks, and the collectives on them: every byte is counted here
mesh.py             the ranks of a plan as a torch DeviceMesh, and its groups
hosts.py            which rank takes which place of a mesh, so that axes which talk most stay inside hosts
layout.py           which part of a parameter a rank holds
batch.py            which rows of a batch a rank works on
same_batch.py       whether all ranks were given the same
window.py           calls of step() whose gradients become one update
losses.py           the loss of a batch, from the losses of its microbatches
differentiable.py   collectives inside a model, each with the collective of its gradient
split_backward.py   gradients of inputs now, gradients of weights later
hyperparameters.py  those of the optimizer, as all ranks have them
plain.py            plain values as a text, equal for equal values
answers.py          what was found of each thing that a plan takes for granted
averages.py         averages of a model's values, as a rank keeps them
streams.py          random numbers: which ranks draw the same ones
elsewhere.py        a gradient that is not whole in a parameter's .grad
outside_reads.py    parameters that a loop of the user's own reads outside of the forward
asked.py            functions of a tensor that do not ask for its values
leaves.py           the leaves of nested arguments, faster than torch's pytree
background.py       work in a thread beside the program
last_words.py       what a rank raised, sent to the ranks that wait for it
"""
