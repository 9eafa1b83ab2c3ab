"""state_dict() and load_state_dict() of the model and the optimizer that the user holds, under every plan,
against one process; how many parameters there are.
"""

import copy
import pickle

import equality
import pytest
import torch
from checkpoint_cases import mixture
from models import GPT, GatedMLP, Llama
from odd_models import cross, tokens
from tiers import tier
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.ground.comm import count_traffic
from pycomm.parallel.recovery.pristine import Pristine


def make(kv_heads=6, narrow=False):
    """Tied, with a frozen parameter and a buffer; q, k and v are Shard(0) unless kv heads do not divide."""
    torch.manual_seed(0)
    model = Llama(layers=2, dim=12, kv_heads=kv_heads, mlp=lambda: GatedMLP(12, 14))
    model.lm_head.weight = model.embed.weight
    model.layers[1].norm1.weight.requires_grad_(False)
    model.register_buffer("mark", torch.randn(3))
    return model.float() if narrow else model.double()


def optimizer_of(model, kind=torch.optim.AdamW):
    """Two groups, in another order than the model's."""
    parameters = list(model.parameters())[::-1]
    groups = [[p for p in parameters if (p.dim() > 1) is matrix] for matrix in (True, False)]
    return kind([{"params": groups[0]}, {"params": groups[1], "lr": 0.02}], lr=0.01)


def alone(narrow=False):
    """The states after two steps, and after two more, of one process."""
    model = make(narrow=narrow)
    opt, states = optimizer_of(model), []
    for step in range(4):
        x, y = tokens(step)
        cross(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        if step % 2:
            states.append((clone(model.state_dict()), clone(opt.state_dict())))
    return states


def clone(tree):
    return torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)


def whole(tree):
    from torch.distributed.tensor import DTensor

    return torch.utils._pytree.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, tree)


def near(found, expected, where, bound=1e-10):
    found, expected = (dict(torch.utils._pytree.tree_leaves_with_path(each)) for each in (found, expected))
    assert found.keys() == expected.keys(), where
    for path, value in found.items():
        other = expected[path]
        if isinstance(value, torch.Tensor):
            assert equality.relative(value, other) < bound, (where, path)
        else:
            assert value == other, (where, path)


def steps(model, opt, numbers):
    for number in numbers:
        par.step(model, opt, tokens(number), cross)


def rows(rank, world_size, texts, states):
    (early, early_opt), (late, late_opt) = states
    count = sum(p.numel() for p in make().parameters())
    for text in texts:
        model = make()
        model, opt = par.parallelize(model, optimizer_of(model), text)
        plan = par.Plan.parse(text)
        assert par.num_parameters(model) == count, text
        assert par.num_parameters(model, trainable_only=True) == count - 12, text
        steps(model, opt, range(2))
        if rank == 0 and plan.zero < 3 and plan.pp == 1:
            model.state_dict()  # on one rank alone, as people do
        with count_traffic() as traffic:
            if plan.zero == 3 or plan.pp > 1:
                for call in (model.state_dict, lambda model=model: model.load_state_dict(early)):
                    with pytest.raises(ValueError, match=r"this rank holds only .* par\."):
                        call()
                state = None
            else:
                state = model.state_dict()
                model.load_state_dict(state)  # changes nothing
                part = model.layers[0].mlp.state_dict()
            is_part = plan.pp > 1 or bool(plan.zero) and plan.dp * plan.ring > 1
            if is_part:
                with pytest.raises(ValueError, match="opt.state_dict.* has only .*par.save"):
                    opt.state_dict()
            else:
                opt.load_state_dict(opt.state_dict())
        assert not traffic.log, text
        if state is not None:
            near(whole(state), early, text)
            near(whole(part), {k[13:]: v for k, v in early.items() if k.startswith("layers.0.mlp.")}, text)
            if not is_part:
                near(whole(opt.state_dict()), early_opt, text)
        steps(model, opt, range(2, 4))
        near(par.full_state_dict(model), late, text)
        resume(text, states, state is not None)


def resume(text, states, takes_model):
    """From the files of one process."""
    (early, early_opt), (late, late_opt) = states
    model = make()
    if not takes_model:
        model.load_state_dict(early)
    model, opt = par.parallelize(model, optimizer_of(model), text)
    if takes_model:
        found = model.load_state_dict({**clone(early), "more": torch.ones(2)}, strict=False)
        assert found == ([], ["more"])
        with pytest.raises(RuntimeError, match='Unexpected key.*"more"'):
            model.load_state_dict({**early, "more": torch.ones(2)})
        with pytest.raises(ValueError, match="assign=True"):
            model.load_state_dict(early, assign=True)
        wrong = {**early, "layers.0.mlp.up_proj.weight": torch.ones(7, 12)}
        with pytest.raises(RuntimeError, match=r"size mismatch for layers.0.mlp.up_proj.*\[14, 12\]"):
            model.load_state_dict(wrong)
        del wrong["layers.0.mlp.up_proj.weight"]
        assert model.load_state_dict(wrong, strict=False).missing_keys == ["layers.0.mlp.up_proj.weight"]
    opt.load_state_dict(clone(early_opt))
    with pytest.raises(ValueError, match="different number of parameter groups"):
        opt.load_state_dict({**early_opt, "param_groups": early_opt["param_groups"][:1]})
    steps(model, opt, range(2, 4))
    near(par.full_state_dict(model), late, text)


CASES = (
    ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "pp=2"),
    ("tp=2,megatron_sp", "ring=2", "ulysses=2", "tp=2,zero=1", "pp=2,zero=1", "dp=2,zero=3,bucket_mb=0.001"),
)


@tier(quick=1 / 2)
@pytest.mark.parametrize("texts", CASES, ids=["short", "long"])
def test_the_dicts_keep_their_word(texts):
    spawn(2, rows, texts, alone())


@tier(slow=1)
def test_over_two_axes():
    spawn(4, rows, ("dp=2,tp=2", "tp=2,ring=2,zero=1"), alone())


def in_bf16(rank, world_size, texts, states):
    """The copies in fp32, which the optimizer updates, are loaded too, and a load of the bf16 values that are
    there changes none of them.
    """
    (early, _), _ = states
    for text in texts:
        models = []
        for load in (False, True):
            model = make(narrow=True)
            model, opt = par.parallelize(model, optimizer_of(model), text)
            steps(model, opt, range(2))
            if load:
                assert model.load_state_dict(model.state_dict()) == ([], [])
            steps(model, opt, range(2, 4))
            models.append(par.full_state_dict(model))
        assert all(torch.equal(models[0][name], models[1][name]) for name in models[0]), text
        assert model.load_state_dict(early) == ([], [])
        frozen = {"layers.1.norm1.weight"}  # in bf16 alone
        for name, value in par.full_state_dict(model).items():
            assert torch.equal(value, early[name].bfloat16() if name in frozen else early[name]), (text, name)
        assert torch.equal(model.state_dict()["norm.weight"], early["norm.weight"].bfloat16())


@tier(slow=1)
def test_master_copies():
    texts = ("dp=2,precision=bf16", "dp=2,zero=1,precision=bf16", "tp=2,precision=bf16")
    spawn(2, in_bf16, texts, alone(narrow=True))


def odd_cuts(rank, world_size):
    """Fused q, k and v; kv heads that two ranks share; another DTensor than the one that is here."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    torch.manual_seed(0)
    model = GPT(dim=16, heads=2, hidden=20, layers=1).double()
    before = clone(model.state_dict())
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "tp=2")
    steps(model, opt, [0])
    for call, name in ((model.state_dict, ""), (opt.state_dict, "opt.")):
        with pytest.raises(ValueError, match=rf"{name}state_dict.*c_attn.weight.*no DTensor.*par.full_state"):
            call()
    assert {type(value) for value in model.blocks[0].mlp.state_dict().values()} == {DTensor, torch.Tensor}
    model.load_state_dict(before)
    for name, value in par.full_state_dict(model).items():
        assert torch.equal(value, before[name]), name

    for kv_heads in (1, 3):  # held twice; two heads on one rank, one on the other
        model, opt = par.parallelize(make(kv_heads), None, "tp=2")
        with pytest.raises(ValueError, match=r"[qk]_proj.weight.*no DTensor"):
            model.state_dict()

    mesh = init_device_mesh("cpu", (2,))
    for text, place, fits in (
        ("dp=2", Replicate(), True),
        ("dp=2", Shard(0), False),
        ("tp=2", Shard(1), False),
    ):
        model, _ = par.parallelize(make(), None, text)
        state = par.full_state_dict(model)
        name = "layers.0.attn.q_proj.weight"
        state[name] = torch.distributed.tensor.distribute_tensor(state[name] + 1, mesh, [place])
        if fits:
            model.load_state_dict(state)
            assert torch.equal(model.get_parameter(name), state[name].to_local())
        else:
            with pytest.raises(ValueError, match=r"q_proj.weight' is a DTensor.*par.load_state_dict"):
                model.load_state_dict(state)


def test_cuts_that_no_dtensor_has():
    spawn(2, odd_cuts)


def odd_objects(rank, world_size, states):
    """Copies of modules, experts of other ranks, an optimizer in a wrapper, what is frozen later."""
    for text, fits in (("dp=2", True), ("tp=2", False), ("dp=2,zero=3", False)):
        model, _ = par.parallelize(make(), None, text)
        if fits:
            for copied in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
                copied(model.layers[0].mlp).load_state_dict(model.layers[0].mlp.state_dict())
        else:
            with pytest.raises(ValueError, match="cannot be copied or pickled|it is sharded under zero=3"):
                copy.deepcopy(model.layers[0].mlp)
        if text == "tp=2":
            near(copy.deepcopy(model.norm).state_dict(), model.norm.state_dict(), text)

    model = mixture(0)
    model, opt = par.parallelize(model, torch.optim.Adam(model.parameters()), "ep=2")
    for call in (model.state_dict, model.layers[0].mlp.state_dict, lambda: model.load_state_dict({})):
        with pytest.raises(ValueError, match=r"only a part of the experts.*par\."):
            call()
    with pytest.raises(ValueError, match=r"only a part of the experts.*par\.save"):
        opt.state_dict()
    near(model.layers[0].attn.state_dict(), mixture(0).layers[0].attn.state_dict(), "ep=2")

    (_, early_opt), (late, _) = states
    model = make()
    model, opt = par.parallelize(model, Wrapper(optimizer_of(model)), "dp=2")
    steps(model, opt, range(2))
    near(opt.state_dict(), early_opt, "a wrapper")
    opt.load_state_dict(opt.state_dict())
    steps(model, opt, range(2, 4))
    near(par.full_state_dict(model), late, "a wrapper")

    for text in ("dp=2", "tp=2"):  # torch's function goes by the order of the groups
        model = make()
        model.requires_grad_(True)
        model, opt = par.parallelize(model, torch.optim.AdamW(model.parameters()), text)
        steps(model, opt, [0])
        found = get_optimizer_state_dict(model, opt)["state"]
        near(whole(found), whole(par.state_dict(model, opt)[1]["state"]), text)

    plain = make()
    plain.layers[0].requires_grad_(False)
    count = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    for text in ("dp=2", "pp=2", "tp=2", "dp=2,zero=3"):
        model, _ = par.parallelize(make(), None, text)
        model.layers[0].requires_grad_(False)
        assert par.num_parameters(model, trainable_only=True) == count, text


class Wrapper:
    """Of an optimizer, which torch does not know as one."""

    def __init__(self, opt):
        self.opt, self.param_groups, self.state = opt, opt.param_groups, opt.state

    def step(self):
        return self.opt.step()

    def state_dict(self):
        return self.opt.state_dict()

    def load_state_dict(self, state):
        self.opt.load_state_dict(state)
        self.param_groups, self.state = self.opt.param_groups, self.opt.state


def test_odd_objects():
    spawn(2, odd_objects, alone())


def test_parallelized_again():
    """Recovery gives model and optimizer back as they were: with no hooks of the plan before."""
    model = make()
    opt = optimizer_of(model)
    pristine = Pristine(model, opt)
    par.parallelize(model, opt, "zero=3")
    pristine.note_hooks()
    with pytest.raises(ValueError, match="a shard of each parameter"):
        model.state_dict()
    pristine.reset()
    hooks = [model._state_dict_hooks, model._load_state_dict_pre_hooks, model._load_state_dict_post_hooks]
    hooks += [opt._optimizer_state_dict_post_hooks, opt._optimizer_load_state_dict_pre_hooks]
    assert not any(hooks)
    par.parallelize(model, opt, "")
    assert len(opt.state_dict()["param_groups"]) == 2 and not model.load_state_dict(model.state_dict())[0]


def test_state_of_another_shape_belongs_to_a_whole_parameter():
    """Adafactor's rows and columns go out and come in, and the training goes on as without."""
    found = []
    for loads in (False, True):
        model = make()
        opt = torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model, opt = par.parallelize(model, opt, "")
        steps(model, opt, [0])
        if loads:
            values, state = par.full_state_dict(model), clone(opt.state_dict())
            assert any(
                v.dim() == 2 and 1 in v.shape for each in state["state"].values() for v in each.values()
            )
            steps(model, opt, [1, 2])
            model.load_state_dict(values)
            opt.load_state_dict(state)
        steps(model, opt, [1])
        found.append(par.full_state_dict(model))
    near(found[1], found[0], "Adafactor")


def test_a_module_without_parameters_can_be_copied():
    """It has no part of anything, also where all parameters are sharded."""
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.Tanh()), torch.nn.Linear(3, 3)
    )
    model, _ = par.parallelize(model, None, "zero=3")
    for copied in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(model[1])(torch.ones(2)), torch.ones(2).tanh())
        assert not copied(model[1]).state_dict()
        with pytest.raises(ValueError, match="cannot be copied or pickled|it is sharded under zero=3"):
            copied(model[0])
