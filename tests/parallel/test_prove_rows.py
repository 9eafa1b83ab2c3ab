"""Models that mix rows of a batch are refused where the batch is cut, before the first update; those that
only look like it train as ever.
"""

import functools
import random

import pytest
import torch
import torch.nn.functional as F
from odd_models import Plain, cross, tokens
from rows_models import DIM, FINE, LENGTH, MIXING, ROWS, Counting, Made, Named, Synchronized
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel import count_traffic
from pycomm.parallel.checks import measures
from pycomm.parallel.ground.answers import Answers

# text of a plan -> options of a step
PLANS = {
    "dp=1": {"microbatches": 2},
    "dp=2": {},
    "dp=2,zero=1": {"microbatches": 2},
    "dp=2,zero=2": {"sharded": True},
    "dp=2,zero=3": {},
    "dp=2,precision=bf16": {},
}
# Models of the plans after the first two.
SOME = {
    "mean",
    "own norm",
    "named",
    "mean, dropout",
    "plain",
    "norms",
    "dropout",
    "private",
    "experts",
    "extra",
}


def models_of(text):
    """{name: function that makes it}"""
    models = {**MIXING, **FINE}
    return models if text in list(PLANS)[:2] else {name: models[name] for name in SOME}


def mean(out, y):
    out = out["out"] if isinstance(out, dict) else out
    if out.dim() == 2:
        return (out - 1).square().mean() + 0 * y.sum()
    y = y if out.shape == y.shape else y.transpose(0, 1)
    if out.shape != y.shape:
        raise ValueError("nothing is broadcast")
    return (out - y).square().mean()


def batch(make, rank=None):
    """rank: that of rows of its own."""
    generator = torch.Generator().manual_seed(1 + (rank or 0))
    x, y = (torch.randn(ROWS, LENGTH, DIM, generator=generator) for _ in range(2))
    return ({"x": x, "more": {"shift": x.flip(0)}} if make is Named else x), y


def parallelized(make, text, dtype=torch.float32):
    torch.manual_seed(0)
    model = make().to(dtype)
    return par.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), par.Plan.parse(text))


def steps(rank, world_size, text):
    """{name: (sentence or None, whether parameters are as before)}"""
    found, options = {}, PLANS[text]
    for name, make in models_of(text).items():
        model, opt = parallelized(make, text)
        before, sentence = par.full_state_dict(model), None
        try:
            par.step(model, opt, batch(make, rank if options.get("sharded") else None), mean, **options)
        except ValueError as error:
            sentence = str(error)
        after = par.full_state_dict(model)
        same = all(torch.equal(before[key], after[key]) for key, _ in model.named_parameters())
        found[name] = sentence, same
    return found


@functools.cache
def outcomes(text):
    """Of each rank."""
    return spawn(par.Plan.parse(text).world_size, steps, text)


@tier(slow=1)
@pytest.mark.parametrize("text", PLANS)
def test_rows_that_are_mixed_are_refused_on_every_rank(text):
    for rank, found in enumerate(outcomes(text)):
        for name in MIXING.keys() & models_of(text):
            sentence, same = found[name]
            assert sentence is not None, name
            assert sentence.startswith(f"[rank {rank}] the model mixes rows of the batch: its output"), name
            assert sentence.endswith("No parameter was changed") and same, name


@tier(quick=1 / 6)
@pytest.mark.parametrize("text", PLANS)
def test_other_models_are_not(text):
    for found in outcomes(text):
        for name in FINE.keys() & models_of(text):
            sentence, same = found[name]
            assert sentence is None and not same, (name, sentence)


def test_the_sentence():
    """Which output, by how much, and what cuts the batch."""
    found = outcomes("dp=2")[1]
    assert "its output['out'] changes by 0." in found["named"][0]
    assert "has 4 x 4 values for 4 rows" in found["pairs"][0]
    assert "is cut over 2 ranks, so" in found["mean"][0]
    assert "is cut over 2 ranks and into 2 microbatches, so" in outcomes("dp=2,zero=1")[1]["mean"][0]
    assert "is cut into 2 microbatches, so" in outcomes("dp=1")[0]["mean"][0]


def alone(make, text, kind):
    """In one process: what a step says."""
    model, opt = parallelized(make, text)
    try:
        par.step(model, opt, batch(make), mean, **kind)
    except ValueError as error:
        return str(error)


def test_where_the_batch_is_not_cut_rows_may_be_mixed():
    for make in MIXING.values():
        assert alone(make, "dp=1", {}) is None


def test_calls_that_wait_cut_the_batch():
    assert "is cut into calls, so" in alone(MIXING["mean"], "dp=1", {"update": False})


def test_of_a_large_output_some_values_are_compared(monkeypatch):
    monkeypatch.setattr(measures, "LARGEST", 30)
    assert "changes by 0." in alone(MIXING["mean"], "dp=1", {"microbatches": 2})
    assert alone(FINE["plain"], "dp=1", {"microbatches": 2}) is None


def leaves_nothing(rank, world_size):
    """(what a model has counted, losses, random numbers after that), with the trial and without."""
    found = []
    for is_tried in (False, True):
        model, opt = parallelized(lambda: Counting(nn.Dropout(0.5)), "dp=2")
        Answers.asks = is_tried
        losses = [par.step(model, opt, batch(Counting), mean, microbatches=2).item() for _ in range(3)]
        counts = (
            model.calls,
            model.seen,
            model.count.item(),
            model.table.tolist(),
            model.generator.initial_seed(),
        )
        numbers = torch.rand(3).tolist(), torch.rand(3, generator=model.generator).tolist(), random.random()
        found.append((counts, losses, numbers[:2]))
    return found


def test_the_trial_leaves_nothing_behind():
    for with_trial, without in spawn(2, leaves_nothing):
        assert with_trial == without
        assert with_trial[0][:2] == (6, [2] * 6)


def calls_of_steps(rank, world_size):
    model, opt = parallelized(Plain, "dp=2")
    counts = []
    for step in range(3):
        with count_traffic() as traffic:
            par.step(model, opt, tokens(step), microbatches=2)
        counts.append(traffic.calls())
    return counts


def test_the_first_step_has_one_collective_more():
    for first, *others in spawn(2, calls_of_steps):
        assert others == [first - 1] * 2


class Centered(Plain):
    """Between its blocks."""

    def forward(self, idx):
        x = self.tok(idx)
        for block in self.blocks:
            x = block(x)
            x = x - 0.5 * x.mean(0)
        return self.head(self.norm(x))


def with_tensors_cut(rank, world_size, texts):
    """{text: what a step says of a model that mixes rows, of one that does not}"""
    found = {}
    for text in texts:
        for make in (Centered, Plain):
            for loss_fn in (None, cross):
                model, opt = parallelized(make, text)
                try:
                    par.step(model, opt, tokens(0), loss_fn, microbatches=2)
                    found[text, make, loss_fn] = ""
                except ValueError as error:
                    found[text, make, loss_fn] = str(error)
    return {(text, make.__name__, loss_fn is None): said for (text, make, loss_fn), said in found.items()}


@tier(quick=1 / 2)
@pytest.mark.parametrize("texts", [("tp=2",), ("dp=2,tp=2", "dp=2,tp=2,zero=3")])
def test_tensor_parallel(texts):
    for found in spawn(par.Plan.parse(texts[0]).world_size, with_tensors_cut, texts):
        for (text, name, _), said in found.items():
            assert ("the model mixes rows" in said) == (name == "Centered"), (text, said)


def of_own_rows(rank, world_size):
    """ZeRO-3 with rows of each rank: equal shapes; other lengths; in a model that raises on one rank."""
    found = []
    for make, length in ((MIXING["mean"], 5), (MIXING["mean"], 5 + rank), (Picky, 5)):
        model, opt = parallelized(make, "dp=2,zero=3")
        generator = torch.Generator().manual_seed(rank)
        x, y = (torch.randn(ROWS, length, DIM, generator=generator) for _ in range(2))
        x[:, :, 0] = rank
        try:
            par.step(model, opt, (x, y), mean, sharded=True)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


class Picky(Made):
    """Does not take few rows of the second rank."""

    def forward(self, x):
        if len(x) < ROWS and x[0, 0, 0] == 1:
            raise RuntimeError("not these")
        return super().forward(x)


def test_sharded_batches_of_zero_3():
    for equal, lengths, picky in spawn(2, of_own_rows):
        assert "the model mixes rows" in equal
        assert lengths == picky == ""


def numbers(step):
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(7, LENGTH, DIM, generator=generator, dtype=torch.float64) for _ in range(2))


def synchronized(rank, world_size):
    model, opt = parallelized(Synchronized, "dp=2", torch.float64)
    return [par.step(model, opt, numbers(step), mean).item() for step in range(3)]


def test_a_model_that_computes_over_all_ranks_itself():
    """As the sentence says that one may: equal to one process."""
    model, opt = parallelized(Synchronized, "dp=1", torch.float64)
    right = [par.step(model, opt, numbers(step), mean).item() for step in range(3)]
    for losses in spawn(2, synchronized):
        assert losses == pytest.approx(right, rel=1e-12)


# Models of transformers ----------------------------------------------------------

SIZES = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "pad_token_id": 0}
GROUPED = {**SIZES, "num_key_value_heads": 1}
T5 = {"vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 12, "num_layers": 2, "num_heads": 2}


def of(config, kind, **sizes):
    hf = pytest.importorskip("transformers")
    return getattr(hf, kind)(getattr(hf, config)(**sizes))


TRANSFORMERS = {
    "llama": lambda: of("LlamaConfig", "LlamaForCausalLM", **GROUPED),
    "bert": lambda: of("BertConfig", "BertForMaskedLM", **SIZES),
    "mixtral": lambda: of(
        "MixtralConfig", "MixtralForCausalLM", **GROUPED, num_local_experts=3, output_router_logits=True
    ),
    "t5": lambda: of("T5Config", "T5ForConditionalGeneration", **T5, decoder_start_token_id=0),
}


def padded(left=False):
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(1, 31, (6, 7), generator=generator) for _ in range(2))
    mask = (torch.arange(7) < torch.tensor([7, 3, 5, 7, 6, 1])[:, None]).long()
    mask = mask.flip(1) if left else mask
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels.where(mask == 1, -100)}


def logits(out, y):
    return F.cross_entropy(out.logits.flatten(0, 1).float(), y.flatten())


def of_transformers(rank, world_size):
    for text, loss_fn in (("dp=2", None), ("dp=2,zero=3", logits), ("dp=2,precision=bf16", None)):
        for name, make in TRANSFORMERS.items():
            model, opt = parallelized(make, text + ",blocks=decoder.block" * (name == "t5"))
            data = padded(name == "llama")
            data |= {"decoder_input_ids": data["input_ids"]} if name == "t5" else {}
            model.train()
            par.step(model, opt, data, loss_fn, microbatches=1 if loss_fn else 2)


@tier(slow=1)
def test_models_of_transformers_with_padding():
    """They have dropout, too."""
    pytest.importorskip("transformers")
    spawn(2, of_transformers)
