"""Arrays of other libraries as tensors over the same memory, and results as the caller's arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch

if TYPE_CHECKING:
    import numpy


class Array(Protocol):
    """A dense array of any library: torch, NumPy, CuPy, JAX. See https://data-apis.org/array-api."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


A = TypeVar("A", bound=Array)
L = TypeVar("L", bound="list[Any] | tuple[Any, ...]")  # of arrays
T = TypeVar("T")


def as_tensor(array: Array) -> torch.Tensor:
    """A tensor over the memory of any array. No copy."""
    if isinstance(array, torch.Tensor):
        return array
    if type(array).__module__ == "numpy" and hasattr(array, "__array_interface__"):
        as_numpy = cast("numpy.ndarray[Any, Any]", array)
        if not as_numpy.flags.writeable:
            raise ValueError("the NumPy array is read-only; pass a writable one")
        return torch.from_numpy(as_numpy)
    if hasattr(array, "__dlpack__"):
        return torch.from_dlpack(array)
    raise TypeError(
        f"expected a torch tensor, a NumPy array or an array with __dlpack__, got {type(array).__name__}"
    )


def as_tensors(arrays: Sequence[Array]) -> list[torch.Tensor]:
    return [as_tensor(array) for array in arrays]


def like(tensor: torch.Tensor, array: A) -> A:
    """A new tensor as the kind of array that the caller uses."""
    if isinstance(array, torch.Tensor):
        return cast(A, tensor)
    if type(array).__module__ == "numpy":
        return cast(A, tensor.numpy())
    if _is_cupy(array):
        import cupy  # optional; the caller has it

        return cast(A, cupy.from_dlpack(tensor))
    namespace = array.__array_namespace__() if hasattr(array, "__array_namespace__") else None
    return cast(A, namespace.from_dlpack(tensor) if namespace is not None else tensor)


def call_with_tensors(
    function: Callable[..., T], kinds: str, arrays: Sequence[Any], rest: Sequence[Any]
) -> T:
    """function(*arrays, *rest) with tensors over the memory of the arrays, in the stream of the first. kinds:
    a letter for each of them, a(rray) or l(ist of arrays).
    """
    tensors = [as_tensors(x) if kind == "l" else as_tensor(x) for kind, x in zip(kinds, arrays, strict=True)]
    for tensor in (tensor for given in tensors for tensor in (given if isinstance(given, list) else [given])):
        if not issubclass(type(tensor), torch.Tensor):  # one that only says so: we would be called again
            raise TypeError(f"expected an array, got {type(tensor).__name__}, which only looks like a tensor")
    return call_in_stream(arrays[0], function, *tensors, *rest)


def call_in_stream(array: Any, function: Callable[..., T], *args: Any) -> T:
    """function(*args) in the stream that the array's library calls current: torch's, where the extension
    looks, or CuPy's.
    """
    if isinstance(array, (list, tuple)) and array:
        array = array[0]
    if not _is_cupy(array):
        return function(*args)
    import cupy  # optional; the caller has it

    current = cupy.cuda.get_current_stream().ptr
    with torch.cuda.stream(torch.cuda.ExternalStream(current, device=array.device.id)):
        return function(*args)


def _is_cupy(array: object) -> bool:
    return type(array).__module__.partition(".")[0] == "cupy"
