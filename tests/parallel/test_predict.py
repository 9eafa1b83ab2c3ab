"""predict() and evaluate(metrics=): what one process gives, on every rank, under every kind of plan."""

import equality
import pytest
import torch
import torch.distributed as dist
from halves import quick
from models import GPT, Llama
from odd_models import cross
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par

LENGTH = 9


def make(kind):
    torch.manual_seed(0)
    if kind == "moe":
        return equality.make_model("moe", torch.float64).eval()
    return (GPT() if kind == "gpt" else Llama()).double().eval()


def batch(rows):
    generator = torch.Generator().manual_seed(rows)
    x, y = (torch.randint(0, 29, (rows, LENGTH), generator=generator) for _ in range(2))
    y[torch.rand(rows, LENGTH, generator=generator) < 0.4] = -100
    y[0] = -100
    return x, y


def accuracy(out, y):
    return (out.argmax(-1) == y)[y != -100].double().mean()


def confidence(out, y):
    """A number and no tensor."""
    return out.softmax(-1).amax(-1)[y != -100].mean().item()


METRICS = {"accuracy": accuracy, "confidence": confidence}
SIZES = ((11, 3), (7, 1), (1, 1))  # rows, microbatches


def predicted(rank, world_size, kind, texts):
    found = []
    for text in texts:
        model, _ = par.parallelize(make(kind), None, par.Plan.parse(text))
        outputs = [par.predict(model, batch(rows)[0], microbatches=m) for rows, m in SIZES]
        means = [
            par.evaluate(model, batch(11), loss_fn, microbatches=2, metrics=METRICS)
            for loss_fn in (None, cross)
        ]
        found.append((outputs, means))
    return found


CASES = {
    "gpt 2": (
        *("dp=2", "dp=2,zero=3", "tp=2", "tp=2,megatron_sp"),
        *("pp=2", "pp=2,schedule=interleaved", "pp=2,schedule=zbv"),
    ),
    "llama 2": ("ulysses=2", "ring=2", "ring=2,zigzag=false,zero=3"),
    "moe 2": ("ep=2", "ep=2,zero=3"),
    "gpt 4": ("dp=2,pp=2,zero=3,schedule=zbv", "tp=2,pp=2,megatron_sp", "dp=2,tp=2,zero=1"),
    "llama 4": ("ring=2,ulysses=2", "pp=2,ring=2", "tp=2,ring=2,megatron_sp", "dp=2,ulysses=2"),
}


@tier(quick=1 / 3)
@pytest.mark.parametrize("name", quick(CASES, "gpt 2", "llama 2", "moe 2", deep=("gpt 4", "llama 4")))
def test_equal_to_one_process(name):
    kind, texts = name.split()[0], CASES[name]
    model = make(kind)
    with torch.no_grad():
        expected = [model(batch(rows)[0]) for rows, _ in SIZES]
    x, y = batch(11)
    out = model(x).detach()
    loss, means = cross(out, y), {key: measure(out, y) for key, measure in METRICS.items()}
    for found in spawn(par.Plan.parse(texts[0]).world_size, predicted, kind, texts):
        for text, (outputs, evaluations) in zip(texts, found, strict=True):
            for out, value in zip(outputs, expected, strict=True):
                assert out.shape == value.shape and out.dtype == value.dtype, text
                assert equality.relative(out, value) < 1e-12, text
            for its_loss, its_means in evaluations:
                assert equality.relative(its_loss, loss) < 1e-12, text
                assert list(its_means) == ["accuracy", "confidence"], text
                for key, value in means.items():
                    assert equality.relative(its_means[key], value) < 1e-12, (text, key)


class Tree(GPT):
    """Returns more than one tensor."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, idx, scale=1.0):
        out = super().forward(idx) * scale
        if self.what == "tree":
            return {"out": out, "more": (out.argmax(-1), None, 3)}
        if self.what == "sum":
            return out, out.sum()
        if self.what == "object":
            return out, nn.Identity()
        if self.what == "rank":
            return out, out.new_full((len(idx), 3), dist.get_rank())
        layer = self.blocks[0].attn.c_attn
        return out, layer(out.new_ones(len(idx), 3, layer.in_features))


def trees(rank, world_size):
    x = batch(7)[0]
    expected = Tree("tree").double()
    torch.manual_seed(0)
    for text in ("dp=2", "pp=2", "ulysses=2"):
        torch.manual_seed(0)
        model = Tree("tree").double().eval()
        torch.manual_seed(0)
        expected = Tree("tree").double()(x, 2.0)
        model, _ = par.parallelize(model, None, par.Plan.parse(text))
        found = par.predict(model, {"idx": x, "scale": 2.0, "labels": x}, microbatches=2)
        assert list(found) == ["out", "more"] and found["more"][1:] == (None, 3)
        assert equality.relative(found["out"], expected["out"].detach()) < 1e-12
        assert torch.equal(found["more"][0], expected["more"][0]) and found["more"][0].dtype == torch.int64
    refusals = {
        "sum": ("dp=2", r"needs the rows as dim 0"),
        "object": ("pp=2", "returns a Identity"),
        "positions": ("ring=2", "needs the positions as dim 1"),
    }
    for what, (text, words) in refusals.items():
        model, _ = par.parallelize(Tree(what).double().eval(), None, par.Plan.parse(text))
        with pytest.raises(ValueError, match=words):
            par.predict(model, x)
    model, _ = par.parallelize(GPT().eval(), None, par.Plan(dp=2))
    with pytest.raises(ValueError, match="ranks 0 and 1 were given different inputs"):
        par.predict(model, x + rank)
    with pytest.raises(ValueError, match="a batch of 0 rows"):
        par.predict(model, x[:0])
    with pytest.raises(ValueError, match="has not been through parallelize"):
        par.predict(GPT(), x)


@tier(slow=1)
def test_trees_and_refusals():
    spawn(2, trees)


def of_own_heads(rank, world_size):
    """Other shapes, or other values alone."""
    for what in ("heads", "rank"):
        model, _ = par.parallelize(Tree(what).double().eval(), None, par.Plan(tp=2))
        with pytest.raises(ValueError, match="differs between ranks 0 and 1 of tp"):
            par.predict(model, batch(7)[0])


def test_outputs_that_differ_over_tp_are_refused():
    spawn(2, of_own_heads)


class OnRank(nn.Module):
    """Returns what cannot be joined where its rank is one of `bad`."""

    def __init__(self, bad):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.bad = bad

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return (x, nn.Identity()) if dist.get_rank() in self.bad else x


def refused_on(rank, world_size, cases):
    """What predict said for each case, and how many rows it then gives of what is right."""
    found = []
    x = torch.ones(5, 3)
    for text, bad, _ in cases:
        model, _ = par.parallelize(OnRank(bad), None, par.Plan.parse(text))
        with pytest.raises(ValueError) as refused:
            par.predict(model, x)
        model.bad = ()
        found.append((str(refused.value), len(par.predict(model, x))))
    model, _ = par.parallelize(OnRank(()), None, par.Plan(dp=world_size))
    with pytest.raises(ValueError) as refused:
        par.predict(model, x + (rank == world_size - 1))
    return found, str(refused.value)


def test_the_rank_whose_output_is_refused_is_named_on_every_rank():
    """The first of them, wherever it is; of stages the last, which alone has an output."""
    cases = [("dp=3", (rank,), rank) for rank in range(3)]
    cases += [("dp=3", (1, 2), 1), ("dp=3", (0, 1, 2), 0), ("pp=3", (0, 1, 2), 2)]
    for rank, (found, inputs) in enumerate(spawn(3, refused_on, cases)):
        for (text, _, named), (said, rows) in zip(cases, found, strict=True):
            assert said.startswith(f"[rank {rank}] predict: on rank {named} the model returns a "), text
            assert rows == 5, text
        assert inputs.startswith(f"[rank {rank}] predict: ranks 0 and 2 were given different inputs")
