"""Hugging Face's Trainer and Accelerate under plans, beside a plain Trainer in one process: losses, what is
logged, parameters, evaluation, checkpoints. Lightning: test_trainers_lightning.py.
"""

import os

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from test_docs import blocks_with
from tiers import tier
from torch_ranks import spawn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import pycomm.parallel as par
from pycomm.parallel.trainers.transformers import PlanTrainer

ROWS, LENGTH, VOCAB, WHOLE = 22, 7, 31, 8  # rows of the data and of a whole batch: the last one has 6
STEPS = 6  # in two epochs


def make():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 4, "vocab_size": VOCAB}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, use_cache=False, **sizes)
    return LlamaForCausalLM(config).double()


def data(rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (rows, LENGTH), generator=generator)
    labels = tokens.masked_fill(torch.rand(rows, LENGTH, generator=generator) < 0.3, -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def as_rank(rank, world_size):
    """The environment that torchrun gives, and nothing of what the parent was to Accelerate."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in names.items()})
    AcceleratorState._reset_state(reset_partial_state=True)


def arguments(folder, rows=WHOLE, **settings):
    options = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1}
    options |= {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}
    options |= {"learning_rate": 0.02, "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1}
    options |= {"max_grad_norm": 0.5, "num_train_epochs": 2, "save_strategy": "no"}
    return TrainingArguments(str(folder), **{**options, **settings})


def exact(out, labels, num_items_in_batch):
    """The loss of the model's class, which computes it in fp32."""
    logits, targets = out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def run(trainer, **options):
    """(losses of the steps, in fp64, of evaluations, some logits; what was logged), after train()."""
    step, losses = trainer.training_step, []
    trainer.training_step = lambda *given: losses.append(step(*given)) or losses[-1]
    before = trainer.evaluate()["eval_loss"]
    trainer.train(**options)
    keys = ("loss", "eval_loss", "grad_norm", "learning_rate", "train_loss", "total_flos", "epoch")
    keys += ("num_input_tokens_seen", "eval_right")
    logs = [{key: log[key] for key in keys if key in log} for log in trainer.state.log_history]
    predicted = trainer.predict(data(9))
    evaluated = [before, predicted.metrics["test_loss"], *predicted.predictions[:, 2, 3].tolist()]
    evaluated += [log.get("eval_loss") for log in logs]
    return [loss.item() for loss in losses] + [loss for loss in evaluated if loss is not None], logs


def right(evaluation):
    """The share of the labels that are the most likely token."""
    found, labels = evaluation.predictions[:, :-1].argmax(-1), evaluation.label_ids[:, 1:]
    return {"right": (found == labels)[labels != -100].mean()}


EVALUATION = {"eval_strategy": "epoch", "include_num_input_tokens_seen": "all"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """By a plain Trainer."""
    args = arguments(tmp_path_factory.mktemp("alone"), **EVALUATION)
    options = {"train_dataset": data(), "eval_dataset": data(9), "compute_metrics": right}
    trainer = Trainer(make(), args, compute_loss_func=exact, **options)
    return *run(trainer), trainer.model.state_dict()


def under_plans(rank, world_size, folder, texts):
    """Rows of 2 microbatches of gradient_accumulation_steps and 2 of the trainer's."""
    as_rank(rank, world_size)
    found = []
    for plan in map(par.Plan.parse, texts):
        settings = {
            **EVALUATION,
            "gradient_accumulation_steps": 2,
            "per_device_eval_batch_size": WHOLE // plan.dp,
        }
        args = arguments(folder, WHOLE // plan.dp // 2, **settings)
        options = {"train_dataset": data(), "eval_dataset": data(9), "compute_metrics": right}
        trainer = PlanTrainer(make(), args, plan=plan, microbatches=2, **options)
        found.append((*run(trainer), par.full_state_dict(trainer.model)))
    return found


def check(found, expected):
    losses, logs, state = found
    assert losses == pytest.approx(expected[0], rel=1e-12) and len(losses) >= STEPS + 4
    assert len(logs) == len(expected[1])
    for log, right in zip(logs, expected[1], strict=True):  # the Trainer adds its losses in fp32
        assert log == pytest.approx(right, rel=1e-6)
    check_state(state, expected[2])


def check_state(state, expected):
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-11 * value.abs().max().item())


@tier(quick=1 / 2)
@pytest.mark.parametrize(
    "texts",
    [
        [""],
        ["dp=2,zero=3", "tp=2"],
        ["dp=2,pp=2,zero=1"],
        pytest.param(["tp=2,megatron_sp", "pp=2,schedule=zb-h1", "ulysses=2"], marks=pytest.mark.slow),
        pytest.param(["dp=2,tp=2,pp=2,zero=1"], marks=pytest.mark.deep),
    ],
    ids=lambda texts: " ".join(texts) or "one process",
)
def test_trainer(tmp_path, alone, texts):
    for found in spawn(par.Plan.parse(texts[0]).world_size, under_plans, tmp_path, texts):
        for one in found:
            check(one, alone)


def save_and_resume(rank, world_size, folder):
    """Saved under one plan, in the middle of an epoch and with accumulation; the best checkpoint, and
    training that goes on under another one.
    """
    as_rank(rank, world_size)
    settings = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "worst", "save_total_limit": 2}

    class Worst(PlanTrainer):
        """Takes the first checkpoint for the best."""

        def evaluate(self, *args, **options):
            return super().evaluate(*args, **options) | {"eval_worst": self.state.global_step}

    options = {"train_dataset": data(), "eval_dataset": data(9), "microbatches": 2}
    accumulated = {"gradient_accumulation_steps": 2, **settings}
    args = arguments(folder, WHOLE // 2, greater_is_better=False, **accumulated)
    first = Worst(make(), args, plan=par.Plan(pp=2), **options)
    first.train()
    best = par.full_state_dict(first.model)
    first.save_model(f"{folder}/final")
    kept = sorted(name for name in os.listdir(folder) if name.startswith("checkpoint"))
    args = arguments(folder, WHOLE // 4, gradient_accumulation_steps=2)
    second = PlanTrainer(make(), args, plan=par.Plan(dp=2, zero=1), **options)
    second.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return best, kept, par.full_state_dict(second.model), second.state.global_step


@tier(slow=1)
def test_trainer_saves_and_resumes(tmp_path, alone):
    for best, kept, state, step in spawn(2, save_and_resume, tmp_path):
        assert kept == ["checkpoint-2", "checkpoint-6"] and step == STEPS
        check_state(state, alone[2])
        for folder in ("final", "checkpoint-2"):
            saved = LlamaForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float64).state_dict()
            assert all(torch.equal(saved[name], best[name]) for name in saved)


class OwnLoss(PlanTrainer):
    def compute_loss(self, model, inputs, **options):
        return model(**inputs).loss


REFUSED = [
    ({"bf16": True}, {}, r"bf16=True .* Plan\(precision="),
    ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor=0.1 .*loss_fn"),
    ({"torch_compile": True}, {}, "torch_compile=True"),
    ({"average_tokens_across_devices": False}, {}, "average_tokens_across_devices=False"),
    ({"train_sampling_strategy": "batch_rebalance"}, {}, "batch_rebalance"),
    ({"optim": "galore_adamw_layerwise"}, {}, "optim='galore_adamw_layerwise'"),
    ({"accelerator_config": {"split_batches": True}}, {}, "accelerator_config"),
    ({"label_names": ["start"]}, {}, r"takes its targets as \['start'\]"),
    ({}, {"compute_loss_func": exact}, "compute_loss_func .*pass loss_fn"),
    (
        {},
        {"plan": par.Plan(dp=4)},
        r"Plan\(dp=4\) is for 4 ranks, and TrainingArguments knows of 1: .*use_cpu",
    ),
]


@pytest.mark.parametrize(("settings", "options", "words"), REFUSED)
def test_trainer_refuses(tmp_path, settings, options, words):
    with pytest.raises(ValueError, match=words):
        PlanTrainer(make(), arguments(tmp_path, **settings), **options)


def test_trainer_refuses_later(tmp_path):
    with pytest.raises(ValueError, match="compute_loss of your own .*pass loss_fn"):
        OwnLoss(make(), arguments(tmp_path))
    Trainer(
        make(), arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1), None, data()
    ).train()
    trainer = PlanTrainer(make(), arguments(tmp_path), train_dataset=data())
    with pytest.raises(ValueError, match="checkpoint-1 has no folder 'plan'"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="no search over plans"):
        trainer.hyperparameter_search()


def too_few(rank, world_size, folder):
    as_rank(rank, world_size)
    trainer = PlanTrainer(make(), arguments(folder, 2), plan=par.Plan(dp=3), train_dataset=data(20))
    with pytest.raises(ValueError, match="20 rows in batches of 6 leave 2 .*dataloader_drop_last"):
        trainer.train()
    return True


def test_trainer_refuses_a_last_batch_of_too_few_rows(tmp_path):
    assert all(spawn(3, too_few, tmp_path))


def with_accelerate(rank, world_size, plan, folder):
    """The block of docs/trainers.md."""
    as_rank(rank, world_size)
    model = make()
    opt = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, STEPS)
    names = {"model": model, "opt": opt, "scheduler": scheduler, "plan": plan}
    names |= {"dataset": data(), "folder": folder}
    exec(blocks_with("docs/trainers.md", "import Accelerator"), names)
    accelerator, loss = names["accelerator"], names["loss"].item()
    return loss, par.full_state_dict(model), accelerator.num_processes, accelerator.is_main_process


def test_accelerate(tmp_path):
    plan, expected = par.Plan(dp=2, zero=1), with_accelerate_alone()
    for rank, found in enumerate(spawn(2, with_accelerate, plan, tmp_path / "saved")):
        assert found[2:] == (2, rank == 0)
        assert found[0] == pytest.approx(expected[0], rel=1e-12)
        check_state(found[1], expected[1])


def with_accelerate_alone():
    """As users of Accelerate write it."""
    accelerator = Accelerator(cpu=True)
    model = make()
    opt = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, STEPS)
    loader = torch.utils.data.DataLoader(data(), WHOLE)
    model, opt, loader, scheduler = accelerator.prepare(model, opt, loader, scheduler)
    for batch in loader:
        opt.zero_grad()
        count = (batch["labels"][:, 1:] != -100).sum()
        loss = exact(model(batch["input_ids"]), batch["labels"], count)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        scheduler.step()
    return loss.item(), model.state_dict()
