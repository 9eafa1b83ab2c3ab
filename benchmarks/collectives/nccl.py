"""NCCL by nccl4py, NVIDIA's own Python bindings (docs/decisions/0006-nccl-bindings.md), written against
nccl4py 0.6.0. One rank per GPU.

The unique id of the group travels through torch's store, as in any program that starts NCCL by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from pycomm.benchmarks.collectives.backends import Adapter, Forms, Unsupported, both, open_store, pingpong
from pycomm.benchmarks.collectives.cases import OPS, Case, OpName
from pycomm.benchmarks.common import device

if TYPE_CHECKING:
    from pycomm.benchmarks.collectives.spec import Spec
    from pycomm.benchmarks.common.data import Buffer

NAMES = {"sum": "SUM", "avg": "AVG", "product": "PROD", "min": "MIN", "max": "MAX"}


def make_adapter() -> Adapter:
    return Nccl4pyAdapter()


class Nccl4pyAdapter(Adapter):
    def start(self, spec: Spec) -> None:
        import nccl.core
        import torch

        torch.set_num_threads(1)
        self.enter_device(spec)
        self.nccl, store = nccl.core, open_store(spec)
        if self.rank == 0:
            # torch's stub has str alone; the store takes both
            store.set("unique_id", cast(str, bytes(self.nccl.get_unique_id())))
        unique_id = self.nccl.UniqueId.from_bytes(bytes(store.get("unique_id")))
        self.comm = self.nccl.Communicator.init(self.world_size, self.rank, unique_id)
        self.stream = torch.cuda.current_stream().cuda_stream
        self.token = torch.zeros(1, device="cuda")

    def version(self) -> str:
        return f"nccl4py {self.nccl.__version__}"

    def calls(self, case: Case, send: Buffer, recv: Buffer) -> Mapping[OpName, Forms]:
        if case.op == "barrier":
            raise Unsupported("NCCL has no barrier")
        comm, root, (after, before, partner) = self.comm, case.root, self.neighbours()
        op = getattr(self.nccl, NAMES[case.redop]) if OPS[case.op].reduces else None
        here = {"stream": self.stream}

        def send_recv() -> None:
            self.nccl.group_start()
            comm.send(send, after, **here)
            comm.recv(recv, before, **here)
            self.nccl.group_end()

        return {
            "all_reduce": both(lambda: comm.allreduce(send, recv, op, **here)),
            "reduce": both(lambda: comm.reduce(send, recv, op, root, **here)),
            "reduce_scatter": both(lambda: comm.reduce_scatter(send, recv, op, **here)),
            "all_gather": both(lambda: comm.allgather(send, recv, **here)),
            "all_to_all": both(lambda: comm.alltoall(send, recv, **here)),
            "broadcast": both(lambda: comm.broadcast(send, recv, root, **here)),
            "gather": both(lambda: comm.gather(send, recv, root, **here)),
            "scatter": both(lambda: comm.scatter(send, recv, root, **here)),
            "send_recv": both(send_recv),
            "pingpong": pingpong(
                self.rank, lambda: comm.send(send, partner, **here), lambda: comm.recv(recv, partner, **here)
            ),
        }

    def barrier(self) -> None:
        self.comm.allreduce(self.token, self.token, self.nccl.SUM, stream=self.stream)
        device.synchronize()

    def close(self) -> None:
        self.comm.destroy()
