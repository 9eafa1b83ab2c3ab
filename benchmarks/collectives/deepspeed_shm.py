"""DeepSpeed's shared-memory all_reduce for inference on CPUs, deepspeed.comm.inference_all_reduce, written
against DeepSpeed 0.19.8.

Its kernel knows one group, the world, and sums of f32, f16 and bf16, in place; it checks nothing and spins.
It is compiled when it is first used, which takes a minute: build() does that before there are ranks. Where
DeepSpeed has no kernel it calls torch's all_reduce instead; that would be Gloo under another name, and is
refused here.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pycomm import env
from pycomm.benchmarks.collectives.backends import Adapter, Forms, TorchAdapter, Unsupported, tensor_of
from pycomm.benchmarks.collectives.cases import Case, OpName

if TYPE_CHECKING:
    from pycomm.benchmarks.collectives.spec import Spec
    from pycomm.benchmarks.common.data import Buffer, DtypeName

BUILD_TIMEOUT_S = 600.0
# dtype -> the vector_kernel_level() that it needs
DTYPES: dict[DtypeName, int] = {"f32": 1, "f16": 2, "bf16": 2}
HOST = {"DS_ACCELERATOR": "cpu"}
PROGRAM = """
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
ShareMemCommBuilder().load()
"""


def build() -> None:
    """Compiles the kernel, if that has not been done. Raises ValueError."""
    command, child_env = [sys.executable, "-c", PROGRAM], env.for_child(**HOST)
    try:
        done = subprocess.run(command, env=child_env, timeout=BUILD_TIMEOUT_S, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        raise ValueError(f"deepspeed: its kernel was not compiled in {BUILD_TIMEOUT_S:g} s.") from None
    if done.returncode:
        raise ValueError(f"deepspeed: its kernel cannot be compiled here.\n{done.stderr[-2000:]}")


def make_adapter() -> Adapter:
    return DeepSpeedAdapter()


class DeepSpeedAdapter(TorchAdapter):
    """The group is Gloo's; inputs, barriers and checks are as there."""

    def __init__(self) -> None:
        super().__init__("gloo")
        self.level = 0

    def start(self, spec: Spec) -> None:
        super().start(spec)
        host, port = spec["store"]
        # LOCAL_SIZE makes the kernel set itself up, address and port name its shared memory
        here = {**HOST, "LOCAL_SIZE": str(spec["ranks"]), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
        env.set_place(self.rank, self.world_size, **here)
        with contextlib.redirect_stdout(sys.stderr):  # it talks while it starts
            import deepspeed

            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        self.deepspeed, backend = deepspeed, deepspeed.comm.comm.cdb
        if getattr(backend, "shm_comm_op", None) is not None:
            self.level = backend.shm_vector_kernel_level

    def version(self) -> str:
        return f"DeepSpeed {self.deepspeed.__version__}, inference_all_reduce"

    def calls(self, case: Case, send: Buffer, recv: Buffer) -> Mapping[OpName, Forms]:
        if case.op != "all_reduce" or case.redop != "sum" or case.dtype not in DTYPES:
            raise Unsupported(f"its kernel has all_reduce alone, of sums of {', '.join(DTYPES)}")
        if self.level < DTYPES[case.dtype]:
            raise Unsupported(f"its kernel for {case.dtype} does not run on this processor or was not built")
        x, reduce = tensor_of(send, case.dtype), self.deepspeed.comm.inference_all_reduce
        return {"all_reduce": (None, lambda: reduce(x))}
