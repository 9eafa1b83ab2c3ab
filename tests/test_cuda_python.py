"""CUDA tensors through all of Python and C++, without a GPU: the native API and torch.distributed on the
device of tests/fake_cuda.py.

The cases are in cuda_native_cases.py, cuda_native_errors.py, cuda_fused_cases.py and cuda_torch_cases.py.
Each leaves nothing: no memory, stream, event or mapping of the driver.
"""

import cuda_native_cases as native
import cuda_native_errors as errors
import cuda_torch_cases as backend
import pytest
import torch
from fake_cuda import Server
from tiers import tier

pytestmark = [
    pytest.mark.timeout(300),  # of which most is for compilers on a busy machine
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has a CUDA device of its own"),
]
MPS, DEVICES = {"mps": True}, {"devices": 3}


@pytest.fixture(scope="module")
def server():
    with Server() as server:
        yield server


@tier(quick=1 / 4, slow=1 / 3)
@pytest.mark.parametrize("world_size, devices", [(1, 1), (2, 1), (3, 1), (3, 3)])
def test_operations_in_threads(server, world_size, devices):
    server.run("cuda_native_cases.operations_in_threads", world_size, devices, "resident", devices=devices)


@pytest.mark.parametrize(
    "world_size, devices, protocol, settings",
    [
        (2, 1, "stream_ordered", {}),
        (3, 1, "stream_ordered", {}),
        (3, 1, "resident", MPS),
        (3, 3, "resident", DEVICES),
    ],
)
def test_operations_in_processes(server, world_size, devices, protocol, settings):
    server.run("cuda_native_cases.operations_in_processes", world_size, devices, protocol, **settings)


@tier(quick=2 / 3, slow=1 / 2)
@pytest.mark.parametrize("name", [case.__name__ for case in native.STREAMS])
@pytest.mark.parametrize("kind, settings", [("threads", {}), ("processes", {}), ("processes", MPS)])
def test_streams(server, name, kind, settings):
    server.run(f"cuda_native_cases.in_{kind}", name, **settings)


@tier(quick=2 / 3, slow=1 / 2)
@pytest.mark.parametrize("name", [case.__name__ for case in errors.ERRORS])
@pytest.mark.parametrize("kind, settings", [("threads", {}), ("processes", {}), ("processes", MPS)])
def test_errors(server, name, kind, settings):
    server.run(f"cuda_native_errors.in_{kind}", name, devices=2, **settings)


@pytest.mark.parametrize(
    "name, world_size, kind, settings",
    [
        ("launch_in_line", 3, "threads", {}),
        ("launch_in_line", 2, "processes", MPS),
        ("shared_stream", 2, "threads", {}),
        ("broken", 2, "processes", MPS),
    ],
)
def test_launches_in_the_line_of_a_group(server, name, world_size, kind, settings):
    server.run(f"cuda_fused_cases.in_{kind}", name, world_size, **settings)


@pytest.mark.parametrize("kind, settings", [("threads", {}), ("processes", {}), ("processes", MPS)])
def test_times_on_the_device(server, kind, settings):
    server.run("cuda_trace_cases.held_up_in", kind, 2, **settings)


@pytest.mark.parametrize("kind, settings", [("threads", {}), ("processes", {})])
def test_traces_begin_and_end_beside_operations(server, kind, settings):
    server.run("cuda_trace_cases.beside_in", kind, **settings)


def test_trace_of_a_killed_rank(server):
    server.run("cuda_trace_cases.killed", **MPS)


@pytest.mark.parametrize("settings", [{}, MPS], ids=["stream_ordered", "resident"])
@pytest.mark.parametrize("wait", ["barrier", "work"])
def test_ctrl_c(server, wait, settings):
    server.run("cuda_torch_cases.ctrl_c", wait, **settings)


@pytest.mark.parametrize("protocol, settings", [("stream_ordered", {}), ("resident", MPS)])
def test_killed_rank(server, protocol, settings):
    server.run("cuda_native_cases.killed", protocol, **settings)


@tier(quick=2 / 3, slow=1 / 2)
@pytest.mark.parametrize("name", [case.__name__ for case in backend.CASES])
@pytest.mark.parametrize("settings", [{}, MPS], ids=["stream_ordered", "resident"])
def test_torch_distributed(server, name, settings):
    server.run("cuda_torch_cases.in_processes", name, 2 if name == "mismatch" else 3, **settings)


@tier(quick=1 / 2)
@pytest.mark.parametrize("settings", [{}, MPS], ids=["stream_ordered", "resident"])
def test_killed_rank_of_torch_distributed(server, settings):
    server.run("cuda_torch_cases.killed", **settings)
