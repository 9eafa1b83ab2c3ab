"""Parts of parallelize() by themselves, in one process: what it lets go, what it takes over, its words."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pycomm.parallel as par
from pycomm.parallel.building import cut, over_hosts
from pycomm.parallel.building.alike import _first_difference, _other
from pycomm.parallel.building.initial import Initial
from pycomm.parallel.building.recompute import recompute_blocks
from pycomm.parallel.building.report import Description, LayerLine
from pycomm.parallel.ground.mesh import Mesh
from pycomm.parallel.models.trunk import find_trunk


def test_the_groups_of_a_refused_call_are_closed(monkeypatch, tmp_path):
    """Whatever it was refused for behind them; then the same call without the mistake does."""
    closed, model = [], nn.Linear(3, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(Mesh, "close", lambda self: closed.append(self))
    for number in (1, 2):
        with pytest.raises(ValueError, match="safetensors"):
            par.parallelize(model, opt, "", weights=tmp_path)
        assert len(closed) == number
    par.parallelize(model, opt, "")
    assert len(closed) == 2


class Twins(nn.Module):
    """One buffer, and one parameter, under two names."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        self.two.running_mean, self.two.weight = self.one.running_mean, self.one.weight


def test_what_is_one_on_meta_stays_one():
    torch.manual_seed(1)
    with torch.device("meta"):
        model = Twins()
    random = torch.get_rng_state()
    par.parallelize(model, None, "")
    assert torch.equal(random, torch.get_rng_state())
    assert model.one.running_mean is model.two.running_mean and model.one.weight is model.two.weight
    assert model.one.running_var is not model.two.running_var
    assert model.one.running_var.tolist() == [1, 1, 1] and not any(b.is_meta for b in model.buffers())


class Draws(nn.Module):
    def __init__(self, fails=False):
        super().__init__()
        self.weight, self.fails = nn.Parameter(torch.empty(5, 4)), fails
        self.register_buffer("number", torch.empty(2, dtype=torch.long))

    def reset_parameters(self):
        torch.rand(7)
        nn.init.normal_(self.weight)
        self.number.fill_(3)
        if self.fails:
            raise ZeroDivisionError("no")


def on_meta(**more):
    with torch.device("meta"):
        return nn.ModuleDict({"a": Draws(), "b": Draws(**more)})


def test_first_values_depend_on_seed_and_name_alone():
    """Not on what was read before, nor on the box; and no random number is drawn for it."""
    random, whole, offsets = torch.get_rng_state(), (5, 4), (0, 0)
    first, again, other = Initial(on_meta(), 3), Initial(on_meta(), 3), Initial(on_meta(), 4)
    a, b = (first.read(f"{name}.weight", offsets, whole) for name in "ab")
    assert not torch.equal(a, b) and not torch.equal(a, other.read("a.weight", offsets, whole))
    assert torch.equal(again.read("b.weight", (1, 2), (3, 2)), b[1:4, 2:4])
    assert (
        torch.equal(again.read("a.weight", (4, 0), (1, 4)), a[4:]) and first.read("a.number", (1,), (1,)) == 3
    )
    again.close()
    assert torch.equal(again.read("b.weight", offsets, whole), b)
    with pytest.raises(ValueError, match=r"'b\.weight' is on meta, .*ZeroDivisionError: no"):
        Initial(on_meta(fails=True), 3).read("b.weight", offsets, whole)
    assert torch.equal(random, torch.get_rng_state())
    assert all(each.is_meta for each in (*first.model.parameters(), *first.model.buffers()))
    assert first.place("b.weight") > first.place("a.number") == first.place("a.weight")
    deep = Initial(nn.ModuleDict({"x": nn.ModuleDict({"y": on_meta()})}), 3)
    around = [deep.model.get_submodule(path) for path in ("x.y.a", "x.y", "x", "")]
    assert deep._around("x.y.a.weight") == around and first._around("weight") == [first.model]


@pytest.mark.parametrize("forgotten", ["weight", "number"])
def test_what_nobody_initialises_beside_what_somebody_does(forgotten):
    class Forgets(Draws):
        def reset_parameters(self):
            for tensor in {"weight": self.weight.data, "number": self.number}.items():
                if tensor[0] != forgotten:
                    tensor[1].fill_(2)

    with torch.device("meta"):
        initial = Initial(Forgets(), 0)
    for _ in range(2):
        for name, sizes in (("number", (2,)), ("weight", (5, 4)), ("number", (2,))):
            if name == forgotten:
                with pytest.raises(ValueError, match=f"'{name}' is on meta, and nothing computes its value"):
                    initial.read(name, (0,) * len(sizes), sizes)
            else:
                assert initial.read(name, (0,) * len(sizes), sizes).unique() == 2


class Switched(nn.Module):
    """Turns its recomputation on and off as transformers' models do."""

    gradient_checkpointing, _gradient_checkpointing_func = False, None

    def __init__(self):
        super().__init__()
        self.blocks, self.runs = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), 0
        for block in self.blocks:
            block.register_forward_hook(self.count)
            block.forward = self.counted(block.forward)

    def count(self, *_):
        pass

    def counted(self, forward):
        def run(x):
            self.runs += 1
            return forward(x)

        return run

    def gradient_checkpointing_enable(self):
        self.gradient_checkpointing = True
        return "on"

    def gradient_checkpointing_disable(self):
        self.gradient_checkpointing = False

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def runs_of(model):
    """How often its blocks run for a forward and a backward, and without gradients."""
    x, found = torch.ones(2, 3, requires_grad=True), []
    model.runs = 0
    model(x).sum().backward()
    found.append(model.runs)
    model.runs = 0
    with torch.no_grad():
        model(x)
    return [*found, model.runs]


@pytest.mark.parametrize("always", [False, True])
def test_recomputation_may_be_turned_on_and_off(always):
    model, around = Switched(), []

    class Around:
        def __enter__(self):
            around.append(1)

        def __exit__(self, *_):
            around.append(-1)

    recompute_blocks(
        model, find_trunk(model, None), par.Plan(checkpoint=always), lambda: (Around(), Around())
    )
    assert runs_of(model) == [6 if always else 3, 3]
    for _ in range(2):
        assert model.gradient_checkpointing_enable() == "on"
        assert runs_of(model) == [6, 3]
        model.gradient_checkpointing_disable()
        assert runs_of(model) == [6 if always else 3, 3]
    assert sum(around) == 0 and around
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    model.gradient_checkpointing_enable()
    model.runs = 0
    torch.func.functional_call(model, parameters, (torch.ones(2, 3, requires_grad=True),)).sum().backward()
    assert model.runs == 3  # its tensors would be gone when it runs again


def test_modules_that_a_cut_replaces_let_go_of_their_parameters(monkeypatch):
    """Those that tensor parallelism replaces, and stacked experts, which are dealt behind it."""
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("tp", "ep", "stays")})
    old, stays = (
        {name: model[name] for name in ("tp", "ep")},
        model.stays if hasattr(model, "stays") else None,
    )

    def replace(name, result=None):
        model[name] = nn.Linear(1, 1)
        return result

    tensor = SimpleNamespace(note_dealt=lambda *given: None)
    monkeypatch.setattr(cut, "parallelize_tensor", lambda *given, **named: replace("tp", tensor))
    monkeypatch.setattr(cut, "deal_stacked_experts", lambda *given: replace("ep"))
    original = SimpleNamespace(
        children={module: dict(module._modules) for module in model.modules()},
        moe_names=(),
        stacked_names=("ep",),
        first_name={},
    )
    mesh = SimpleNamespace(group=lambda axis: None, coordinate=lambda axis: 0)
    cut.cut_tensors(model, original, cut.Cut(None, {}, None, None, None), mesh, par.Plan())
    for name, module in old.items():
        assert list(module._parameters.values()) == [None, None], name
    assert all(p is not None for p in model["stays"].parameters()) and len(list(model.parameters())) == 6
    assert stays is None or stays is model["stays"]


def test_the_rank_that_is_named():
    """This one where it differs from rank 0, else the first that does; a missing key is a difference."""
    one, other, more = ({("models", "a"): text} for text in "xyz")
    told = [one, one, other, more]
    assert [_other(told, rank) for rank in range(4)] == [2, 2, 2, 3]
    assert _first_difference(one, {}) == (("models", "a"), ("x", None))
    assert _first_difference({}, one) == (("models", "a"), (None, "x"))
    named = {("models", "a"): "torch.nn.GELU"}, {("models", "a"): "torch.nn.ReLU"}
    assert _first_difference(*named) == (("models", "a"), ("GELU", "ReLU"))
    twins = {("models", "a"): "torch.nn.GELU"}, {("models", "a"): "mine.GELU"}
    assert _first_difference(*twins) == (("models", "a"), ("torch.nn.GELU", "mine.GELU"))
    ab, ba = ({("models", key): "1" for key in keys} for keys in ("ab", "ba"))
    (kind, place), values = _first_difference(ab, ba)
    assert (kind, place) == ("models", "number 0 of all names") and values == ("a", "b")


def test_for_which_axis_bytes_go_over_the_link():
    """A joint group counts as the group of dp; bytes that stay within a host are not counted."""
    groups = {"dp": 1, "tp": 2, "dp+tp": 4, "dp+ep": 8, "dp inside hosts": 16, "ep": 32, "dp over hosts": 64}
    right = {"dp": 1 + 4 + 8 + 64, "tp": 2, "ep": 32, "pp": 0}
    for axis, total in right.items():
        assert sum(n for name, n in groups.items() if over_hosts._is_of(name, axis)) == total, axis
        parts = SimpleNamespace(
            last_step=SimpleNamespace(sent={name: n * 1000 for name, n in groups.items()})
        )
        assert over_hosts._cost(parts, axis) == f"; this rank sent {total * 1000:,} bytes so in the last step"
    assert "after a step" in over_hosts._cost(SimpleNamespace(last_step=SimpleNamespace(sent=None)), "dp")


def mesh_of(hosts, crossing, **sizes):
    return SimpleNamespace(
        hosts=hosts,
        names=tuple(sizes),
        plan=SimpleNamespace(**sizes),
        crossings=lambda axis: (crossing[axis], 4),
    )


def test_the_way_out_of_an_axis_that_crosses_hosts():
    """Where the inner axes do not divide a host's ranks, else where ranks lie in turn."""
    found = over_hosts.warnings_of(mesh_of([0, 0, 0, 1], {"dp": 2, "tp": 1, "pp": 3}, pp=1, dp=2, tp=2))
    assert len(found) == 1 and found[0].startswith("tp crosses hosts in 1 of 4 groups: every layer")
    assert "if tp=2 divided the ranks of each host" in found[0]
    found = over_hosts.warnings_of(mesh_of([0, 0, 0, 1, 1, 1], {"ring": 2, "tp": 0}, ring=3, tp=2))
    assert len(found) == 1 and "ring=3 x tp=2 divided" in found[0]
    found = over_hosts.warnings_of(mesh_of([0, 1, 0, 1], {"dp": 0, "tp": 2}, dp=2, tp=2))
    assert (
        len(found) == 1
        and "if the ranks of a host followed each other; they are on hosts 0 1 0 1" in found[0]
    )


def test_the_columns_of_a_description():
    """As wide as the longest name, 44 at most; a name that is longer is not cut."""
    sizes = {"model": 3_000_000, "here": 999, "updated": 1000}
    for longest, width in (("blocks.*.mlp", 12), ("m" * 60, 44)):
        lines = [LayerLine("tok", "vocab", "29 rows", 1), LayerLine(longest, "mlp", "x", 4)]
        text = str(Description((1, 2), par.Plan(tp=2), {}, lines, (sizes, sizes), ((None, []), {"a": "b"})))
        assert f"    {'tok':{width}}       vocab      29 rows\n" in text, text
        assert f"    {longest:{width}}   4 x mlp        x\n" in text
        assert "3.0 MB in the whole model, 999 bytes here, 1.0 kB that this rank's optimizer" in text
        assert text.startswith("Plan(tp=2), rank 1 of 2\n") and text.endswith(f"    {'a':16} b")
