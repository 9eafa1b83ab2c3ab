"""What pycomm.parallel.models knows of a model, part by part and without ranks: what is remembered across a
run without data, random numbers, views of a configuration, copies, and the list of blocks.
"""

import collections
import copy
import functools
import random
import sys
import threading
import types

import numpy
import pytest
import torch
import torch._dynamo  # noqa: F401  (without it nothing is compiled)
from models import Block
from odd_models import Plain
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from pycomm.parallel.models import drawn, modes
from pycomm.parallel.models.caches import Caches
from pycomm.parallel.models.config_view import ConfigView, values_of
from pycomm.parallel.models.norms import batch_norms
from pycomm.parallel.models.trunk import (
    Side,
    Trunk,
    find_trunk,
    hidden_of,
    hidden_out,
    owners,
    replace_hidden,
)

# Results that functools.lru_cache remembers -----------------------------------------------------


def module_of(name, monkeypatch, **functions):
    module = types.ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def table(length):
    return torch.arange(length)


def cached(function=table, module="of_a_user"):
    made = functools.lru_cache(lambda *args: function(*args))
    made.__module__ = module
    return made


def sizes(*caches):
    return [each.cache_info().currsize for each in caches]


def test_a_run_without_data_leaves_nothing_in_a_cache(monkeypatch):
    one, other, method = cached(), cached(), cached()
    module_of("of_a_user", monkeypatch, one=one, other=other, Kind=type("Kind", (), {"method": method}))
    caches = Caches()
    other(3)
    assert caches.around(lambda: (one(2), method(4), "result"))[2] == "result"
    assert sizes(one, other, method) == [0, 1, 0]  # what the run has not asked stays
    assert torch.equal(other(3), table(3)) and other.cache_info().hits == 1


def test_a_cache_of_a_module_that_comes_later_and_of_torch(monkeypatch):
    caches = Caches()
    late, of_torch = cached(), cached(module="torch.of_a_user")
    module_of("of_a_user_later", monkeypatch, late=late, of_torch=of_torch)
    caches.around(lambda: (late(2), of_torch(2)))
    assert sizes(late, of_torch) == [0, 1]


@pytest.mark.parametrize("old", [0, 1])
def test_a_run_that_was_given_something_old_is_tried_again(monkeypatch, old):
    """Whichever of the caches it was, and once more only."""
    both = [cached(lambda name: object()) for _ in range(2)]
    module_of("of_a_user", monkeypatch, one=both[0], other=both[1])
    caches, runs = Caches(), []
    real = both[old]("real")

    def run():
        runs.append([each("real") for each in both])
        if len(runs) == 1:
            raise TypeError("real and meta")
        return len(runs)

    assert caches.around(run) == 2 and caches.hit is False and sizes(*both) == [0, 0]
    assert runs[0][old] is real and runs[1][old] is not real


def test_a_run_that_fails_by_itself_is_not_tried_again(monkeypatch):
    one, runs = cached(), []
    module_of("of_a_user", monkeypatch, one=one)
    caches = Caches()

    def run():
        runs.append(one(2))
        raise KeyError("its own")

    for count in (1, 2):
        with pytest.raises(KeyError, match="its own"):
            caches.around(run)
        assert len(runs) == count and sizes(one) == [0]


# Random numbers ------------------------------------------------------------

DRAWS = {
    "torch": lambda: torch.rand(1),
    "python": random.random,
    "numpy": numpy.random.random,
    "numpy's normals": numpy.random.standard_normal,  # keeps every second one for the next call
}


@pytest.mark.parametrize("name", DRAWS)
def test_whatever_is_drawn_is_seen(name):
    before = drawn.drawn(torch.device("cpu"))
    assert drawn.same(before, drawn.drawn(torch.device("cpu")))
    DRAWS[name]()
    assert not drawn.same(before, drawn.drawn(torch.device("cpu")))


@pytest.mark.parametrize("fails", [False, True])
def test_pythons_and_numpys_numbers_are_put_back(fails):
    numpy.random.standard_normal()
    expected = random.getstate(), numpy.random.get_state()
    try:
        with drawn.kept():
            for draw in DRAWS.values():
                draw()
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert random.getstate() == expected[0]
    for mine, right in zip(numpy.random.get_state(), expected[1], strict=True):
        assert numpy.array_equal(mine, right)


def test_numbers_are_passed_over():
    for number in (0, 1, 3):
        before = drawn.drawn(torch.device("cpu"))
        expected = [random.Random(), numpy.random.RandomState()]
        expected[0].setstate(random.getstate())
        expected[1].set_state(numpy.random.get_state())
        drawn.pass_over(number, torch.device("cpu"))
        after = drawn.drawn(torch.device("cpu"))
        same = [drawn.same([one], [other]) for one, other in zip(before, after, strict=True)]
        assert same == [number == 0] * 3
        for _ in range(number):
            expected[0].random()
        expected[1].random(number)
        assert random.getstate() == expected[0].getstate()
        assert numpy.random.random() == expected[1].random()


# Configurations, copies, modes ------------------------------------------------------------


class Config:
    heads, name = 4, "of the class"

    def __init__(self):
        self.width = 12


def test_a_view_of_a_configuration():
    config = Config()
    view = ConfigView(config, {"heads": 1, "width": 3})
    nested = ConfigView(view, {"width": 2})
    assert (view.heads, view.width, view.name, nested.heads, nested.width) == (1, 3, "of the class", 1, 2)
    assert values_of(config) == {"width": 12}
    assert values_of(view) == {"heads": 1, "width": 3} and values_of(nested) == {"heads": 1, "width": 2}
    view.new, nested.name = 5, "written"
    assert (config.new, config.name, nested.new, view.name) == (5, "written", 5, "written")
    assert config.width == 12 and config.heads == 4
    with pytest.raises(AttributeError):
        _ = view.missing
    twin = copy.deepcopy(nested)
    assert (twin.heads, twin.width, twin.new) == (1, 2, 5) and copy.copy(view).heads == 1
    twin.new = 6
    assert config.new == 5


def test_what_cannot_be_copied_is_named():
    model = Plain()
    model.blocks[1].mlp[0].lock = threading.Lock()
    with pytest.raises(
        ValueError, match=r"a Plain cannot be copied.* its 'blocks.1.mlp.0.lock', a lock"
    ) as e:
        modes.copied(model)
    assert "without pp" in str(e.value) and "__getstate__" in str(e.value) and "TypeError" in str(e.value)
    del model.blocks[1].mlp[0].lock
    model.norm.kept = model.norm.weight * 2  # not a leaf, as a hook of weight_norm makes it
    with pytest.raises(ValueError, match="its 'norm.kept', a Tensor.*parametrization"):
        modes.copied(model)
    del model.norm.kept
    twin = modes.copied(model, {id(model.tok.weight): model.tok.weight})
    assert twin.tok.weight is model.tok.weight and twin.head.weight is not model.head.weight


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_no_mode_is_active_inside():
    one, other = Seen(), Seen()
    with one, other:
        before = list(_get_current_function_mode_stack())
        with pytest.raises(KeyError), modes.without_modes():
            assert not _get_current_function_mode_stack()
            torch.ones(1) + 1
            raise KeyError
        assert before == list(_get_current_function_mode_stack()) == [one, other]
        calls = one.calls, other.calls
        torch.ones(1)
        assert (one.calls, other.calls) == (calls[0] + 1, calls[1] + 1)


def test_a_function_that_a_compiler_passes_over_stays_itself():
    function = lambda x: x + 1  # noqa: E731
    made = modes.uncompiled(function)
    assert (
        made is not function
        and modes.as_written(made) is function
        and modes.as_written(function) is function
        and made(2) == 3
    )
    plain, changed = nn.Linear(2, 2), nn.Linear(2, 2)
    changed.compile(backend="eager")
    found = [plain, changed, torch.compile(plain, backend="eager")]
    assert [modes.is_compiled(module) for module in found] == [False, True, True]


def test_norms_over_rows():
    kinds = (nn.BatchNorm1d(2), nn.SyncBatchNorm(2), nn.LayerNorm(2), nn.BatchNorm3d(2, affine=False))
    model = nn.Sequential(*kinds, nn.Sequential(nn.BatchNorm2d(1)))
    assert list(batch_norms(model)) == ["0", "3", "4.0"]


# The list of blocks ------------------------------------------------------------


class TwoLists(nn.Module):
    """An encoder of 12 blocks and a decoder of 3, with a module of each side."""

    def __init__(self):
        super().__init__()
        self.source, self.encoder = nn.Linear(2, 2), nn.ModuleList(nn.Linear(3, 3) for _ in range(12))
        self.middle = nn.Linear(2, 2)
        self.decoder = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("a", "ab", "a_b")})
        self.last, self.counted = nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)


def test_two_lists_make_one_trunk():
    model = TwoLists()
    trunk = find_trunk(model, ("encoder", "decoder"))
    names = [f"encoder.{i}" for i in range(12)] + ["decoder.a", "decoder.ab", "decoder.a_b"]
    assert trunk.names == tuple(names) and trunk.border == 12 and trunk.name == "encoder+decoder"
    for index, name in enumerate(names):
        assert trunk.block_of(name) == trunk.block_of(f"{name}.weight") == index
        assert trunk.blocks[index] is model.get_submodule(name)
    for name in (
        "",
        "encoder",
        "encoder.12",
        "encoders.1",
        "source.weight",
        "decoder.b.weight",
        "decoder.a1",
    ):
        assert trunk.block_of(name) is None
    assert [trunk.contained_in(name) for name in ("", "encoder", "decoder", "source", "encoder.1")] == [
        *(True, True, True),
        *(False, False),
    ]
    found = {name: side for name, _, side in owners(model, trunk)}
    before, between, after = Side.BEFORE, Side.BETWEEN, Side.AFTER
    assert found == {"source": before, "middle": between, "last": after, "counted": after}
    known = owners(model, trunk, {"last": before, "middle": after})
    assert [side for _, _, side in known] == [before, after, before, after]
    assert {side for _, _, side in owners(model, None)} == {Side.AROUND}
    model.encoder[11] = nn.Identity()
    assert isinstance(trunk.now(model).blocks[11], nn.Identity) and trunk.now(model).names == trunk.names


class Own(TwoLists):
    """With a parameter beside its lists."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def test_what_lies_around_the_blocks():
    trunk = find_trunk(Own(), "encoder")
    assert owners(Own(), trunk)[0][::2] == ("", Side.AROUND)
    sequential = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert find_trunk(sequential) == Trunk(("",), list(sequential), ("0", "1"), 0)
    assert find_trunk(sequential).block_of("1.weight") == 1
    lists = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)] * 2), nn.ModuleDict({"x": nn.Linear(2, 2)})])
    assert find_trunk(lists, "").names == ("0.0", "0.1", "1.x")


def lists(*counts):
    """A model with lists of so many blocks of one size."""
    made = {f"list{n}": nn.ModuleList(nn.Linear(2, 2) for _ in range(c)) for n, c in enumerate(counts)}
    return nn.ModuleDict(made)


@pytest.mark.parametrize(
    "counts, name, found",
    [
        ((2, 5), None, "list1"),
        ((5, 2), None, "list0"),
        ((4, 2), None, "list0"),
        ((1, 1), None, None),
        ((1, 2), None, "list1"),
        ((3, 9), "list0", "list0"),
        ((2, 3), None, "both 'list1' and 'list0' may be the list of blocks"),
        ((2, 3), "list2", "blocks='list2': is not in the model; it must be a ModuleList"),
        ((2, 3), ("list0", "list2"), r"blocks=\('list0', 'list2'\): 'list2' is not in the model"),
        ((2, 3), "list0.1", "blocks='list0.1': is a Linear"),
        ((2, 3, 4), ("list0", "list1", "list2"), "one list or two, none of them inside of the other"),
    ],
)
def test_which_list_it_is(counts, name, found):
    model = lists(*counts)
    if found is not None and " " in found:
        with pytest.raises(ValueError, match=found):
            find_trunk(model, name)
    else:
        trunk = find_trunk(model, name)
        assert (trunk and trunk.lists) == ((found,) if found else None)


Output = collections.namedtuple("Output", "number hidden")


def test_the_hidden_state():
    x, y = torch.zeros(1), torch.zeros(1)
    assert hidden_of(x) is x and hidden_of((3, x, y)) is x and hidden_of((), {"n": 2, "x": y, "z": x}) is y
    assert hidden_of((None,), {"x": y}) is y and hidden_out(x) is x
    assert hidden_out({"n": 1, "x": x, "y": y}) is x and hidden_out(Output(1, y)) is y
    for nothing in ((), (1, "x"), {"n": 2}):
        with pytest.raises(ValueError, match="without a tensor"):
            hidden_out(nothing)
    with pytest.raises(ValueError, match="returned a int"):
        hidden_out(3)
    args, kwargs = replace_hidden((x, y, 1, x), {"a": y, "b": x}, x, new := torch.ones(1))
    assert [a is new for a in args] == [True, False, False, True] and args[1] is y
    assert kwargs["a"] is y and kwargs["b"] is new


def test_blocks_of_a_model():
    model = Plain(Block, 3)
    assert find_trunk(model).names == ("blocks.0", "blocks.1", "blocks.2")
