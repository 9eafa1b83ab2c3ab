"""Quantities of the planner that are easily taken for each other, as types of their own. They are plain
floats when a program runs, since what a rank has may be a fraction of a byte or of a parameter.
"""

from typing import NewType

__all__ = ["ByteRate", "FlopRate", "Flops", "MeanBytes", "MeanElements", "MeanTokens", "Seconds"]

Seconds = NewType("Seconds", float)
MeanBytes = NewType("MeanBytes", float)  # that a rank holds, sends or moves
MeanElements = NewType("MeanElements", float)  # of a rank: parameters, or their gradients
MeanTokens = NewType("MeanTokens", float)  # of a microbatch, on a rank
Flops = NewType("Flops", float)
ByteRate = NewType("ByteRate", float)  # bytes per second
FlopRate = NewType("FlopRate", float)  # FLOPs per second
