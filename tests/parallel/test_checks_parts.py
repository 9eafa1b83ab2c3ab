"""Parts of the checks by themselves, in one process: what they compare, and what they leave as it was."""

import collections
import functools
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from late_messages import Meeting
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import pycomm.parallel as par
from pycomm.parallel.checks import agree, choice, gradient_hooks, outputs, positions, rows
from pycomm.parallel.checks.copied import copied_function
from pycomm.parallel.checks.cut import is_same
from pycomm.parallel.checks.kept import kept
from pycomm.parallel.checks.measures import Refused, Unweighted
from pycomm.parallel.checks.optimizers import try_optimizer
from pycomm.parallel.ground.answers import State
from pycomm.parallel.ground.batch import count_targets

CPU, NAN, INF = torch.device("cpu"), torch.nan, torch.inf

# Copies, and what is kept --------------------------------------------------------------------

SEEN, TABLE, QUEUE = [], {"calls": 0}, collections.deque([1, 2], maxlen=2)


def nested(x):
    def inner():
        SEEN.append(1)
        return [QUEUE.append(3) for _ in range(1)]

    inner()
    TABLE["calls"] += 1
    return x


class Holder:
    def __init__(self):
        self.calls = 0

    def method(self, x, *, more=[]):  # noqa: B006
        self.calls += 1
        more.append(1)
        return x + self.calls


def closing():
    held, counts = [], {"calls": 0}

    def inner(x):
        held.append(x)
        counts["calls"] += 1
        return x * len(held)

    return (lambda x: inner(x)), held, counts


def test_a_copy_of_a_function_writes_to_copies():
    """Globals of the functions inside of it too, closures of closures, defaults, arguments, objects."""
    holder, kept_list, (outer, held, counts) = Holder(), [], closing()

    def defaults(x, own=[], *, named=kept_list):  # noqa: B006
        own.append(1)
        named.append(1)
        return x + len(own)

    partial = functools.partial(lambda given, key, x: given.append(x) or len(given) + key, kept_list, key=1)
    for function in (nested, holder.method, outer, defaults, functools.partial(partial, x=2)):
        twin = copied_function(function)
        first = [twin(1) if function.__class__ is not functools.partial else twin() for _ in range(2)]
        again = copied_function(function)
        assert first[0] == (again(1) if function.__class__ is not functools.partial else again())
    assert (SEEN, TABLE, list(QUEUE)) == ([], {"calls": 0}, [1, 2]) and not held and counts == {"calls": 0}
    assert holder.calls == 0 and not kept_list and not defaults.__defaults__[0]
    assert not Holder.method.__kwdefaults__["more"]


class Holds(nn.Module):
    """What draws, counts or fills when it is used."""

    def __init__(self):
        super().__init__()
        self.linear, self.python, self.torchs = nn.Linear(2, 2), random.Random(3), torch.Generator()
        self.bytes, self.row = bytearray(b"ab"), collections.deque([1, 2, 3], maxlen=3)
        self.tables = {"deep": [{"calls": 0}, (torch.zeros(2), [1])]}
        self.names, self.own = {"a"}, SimpleNamespace(count=0)
        self.linear.register_buffer("total", torch.zeros(1))


def use(model):
    model.python.random()
    torch.rand(1, generator=model.torchs)
    model.bytes[0] = 0
    model.row.append(9)
    model.tables["deep"][0]["calls"] += 1
    model.tables["deep"][1][0].add_(1)
    model.tables["deep"][1][1].append(2)
    model.tables["more"] = 1
    model.names.add("b")
    model.own.count += 1
    model.linear.total += 1
    model.late, model.linear.extra = nn.Dropout(), [1]
    model.linear.weight.grad = torch.ones(2, 2)
    model.linear.weight.register_hook(lambda gradient: gradient)
    model.linear.register_forward_hook(lambda *given: None)
    model.training = model.linear.training = False


def state_of(model):
    own = [model.tables, model.bytes, list(model.row), model.names, model.own.count, list(vars(model))]
    linear = model.linear
    more = [
        linear.total,
        len(linear._forward_hooks),
        len(linear.weight._backward_hooks or ()),
        list(vars(linear)),
    ]
    state = [model.python.getstate(), model.torchs.get_state().tolist(), list(model._modules), model.training]
    return repr([own, more, state, linear.training])


def test_what_a_run_aside_writes_is_put_back():
    """After an error too, and again; every place has the same object."""
    model = Holds()
    before, random_numbers = state_of(model), torch.get_rng_state()
    places = [model.python, model.torchs, model.bytes, model.row, model.tables, model.tables["deep"][1][0]]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), kept(model):
            use(model)
            assert state_of(model) != before
            1 / 0  # noqa: B018
        assert state_of(model) == before
        now = [model.python, model.torchs, model.bytes, model.row, model.tables, model.tables["deep"][1][0]]
        assert all(one is other for one, other in zip(places, now, strict=True))
    assert torch.equal(random_numbers, torch.get_rng_state()) and model.row.maxlen == 3


class Loss:
    def __init__(self):
        self.calls, self.large = 0, torch.zeros(1)

    def __call__(self, out, y):
        self.calls += 1
        self.large += 1
        return out


def test_what_a_loss_holds_is_put_back():
    loss, (function, held, counts) = Loss(), closing()
    for each in (loss, function, functools.partial(loss, y=1)):
        with kept(Holds(), each):
            each(1, 2) if each is loss else each(1)
    assert loss.calls == 0 and loss.large == 0 and not held and counts == {"calls": 0}


class Fails(torch.optim.Optimizer):
    """Raises, or draws random numbers, in its step."""

    def __init__(self, params, how):
        super().__init__(params, {"lr": 0.1})
        self.how = how

    def step(self, closure=None):
        torch.rand(3) if self.how == "draws" else 1 / 0


@pytest.mark.parametrize("how, why", [("raises", "ZeroDivisionError"), ("draws", "it draws random numbers")])
def test_hooks_of_all_optimizers_stay_after_a_trial_that_fails(how, why):
    calls, model, random_numbers = [], nn.Linear(2, 2), torch.get_rng_state()
    handles = [
        register_optimizer_step_pre_hook(lambda *given: calls.append("before")),
        register_optimizer_step_post_hook(lambda *given: calls.append("after")),
    ]
    try:
        answer = try_optimizer(Fails(model.parameters(), how), par.Plan(dp=2, zero=1))
        assert answer.state is State.NOT_TRIED and why in answer.why and calls == []
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["before", "after"] and torch.equal(random_numbers, torch.get_rng_state())


# Whether a loss is the one that is known ------------------------------------------------------


def made(value, *, default=1, named=1):
    """A function in which values of three kinds are."""

    def loss(out, y, weight=default, *, more=named):
        return out * value * weight * more

    return loss


class Module(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value


HOLDER, TENSOR = Holder(), torch.ones(2)
SAME = [
    (made(1), made(1)),
    (made([1, {"a": (2.5, "b")}]), made([1, {"a": (2.5, "b")}])),
    (functools.partial(made(1), weight=2), functools.partial(made(1), weight=2)),
    (HOLDER.method, HOLDER.method),
    (Module(3), Module(3)),
    (nn.CrossEntropyLoss(), nn.CrossEntropyLoss()),
    (made(nn.MSELoss()), made(nn.MSELoss())),
    (made(TENSOR), made(TENSOR)),
    (None, None),
]
OTHER = [
    (made(1), made(2)),
    (made(1), made(1, default=2)),
    (made(1), made(1, named=2)),
    (made(1), made(1.0)),
    (made(1), made(True)),
    (made([1]), made((1,))),
    (made([1]), made([1, 2])),
    (made({"a": 1}), made({"b": 1})),
    (made({"a": 1}), made({"a": 2})),
    (functools.partial(made(1), weight=2), functools.partial(made(1), weight=3)),
    (functools.partial(made(1), 2), functools.partial(made(1), 3)),
    (functools.partial(made(1)), functools.partial(made(2))),
    (HOLDER.method, Holder().method),
    (Module(3), Module(4)),
    (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)),
    (nn.CrossEntropyLoss(), nn.NLLLoss()),
    (made(TENSOR), made(TENSOR.clone())),
    (len, abs),
    (None, made(1)),
]


def test_which_losses_are_the_same():
    assert all(is_same(one, other) and is_same(other, one) for one, other in SAME)
    for number, (one, other) in enumerate(OTHER):
        assert not is_same(one, other) and not is_same(other, one), number


# Numbers ------------------------------------------------------------------------------------


def halved(gradient):
    """In place, without a result."""
    gradient.mul_(0.5)


LINEAR = {
    "half": lambda g: g * 0.5,
    "mask": lambda g: g * (torch.arange(12.0).view(3, 4) % 2).to(g),
    "in place": halved,
    "nothing": lambda g: None,
    "negative": lambda g: -g,
}
NOT_LINEAR = {
    "nan": lambda g: g * NAN,
    "one nan": lambda g: g + torch.where(torch.arange(12).view(3, 4) == 11, NAN, 0.0).to(g),
    "clamped": lambda g: g.clamp(-1e-3, 1e-3),
    "positive": torch.relu,
    "absolute": torch.abs,
    "norm": lambda g: g / g.norm().clamp_min(1.0),
    "shifted": lambda g: g + 1.0,
    "rounded": torch.round,
}


def judged(hook, shape=(3, 4), dtype=torch.float32):
    info = SimpleNamespace(param=torch.zeros(shape, dtype=dtype), shape=shape)
    return gradient_hooks._judged(hook, info)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradient_hooks_that_are_linear(dtype):
    for name, hook in LINEAR.items():
        found = judged(hook, dtype=dtype)
        assert (found.of_summands, found.of_pieces) == (None, None), name
        assert (found.of_tied is None) == (name == "nothing"), name
    for name, hook in NOT_LINEAR.items():
        assert judged(hook, dtype=dtype).of_summands is not None, name
    centered = judged(lambda g: g - g.mean(0, keepdim=True), dtype=dtype)
    assert centered.of_summands is None and "other elements change" in centered.of_pieces
    assert "raises ZeroDivisionError" in judged(lambda g: 1 / 0, dtype=dtype).of_summands


def test_how_far_rows_are_apart():
    """By min and max of pairs; nan is where nan is, and none beside a number."""
    values = torch.tensor([[1.0, NAN, INF, -0.0, 1e-40], [2.0, NAN, -INF, 0.0, 5.0]])
    a, b = values
    for one, other in itertools.product((a, b), repeat=2):
        assert rows.distance([one, other, one, other]) == rows.distance([one, other, other, one]) == 0.0
    mixed = torch.tensor([True, False, True, False, True])
    c, d = torch.where(mixed, a, b), torch.where(mixed, b, a)
    assert rows.distance([a, b, c, d]) == 0.0
    for place in (0, 2, 3, 4):
        used = torch.arange(5) != place
        wrong = c.clone()
        wrong[place] = 3.0
        assert rows.distance([a, b, wrong, d]) > 0.0, place
        assert rows.distance([a, b, wrong, d], used) == 0.0, place
    assert rows.distance([a, b, torch.full_like(a, NAN), d]) == INF
    assert rows.distance([torch.zeros(2)] * 4) == 0.0


def test_means_that_are_weighted_by_class():
    out, y, weight = torch.randn(4, 3), torch.tensor([0, 1, 2, 1]), torch.tensor([1.0, 2.0, 3.0])
    for function, name in ((F.cross_entropy, "cross_entropy"), (F.nll_loss, "nll_loss")):
        for refused in (
            lambda f=function: f(out, y, weight),
            lambda f=function: f(out, y, weight=weight),
            lambda f=function: f(input=out, target=y, weight=weight, reduction="mean"),
        ):
            with pytest.raises(Refused, match=f"loss_fn calls {name} with weights"), Unweighted():
                refused()
        with Unweighted():
            assert torch.equal(function(out, y), function(out, y, None, reduction="mean"))
            assert function(out, y, weight, reduction="sum").dim() == 0
            assert function(out, y, weight, None, -100, None, "none").shape == (4,)


def test_which_part_of_a_large_output_is_compared():
    """The same places each time, spread over all, no more than asked for; a copy."""
    for size, most in ((1, 5), (5, 5), (6, 5), (17, 5), (100, 7), (64, 8)):
        leaf = torch.arange(float(size))
        part = outputs.part_of(leaf, most)
        assert 0 < len(part) <= most and torch.equal(part, outputs.part_of(leaf, most))
        assert size > most or len(part) == size
        assert len(part) == 1 or part.diff().unique().numel() == 1
        assert part.data_ptr() != leaf.data_ptr()


# Rows and positions ---------------------------------------------------------------------------


def test_rows_that_differ_most():
    """The fewest and the most that count are among two; in the order of what counts; again where there are
    too few.
    """
    y = torch.randint(0, 9, (11, 6), generator=torch.Generator().manual_seed(1))
    y[torch.rand(11, 6, generator=torch.Generator().manual_seed(2)) < 0.5] = -100
    y[3], y[7], y[8] = -100, -100, 4
    y[7, 0] = 1
    x = torch.randn(11, 6, generator=torch.Generator().manual_seed(3))
    scores = choice.scores_of(y, count_targets)
    assert scores[:, 0].tolist() == (y != -100).sum(1).tolist()
    few = [scores[row, 0].item() for row in choice.chosen_rows(x, y, scores, 2)]
    assert few == [0, 6] == [scores[:, 0].min(), scores[:, 0].max()]
    for number in (1, 2, 5, 11, 16):
        found = choice.chosen_rows(x, y, scores, number)
        counts = [scores[row, 0].item() for row in found]
        assert len(found) == number and counts == sorted(counts) and len(set(found)) == min(number, 11)
    same = torch.ones(3, 6, dtype=torch.long)
    assert sorted(choice.chosen_rows(x[:3], same, choice.scores_of(same, count_targets), 4)) in (
        [0, 0, 1, 2], [0, 1, 1, 2], [0, 1, 2, 2])  # fmt: skip


@pytest.mark.parametrize("place", [0, 300, 640, 1023])
def test_a_window_lies_where_rows_differ(place):
    """And has as many positions as it may; the whole where there are few."""
    y = torch.ones(2, 1024, dtype=torch.long)
    y[1, place] = -100
    window = choice.window_of(y, y, 64)
    assert window.length == 1024 and window.width == 128 and window.start <= place < window.start + 128
    cut = window.of({"x": y, "square": torch.zeros(2, 1024, 1024), "other": torch.zeros(1024, 5), "n": 3})
    assert (
        cut["x"].shape == (2, 128)
        and cut["square"].shape == (2, 128, 128)
        and cut["other"].shape == (1024, 5)
    )
    assert (cut["x"] == -100).sum() == 1 and cut["n"] == 3
    assert choice.window_of(y, y, 10**9).width == 512 and choice.window_of(y, y, 64, least=200).width == 200
    assert choice.window_of(y[:, :100], y[:, :100], 64) is None
    assert choice.window_of(torch.zeros(2), torch.zeros(2), 64) is None


# Ranks agree --------------------------------------------------------------------------------


def parts_of(group, words):
    return SimpleNamespace(
        mesh=SimpleNamespace(world=group), device=CPU, last_words=SimpleNamespace(leave=words.append)
    )


@pytest.mark.parametrize("which", [(0,), (2,), (1, 2), (0, 1, 2), ()])
def test_all_ranks_raise_the_sentence_of_the_first_that_has_one(which, monkeypatch):
    def body(group):
        own = f"of rank {group.rank}: " + "ä" * 2000 if group.rank in which else None
        with pytest.raises(ValueError) as raised:
            agree.raise_together(parts_of(group, []), own)
        return str(raised.value)

    if not which:
        return  # not called in this way
    for rank, said in enumerate(Meeting(monkeypatch).run(3, body)):
        assert (
            said.startswith(f"[rank {rank}] of rank {which[0]}: ää")
            and "\N{REPLACEMENT CHARACTER}" not in said
        )
        assert 1000 < len(said.encode()) < 1600


def test_the_largest_numbers_of_all_ranks(monkeypatch):
    """Last words are left while a rank that has raised waits, and taken back where the others have come."""
    words = [[] for _ in range(3)]

    def body(group):
        error = ZeroDivisionError("no") if group.rank == 1 else agree.Elsewhere() if group.rank else None
        parts = parts_of(group, words[group.rank])
        return agree.agreed(parts, group.rank, -group.rank, group.rank == 2, error=error)

    assert Meeting(monkeypatch).run(3, body) == [[2.0, 0.0, 1.0]] * 3
    assert words == [[], [None], []]


class Units:
    def __init__(self, number):
        self.units = [SimpleNamespace(after_gather=None) for _ in range(number)]


@pytest.mark.parametrize("number", [0, 2])
def test_parameters_that_are_zero_are_so_again(number):
    """Inside they have small values that differ; under zero=3 when they are gathered."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    parts = SimpleNamespace(model=model, units=Units(number) if number else None)
    before = {name: (value.data_ptr(), value.detach().clone()) for name, value in model.named_parameters()}
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), positions._awake(parts):
            for unit in parts.units.units if number else ():
                unit.after_gather([model[1].bias])
            assert model[1].bias.abs().max() <= 0.1 and len(model[1].bias.unique()) == 3
            assert torch.equal(model[1].weight, torch.ones(3))
            model[1].bias.data = before["1.bias"][1].clone() if number else model[1].bias.data
            1 / 0  # noqa: B018
        assert not number or all(unit.after_gather is None for unit in parts.units.units)
        for name, value in model.named_parameters():
            assert torch.equal(value, before[name][1]), name
            assert number or value.data_ptr() == before[name][0]
