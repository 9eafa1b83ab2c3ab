"""What every strategy stands on. Nothing here knows a strategy.

plan.py             how many ranks each axis has, and how each strategy is to work
comm.py, mesh.py    groups of ranks, and the collectives on them: every byte is counted here
layout.py           which part of a parameter a rank holds
trunk.py            the list of blocks at which a model is cut
batch.py            which rows of a batch a rank works on
differentiable.py   collectives inside a model, each with that of its gradient
split_backward.py   gradients of inputs now, gradients of weights later
streams.py          random numbers: which ranks draw the same ones
last_words.py       what a rank raised, told to those that wait for it
"""
