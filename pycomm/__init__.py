"""pycomm: collective communication for training and inference on many ranks.

Three ways to use it:

    torch.distributed.init_process_group("pycomm")   a backend of torch.distributed; needs no `import pycomm`
    pycomm.Communicator()                            on its own, with torch, NumPy and DLPack arrays
    python -m pycomm.benchmarks all_reduce           to measure

Importing this package is light: no torch, no extension, no socket, no thread. A name is imported when it is
first used (PEP 562), which also keeps torch's autoload, which imports us in the middle of `import torch`,
from being circular.
"""

import importlib

TYPE_CHECKING = False  # typing costs time, and torch imports this file
if TYPE_CHECKING:
    from pycomm import fused, testing
    from pycomm._autoload import set_default_cpu_backend
    from pycomm._explain import explain
    from pycomm._shrink_group import shrink_group
    from pycomm.communicator import Communicator, Work, empty
    from pycomm.errors import AbortedError, CommError, CommTimeoutError, MismatchError, PeerError
    from pycomm.options import premul_sum

__version__ = "0.1.0"

__all__ = [
    "AbortedError",
    "CommError",
    "CommTimeoutError",
    "Communicator",
    "MismatchError",
    "PeerError",
    "Work",
    "__version__",
    "empty",
    "explain",
    "fused",
    "premul_sum",
    "set_default_cpu_backend",
    "shrink_group",
    "testing",
]

# Public name -> the submodule that defines it. The function explain lives in _explain: in a module of its own
# name it would be replaced by that module, since importing a submodule sets the attribute of the package.
_HOME = {
    "AbortedError": "errors",
    "CommError": "errors",
    "CommTimeoutError": "errors",
    "Communicator": "communicator",
    "MismatchError": "errors",
    "PeerError": "errors",
    "Work": "communicator",
    "empty": "communicator",
    "explain": "_explain",
    "premul_sum": "options",
    "set_default_cpu_backend": "_autoload",
    "shrink_group": "_shrink_group",
}


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> object:
        if name in _HOME:
            value = getattr(importlib.import_module(f"pycomm.{_HOME[name]}"), name)
        elif name in ("fused", "testing"):
            value = importlib.import_module(f"pycomm.{name}")
        elif (
            name == "_C"
            # `from pycomm import _C` comes here first: it must not load an extension that belongs to another
            # torch
        ):
            value = importlib.import_module("pycomm._extension").load()
        else:
            raise AttributeError(f"module 'pycomm' has no attribute '{name}'")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
