"""Where the buffers of a program lie.

    guard | elements | guard       they may start at an odd element or in the middle of one, have gaps between
                                   them, and be a slice of registered memory

Guards and gaps must be as they were when the operation is over.
"""

import torch

GUARD, PATTERN, JUNK = 64, 0xA5, 0x3C
PLACEMENTS = ["dense", "dense", "odd", "unaligned", "strided"]


class Buffer:
    """`tensor`: `count` elements with these values; without values, an output, filled with PATTERN."""

    def __init__(self, placement, dtype, count, *, values=None, pool=None):
        item = dtype.itemsize
        if placement == "unaligned" and (dtype.is_complex or not count):
            placement = "odd"  # torch's own copy of unaligned complex numbers crashes
        self._strides = 2 if placement == "strided" else 1
        size = -(-(self._strides * count * item + 2 * GUARD) // GUARD) * GUARD
        self._pool, self._memory = pool, pool.take(size) if pool else None
        if self._memory is None:
            self._pool, self._memory = None, torch.empty(size, dtype=torch.uint8)
        self._memory.fill_(PATTERN)
        self._start = GUARD - {"odd": item, "unaligned": 3}.get(placement, 0)
        self._shape = (count, self._strides, item)
        if placement == "unaligned":  # which view() refuses
            self.tensor = torch.frombuffer(self._memory.numpy(), dtype=dtype, count=count, offset=self._start)
        else:
            self.tensor = self._elements(self._memory).reshape(-1).view(dtype)
            if placement == "strided":
                cells = self._memory[self._start :][: 2 * count * item].view(dtype).view(count, 2)
                self.tensor = cells[:, 1]
        if values is not None:
            self.tensor.copy_(values)

    def _elements(self, memory):
        """The bytes of the elements, as a view of (count, bytes of one)."""
        nbytes = self._shape[0] * self._shape[1] * self._shape[2]
        return memory[self._start : self._start + nbytes].view(self._shape)[:, -1]

    def guards_kept(self):
        memory = self._memory.clone()
        self._elements(memory).fill_(PATTERN)
        return bool((memory == PATTERN).all())

    def untouched(self):
        return bool((self._elements(self._memory) == PATTERN).all())

    def end(self):
        """Overwrites it: who still reads it gets junk."""
        self._memory.fill_(JUNK)
        if self._pool:
            self._pool.give_back(self._memory)


class Pool:
    """Slices of a registered tensor of bytes."""

    def __init__(self, tensor):
        self._tensor, self._free = tensor, [(0, tensor.numel())]

    def take(self, nbytes):
        """None where there is no room."""
        for i, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                self._free[i] = (start + nbytes, end)
                return self._tensor[start : start + nbytes]
        return None

    def give_back(self, memory):
        start = memory.storage_offset() - self._tensor.storage_offset()
        free, self._free = sorted([*self._free, (start, start + memory.numel())]), []
        for start, end in free:
            if self._free and self._free[-1][1] == start:
                start = self._free.pop()[0]
            self._free.append((start, end))
