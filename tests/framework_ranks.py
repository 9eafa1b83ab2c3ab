"""One rank of a small training under a framework, for test_frameworks.py:

    python framework_ranks.py FRAMEWORK BACKEND FILE

BACKEND is the name that the framework is given, "pycomm" or "gloo"; under PYCOMM_REPLACE=gloo the latter
means pycomm too. Rank 0 writes to FILE which backend torch.distributed has used and the parameters after the
training. Trainings under a plan: lightning_ranks.py.
"""

import importlib
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

STEPS, BATCH = 4, 8


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 4))


def dataset():
    generator = torch.Generator().manual_seed(1)
    count = 2 * STEPS * BATCH
    return torch.utils.data.TensorDataset(
        torch.randn(count, 12, generator=generator), torch.randn(count, 4, generator=generator)
    )


def accelerate(backend):
    """Accelerate takes no name of a backend: on CPUs it uses Gloo."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(0)
    accelerator = Accelerator(cpu=True)
    net = new_model()
    net, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.AdamW(net.parameters(), 1e-2),
        torch.utils.data.DataLoader(dataset(), BATCH, shuffle=True),
    )
    seen = 0
    for x, y in loader:
        with accelerator.accumulate(net):
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(net(x), y))
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        seen += accelerator.gather_for_metrics(y).shape[0]
    assert seen == len(dataset()) and accelerator.num_processes == 2
    assert accelerator.reduce(torch.tensor([1.0]), "sum").item() == 2
    accelerator.wait_for_everyone()
    return accelerator.unwrap_model(net).parameters()


def lightning_fabric(backend):
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=backend))
    fabric.launch()
    net = new_model()
    net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 1e-2))
    for x, y in fabric.setup_dataloaders(torch.utils.data.DataLoader(dataset(), BATCH)):
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        fabric.backward(loss)
        optimizer.step()
    assert fabric.all_gather(loss.detach()).shape == (2,)
    fabric.barrier()
    return net.module.parameters()


def lightning_trainer(backend):
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = new_model()

        def training_step(self, batch, index):
            loss = F.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(dataset(), BATCH))
    return module.parameters()


def deepspeed(backend, stage):
    import deepspeed as ds

    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # its own kernel for inference: compiled at first use, a minute
    )
    ds.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    net = new_model()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
    }
    engine, _, loader, _ = ds.initialize(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), 1e-2),
        training_data=dataset(),
        config=config,
        dist_init_required=False,
    )
    for x, y in loader:
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
    with ds.zero.GatheredParameters(list(net.parameters()), enabled=stage == 3):
        return [parameter.detach().clone() for parameter in net.parameters()]


def main(framework, backend, path):
    if framework.startswith("plan"):
        lightning_ranks = importlib.import_module("lightning_ranks")
        return getattr(lightning_ranks, framework)(backend, path)
    name, _, stage = framework.partition(":")
    result = globals()[name](backend, *map(int, stage.split())) if stage else globals()[name](backend)
    parameters = [parameter.detach().clone() for parameter in result]
    used = (
        dist.get_backend(),
        dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).name(),
    )
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save({"used": used, "parameters": parameters}, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.chdir(os.path.dirname(os.path.abspath(sys.argv[3])))  # what frameworks write falls there
    main(*sys.argv[1:])
