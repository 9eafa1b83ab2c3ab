"""NCCL by nccl4py, NVIDIA's own Python bindings (docs/decisions/0006-nccl-bindings.md), written against nccl4py 0.6.0. One rank per GPU.

The unique id of the group travels through torch's store, as in any program that starts NCCL by itself.
"""

from . import metrics
from .backends import Adapter, Unsupported, open_store, pingpong


class Nccl4pyAdapter(Adapter):
    def start(self, spec):
        import nccl.core
        import torch

        torch.set_num_threads(1)
        self.enter_device(spec)
        self.nccl, store = nccl.core, open_store(spec)
        if self.rank == 0:
            store.set("unique_id", bytes(self.nccl.get_unique_id()))
        unique_id = self.nccl.UniqueId.from_bytes(bytes(store.get("unique_id")))
        self.comm = self.nccl.Communicator.init(self.world_size, self.rank, unique_id)
        self.stream = torch.cuda.current_stream().cuda_stream
        self.token = torch.zeros(1, device="cuda")

    def version(self):
        return f"nccl4py {self.nccl.__version__}"

    def make_call(self, case, form, send, recv):
        comm, root, stream, (after, before, partner) = self.comm, case.root, self.stream, self.neighbours()
        names = {"sum": "SUM", "avg": "AVG", "product": "PROD", "min": "MIN", "max": "MAX"}
        op = getattr(self.nccl, names[case.redop]) if metrics.OPS[case.op].reduces else None

        def sendrecv():
            self.nccl.group_start()
            comm.send(send, after, stream=stream)
            comm.recv(recv, before, stream=stream)
            self.nccl.group_end()

        match case.op:
            case "all_reduce":
                return lambda: comm.allreduce(send, recv, op, stream=stream)
            case "reduce":
                return lambda: comm.reduce(send, recv, op, root, stream=stream)
            case "reduce_scatter":
                return lambda: comm.reduce_scatter(send, recv, op, stream=stream)
            case "all_gather":
                return lambda: comm.allgather(send, recv, stream=stream)
            case "all_to_all":
                return lambda: comm.alltoall(send, recv, stream=stream)
            case "broadcast":
                return lambda: comm.broadcast(send, recv, root, stream=stream)
            case "gather":
                return lambda: comm.gather(send, recv, root, stream=stream)
            case "scatter":
                return lambda: comm.scatter(send, recv, root, stream=stream)
            case "sendrecv":
                return sendrecv
            case "pingpong":
                return pingpong(self.rank, lambda: comm.send(send, partner, stream=stream), lambda: comm.recv(recv, partner, stream=stream))
            case "barrier":
                raise Unsupported("NCCL has no barrier")
        raise AssertionError(case.op)

    def barrier(self):
        import torch

        self.comm.allreduce(self.token, self.token, self.nccl.SUM, stream=self.stream)
        torch.cuda.current_stream().synchronize()

    def close(self):
        self.comm.destroy()
