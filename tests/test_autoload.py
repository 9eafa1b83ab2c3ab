"""The backend name "pycomm" in torch.distributed: known without an import, free of cost, and of effect on
nobody who did not ask.

Each case runs in a fresh interpreter: what a process does with the name cannot be undone in it.
"""

import subprocess
import sys

import pytest
from tiers import tier

from pycomm import env

# Makes a group of one rank; prints the name torch has for it and what actually carries CPU tensors.
GROUP = """
import datetime, torch, torch.distributed as dist
def group(*backend, **options):
    dist.init_process_group(*backend, store=dist.HashStore(), rank=0, world_size=1, **options)
def says(group=None):
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [1, 1, 1]
    backend = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))
    return dist.get_backend(group), type(backend).__name__
"""


def run(code, **variables):
    """Runs code in a fresh interpreter with these environment variables; returns its standard output and
    error, split in lines.
    """
    child = env.for_child(**{"PYCOMM_REPLACE": None, "PYCOMM_LOG": None, "RANK": None, **variables})
    done = subprocess.run(
        [sys.executable, "-c", code], env=child, capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines(), done.stderr.splitlines()


def result(code, **variables):
    out, err = run(code, **variables)
    assert out, "\n".join(err)
    return out[-1]


@tier(slow=1)
def test_import_torch_registers_the_name_and_loads_nothing():
    code = """
import sys, torch.distributed as dist
ours = sorted(name for name in sys.modules if name.startswith("pycomm"))
default = dist.Backend.default_device_backend_map["cpu"]
print(dist.is_backend_available("pycomm"), dist.Backend("PyComm"), default, ours)
"""
    assert result(code) == "True pycomm gloo ['pycomm', 'pycomm._autoload', 'pycomm.env', 'pycomm.values']"


def test_autoload_imports_four_small_modules_and_nothing_else():
    """So that our part of `import torch` takes a few milliseconds."""
    code = """
import sys, torch
from importlib.metadata import entry_points
entry, = [e for e in entry_points(group="torch.backends") if e.name == "pycomm"]
before = set(sys.modules)
entry.load()()
new = sorted(set(sys.modules) - before)
print(new, sum(open(sys.modules[name].__file__).read().count("\\n") for name in new) < 1000)
"""
    assert (
        result(code, TORCH_DEVICE_BACKEND_AUTOLOAD=0)
        == "['pycomm', 'pycomm._autoload', 'pycomm.env', 'pycomm.values'] True"
    )


@tier(quick=1 / 3)
@pytest.mark.parametrize(
    "order", ["import pycomm, torch", "import torch, pycomm", "from pycomm import CommError; import torch"]
)
def test_no_import_order_is_circular(order):
    assert (
        result(f"{order}\nimport torch.distributed as dist\nprint(dist.is_backend_available('pycomm'))")
        == "True"
    )


@tier(slow=1)
def test_registering_again_changes_nothing():
    code = """
import torch.distributed as dist
from pycomm import _autoload
before = dict(dist.Backend._plugins)
_autoload.register(); _autoload.autoload()
print(before == dict(dist.Backend._plugins), "PYCOMM" in before, dist.Backend.backend_list.count("pycomm"))
"""
    assert result(code) == "True True 1"


@tier(slow=1)
def test_without_torch_distributed_nothing_happens():
    code = "import torch.distributed as dist; dist.is_available = lambda: False; del dist.Backend\n"
    assert (
        result(
            code + "from pycomm import _autoload; _autoload.autoload(); print('fine')",
            TORCH_DEVICE_BACKEND_AUTOLOAD=0,
        )
        == "fine"
    )
    assert (
        result(
            code + "from pycomm import _autoload; _autoload.autoload(); print('fine')", PYCOMM_REPLACE="gloo"
        )
        == "fine"
    )


@tier(slow=1)
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_groups_of_gloo_are_as_without_us(backend):
    """On torch <= 2.13 "cpu:gloo" lost its default backend to any installed plug-in: [Note: device-qualified
    names on torch <= 2.13].
    """
    code = (
        GROUP
        + f"group({backend!r})\nworld = dist.group.WORLD\n"
        + "print(says()[1], world._get_sequence_number_for_group(), world.name())"
    )
    assert result(code).split() == ["ProcessGroupGloo", "1", "gloo"]


@tier(quick=1 / 4)
@pytest.mark.parametrize("backend", ["pycomm", "PYCOMM", "cpu:pycomm"])
def test_group(backend):
    assert (
        result(GROUP + f"group({backend!r})\nname, kind = says()\nprint(name, kind != 'ProcessGroupGloo')")
        == "pycomm True"
    )


@tier(quick=1 / 4)
@pytest.mark.parametrize("backend", ["gloo", "GLOO", "cpu:gloo", None])
def test_replace_gloo(backend):
    code = (
        GROUP
        + f"group({backend!r})\nprint(*says(), says(dist.new_group([0], backend='gloo')), dist.Backend.GLOO)"
    )
    words = result(code, PYCOMM_REPLACE="gloo").split()
    assert words[0] == "pycomm" and words[-1] == "gloo" and "ProcessGroupGloo" not in " ".join(words)


@tier(slow=1)
def test_replace_nccl():
    assert result(GROUP + "group('nccl')\nprint(says()[0])", PYCOMM_REPLACE="nccl") == "pycomm"


@tier(quick=1 / 4)
@pytest.mark.parametrize(
    ("replace", "meanings"),
    [
        (None, {"gloo": "gloo", "cpu:gloo": "cpu:gloo", "CPU:PyComm": "pycomm"}),
        (
            "gloo",
            {"cpu:gloo,cuda:nccl": "cpu:pycomm,cuda:nccl", "fake": "fake", "mpi": "mpi", "nccl": "nccl"},
        ),
        ("nccl", {"gloo": "gloo", "cpu:gloo": "cpu:gloo", "NCCL": "pycomm"}),
        (" gloo , NCCL", {"CPU:Gloo": "pycomm", "nccl": "pycomm", "cpu:gloo,cuda:nccl": "pycomm"}),
    ],
)
def test_what_names_mean(replace, meanings):
    meant = f"{{name: str(dist.Backend(name)) for name in {list(meanings)}}}"
    code = f"import torch.distributed as dist; print({meant})"
    assert result(code, PYCOMM_REPLACE=replace) == str(meanings)


@tier(slow=1)
def test_replacement_is_said_once_and_by_rank_0_only():
    asked = "for _ in range(3): dist.Backend('gloo'); dist.Backend('cpu:gloo')"
    code = f"import torch.distributed as dist\n{asked}\nprint('end')"
    assert sum("means pycomm" in line for line in run(code, PYCOMM_REPLACE="gloo", RANK=0)[1]) == 1
    assert run(code, PYCOMM_REPLACE="gloo", RANK=1)[1] == []
    assert run(code, PYCOMM_REPLACE="gloo", PYCOMM_LOG="error")[1] == []
    assert run("import torch", PYCOMM_REPLACE="gloo")[1] == []  # only where the name is used


def test_wrong_replacement_is_an_error():
    err = "\n".join(run("import torch", PYCOMM_REPLACE="glue")[1])
    assert "PYCOMM_REPLACE='glue' in the environment: must be gloo, nccl or both" in err


@tier(slow=1)
def test_default_cpu_backend():
    code = (
        GROUP
        + """
import pycomm
pycomm.set_default_cpu_backend(); pycomm.set_default_cpu_backend()
group()
default = dist.get_default_backend_for_device("cpu")
print(says()[0], default, says(dist.new_group([0]))[0], dist.Backend("gloo"))
"""
    )
    assert result(code) == "pycomm pycomm pycomm gloo"
