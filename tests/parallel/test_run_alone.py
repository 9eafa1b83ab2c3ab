"""Steps and evaluations in one process, where a plan's own bookkeeping is the same as on many ranks: what is
counted, weighted and left out, call after call.
"""

import pytest
import torch
from late_messages import Mailbox
from mean_losses import data, mean, over_all
from torch import nn

import pycomm.parallel as par
from pycomm.parallel.pipeline import ModelParallel
from pycomm.parallel.run import own_loop, step


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * x


def made(plan=""):
    model = Scaled()
    return par.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.0), plan)


def test_every_second_update_compares(monkeypatch):
    """Calls with update=False do not count as updates; opt.step() in the user's loop does."""
    compared, now = [], []
    for module in (own_loop, step):
        monkeypatch.setattr(module, "compare_replicas", lambda parts: compared.append(now[-1]))
    model, opt = made("compare_every=2")
    x, y = data("uneven")
    kinds = ["waits", "waits", "step", "own", "own", "waits", "step", "step", "own"]
    for number, kind in enumerate(kinds):
        now.append(number)
        if kind == "own":
            opt.zero_grad()
            mean(model(x), y).backward()
            opt.step()
        else:
            par.step(model, opt, (x, y), mean, update=kind == "step")
    # the updates are calls 2, 3, 4, 6, 7, 8; the fourth begins with call 5
    assert compared == [3, 5, 8]


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_each_metric_is_weighted_with_what_counts_for_it(microbatches):
    model, _ = made()
    x, y = data("uneven")
    metrics = {"rows": over_all, "again": mean}
    loss, found = par.evaluate(model, (x, y), mean, metrics=metrics, microbatches=microbatches)
    assert loss.item() == pytest.approx(mean(x, y).item(), rel=1e-6)
    for name, metric in metrics.items():
        assert float(found[name]) == pytest.approx(metric(x, y).item(), rel=1e-6), name


def test_calls_that_wait_are_weighted_with_one_count():
    """A later batch shows that rows count: the calls before were weighted with targets. Afterwards it is
    known.
    """
    model, opt = made()
    par.step(model, opt, data("even"), over_all, update=False)
    with pytest.raises(ValueError, match="is a mean over rows, and earlier calls, .* weighted with targets"):
        par.step(model, opt, data("uneven"), over_all)
    x, y = data("uneven")
    for _ in range(2):
        assert par.step(model, opt, (x, y), over_all, microbatches=2).item() == pytest.approx(
            over_all(x, y).item(), rel=1e-6
        )


class Overflows(nn.Module):
    """The gradient of `late` is inf, its output is not."""

    def __init__(self):
        super().__init__()
        self.scale, self.late = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))
        self.late.requires_grad_(False)

    def forward(self, x):
        return self.scale * x + self.late * 1e38 * 1e38


def test_an_overflow_in_what_was_just_unfrozen():
    """The step is left out, as one of any other parameter."""
    model = Overflows()
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), "")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = torch.ones(2, 3), torch.zeros(2, 3)
    for late, scale in ((False, 4.0), (True, 2.0), (True, 1.0)):
        model.late.requires_grad_(late)
        before = model.scale.item()
        par.step(model, opt, (x, y), nn.functional.mse_loss, scaler=scaler)
        assert scaler.get_scale() == scale and (model.scale.item() == before) is late
        assert model.late.item() == 0.0


class Doubles(nn.Module):
    def forward(self, x):
        return torch.cat([x, x], -1)


def test_inputs_of_one_shape_and_two_dtypes(monkeypatch):
    """Each has its own message; the shape that a stage gives must follow from them."""
    box, inputs = Mailbox(monkeypatch), [torch.ones(2, 3), torch.ones(2, 3).double(), torch.ones(2, 3).long()]

    def body(group):
        model, found = ModelParallel([Doubles(), nn.Identity(), Doubles()], group), []
        for x in (*inputs, inputs[0] * 2, inputs[1][:1]):
            out = model(x)
            if model.is_last:
                found.append(torch.equal(out, torch.cat([x] * 4, -1)) and out.dtype == x.dtype)
        return found

    assert box.run(3, body) == [[], [], [True] * 5]
