"""What hangs at a parallelized model: its refusals, what it notes of its steps, samplers, and the words that
the front adds to errors. One process, and stand-ins for several.
"""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DistributedSampler

import pycomm
import pycomm.parallel as par
from pycomm.parallel import api
from pycomm.parallel.parts import LastStep, Passes, Saves, parts_of


def small(**options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3))
    model[1].register_buffer("exact", torch.ones(2, dtype=torch.float64))
    return par.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1, **options))


def batch(rows=8):
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))
    return x, x[:, :3]


CHANGES = {
    "half()": lambda model: model.half(),
    "double()": lambda model: model.double(),
    "float()": lambda model: model.float(),  # only a buffer would change
    "to(bfloat16)": lambda model: model.to(torch.bfloat16),
    "to(meta)": lambda model: model.to("meta"),
    "share_memory()": lambda model: model.share_memory(),
}
REFUSED = r"this Sequential is one rank's part of a model under Plan\(single process\), in torch.\w+ on cpu"


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_a_tensor_is_refused(name):
    """And nothing is changed, not even those that come first."""
    model, _ = small()
    before = {key: (value.dtype, value.data_ptr()) for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=REFUSED):
        CHANGES[name](model)
    assert {key: (value.dtype, value.data_ptr()) for key, value in model.state_dict().items()} == before
    assert model.to("cpu") is model and model.cpu() is model


def test_no_copy_and_no_pickle():
    model, _ = small()
    for copied in (copy.deepcopy, pickle.dumps, lambda m: copy.deepcopy([m])):
        with pytest.raises(ValueError, match="cannot be copied or pickled.*call parallel.ema"):
            copied(model)
    assert copy.deepcopy(model[0].weight.detach()).shape == (6, 4)


def test_another_model_and_another_optimizer_are_refused():
    (model, opt), (_, other) = small(), small()
    assert parts_of(model) is parts_of(model, opt) and parts_of(model).opt is opt
    for wrong in (torch.nn.Linear(2, 2), 3, None, opt):
        with pytest.raises(ValueError, match=r"this model has not been through parallelize\(\)"):
            parts_of(wrong)
    for call in (lambda: parts_of(model, other), lambda: par.step(model, other, batch(), mse_loss)):
        with pytest.raises(ValueError, match="is not the one that the model was parallelized with"):
            call()
    with pytest.raises(ValueError, match="step needs the optimizer .*parallel.evaluate needs none"):
        par.step(model, None, batch(), mse_loss)
    assert par.evaluate(model, batch(), mse_loss) > 0


def test_a_norm_is_that_of_the_last_step():
    """Before clipping; none where a step did not ask for it; updates are counted."""
    model, opt = small()
    values = {name: value.clone().requires_grad_() for name, value in model.named_parameters()}
    loss = mse_loss(torch.func.functional_call(model, values, batch()[0]), batch()[1])
    gradients = torch.autograd.grad(loss, list(values.values()))
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    assert par.grad_norm(model) is None
    par.step(model, opt, batch(), mse_loss, clip=1e-3)
    assert par.grad_norm(model).item() == pytest.approx(norm, rel=1e-5)
    par.step(model, opt, batch(), mse_loss)
    assert par.grad_norm(model) is None and parts_of(model).last_step.updates == 2
    par.step(model, opt, batch(), mse_loss, clip=float("inf"))
    assert par.grad_norm(model) > 0
    last = LastStep()
    last.note(torch.ones(()), {"dp": 3})
    last.note(None)
    assert (last.norm, last.sent) == (None, None)


def test_means_come_back_by_their_names():
    model, _ = small()
    metrics = {"b": lambda out, y: 2.0, "a": lambda out, y: (out - y).abs().mean(), "c": lambda *_: 0.5}
    loss, found = par.evaluate(model.eval(), batch(), mse_loss, metrics=metrics, microbatches=3)
    with torch.no_grad():
        expected = (model(batch()[0]) - batch()[1]).abs().mean().item()
    assert list(found) == ["b", "a", "c"] and (found["b"], found["c"]) == (2.0, 0.5)
    assert found["a"].item() == pytest.approx(expected, rel=1e-5) and found["a"].dtype == torch.float64
    assert loss.item() == pytest.approx(par.evaluate(model, batch(), mse_loss).item(), rel=1e-6)


@pytest.mark.parametrize("rows", [(1, 0), (3, 0), (3, 1), (3, 2)])
@pytest.mark.parametrize(
    "options", [{}, {"seed": 5}, {"shuffle": False}, {"seed": 2, "drop_last": True}], ids=str
)
def test_a_sampler_is_that_of_the_data_ranks(rows, options, monkeypatch):
    monkeypatch.setattr(api, "parts_of", lambda model: SimpleNamespace(mesh=SimpleNamespace(rows=rows)))
    found, right = par.sampler(None, range(20), **options), DistributedSampler(range(20), *rows, **options)
    for epoch in (0, 4):
        found.set_epoch(epoch), right.set_epoch(epoch)
        assert list(found) == list(right) and len(found) == len(right)
    assert (found.seed, found.shuffle, found.drop_last) == (right.seed, right.shuffle, right.drop_last)


@pytest.mark.parametrize(
    ("error", "saved", "text"),
    [
        (pycomm.PeerError("rank 1 died", peer=1), "here", "rank 1 died The last checkpoint is here."),
        (pycomm.CommTimeoutError("late"), "here", "late The last checkpoint is here."),
        (pycomm.PeerError("rank 1 died", peer=1), None, "rank 1 died"),
        (pycomm.MismatchError("other sizes"), "here", "other sizes"),
        (ValueError("a batch"), "here", "a batch"),
    ],
)
def test_a_broken_group_names_the_checkpoint(error, saved, text):
    parts = SimpleNamespace(saves=SimpleNamespace(last=saved))
    with pytest.raises(type(error)) as found, api._way_back(parts):
        raise error
    assert found.value is error and str(error) == text
    assert getattr(error, "peer", None) == (1 if isinstance(error, pycomm.PeerError) else None)


def test_saves_have_one_group():
    saves, made = Saves(), []
    groups = [saves.group_of(lambda: made.append(1) or object()) for _ in range(3)]
    assert made == [1] and groups[0] is groups[1] is groups[2] and saves.last is None


def test_what_a_rank_does_with_its_model():
    """Forwards inside of forwards, steps that raise, and what the user's own loop has left."""
    passes, told = Passes(), []
    passes.drop = lambda: told.append("drop")
    passes.outside = SimpleNamespace(
        is_used=True, allow=lambda: told.append("allow"), refuse=lambda: told.append("refuse")
    )
    with passes.forward():
        with passes.forward():
            assert passes.running == 2
        assert passes.running == 1 and told == ["allow", "allow"]
    assert passes.running == 0 and told == ["allow", "allow", "refuse"]
    with pytest.raises(KeyError), passes.forward():
        raise KeyError
    assert passes.running == 0 and told[-1] == "refuse"
    passes.own, told[:] = True, []
    with pytest.raises(KeyError), passes.step():
        assert (passes.in_step, passes.left, passes.own, passes.outside.is_used) == (True, True, False, False)
        raise KeyError
    assert told == ["drop"] and not passes.in_step and passes.left
