"""Models that do something with their logits, or tie more than a table and a head, under tensor parallelism:
as one process.
"""

import pytest
import torch
import torch.nn.functional as F
from odd_models import Plain, cross, tokens
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.groups import as_group
from pycomm.parallel.tensor import ColumnParallelLinear

STEPS = 3


def written(logits, view):
    """The logits, after a view of them was changed."""
    view.view(-1, 29)[:, 3] = 0.5
    return logits


def measured(logits, offset):
    with torch.no_grad():
        assert logits.softmax(-1).amax() <= 1
    return logits + offset


def hooked(logits, offset):
    logits.register_hook(lambda grad: grad * offset)
    return logits


class Changed(Plain):
    def __init__(self, change):
        super().__init__()
        self.change = change
        self.register_buffer("offset", torch.linspace(-1, 1, 29).view(1, 29))

    def forward(self, idx):
        return self.change(super().forward(idx), self.offset)


CHANGES = {
    "nothing": lambda logits, offset: logits,
    "scaled": lambda logits, offset: 0.5 - (logits * 0.7) / 1.1,
    "soft cap": lambda logits, offset: torch.tanh(logits / 3.0) * 3.0,
    "offset": lambda logits, offset: logits + offset,
    "offset first": lambda logits, offset: offset + logits,
    "log_softmax": lambda logits, offset: F.log_softmax(2 * logits, -1),
    "softmax": lambda logits, offset: logits.softmax(-1) * 4,
    "centred": lambda logits, offset: logits - logits.mean(-1, keepdim=True),
    "viewed": lambda logits, offset: logits.view(-1, logits.size(-1)).view(logits.shape),
    "stacked": lambda logits, offset: torch.stack([logits, offset.expand(logits.shape)]).sum(0),
    "multiplied by itself": lambda logits, offset: logits * logits,
    "out of place and in": lambda logits, offset: (logits * 1.5).clone() + offset.exp(),
    "measured before": measured,
    "hook": hooked,
    "in place": lambda logits, offset: logits.add_(offset),
    "relu in place": lambda logits, offset: (F.relu(logits, inplace=True), logits)[1],
    "view written": lambda logits, offset: written(logits, logits),
    "contiguous written": lambda logits, offset: written(logits, logits.contiguous()),
    "detached written": lambda logits, offset: written(logits, logits.detach()),
    "data written": lambda logits, offset: written(logits, logits.data),
    "transposed": lambda logits, offset: logits.mT.softmax(1).mT,
}
FREE = {"nothing", "scaled", "soft cap"}


def train(model, plan=None):
    model = model.double()
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    if plan is not None:
        par.parallelize(model, opt, plan)
    for step in range(STEPS):
        x, y = tokens(step)
        if plan is None:
            opt.zero_grad()
            loss = cross(model(x), y)
            loss.backward()
            opt.step()
        else:
            loss = par.step(model, opt, (x, y), par.cross_entropy)
        losses.append(loss.item())
    state = par.full_state_dict(model) if plan is not None else dict(model.state_dict())
    return losses, {name: value.detach().clone() for name, value in state.items()}


def check(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=1e-12, msg=name)


def changed(rank, world_size, name):
    torch.manual_seed(0)
    with par.count_traffic() as traffic:
        found = train(Changed(CHANGES[name]), par.Plan(tp=2))
    return found, traffic.calls("all_gather")


@tier(quick=1 / 21)
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_model_does_with_its_logits(name):
    """What it returns is cut, or an elementwise function of it; anything else is computed from the whole, for
    which they are gathered once a step.
    """
    torch.manual_seed(0)
    expected = train(Changed(CHANGES[name]))
    found = spawn(2, changed, name)
    gathers = {gathers for _, gathers in found}
    plain = spawn(2, changed, "nothing")[0][1]
    assert gathers == {plain if name in FREE else plain + STEPS}
    for each, _ in found:
        check(each, expected)


MORE_CHANGES = {
    "scaled after it was written": lambda logits, offset: (logits.add_(offset), logits * 0.5)[1],
    "cast after a view was written": lambda logits, offset: written(logits, logits).double() * 2,
    "measured and then scaled": lambda logits, offset: measured(logits * 2, 0) * 0.5,
    "sizes": lambda logits, offset: logits * (logits.size(-1) + logits.shape[-1] + logits.numel() / 58),
    "of a list": lambda logits, offset: torch.cat([logits, logits], 1)[:, : logits.size(1)],
    "by name": lambda logits, offset: torch.add(input=logits, other=offset),
    "negative": lambda logits, offset: -torch.neg(logits) - 1,
    "divided": lambda logits, offset: (1 + logits) / 3,
    "by a tensor": lambda logits, offset: logits.mul(offset[:, :1]),
    "number before": lambda logits, offset: 2 * logits,
    "power": lambda logits, offset: logits.pow(2),
    "sorted": lambda logits, offset: logits.sort(-1)[0],
    "shifted": lambda logits, offset: logits.roll(1, -1),
}


def head_of_words():
    torch.manual_seed(3)
    head = nn.Linear(4, 29).double()
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return head, x.requires_grad_(), torch.linspace(-1, 1, 29).double().view(1, 29)


def of_one_head(head, x, logits_of):
    """Loss and gradients, with targets on the first and the last rank and none."""
    targets = torch.tensor([[0, 28, -100], [15, 14, 9]])
    loss = par.cross_entropy(logits_of(head(x)), targets)
    (loss * 3).backward()
    return loss.detach(), x.grad, head.weight.grad, head.bias.grad


def changed_alone(rank, world_size):
    found = {}
    for name, change in {**CHANGES, **MORE_CHANGES}.items():
        head, x, offset = head_of_words()
        layer = ColumnParallelLinear.from_module(head, as_group(None, "tp"))
        layer.become_head()
        layer.leave_cut(True)
        found[name] = of_one_head(layer, x, lambda logits: change(logits, offset))  # noqa: B023
    return found, layer.layouts()


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_changes_of_logits_by_themselves(world_size):
    """Each without a model around it: the loss, and the gradients of the head and of its input."""
    results = spawn(world_size, changed_alone)
    for name, change in {**CHANGES, **MORE_CHANGES}.items():
        head, x, offset = head_of_words()
        changed_logits = lambda logits: change(logits, offset)  # noqa: E731, B023
        loss, of_x, of_weight, of_bias = of_one_head(head, x, changed_logits)
        for found, layouts in results:
            right = loss, of_x, layouts["weight"].take(of_weight), layouts["bias"].take(of_bias)
            for mine, value in zip(found[name], right, strict=True):
                torch.testing.assert_close(mine, value, rtol=0, atol=1e-12, msg=name)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


UNSEEN = [
    lambda logits, offset: Twice.apply(logits) + offset,
    lambda logits, offset: logits - torch.vmap(lambda x: x.logsumexp(-1))(logits)[..., None],
    lambda logits, offset: logits - torch.func.grad(lambda x: x.logsumexp(-1).sum())(logits),
]


def unseen(rank, world_size, change):
    with pytest.raises(ValueError, match="code that torch's functions do not see.*'replicate'"):
        train(Changed(change), par.Plan(tp=2))


@pytest.mark.parametrize("change", UNSEEN)
def test_code_that_would_take_a_part_for_the_whole_is_refused(change):
    spawn(2, unseen, change)


def gathers_of(rank, world_size, plan):
    torch.manual_seed(0)
    with par.count_traffic() as traffic:
        found = train(Changed(CHANGES["nothing"]), plan)
    return found, traffic.calls("all_gather", "tp")


def test_sharded_values_do_not_gather_logits():
    """ZeRO-3 hooks what a module returns."""
    torch.manual_seed(0)
    expected = train(Changed(CHANGES["nothing"]))
    plain = spawn(2, gathers_of, par.Plan(tp=2))[0][1]
    for found, gathers in spawn(4, gathers_of, par.Plan(dp=2, tp=2, zero=3)):
        check(found, expected)
        assert gathers == plain


class Tied(Plain):
    """Three tables and a head of one weight, as in T5."""

    def __init__(self):
        super().__init__()
        self.second, self.third = nn.Embedding(29, 16), nn.Embedding(29, 16)
        self.second.weight = self.third.weight = self.head.weight = self.tok.weight
        for name in ("blocks", "norm", "head"):
            self._modules[name] = self._modules.pop(name)  # in the order in which they are called

    def forward(self, idx):
        x = self.run_blocks(self.tok(idx) + self.second(idx.flip(1)) - self.third(idx.roll(1, 1)))
        return self.head(self.norm(x))


class Alias(Plain):
    """The head's bias has a second name outside of the head, as in BERT, which is read."""

    def __init__(self):
        super().__init__()
        self.bias = self.head.bias
        nn.init.normal_(self.bias)
        self.head.weight = self.tok.weight

    def forward(self, idx):
        return super().forward(idx) + self.bias.square().mean()


def tied(rank, world_size, kind, plan):
    torch.manual_seed(0)
    return train(kind(), plan)


@tier(quick=1 / 6)
@pytest.mark.parametrize("plan", ["tp=2", "tp=2,pp=2", "dp=2,tp=2,zero=2"])
@pytest.mark.parametrize("kind", [Tied, Alias])
def test_weights_that_are_tied_more_than_once(kind, plan):
    torch.manual_seed(0)
    expected = train(kind())
    plan = par.Plan.parse(plan)
    for found in spawn(plan.world_size, tied, kind, plan):
        check(found, expected)


def cut_names(kind):
    lines = par.tensor.apply.find(kind())
    return {line.fqn for line in lines.found if line.rule == "vocab"}


def test_all_of_them_are_cut_or_none():
    assert cut_names(Tied) == {"tok", "second", "third", "head"}
    assert cut_names(Alias) == set()
