"""DeepSpeed's ZeRO on CPU, over the default process group: its engine can be given no other, hence launches
of their own (command.py).
"""

import deepspeed
import torch
import torch.distributed as dist

from pycomm import env
from pycomm.benchmarks.strategies.model import Batch, Size, loss_of, make_model, make_optimizer
from pycomm.benchmarks.strategies.variants import Spec, Variant

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
    False  # its own kernel for inference: compiled at first use, a minute
)

BUCKET = 6_250_000  # elements: 25 MB, as the others have; by default its buffers are of 2 GB


class DeepSpeed(Variant):
    """spec.strategy: "zero=1", 2 or 3."""

    def __init__(self, spec: Spec, size: Size, group: dist.ProcessGroup) -> None:
        super().__init__(spec, size, group)
        env.set_place(dist.get_rank(), dist.get_world_size())
        deepspeed.init_distributed(dist_backend=spec.backend, auto_mpi_discovery=False, verbose=False)
        rows = len(self.rows(torch.empty(size.rows)))
        buckets = {
            name: BUCKET
            for name in ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
        }
        config = {
            "train_micro_batch_size_per_gpu": rows,
            "zero_optimization": {
                "stage": int(spec.strategy[-1]),
                "stage3_param_persistence_threshold": 0,
                **buckets,
            },
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # without this it clips at 1
        }
        model = make_model(size)
        self.engine = deepspeed.initialize(
            model=model, optimizer=make_optimizer(model.parameters()), config=config, dist_init_required=False
        )[0]

    def step(self, batch: Batch) -> float:
        inputs, targets = map(self.rows, batch)
        loss = loss_of(self.engine(inputs), targets)
        self.engine.backward(loss)
        self.engine.step()
        return self.mean(loss, 1 / self.world_size)
