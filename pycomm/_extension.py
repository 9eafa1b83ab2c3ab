"""Loads pycomm._C, after a check that it belongs to the installed torch.

The extension derives from c10d::Backend, whose vtable and size change with every minor version of torch:
loaded into another one it would fail with an undefined symbol at best. setup.py records the version in
_build_info.py.
"""

import importlib
from types import ModuleType


def load() -> ModuleType:
    """Returns the extension module. Raises ImportError, which says how to build, if there is none or it is
    for another torch.
    """
    import torch  # its libraries must be in the process before the extension, which links to them

    try:
        built_for = importlib.import_module("pycomm._build_info").TORCH_VERSION
    except ModuleNotFoundError:
        raise ImportError(
            "pycomm's extension is not built. Run `make build`, or `pip install --no-build-isolation -e .`"
        ) from None
    check(built_for, torch.__version__)
    importlib.import_module("pycomm.errors")  # now: it may be for want of a descriptor that it is raised
    return importlib.import_module("pycomm._C")


def check(built_for: str, installed: str) -> None:
    """Raises ImportError when two torch versions differ in major or minor, e.g. "2.13.0+cpu" and "2.14.1"."""
    if built_for.split(".")[:2] != installed.split(".")[:2]:
        raise ImportError(
            f"pycomm's extension was built for torch {built_for}, but torch {installed} is installed. Build "
            "it again: "
            "`pip install --no-build-isolation --no-deps --force-reinstall` with the source folder or "
            "pycomm-runtime."
        )
