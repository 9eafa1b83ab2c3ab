"""What every strategy stands on. Nothing here knows a strategy.

plan.py             how many ranks each axis has, and how each strategy is to work
comm.py, mesh.py    groups of ranks, and the collectives on them: every byte is counted here
layout.py           which part of a parameter a rank holds
trunk.py            the list of blocks at which a model is cut, or two
call_order.py       which modules are called before, between and after them
batch.py            which rows of a batch a rank works on
same_batch.py       whether all ranks were given the same
window.py           calls of step() whose gradients become one update
differentiable.py   collectives inside a model, each with that of its gradient
split_backward.py   gradients of inputs now, gradients of weights later
streams.py          random numbers: which ranks draw the same ones
shared_state.py     what modules write beside themselves
modes.py            torch's modes, and copies that run on the side
last_words.py       what a rank raised, told to those that wait for it
"""
