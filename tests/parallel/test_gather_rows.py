"""Losses that compare the rows of a batch: with gather_rows equal to one process, without it refused."""

import functools

import pytest
import torch
import torch.nn.functional as F
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.groups import ALONE
from pycomm.parallel.data.gather_rows import RowsGathered, gathering, take_gathered

ROWS, DIM, STEPS = 9, 6, 3
PLANS = ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "dp=3", "dp=2,tp=2", "dp=2,pp=2")


class Views(nn.Module):
    """Two views of each row -> two vectors of it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(DIM, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(8, 5)

    def forward(self, a, b):
        x = self.first(torch.stack([a, b], 1))
        for block in self.blocks:
            x = x + block(x)
        return self.last(x).unbind(1)


def nt_xent(out, y, gather):
    a, b = (gather(F.normalize(each, dim=1)) for each in out)
    both = torch.cat([a, b])
    scores = (both @ both.T / 0.5).fill_diagonal_(-torch.inf)
    rows = len(a)
    return F.cross_entropy(scores, torch.cat([torch.arange(rows) + rows, torch.arange(rows)]))


def info_nce(out, y, gather):
    a, b = (gather(each) for each in out)
    return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))


def barlow(out, y, gather):
    a, b = (gather(each) for each in out)
    a, b = ((each - each.mean(0)) / each.std(0) for each in (a, b))
    found = a.T @ b / len(a)
    return (found - torch.eye(len(found), dtype=found.dtype)).square().sum()


def triplet_and_own(out, y, gather):
    """With a part that is a mean over rows."""
    a, labels = gather(out[0]), gather(y)
    distances = torch.cdist(a, a)
    same = labels[:, None] == labels[None]
    far, near = distances.masked_fill(~same, 0.0).amax(1), distances.masked_fill(same, 9.0).amin(1)
    return F.relu(far - near + 1).mean() + out[1].square().mean()


LOSSES = {loss.__name__: loss for loss in (nt_xent, info_nce, barlow, triplet_and_own)}


class InForward(Views):
    """InfoNCE in the forward; what it returns is the loss."""

    def forward(self, a, b):
        return info_nce(super().forward(a, b), None, par.gather_rows)


def as_it_is(x):
    return x


def batch(step):
    generator = torch.Generator().manual_seed(step)
    a, b = (torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    return (a, b), torch.arange(ROWS) % 3


def made(make=Views):
    torch.manual_seed(0)
    model = make().double()
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def alone(name):
    model, opt = made()
    losses = []
    for step in range(STEPS):
        inputs, y = batch(step)
        opt.zero_grad()
        loss = LOSSES[name](model(*inputs), y, as_it_is)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def steps(rank, world_size, text):
    """{name: (losses, values of the parameters)}"""
    found = {}
    for name, loss in LOSSES.items():
        model, opt = par.parallelize(*made(), par.Plan.parse(text))
        loss_fn = functools.partial(loss, gather=par.gather_rows)
        losses = [par.step(model, opt, batch(step), loss_fn).item() for step in range(STEPS)]
        found[name] = losses, par.full_state_dict(model), str(model._parallel.checks.of["rows"])
    return found


@tier(quick=1 / 2)
@pytest.mark.parametrize("text", PLANS)
def test_as_in_one_process(text):
    for found in spawn(par.Plan.parse(text).world_size, steps, text):
        for name, (losses, values, said) in found.items():
            expected, right = alone(name)
            assert losses == pytest.approx(expected, rel=1e-10), name
            for key, value in right.items():
                assert torch.allclose(values[key], value, rtol=1e-9, atol=1e-11), (name, key)
            assert said == "held: gather_rows gives the rows of all ranks"


def in_forward(rank, world_size, text):
    model, opt = par.parallelize(*made(InForward), par.Plan.parse(text))
    return [par.step(model, opt, batch(step), lambda out, y: out).item() for step in range(STEPS)]


@pytest.mark.parametrize("text", ["dp=2", "dp=2,zero=3"])
def test_in_the_forward(text):
    expected, _ = alone("info_nce")
    for losses in spawn(2, in_forward, text):
        assert losses == pytest.approx(expected, rel=1e-10)


def said(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def refused(rank, world_size):
    model, opt = par.parallelize(*made(), par.Plan(dp=2))
    plain = functools.partial(nt_xent, gather=as_it_is)
    gathers = functools.partial(nt_xent, gather=par.gather_rows)
    step = functools.partial(par.step, model, opt, batch(0))
    return [
        said(lambda: step(plain)),
        said(lambda: step(gathers, microbatches=2)),
        said(lambda: step(gathers, update=False)),
        said(lambda: step(gathers)),
    ]


def test_what_is_refused():
    for rank, (plain, cut, waiting, fine) in enumerate(spawn(2, refused)):
        assert plain.startswith(f"[rank {rank}] loss_fn is no mean") and "par.gather_rows" in plain
        assert cut.startswith("gather_rows: the rows of a batch are those of one microbatch; there are 2")
        assert waiting.startswith("gather_rows: several calls make one update")
        assert fine is None


def own_rows(rank, world_size):
    """Ranks with 4 and 5 rows of their own."""
    model, opt = par.parallelize(*made(), par.Plan(dp=2))
    (a, b), y = batch(0)
    rows = slice(0, 4) if rank == 0 else slice(4, None)
    loss_fn = functools.partial(nt_xent, gather=par.gather_rows)
    loss = par.step(model, opt, ((a[rows], b[rows]), y[rows]), loss_fn, sharded=True)
    model.eval()
    return loss.item(), par.evaluate(model, ((a[rows], b[rows]), y[rows]), loss_fn, sharded=True).item()


def test_rows_of_ranks_that_differ_in_number():
    model, opt = made()
    inputs, y = batch(0)
    loss = nt_xent(model(*inputs), y, as_it_is)
    loss.backward()
    opt.step()
    after = nt_xent(model(*inputs), y, as_it_is).item()
    for found in spawn(2, own_rows):
        assert found == pytest.approx((loss.item(), after), rel=1e-10)


def mixed(out, y, gather):
    """With a cross-entropy, for which nothing counts on one rank."""
    return info_nce(out, y, gather) + F.cross_entropy(out[0], y)


def one_without_targets(rank, world_size):
    model, opt = par.parallelize(*made(), par.Plan(dp=2))
    inputs, y = batch(0)
    y = y.clone()
    y[5:] = -100  # all rows of rank 1
    loss_fn = functools.partial(mixed, gather=par.gather_rows)
    loss = par.step(model, opt, (inputs, y), loss_fn).item()
    return loss, par.full_state_dict(model)


def test_a_rank_of_which_no_target_counts():
    """The rows of it are in the loss of the other one."""
    model, opt = made()
    inputs, y = batch(0)
    y = y.clone()
    y[5:] = -100
    loss = mixed(model(*inputs), y, as_it_is)
    loss.backward()
    opt.step()
    for found, values in spawn(2, one_without_targets):
        assert found == pytest.approx(loss.item(), rel=1e-10)
        for key, value in model.state_dict().items():
            assert torch.allclose(values[key], value, rtol=1e-9, atol=1e-11), key


def clip_model() -> nn.Module:
    """That of transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    return transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**sizes, "vocab_size": 30, "eos_token_id": 29},
            vision_config={**sizes, "image_size": 8, "patch_size": 4},
            projection_dim=8,
        )
    ).double()


def clip(rank, world_size, text):
    """Its loss: of rank 0 with a plan, or alone."""
    model = clip_model()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "input_ids": torch.randint(0, 29, (6, 5), generator=generator),
        "pixel_values": torch.randn(6, 3, 8, 8, generator=generator, dtype=torch.float64),
        "attention_mask": torch.ones(6, 5, dtype=torch.long),
    }
    losses = []
    if text is None:
        for _ in range(STEPS):
            opt.zero_grad()
            loss = model(**inputs, return_loss=True).loss
            loss.backward()
            opt.step()
            losses.append(loss.item())
        return losses

    def loss_fn(out, y):
        texts, images = par.gather_rows(out.text_embeds), par.gather_rows(out.image_embeds)
        scores, right = texts @ images.T * model.logit_scale.exp(), torch.arange(len(texts))
        return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2

    model, opt = par.parallelize(model, opt, par.Plan.parse(text))
    return [par.step(model, opt, (inputs, torch.arange(6)), loss_fn).item() for _ in range(STEPS)]


TEXTS = "text_model.encoder.layers"


@tier(quick=1 / 3)
@pytest.mark.parametrize("text", ["dp=2", f"dp=2,zero=3,blocks={TEXTS}", f"tp=2,blocks={TEXTS}"])
def test_the_loss_of_clip(text):
    right = clip(0, 1, None)
    for losses in spawn(2, clip, text):
        assert losses == pytest.approx(right, rel=1e-10)


def clip_in_stages(rank: int, world_size: int) -> str:
    model = clip_model()
    with pytest.raises(ValueError) as caught:
        par.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), "pp=2")
    return str(caught.value)


def test_clip_in_stages_is_told_a_way_out():
    """Alike on both ranks. What it names is a plan of the test above."""
    first, second = spawn(2, clip_in_stages)
    assert first == second and "Two towers with an input each (CLIP) cannot be cut into pipeline" in first
    assert first.endswith(f"use a plan with pp=1, such as tp=2,blocks={TEXTS}")


def test_one_rank_and_what_it_is_told():
    """Own rows, no rows for a stand-in without any, and the reason for a refusal."""
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    with gathering(ALONE):
        found = par.gather_rows(x)
        assert torch.equal(found, x) and par.gather_rows(x[:1]).shape == (1, 2)
        assert [len(rows) for rows in take_gathered()] == [3, 1] and take_gathered() == []
        with pytest.raises(ValueError, match=r"x needs rows \(dim 0\); it has no dimensions"):
            par.gather_rows(torch.tensor(1.0))
        with gathering(ALONE, counts=False):
            assert par.gather_rows(x).shape == (0, 2) and len(take_gathered()) == 1
        assert torch.equal(par.gather_rows(x), x)
    with gathering(ALONE, "three microbatches"), pytest.raises(ValueError, match="gather_rows: three microb"):
        par.gather_rows(x)
    with gathering(ALONE, "three microbatches", is_check=True), pytest.raises(RowsGathered):
        par.gather_rows(x)
    assert par.gather_rows(x) is x and take_gathered() == []


def test_elsewhere_it_is_the_tensor():
    x = torch.randn(3, 2)
    assert par.gather_rows(x) is x
