"""What the arrays of a trace are, for type checkers: nothing imports this when a program runs."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Integers", "Mask", "Operation", "Operations", "Span", "Spans", "Times", "Words"]

Operations: TypeAlias = NDArray[np.void]  # with the fields of files.OPERATIONS
Operation: TypeAlias = np.void  # one of them
Spans: TypeAlias = NDArray[np.void]  # with the fields of files.SPANS
Span: TypeAlias = np.void  # one of them
Times: TypeAlias = NDArray[np.float64]  # nanoseconds; nan: not known
Integers: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]
Words: TypeAlias = NDArray[np.uint64]  # [record, word of it]: csrc/trace/record.h
