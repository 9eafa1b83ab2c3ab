"""Integers that are easily taken for each other, as types of their own. They are plain integers when a
program runs.

A plain `int` named `rank` is the rank in the group that the function works on.
"""

from typing import NewType

__all__ = ["Bytes", "Elements", "GlobalRank", "LocalRank", "Rows", "Tokens"]

GlobalRank = NewType("GlobalRank", int)  # in the default group of torch.distributed, or of the launch
LocalRank = NewType("LocalRank", int)  # among the ranks of one host
Bytes = NewType("Bytes", int)
Elements = NewType("Elements", int)  # of an array
Rows = NewType("Rows", int)  # of a batch
Tokens = NewType("Tokens", int)  # of a batch: rows times length
