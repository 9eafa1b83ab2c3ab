"""Buffers of a rank, inputs that are exact in every dtype, and the count of wrong elements in a result.

Rank r's input is a pattern of small whole numbers that repeats every PERIOD elements; patterns of two ranks,
or of two salts, differ:

    input of rank r     p_r[0] p_r[1] ... p_r[PERIOD-1]  p_r[0] p_r[1] ...

PERIOD is prime, so a chunk that lands at a wrong place does not match either (chunks are seldom a multiple of
it). What a rank must hold afterwards is a list of pieces (oracle.py). So the check needs PERIOD elements of
memory, not world_size buffers. Numbers stay small enough that a sum over 31 ranks is exact in every dtype.

A buffer on the host is a NumPy array for every backend: the same allocator, alignment and page state. NumPy
has no bf16; such an array holds the bits as uint16. On a GPU a buffer is a torch tensor; only one period of
the pattern crosses from the host, and one number back.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from pycomm.benchmarks.common.oracle import Case, Piece

    Array: TypeAlias = npt.NDArray[Any]
    Buffer: TypeAlias = Array | torch.Tensor

B = TypeVar("B", "Array", "torch.Tensor")
DtypeName: TypeAlias = Literal["i8", "u8", "f16", "bf16", "i32", "f32", "i64", "f64"]
PERIOD = 1021
ALIGNMENT = 64  # bytes, what torch gives its tensors
POISON = 0xA5  # fills results before a check; no pattern has these bytes
FOLDS: dict[str, Callable[..., Array]] = {
    "sum": np.sum,
    "avg": np.mean,
    "product": np.prod,
    "min": np.min,
    "max": np.max,
}
DTYPES: dict[DtypeName, str] = {  # short name -> torch's
    "i8": "int8",
    "u8": "uint8",
    "f16": "float16",
    "bf16": "bfloat16",
    "i32": "int32",
    "f32": "float32",
    "i64": "int64",
    "f64": "float64",
}


def storage(dtype: DtypeName) -> np.dtype[Any]:
    """The NumPy dtype of a host buffer."""
    return np.dtype("uint16" if dtype == "bf16" else DTYPES[dtype])


ITEMSIZE = {dtype: storage(dtype).itemsize for dtype in DTYPES}


def encode(values: Array, dtype: DtypeName) -> Array:
    """Whole numbers as an array that holds them in dtype; integers wrap."""
    if dtype == "bf16":  # the upper half of an f32; exact for the values here
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(storage(dtype))


@functools.lru_cache(maxsize=64)
def numbers(redop: str, n: int, source: int, salt: int) -> Array:
    """One period of a rank's input, as whole numbers."""
    drawn = np.random.default_rng([salt, source]).integers(0, 5, PERIOD)
    if redop == "product":
        return 1 + drawn % 2
    return drawn * n if redop == "avg" else drawn  # the mean of multiples of n is whole


def pattern(case: Case, n: int, source: int | None, salt: int) -> Array:
    """The pattern of a rank's input, or (source None) of the reduction over all n ranks."""
    if source is not None:
        return encode(numbers(case.redop, n, source, salt), case.dtype)
    rows = np.stack([numbers(case.redop, n, rank, salt) for rank in range(n)])
    return encode(FOLDS[case.redop](rows, axis=0), case.dtype)


class Memory(abc.ABC, Generic[B]):
    """Slices and len() are the buffer's own."""

    block: int | None = None  # elements compared at once, None: everything

    @abc.abstractmethod
    def empty(self, count: int, dtype: DtypeName) -> B:
        """An uninitialised buffer of count elements, aligned."""

    @abc.abstractmethod
    def poison(self, buffer: B) -> None: ...

    @abc.abstractmethod
    def _beside(self, period: Array, buffer: B) -> B:
        """A pattern where the buffer is."""

    def zero(self, buffer: B) -> None:
        buffer[:] = 0

    def fill(self, buffer: B, numbers: Array) -> None:
        """Writes a pattern over the whole buffer."""
        period, whole = self._beside(numbers, buffer), len(buffer) // PERIOD * PERIOD
        buffer[:whole].reshape(-1, PERIOD)[:] = period
        buffer[whole:] = period[: len(buffer) - whole]

    def count_wrong(self, buffer: B, pieces: Iterable[Piece], case: Case, n: int, salt: int) -> int:
        """How many elements of the buffer differ from what the pieces say."""
        wrong = 0
        for piece in pieces:
            numbers = np.roll(pattern(case, n, piece.source, salt), -(piece.offset % PERIOD))
            period = self._beside(numbers, buffer)
            end, block = piece.start + piece.length, self.block or max(PERIOD, piece.length)
            for start in range(piece.start, end, block // PERIOD * PERIOD):
                part = buffer[start : min(end, start + block // PERIOD * PERIOD)]
                whole = len(part) // PERIOD * PERIOD
                wrong += int((part[:whole].reshape(-1, PERIOD) != period).sum())
                wrong += int((part[whole:] != period[: len(part) - whole]).sum())
        return wrong


class HostMemory(Memory["Array"]):
    """Buffers as NumPy arrays."""

    block = 512 * PERIOD  # temporaries stay small

    def empty(self, count: int, dtype: DtypeName) -> Array:
        kind = storage(dtype)
        raw = np.empty(count * kind.itemsize + ALIGNMENT, np.uint8)
        skip = -raw.ctypes.data % ALIGNMENT
        return raw[skip : skip + count * kind.itemsize].view(kind)

    def poison(self, buffer: Array) -> None:
        buffer.view(np.uint8).fill(POISON)

    def _beside(self, period: Array, buffer: Array) -> Array:
        return period


class DeviceMemory(Memory["torch.Tensor"]):
    """Buffers as tensors on `device` (anything torch knows). allocate(count, torch dtype) replaces
    torch.empty where buffers must be registered."""

    def __init__(
        self, device: str, allocate: Callable[[int, torch.dtype], torch.Tensor] | None = None
    ) -> None:
        import torch  # a rank under MPI, which has host memory, does without torch

        self.torch, self.device = torch, device
        self.allocate = allocate or (lambda count, dtype: torch.empty(count, dtype=dtype, device=device))

    def empty(self, count: int, dtype: DtypeName) -> torch.Tensor:
        return self.allocate(count, getattr(self.torch, DTYPES[dtype]))

    def poison(self, buffer: torch.Tensor) -> None:
        buffer.view(self.torch.uint8).fill_(POISON)

    def _beside(self, period: Array, buffer: torch.Tensor) -> torch.Tensor:
        found = self.torch.from_numpy(np.ascontiguousarray(period))
        return (found.view(buffer.dtype) if buffer.dtype == self.torch.bfloat16 else found).to(self.device)
