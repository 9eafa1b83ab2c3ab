"""The parts of the trainers' adapters by themselves, in one process: batches of few rows, settings that are
refused, what is asked of par.step, checkpoints. Lightning is a stand-in here, see test_frameworks.py.
"""

import enum
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.functional import mse_loss
from transformers import Trainer, TrainingArguments

import pycomm.parallel as par
from pycomm.parallel.trainers import transformers as adapter
from pycomm.parallel.trainers.rows import enough_rows, fewer_microbatches
from pycomm.parallel.trainers.transformers import REFUSED, PlanTrainer

# --- few rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "microbatches", "plan", "expected"),
    [
        (12, 4, "dp=2", 4),
        (7, 4, "dp=2", 3),
        (7, 4, "dp=2,ep=2", 1),
        (11, 4, "ep=3", 3),
        (3, 4, "dp=4", 1),
        (8, 4, "tp=2,pp=4", 4),
        (0, 4, "dp=2", 1),
    ],
)
def test_as_many_microbatches_as_rows_allow(rows, microbatches, plan, expected):
    for batch in (
        (torch.ones(rows, 2), torch.ones(rows)),
        {"n": 3, "scale": torch.tensor(2.0), "x": torch.ones(rows, 2), "labels": torch.ones(rows)},
    ):
        assert fewer_microbatches(batch, microbatches, par.Plan.parse(plan)) == expected
    assert fewer_microbatches({"n": 3}, microbatches, par.Plan.parse(plan)) == 1


@pytest.mark.parametrize(
    ("plan", "ranks"), [("dp=4", 4), ("ep=3,dp=2", 6), ("ep=5", 5), ("tp=4", 1), ("dp=2", 2)]
)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_that_do_not_count_are_added(plan, ranks, rows):
    """A row for each data rank: the last row is repeated in all inputs; non-tensors are unchanged."""
    plan = par.Plan.parse(plan)
    x, y = torch.arange(2 * rows).view(rows, 2), torch.arange(rows)[:, None].repeat(1, 3)
    missing = max(ranks - rows, 0)
    for batch in ((x, y), {"x": x, "mask": x > 1, "k": "v", "labels": y}):
        found = enough_rows(batch, plan)
        if not missing:
            assert found is batch
            continue
        inputs, targets = (found[0], found[1]) if isinstance(batch, tuple) else (found["x"], found["labels"])
        assert torch.equal(inputs[:rows], x) and torch.equal(targets[:rows], y)
        assert len(inputs) == len(targets) == ranks and (targets[rows:] == -100).all()
        assert (inputs[rows:] == x[-1]).all() and targets.dtype == y.dtype
        if isinstance(batch, dict):
            assert list(found) == list(batch) and found["k"] == "v" and len(found["mask"]) == ranks
    real = x, y.float()
    assert enough_rows(real, plan) is real


# --- transformers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    return TrainingArguments(str(tmp_path_factory.mktemp("args")), use_cpu=True, report_to="none")


class Changed:
    """TrainingArguments, but for these attributes."""

    def __init__(self, given, **changes):
        self.__dict__.update(changes, given=given)

    def __getattr__(self, name):
        return getattr(self.given, name)


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_is_refused_with_what_there_is_instead(name, given):
    with pytest.raises(ValueError) as refused:
        adapter._refuse(PlanTrainer, Changed(given, **{name: "x"}), {}, par.Plan())
    assert str(refused.value) == f"PlanTrainer: {name}='x' is not possible under a plan; use {REFUSED[name]}"
    adapter._refuse(PlanTrainer, given, {}, par.Plan())


CONFIG = SimpleNamespace(split_batches=False, dispatch_batches=None, gradient_accumulation_kwargs=None)
OTHERS = [
    ({"mixed_precision": "fp16"}, {}, "mixed_precision='fp16'"),
    ({"average_tokens_across_devices": False}, {}, "average_tokens_across_devices=False"),
    ({"optim": SimpleNamespace(value="lomo")}, {}, "optim='lomo'"),
    ({"optim": SimpleNamespace(value="apollo_adamw_layerwise")}, {}, "optim='apollo_adamw_layerwise'"),
    ({"accelerator_config": SimpleNamespace(**vars(CONFIG) | {"dispatch_batches": 1})}, {}, "accelerator_co"),
    ({"load_best_model_at_end": True, "save_only_model": True}, {}, "load_best_model_at_end with save_only"),
    ({}, {"compute_loss_func": mse_loss}, "compute_loss_func (pass loss_fn)"),
    ({"n_gpu": 2}, {}, "several GPUs in one process"),
    ({"world_size": 3}, {}, "is for 1 ranks, and TrainingArguments knows of 3: start them with torchrun"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "options", "words"), OTHERS)
def test_what_else_is_refused(changes, options, words, given):
    with pytest.raises(ValueError) as refused:
        adapter._refuse(PlanTrainer, Changed(given, **changes), options, par.Plan())
    assert words in str(refused.value)
    adapter._refuse(
        PlanTrainer, Changed(given, load_best_model_at_end=True), {"compute_loss_func": None}, par.Plan()
    )


def stub(**more):
    """A PlanTrainer that was not made."""
    self = object.__new__(PlanTrainer)
    vars(self).update(more)
    return self


@pytest.mark.parametrize(
    ("norm", "schedule", "expected"),
    [(0.5, "1f1b", 0.5), (0.0, "1f1b", float("inf")), (0.0, "pipedream", None), (2.0, "pipedream", 2.0)],
)
def test_a_step_clips_as_asked_or_measures(norm, schedule, expected):
    plan = SimpleNamespace(schedule=schedule)
    assert stub(args=SimpleNamespace(max_grad_norm=norm), plan=plan)._clip() == expected


@pytest.mark.parametrize("should_save", [True, False])
def test_one_rank_tells_the_work_of_the_whole_batch(should_save):
    self = stub(model=torch.nn.Linear(2, 2), args=SimpleNamespace(should_save=should_save), flops_per_token=7)
    tokens = torch.ones(3, 5)
    assert self.floating_point_ops({"input_ids": tokens}) == (7 * 15 if should_save else 0)
    assert self.floating_point_ops({"pixels": tokens}) == 0


@pytest.mark.parametrize(("dp", "ep", "accumulated"), [(1, 1, 1), (2, 1, 3), (2, 3, 4)])
def test_batches_are_those_of_the_whole_job(dp, ep, accumulated, monkeypatch):
    """In training with all that is accumulated, else without; a last one of too few rows is refused."""
    asked = []
    monkeypatch.setattr(Trainer, "_get_dataloader", lambda self, *a, **k: asked.append((a[2], k)))
    args, data_ranks = SimpleNamespace(dataloader_drop_last=False), dp * ep
    self = stub(data_ranks=data_ranks, accumulated=accumulated, _train_batch_size=5, args=args)
    assert self.get_total_train_batch_size(args) == 5 * data_ranks * accumulated
    rows = 5 * data_ranks * accumulated
    self._get_dataloader(range(3 * rows + data_ranks), "Training", 5, is_training=True)
    self._get_dataloader(range(3 * rows + 1), "Evaluation", 5, is_training=False)
    assert asked == [(rows, {"is_training": True}), (5 * data_ranks, {"is_training": False})]
    if data_ranks > 1:
        with pytest.raises(ValueError, match=f"in batches of {rows} leave {data_ranks - 1} for the last one"):
            self._get_dataloader(range(rows + data_ranks - 1), "Training", 5, is_training=True)
        args.dataloader_drop_last = True
        self._get_dataloader(range(rows + data_ranks - 1), "Training", 5, is_training=True)


def test_checkpoints_are_those_of_par(tmp_path, monkeypatch):
    """Values, optimizer and scheduler under <checkpoint>/plan; the best model without its optimizer."""
    calls, opt, scheduler = (
        [],
        object(),
        torch.optim.lr_scheduler.LinearLR(torch.optim.SGD([torch.ones(1)], lr=1.0)),
    )
    self = stub(model="model", optimizer=SimpleNamespace(optimizer=opt), lr_scheduler=scheduler)
    self.state = SimpleNamespace(best_model_checkpoint=str(tmp_path / "best"))
    monkeypatch.setattr(par, "save", lambda *a, **k: calls.append((a, k)))
    monkeypatch.setattr(par, "load", lambda *a: calls.append((a, {})) or {"last_epoch": 12})
    self._save_optimizer_and_scheduler(str(tmp_path))
    self._load_optimizer_and_scheduler(None)
    self._load_optimizer_and_scheduler(str(tmp_path))
    self._load_best_model()
    assert scheduler.last_epoch == 12
    (saved, options), (loaded, _), (best, _) = calls
    assert saved == loaded == ("model", opt, tmp_path / "plan") and options["extra"]["last_epoch"] == 0
    assert best == ("model", None, tmp_path / "best" / "plan")
    (tmp_path / "plan").mkdir()
    self._load_from_checkpoint(str(tmp_path))
    with pytest.raises(ValueError, match="has no folder 'plan': it was written without a plan"):
        self._load_from_checkpoint(str(tmp_path / "best"))


def test_an_evaluated_batch_has_a_loss_for_each_row(monkeypatch):
    """Loss alone, loss with outputs, outputs alone without labels; of the rows that were given."""
    calls = []
    monkeypatch.setattr(par, "evaluate", lambda model, **k: calls.append(k) or torch.tensor(2.5))
    monkeypatch.setattr(par, "predict", lambda model, inputs, **k: ("out", len(inputs["x"]), k))
    plan = par.Plan(dp=2, ep=2)
    self = stub(model="model", plan=plan, data_ranks=4, microbatches=8, loss_fn=mse_loss)
    self._prepare_inputs = lambda inputs: inputs
    batch = {"x": torch.ones(3, 2), "labels": torch.ones(3, dtype=torch.int64)}
    loss, logits, labels = self.prediction_step(None, batch, True)
    assert loss.tolist() == [2.5] * 4 and logits is None and labels is None
    (call,) = calls
    assert len(call["batch"]["x"]) == 4 and call["loss_fn"] is mse_loss and call["microbatches"] == 1
    loss, logits, labels = self.prediction_step(None, batch, False)
    assert logits == ("out", 3, {"microbatches": 1}) and labels is batch["labels"] and len(calls) == 2
    loss, logits, _ = self.prediction_step(None, {"x": torch.ones(9, 2)}, False)
    assert loss is None and logits == ("out", 9, {"microbatches": 2}) and len(calls) == 2


# --- Lightning ------------------------------------------------------------------------------------


class TrainerFn(enum.Enum):
    FITTING = "fit"
    VALIDATING = "validate"


class Base:
    """DDPStrategy, as far as PlanStrategy asks for it."""

    def __init__(self, **options):
        self.given, self.optimizers, self.made = options, [], []
        self.accelerator = SimpleNamespace(setup=lambda trainer: None, teardown=lambda: None)
        self.precision_plugin = SimpleNamespace(precision="32-true", convert_module=lambda module: module)

    def model_to_device(self):
        self.made.append("device")

    def setup_optimizers(self, trainer):
        self.made.append("optimizer")
        self.optimizers = [torch.optim.SGD(self.lightning_module.parameters(), lr=0.1)]

    def setup_precision_plugin(self):
        self.made.append("precision")


def seed_worker(worker, rank=None):
    return worker, rank


@pytest.fixture
def lightning(monkeypatch):
    """The adapter's module over stand-ins of what it imports."""
    parts = {
        "lightning.fabric.utilities.seed": {"pl_worker_init_function": seed_worker},
        "lightning.pytorch.strategies": {"DDPStrategy": Base},
        "lightning.pytorch.trainer.states": {"TrainerFn": TrainerFn, "TrainerState": object},
        "lightning.pytorch.utilities.model_helpers": {
            "is_overridden": lambda name, module: name in vars(type(module))
        },
    }
    for path in parts:
        pieces = path.split(".")
        for end in range(1, len(pieces) + 1):
            monkeypatch.setitem(sys.modules, ".".join(pieces[:end]), ModuleType(".".join(pieces[:end])))
    for path, names in parts.items():
        vars(sys.modules[path]).update(names)
    monkeypatch.delitem(sys.modules, "pycomm.parallel.trainers.lightning", raising=False)
    yield importlib.import_module("pycomm.parallel.trainers.lightning")
    del sys.modules["pycomm.parallel.trainers.lightning"]


class Net(torch.nn.Module):
    automatic_optimization = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.net(x)


def made(lightning, fn=TrainerFn.FITTING, module=None, name=None, **settings):
    strategy = lightning.PlanStrategy(microbatches=4, model=name)
    connector = SimpleNamespace(use_distributed_sampler=True)
    usual = {
        "accumulate_grad_batches": 1,
        "gradient_clip_val": 0.5,
        "gradient_clip_algorithm": None,
        "callbacks": [],
    }
    trainer = SimpleNamespace(**{**usual, **settings}, state=SimpleNamespace(fn=fn), strategy=strategy)
    trainer._accelerator_connector, strategy._layer_sync = connector, None
    strategy.lightning_module = strategy.model = module or Net()
    object.__setattr__(strategy.lightning_module, "trainer", trainer)
    return strategy, trainer


def rows(count):
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return x, x[:, :3]


@pytest.mark.parametrize("name", [None, "net"])
def test_lightning_steps_by_the_plan(lightning, name):
    """Clipped by the Trainer's value, in as many microbatches as there are rows; one backward per step."""
    strategy, trainer = made(lightning, name=name)
    assert strategy.given == {"process_group_backend": "pycomm"}
    strategy.setup(trainer)
    assert not trainer._accelerator_connector.use_distributed_sampler
    assert strategy.made == ["device", "optimizer", "precision"]
    twin = Net()
    opt = torch.optim.SGD(twin.parameters(), lr=0.1)
    for count in (9, 2):
        with pytest.raises(ValueError, match=r"has to return self.trainer.strategy.step\(batch, loss_fn\)"):
            strategy.backward(torch.ones(()), None)
        loss = strategy.step(rows(count), mse_loss)
        assert strategy.backward(loss, None) is loss
        assert strategy.optimizer_step(None, lambda: "closed") == "closed"
        opt.zero_grad()
        right = mse_loss(twin(rows(count)[0]), rows(count)[1])
        right.backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        opt.step()
        assert loss.item() == pytest.approx(right.item(), rel=1e-5)
        assert par.grad_norm(strategy._planned).item() == pytest.approx(norm.item(), rel=1e-5)
    for one, other in zip(twin.parameters(), strategy.lightning_module.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert strategy.evaluate(rows(3), mse_loss) > 0
    planned = strategy._planned
    trainer.state.fn = TrainerFn.VALIDATING
    strategy.setup(trainer)
    assert strategy._planned is planned and strategy.made == ["device", "optimizer", "precision"]
    assert strategy.restore_checkpoint_after_setup
    assert strategy.lightning_module_state_dict() == strategy.optimizer_state(opt) == {}
    if name is None:
        for call in (strategy.step, strategy.evaluate):
            with pytest.raises(ValueError, match=r"pass loss_fn, .*PlanStrategy\(model="):
                call(rows(3))
    trainer.accumulate_grad_batches = 3
    with pytest.raises(ValueError, match="accumulate_grad_batches=3: a plan does so inside of a batch"):
        strategy.step(rows(3), mse_loss)


class Hooked(Net):
    def on_before_optimizer_step(self, optimizer):
        pass

    def on_after_backward(self):
        pass


class StochasticWeightAveraging:
    pass


class Own(StochasticWeightAveraging):
    pass


def manual():
    module = Net()
    module.automatic_optimization = False
    return module


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches > 1 (use microbatches)"),
        ({"gradient_clip_algorithm": "value"}, 'gradient_clip_algorithm="value"'),
        ({"module": manual()}, "manual optimization"),
        ({"callbacks": [object(), Own()]}, "a callback that averages (Own)"),
        (
            {"module": Hooked()},
            "a hook that is not called then (on_after_backward, on_before_optimizer_step)",
        ),
    ],
)
def test_lightning_refuses(lightning, settings, words):
    strategy, trainer = made(lightning, **settings)
    with pytest.raises(ValueError) as refused:
        strategy.setup(trainer)
    assert str(refused.value) == f"PlanStrategy: {words} is not possible under a plan" and not strategy.made


@pytest.mark.parametrize(
    "precision", ["32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"]
)
def test_precisions_of_lightning(lightning, precision):
    strategy, trainer = made(lightning)
    strategy.precision_plugin.precision = precision
    if precision in ("32-true", "64-true", "bf16-true"):
        lightning._refuse(trainer, strategy.lightning_module, strategy.precision_plugin)
        strategy._layer_sync = object()
        precision = "sync_batchnorm=True"
    with pytest.raises(ValueError, match=precision):
        lightning._refuse(trainer, strategy.lightning_module, strategy.precision_plugin)


def test_workers_of_lightning_draw_alike_on_all_ranks(lightning):
    strategy, _ = made(lightning)
    loader = strategy.process_dataloader(SimpleNamespace(worker_init_fn=None))
    assert loader.worker_init_fn(3) == (3, 0)
    own = strategy.process_dataloader(SimpleNamespace(worker_init_fn=print))
    assert own.worker_init_fn is print
    assert strategy.process_dataloader([1, 2]) == [1, 2]


def test_checkpoints_of_lightning_are_those_of_par(lightning, tmp_path):
    """With the optimizer where one is asked for; what Lightning keeps is the extra of the folder."""
    strategy, trainer = made(lightning)
    strategy.setup(trainer)
    strategy.step(rows(6), mse_loss)
    strategy.save_checkpoint({"epoch": 4, "optimizer_states": [{}]}, tmp_path / "whole")
    strategy.save_checkpoint({"epoch": 5}, tmp_path / "weights")
    values = {name: value.clone() for name, value in par.full_state_dict(strategy._planned).items()}
    strategy.step(rows(6), mse_loss)
    strategy.load_model_state_dict({}), strategy.load_optimizer_state_dict({})
    assert strategy.load_checkpoint(tmp_path / "whole")["epoch"] == 4
    for name, value in par.full_state_dict(strategy._planned).items():
        assert torch.equal(value, values[name])
    with pytest.raises(ValueError, match=r"was saved with no optimizer, .*load\(model, None, path\)"):
        strategy.load_checkpoint(tmp_path / "weights")
    trainer.state.fn = TrainerFn.VALIDATING
    assert strategy.load_checkpoint(tmp_path / "weights")["epoch"] == 5
