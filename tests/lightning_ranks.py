"""Lightning under plans, for test_frameworks.py: one of two ranks, which framework_ranks.py has started."""

import lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_model import EPOCHS, WHOLE, Net, data, optimizer_of
from test_docs import blocks_with

import pycomm.parallel as par
from pycomm.parallel.trainers.lightning import PlanStrategy


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        loss = self.trainer.strategy.step(batch, F.mse_loss)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.trainer.strategy.evaluate(batch, F.mse_loss))

    def configure_optimizers(self):
        opt = optimizer_of(self)
        return [opt], [torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)]


class OwnBackward(Module):
    def training_step(self, batch, index):
        return F.mse_loss(self(batch[0]), batch[1])


class Hooked(Module):
    def on_after_backward(self):
        pass


def trainer_of(strategy, folder, **options):
    options = {"gradient_clip_val": 0.5, "max_epochs": EPOCHS, **options}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    return lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, callbacks=[keep], **quiet, **options
    )


def fit(plan, folder, **options):
    """(parameters, steps, loss of the validation after the last epoch and by validate)"""
    module = Module()
    trainer = trainer_of(PlanStrategy(plan, microbatches=2), folder)
    loader = torch.utils.data.DataLoader(data(), WHOLE)
    trainer.fit(module, loader, loader, **options)
    losses = [trainer.callback_metrics["val_loss"].item()]
    losses.append(trainer.validate(module, loader, verbose=False)[0]["val_loss"])
    state = {name.removeprefix("net."): value for name, value in par.full_state_dict(module).items()}
    return state, trainer.global_step, losses


def refusals(folder):
    """What each of these raises, on this rank."""
    cases = {
        "accumulate": (Module(), {"accumulate_grad_batches": 2}),
        "value": (Module(), {"gradient_clip_algorithm": "value"}),
        "precision": (Module(), {"precision": "bf16-mixed"}),
        "backward": (OwnBackward(), {}),
        "hook": (Hooked(), {}),
    }
    found = {}
    for name, (module, options) in cases.items():
        try:
            trainer = trainer_of(PlanStrategy(par.Plan(dp=2)), f"{folder}/{name}", **options)
            trainer.fit(module, torch.utils.data.DataLoader(data(), WHOLE))
        except ValueError as error:
            found[name] = str(error)
    return found


def write(path, **found):
    dist.barrier()
    torch.save(found, f"{path}.{dist.get_rank()}")
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save([torch.load(f"{path}.{rank}") for rank in range(2)], path)
    dist.destroy_process_group()


def plan_trainer(backend, path):
    first = fit(par.Plan(pp=2), "first")
    resumed = fit(par.Plan(dp=2, zero=3), "second", ckpt_path="first/epoch=0.ckpt")
    write(path, runs=[first, resumed], refused=refusals("refused"), backend=dist.get_backend())


def plan_fabric(backend, path):
    """The block of docs/trainers.md: an epoch."""
    model = Net()
    given = {"model": model, "opt": optimizer_of(model), "loss_fn": F.mse_loss, "plan": par.Plan(tp=2)}
    given |= {"dataset": data(), "folder": "saved"}
    exec(blocks_with("docs/trainers.md", "import Fabric"), given)
    write(path, runs=[(par.full_state_dict(model), None, [])], backend=dist.get_backend())
