"""ZeRO: optimizer state, gradients and parameters as shards. Rajbhandari et al. 2020.

apply.py        where gradients and values of a rank's parameters lie: buckets, shards, units
kinds.py        the classes of each value of Plan(zero=)
flat.py         ZeRO 1: the optimizer's state is sharded
streamed.py     ZeRO 2 and 3: gradients, and values, exist for a few buckets at a time
units.py        ZeRO 3: parameters are whole only while a part of the model computes with them
shards.py       the part of a bucket that this rank owns
trained.py      parameters that are frozen, or begin to be trained, between steps
optimizer.py    the user's optimizer over what this rank owns
reading.py      sharded parameters that are read without calling their module
sharded.py      what parameters are for the user between calls
writes.py       what the user writes to them, and whether it would be lost
"""
