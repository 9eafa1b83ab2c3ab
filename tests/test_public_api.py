"""Freezes what `import pycomm` offers: a change of these lists is a change of the public API."""

import inspect
import pickle
import subprocess
import sys

import pytest

import pycomm
from pycomm import _extension, errors

PUBLIC = """AbortedError CommError CommTimeoutError Communicator MismatchError PeerError Work __version__
empty explain fused premul_sum set_default_cpu_backend shrink_group testing""".split()


def test_public_names_are_frozen():
    assert pycomm.__all__ == PUBLIC
    assert dir(pycomm) == PUBLIC


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "__version__"])
def test_public_names_are_documented(name):
    thing = getattr(pycomm, name)
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        for member, method in inspect.getmembers(thing, inspect.isroutine):
            if not member.startswith("_") and getattr(method, "__module__", None) == thing.__module__:
                assert inspect.getdoc(method), f"{name}.{member} has no docstring"


def test_explain_is_the_function_even_after_its_module_was_imported():
    import pycomm._explain  # noqa: F401

    assert inspect.isfunction(pycomm.explain)


def test_unknown_name():
    with pytest.raises(AttributeError, match="module 'pycomm' has no attribute 'all_redcue'"):
        _ = pycomm.all_redcue


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_carry_their_attributes(name):
    import torch.distributed

    kind = getattr(errors, name)
    error = kind("text", rank=2, world_size=4, op="all_reduce", sequence=17, peer=3)
    assert isinstance(error, errors.CommError) and isinstance(error, torch.distributed.DistBackendError)
    for copy in (error, pickle.loads(pickle.dumps(error))):  # pickled on their way out of a rank's process
        assert str(copy) == "text"
        assert (copy.rank, copy.world_size, copy.op, copy.sequence, copy.peer) == (2, 4, "all_reduce", 17, 3)
    assert kind("text").peer is None


def test_timeout_is_a_timeout_error():
    assert issubclass(errors.CommTimeoutError, TimeoutError)


@pytest.mark.parametrize(
    ("built_for", "installed", "fits"),
    [
        ("2.13.0", "2.13.0", True),
        ("2.13.0+cpu", "2.13.1+cu130", True),
        ("2.13.0", "2.14.0", False),
        ("2.13.0", "3.13.0", False),
        ("2.1.0", "2.11.0", False),
    ],
)
def test_extension_of_another_torch_is_refused(built_for, installed, fits):
    if fits:
        _extension.check(built_for, installed)
    else:
        with pytest.raises(ImportError, match=f"built for torch {built_for}, but torch {installed}"):
            _extension.check(built_for, installed)


def test_import_is_light():
    """Neither torch nor NumPy nor the extension, no thread."""
    code = """
import sys, threading
before = set(sys.modules)
import pycomm
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names)), "pycomm._C" in sys.modules, threading.active_count())
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split("\n")[0] == "['pycomm'] False 1"
