"""par.state_dict and par.load_state_dict: DTensors under every plan, through torch.distributed.checkpoint,
between plans, one process and FSDP2.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_cases import batch, mixture, quiet  # noqa: F401
from odd_models import cross, tokens
from test_dicts import alone, make, near, optimizer_of, steps, whole
from tiers import tier
from torch_ranks import spawn

import pycomm.parallel as par


def written(rank, world_size, texts, folder, states):
    """Whole values of all kinds of cuts are those of one process; files of each plan are read by the next."""
    (early, early_opt), (late, _) = states
    for number, text in enumerate(texts):
        model = make()
        model, opt = par.parallelize(model, optimizer_of(model), text)
        if number == 0:
            steps(model, opt, range(2))
        else:
            state, opt_state = par.state_dict(model, opt)
            both = {"model": state, "optim": opt_state}
            dcp.load(both, checkpoint_id=folder / str(number - 1))
            assert par.load_state_dict(model, (state, both["optim"]), opt) == ([], [])
        state, opt_state = par.state_dict(model, opt)
        near(whole(state), early, text)
        compare(opt_state, early_opt, model, text)
        for value in state.values():
            if value.shape != (3,):  # the buffer
                (placement,) = value.placements
                rows = torch.empty(value.shape).chunk(world_size)[rank].shape
                assert placement.is_shard(0) and value.to_local().shape == rows, text
        dcp.save({"model": state, "optim": opt_state}, checkpoint_id=folder / str(number))
        steps(model, opt, range(2, 4))
        near(par.full_state_dict(model), late, text)


def compare(opt_state, expected, model, text):
    """By name, against the optimizer of one process."""
    names = [name for group in opt_state["param_groups"] for name in group["params"]]
    assert sorted(names) == sorted(name for name, _ in make().named_parameters()), text
    places = [place for group in expected["param_groups"] for place in group["params"]]
    state = dict(zip(places, names, strict=True))
    near(whole(opt_state["state"]), {state[place]: each for place, each in expected["state"].items()}, text)


PLANS = ("dp=2", "dp=2,zero=3", "tp=2", "pp=2", "dp=2,zero=1", "tp=2,megatron_sp", "dp=2,zero=2")
PLANS += ("ring=2", "pp=2,zero=1", "ulysses=2,zero=3")


@tier(quick=1 / 2)
@pytest.mark.parametrize("texts", [PLANS[:4], PLANS[4:]], ids=["short", "long"])
def test_files_between_plans(texts, tmp_path):
    spawn(2, written, texts, tmp_path, alone())


def fsdp(rank, world_size, folder, states):
    """FSDP2 reads a file of a plan, trains, and its file is read by another plan."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    (early, _), (late, _) = states
    model = make()
    model, opt = par.parallelize(model, optimizer_of(model), "tp=2")
    steps(model, opt, range(2))
    state, opt_state = par.state_dict(model, opt)
    dcp.save({"model": state, "optim": opt_state}, checkpoint_id=folder / "plan")

    other = make()
    for layer in other.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(other, mesh=init_device_mesh("cpu", (2,)))
    other_opt = optimizer_of(other)
    state, opt_state = get_state_dict(other, other_opt)
    both = {"model": state, "optim": opt_state}
    dcp.load(both, checkpoint_id=folder / "plan")
    set_state_dict(other, other_opt, model_state_dict=both["model"], optim_state_dict=both["optim"])
    near(whole(other.state_dict()), early, "fsdp")
    x, y = tokens(2)
    cross(other(x), y).backward()
    other_opt.step()
    state, opt_state = get_state_dict(other, other_opt)
    dcp.save({"model": state, "optim": opt_state}, checkpoint_id=folder / "fsdp")

    model = make()
    model, opt = par.parallelize(model, optimizer_of(model), "dp=2,zero=3")
    par.load_state_dict(model, (state, opt_state), opt)  # FSDP2's own DTensors
    steps(model, opt, [3])
    near(par.full_state_dict(model), late, "from FSDP2")
    read = dict(zip(("model", "optim"), par.state_dict(model, opt), strict=True))
    dcp.load(read, checkpoint_id=folder / "fsdp")
    par.load_state_dict(model, (read["model"], read["optim"]), opt)
    steps(model, opt, [3])
    near(par.full_state_dict(model), late, "from FSDP2's file")


def test_files_of_fsdp2(tmp_path):
    spawn(2, fsdp, tmp_path, alone())


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "adadelta": (torch.optim.Adadelta, {}),
    "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {"lr": 0.001}),
    "adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
}


def begin(rank, world_size, text, names):
    """The state before the first step has all that is there after one, and trains like no state."""
    for name in names:
        found = []
        for load in (False, True):
            kind, options = OPTIMIZERS[name]
            model = make()
            model, opt = par.parallelize(model, kind(model.parameters(), **{"lr": 0.01, **options}), text)
            state = par.state_dict(model, opt)
            if load:
                par.load_state_dict(model, state, opt)
            steps(model, opt, range(2))
            after, opt_state = par.state_dict(model, opt)
            for each, values in opt_state["state"].items():
                kinds = [
                    {key: (type(v), v.shape, v.dtype) for key, v in which.items()}
                    for which in (values, state[1]["state"][each])
                ]
                assert kinds[0] == kinds[1], (name, each)
            assert opt_state["state"].keys() == state[1]["state"].keys(), name
            found.append(whole(after))
        assert all(torch.equal(found[0][key], found[1][key]) for key in found[0]), name


@tier(quick=1 / 6, slow=1 / 2)
@pytest.mark.parametrize("third", range(3))
@pytest.mark.parametrize("text", ["dp=2,zero=1", "tp=2"])
def test_the_state_before_the_first_step(text, third):
    spawn(2, begin, text, list(OPTIMIZERS)[third::3])


def less_state(rank, world_size):
    """A state that lacks a parameter takes what the optimizer had of it; the others are as in the state."""
    for text in ("dp=2,zero=1", "tp=2"):
        model = make()
        model, opt = par.parallelize(model, optimizer_of(model), text)
        steps(model, opt, range(1))
        values, state = par.state_dict(model, opt)
        steps(model, opt, range(1, 2))
        kept = list(state["state"])[1:]
        less = {**state, "state": {name: state["state"][name] for name in kept}}
        par.load_state_dict(model, (values, less), opt)
        found = par.state_dict(model, opt)[1]["state"]
        assert list(found) == kept, text
        for name in kept:
            near(whole(found[name]), whole(state["state"][name]), (text, name), 1e-300)


def test_state_that_is_not_there_is_dropped():
    spawn(2, less_state)


def refused(rank, world_size, states):
    """What does not fit is refused on all ranks, and changes nothing; files of one process do fit."""
    (early, early_opt), (late, _) = states
    less = {name: value for name, value in early.items() if name != "norm.weight"}
    one_group = {**early_opt, "param_groups": early_opt["param_groups"][:1]}
    short = {**early_opt, "param_groups": [{**group, "params": [0]} for group in early_opt["param_groups"]]}
    frozen = next(
        n for n, p in enumerate(optimizer_of(make()).param_groups[1]["params"]) if not p.requires_grad
    )
    place = early_opt["param_groups"][1]["params"][frozen]
    of_frozen = {**early_opt, "state": {**early_opt["state"], place: early_opt["state"][0]}}
    wrong = {
        "lacks 'norm.weight' of this model, and has nothing": (less, early_opt),
        "lacks nothing of this model, and has 'more'": ({**early, "more": torch.ones(1)}, early_opt),
        r"'norm.weight' has shape \(7,\)": ({**early, "norm.weight": torch.ones(7)}, early_opt),
        "is a int": ({**early, "norm.weight": 3}, early_opt),
        "given different states: 'norm.weight'": (less if rank else early, early_opt),
        "has 1 parameter groups, the optimizer here 2": (early, one_group),
        "group 0 of the optimizer's state has 1 parameters": (early, short),
        "the keys 'a', but needs 'state'": (early, {"a": 1}),
        "'layers.1.norm1.weight', which is frozen here": (early, of_frozen),
    }
    for text in ("dp=2,zero=3", "pp=2", "dp=2,zero=1"):
        model = make()
        model, opt = par.parallelize(model, optimizer_of(model), text)
        before = par.full_state_dict(model)
        for message, state in wrong.items():
            with pytest.raises(ValueError, match=message):
                par.load_state_dict(model, state, opt, strict="given different" not in message)
        with pytest.raises(ValueError, match="got an optimizer state and no optimizer"):
            par.load_state_dict(model, (early, early_opt))
        assert all(torch.equal(value, before[name]) for name, value in par.full_state_dict(model).items())
        found = par.load_state_dict(model, {**less, "more": torch.ones(1)}, strict=False)
        assert found == (["norm.weight"], ["more"])
        par.load_state_dict(model, (early, early_opt), opt)
        steps(model, opt, range(2, 4))
        near(par.full_state_dict(model), late, text)


def test_what_does_not_fit():
    spawn(2, refused, alone())


def odd_states(rank, world_size):
    """State that has not its parameter's shape; experts; copies in fp32; an optimizer that is not known."""
    trained = []
    for text in ("dp=2,zero=1", "dp=2,zero=3"):
        model = make()
        opt = torch.optim.Adafactor(model.parameters(), lr=0.01)
        model, opt = par.parallelize(model, opt, text)
        if trained:
            par.load_state_dict(model, trained[0], opt)
        else:
            with pytest.raises(ValueError, match="Adafactor has not taken a step.*par.save and par.load"):
                par.state_dict(model, opt)
            steps(model, opt, [0])
            trained.append(par.state_dict(model, opt))
        steps(model, opt, [1])
        trained.append(par.full_state_dict(model))
    near(trained[1], trained[2], "Adafactor")
    model, _ = par.parallelize(mixture(0), None, "ep=2")
    near(whole(par.state_dict(model)), dict(mixture(0).state_dict()), "ep=2")
    model = make(narrow=True)
    model, opt = par.parallelize(model, optimizer_of(model), "dp=2,zero=2,precision=bf16")
    steps(model, opt, [0])
    before = {name: value.clone() for name, value in par.full_state_dict(model).items()}
    near(whole(par.state_dict(model)), before, "bf16", 1e-30)
    par.load_state_dict(model, model.state_dict())  # what the copies round to
    near(par.full_state_dict(model), before, "bf16", 1e-30)


@tier(slow=1)
def test_odd_states():
    spawn(2, odd_states)


def experts(rank, world_size):
    """A rank knows which experts of others are trained: the optimizer's state before the first step, of
    itself and of one process, and after the experts were unfrozen.
    """
    for frozen in (False, True):
        models = [mixture(0) for _ in range(2)]
        alone, model = models
        opts = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in models]
        for each in models:
            for name, param in each.named_parameters():
                param.requires_grad_(not frozen or ".experts." not in name)
        model, opt = par.parallelize(model, opts[1], "ep=2")
        first = par.state_dict(model, opt)
        trained = [name for name, p in alone.named_parameters() if p.requires_grad]
        assert list(first[1]["state"]) == trained
        for each in models:
            each.requires_grad_(True)
        alone_opt = opts[0]
        for number in range(2):
            x, y = batch(number)
            alone_opt.zero_grad()
            cross(alone(x), y).backward()
            alone_opt.step()
            par.step(model, opt, (x, y), cross)
        expected = dict(alone.state_dict())
        near(par.full_state_dict(model), expected, frozen)
        state = par.state_dict(model, opt)
        par.step(model, opt, batch(7), cross)
        for given in (state, (alone.state_dict(), alone_opt.state_dict())):
            par.load_state_dict(model, given, opt)
            near(par.full_state_dict(model), expected, frozen)
            near(whole(par.state_dict(model, opt)[1]["state"]), whole(state[1]["state"]), frozen)
        opt.load_state_dict(alone_opt.state_dict())
        near(whole(par.state_dict(model, opt)[1]["state"]), whole(state[1]["state"]), frozen)


def test_experts_of_other_ranks():
    spawn(2, experts)


def test_one_process():
    model = make()
    model, opt = par.parallelize(model, optimizer_of(model), "zero=3")
    steps(model, opt, [0])
    state, opt_state = par.state_dict(model, opt)
    assert {type(value) for value in state.values()} == {torch.Tensor}
    near(state, par.full_state_dict(model), "one rank")
    steps(model, opt, [1])
    expected = par.full_state_dict(model)
    model = make()
    model, opt = par.parallelize(model, optimizer_of(model), None)
    par.load_state_dict(model, (state, opt_state), opt)
    steps(model, opt, [1])
    near(model.state_dict(), expected, "one rank")
