"""Checkpoints from every plan to every plan.

The reference for the bits is the checkpoint as a plain model in one process reads it, compared with what each rank held when it saved and
what each rank holds after it has loaded; the reference for the next step is the single process.
"""

import itertools
import logging
import os

import pytest
import torch
import torch._dynamo  # every optimizer imports it, which takes seconds: here once, and not in every forked rank
from models import Llama
from torch import nn
from torch_ranks import spawn

from pycomm.parallel import MoE, Plan, cross_entropy, parallelize, step
from pycomm.parallel.build import engine_of
from pycomm.parallel.checkpoint import full_gradients, full_state_dict, load, save
from pycomm.parallel.holdings import holdings

SIZES = {"vocab": 11, "dim": 12, "heads": 6, "kv_heads": 2, "layers": 4, "hidden": 7}
PLANS = {
    1: [""],
    2: ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2", "pp=2,schedule=zbv"],
    3: ["dp=3,zero=2,bucket_mb=0.003", "tp=3"],
    4: ["dp=2,tp=2,zero=1", "pp=2,dp=2,zero=3"],
}
ALL = [plan for plans in PLANS.values() for plan in plans]


@pytest.fixture(autouse=True)
def _quiet():
    """torch.distributed.checkpoint logs every key, which costs more than the rest of these tests when pytest listens."""
    logging.disable(logging.DEBUG)
    yield
    logging.disable(logging.NOTSET)


def dense(seed, dtype=torch.float64):
    """Tied, with kv heads fewer than tp=3, a frozen parameter and buffers of both kinds; small, as each key costs a millisecond to read."""
    torch.manual_seed(seed)
    model = Llama(**SIZES, mlp=lambda: nn.Linear(12, 12, bias=False))
    model.lm_head.weight = model.embed.weight
    model.layers[1].norm1.weight.requires_grad_(False)
    for layer in model.layers:
        layer.register_buffer("mark", torch.randn(3))
    model.register_buffer("count", torch.tensor(seed, dtype=torch.int64))
    model.register_buffer("local", torch.randn(2), persistent=False)
    return model.to(dtype)


def mixture(seed, dtype=torch.float64):
    torch.manual_seed(seed)
    return Llama(**SIZES, mlp=lambda: MoE(12, lambda: nn.Sequential(nn.Linear(12, 5), nn.SiLU(), nn.Linear(5, 12)), 3, top_k=2)).to(dtype)


def two_groups(model, make=torch.optim.SGD, options=None):
    """Matrices and vectors in different parameter groups."""
    groups = [[p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False)]
    options = {"momentum": 0.9} if options is None else options
    return make([{"params": groups[0]}, {"params": groups[1], "lr": 0.02}], **{"lr": 0.01, **options})


def batch(number):
    generator = torch.Generator().manual_seed(100 + number)
    idx = torch.randint(0, SIZES["vocab"], (9, 5), generator=generator)
    return idx, idx.roll(-1, 1)


def train(model, opt, numbers):
    for number in numbers:
        step(model, opt, batch(number), cross_entropy, microbatches=2, clip=0.5)


def make(plan, seed, build=dense, optimizer=two_groups, dtype=torch.float64):
    model = build(seed, dtype)
    opt = optimizer(model)
    return parallelize(model, opt, Plan.parse(plan) if isinstance(plan, str) else plan)


def held(model, opt):
    """[(name, layout, start, stop, values, state)] of this rank; counted or not."""
    found = []
    for h in holdings(engine_of(model)):
        state = opt.state.get(h.part, {}) if h.part is not None else {}
        copied = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        found.append((h.info.name, h.info.layout, h.start, h.stop, h.values.clone(), copied))
    return found


def reference_of(model, opt):
    """{name: (values, state)} of a single process."""
    return {name: (p.detach().clone(), dict(opt.state.get(p, {}))) for name, p in model.named_parameters()}


def same(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape and torch.equal(actual, expected), f"{actual} {expected}"


def compare(found, reference, where):
    """Bit for bit: what a rank holds, against the single process."""
    for name, layout, start, stop, values, state in found:
        full, full_state = reference[name]

        def cut(tensor, layout=layout, start=start, stop=stop, shape=values.shape):
            return layout.take(tensor).reshape(-1)[start:stop].reshape(shape)

        assert state.keys() == full_state.keys(), (where, name, state.keys(), full_state.keys())
        same(values, cut(full))
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                same(value, cut(full_state[key]) if full_state[key].shape == full.shape else full_state[key])
            else:
                assert value == full_state[key], (where, name, key)


def folder_of(plan):
    return plan.replace(",", "+") or "single"


def save_all(rank, world_size, plans, root, build):
    found = {}
    for plan in plans:
        model, opt = make(plan, 1, build)
        train(model, opt, [0, 1])
        for buffer in model.buffers():
            if not buffer.is_meta:
                buffer.add_(3)
        opt.param_groups[1]["lr"] = 0.03
        save(model, opt, root / folder_of(plan), extra={"plan": plan})
        found[plan] = held(model, opt), full_state_dict(model)
    return found


def load_all(rank, world_size, plans, root, references, build):
    for plan in plans:
        model, opt = make(plan, 2, build)
        for number, (source, (reference, full, after)) in enumerate(references.items()):
            assert load(model, opt, root / folder_of(source)) == {"plan": source}
            compare(held(model, opt), reference, f"{source} -> {plan}")
            assert [group["lr"] for group in opt.param_groups] == [0.01, 0.03]
            loaded = full_state_dict(model)
            assert loaded.keys() == full.keys()
            for name in full:
                same(loaded[name], full[name])
            if (number + len(plan)) % 3 == 0 or source == plan:
                train(model, opt, [2])
                for name, value in full_state_dict(model).items():
                    assert torch.allclose(value, after[name], rtol=1e-11, atol=1e-12), f"{source} -> {plan}: {name}"
    return True


def run_matrix(root, groups, build):
    """Saves under every plan, then loads each under every plan."""
    saved = {}
    for world_size, plans in groups.items():
        ranks = [save_all(0, 1, plans, root, build)] if world_size == 1 else spawn(world_size, save_all, plans, root, build)
        for plan in plans:
            saved[plan] = [rank[plan] for rank in ranks]
    references = {}
    for plan, ranks in saved.items():
        model, opt = make("", 2, build)
        load(model, opt, root / folder_of(plan))
        reference = {name: (v, {k: s.clone() for k, s in state.items()}) for name, (v, state) in reference_of(model, opt).items()}
        full = {name: value.clone() for name, value in model.state_dict().items()}
        for rank, (found, their_full) in enumerate(ranks):
            compare(found, reference, f"{plan} rank {rank}")
            assert their_full.keys() == full.keys(), their_full.keys() ^ full.keys()
            for name in full:
                same(their_full[name], full[name])
        train(model, opt, [2])
        references[plan] = reference, full, {name: value.clone() for name, value in model.state_dict().items()}
    single = references[""][2]
    for _, _, after in references.values():
        for name in single:
            torch.testing.assert_close(after[name], single[name], rtol=1e-10, atol=1e-11)
    for world_size, plans in groups.items():
        for plan in plans:
            arguments = [plan], root, references, build
            assert load_all(0, 1, *arguments) if world_size == 1 else spawn(world_size, load_all, *arguments)


def test_every_plan_to_every_plan(tmp_path):
    run_matrix(tmp_path, PLANS, dense)
    assert sorted(os.listdir(tmp_path)) == sorted(folder_of(plan) for plan in ALL)


def test_experts(tmp_path):
    run_matrix(tmp_path, {1: [""], 2: ["ep=2", "dp=2,zero=1"], 4: ["dp=2,ep=2,zero=3"]}, mixture)


# -- dtypes and optimizers -----------------------------------------------------------------------------------------------------------------


def mixed_precision(rank, world_size, root):
    plans = ["dp=2", "dp=2,zero=1,precision=bf16", "dp=2,zero=3,precision=bf16", "dp=2,precision=bf16", "tp=2,precision=bf16"]
    saved = {}
    for plan in plans:
        model, opt = make(plan, 1, dtype=torch.float32)
        train(model, opt, [0, 1])
        save(model, opt, root / folder_of(plan))
        saved[plan] = full_state_dict(model)
    for plan, source in itertools.product(plans, plans[:3]):
        expected = saved[source]
        model, opt = make(plan, 2, dtype=torch.float32)
        load(model, opt, root / folder_of(source))
        frozen = "layers.1.norm1.weight"  # computed with, and kept, in bfloat16 unless zero=3 has a master copy of it
        for name, value in full_state_dict(model).items():
            narrow = torch.bfloat16 in (value.dtype, expected[name].dtype) and name == frozen
            same(value.bfloat16() if narrow else value, expected[name].bfloat16() if narrow else expected[name])
        if "bf16" in plan and "zero=3" not in plan and "tp" not in plan:
            for name, parameter in model.named_parameters():
                same(parameter.detach(), expected[name].to(torch.bfloat16))
        train(model, opt, [2])
    narrow, opt = make("dp=2", 2, dtype=torch.bfloat16)
    before = full_state_dict(narrow)
    with pytest.raises(ValueError, match="would lose bits"):
        load(narrow, opt, root / folder_of("dp=2"))
    for name, value in full_state_dict(narrow).items():
        same(value, before[name])
    save(narrow, opt, root / "narrow")
    wide, opt = make("dp=2,zero=2", 1, dtype=torch.float32)
    load(wide, opt, root / "narrow")
    for name, value in full_state_dict(wide).items():
        same(value, before[name].to(value.dtype))
    return True


def test_mixed_precision_to_and_from_full(tmp_path):
    assert all(spawn(2, mixed_precision, tmp_path))


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
    "nadam": (torch.optim.NAdam, {}),
    "adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "adafactor": (torch.optim.Adafactor, {}),
}


def optimizer_of(name):
    kind, options = OPTIMIZERS[name]
    return lambda model: two_groups(model, kind, options)


def save_optimizers(rank, world_size, root, names):
    for name in names:
        model, opt = make("dp=2,zero=1", 1, optimizer=optimizer_of(name))
        train(model, opt, [0, 1])
        save(model, opt, root / name)


def load_optimizers(rank, world_size, root, references):
    for name, (reference, after) in references.items():
        # zbv has a tied weight twice on a rank: each copy needs a step counter of its own
        for plan in ("dp=2,zero=2", "tp=2" if name == "amsgrad" else "pp=2,schedule=zbv"):
            model, opt = make(plan, 2, optimizer=optimizer_of(name))
            load(model, opt, root / name)
            compare(held(model, opt), reference, f"{name} {plan}")
            train(model, opt, [2])
            full = full_state_dict(model)
            for key, value in full.items():
                assert torch.allclose(value, after[key], rtol=1e-11, atol=1e-12), (name, plan, key)
            for key, layout, start, stop, values, _ in held(model, opt):
                same(values, layout.take(full[key]).reshape(-1)[start:stop].reshape(values.shape))
    return True


def test_optimizers(tmp_path):
    spawn(2, save_optimizers, tmp_path, list(OPTIMIZERS))
    references = {}
    for name in OPTIMIZERS:
        single, single_opt = make("", 1, optimizer=optimizer_of(name))
        train(single, single_opt, [0, 1])
        model, opt = make("", 2, optimizer=optimizer_of(name))
        load(model, opt, tmp_path / name)
        expected = reference_of(single, single_opt)
        reference = {}
        for key, (values, state) in reference_of(model, opt).items():
            assert torch.allclose(values, expected[key][0], rtol=1e-11, atol=1e-12) and state.keys() == expected[key][1].keys(), (name, key)
            for part, value in state.items():
                other = expected[key][1][part]
                assert value is other is None or torch.allclose(value, other, rtol=1e-9, atol=1e-12), (name, key, part)
            reference[key] = values, {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        train(model, opt, [2])
        references[name] = reference, {key: value.clone() for key, value in model.state_dict().items()}
    assert all(spawn(2, load_optimizers, tmp_path, references))


# -- what else -----------------------------------------------------------------------------------------------------------------------------


def odds_and_ends(rank, world_size, root):
    model, opt = make("dp=2,zero=1", 1)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    save(model, opt, root / "fresh", extra=scheduler.state_dict())
    train(model, opt, [0])
    scheduler.step()
    with torch.no_grad():
        model.local.fill_(-0.0)
        for layer in model.layers:
            layer.mark.copy_(torch.tensor([-0.0, float("nan"), 1.0]))
    full = full_state_dict(model)
    assert torch.equal(full["layers.3.mark"].signbit(), torch.tensor([True, False, False])) and full["layers.3.mark"][1].isnan()
    assert "local" not in full and full["lm_head.weight"] is full["embed.weight"]
    save(model, opt, root / "fresh2", extra=scheduler.state_dict())
    assert load(model, opt, root / "fresh")["last_epoch"] == 0
    assert not any(state for _, _, _, _, _, state in held(model, opt))  # as before the first step
    for plan in ("tp=2", "pp=2"):
        other, opt = make(plan, 2)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
        scheduler.load_state_dict(load(other, opt, root / "fresh2"))
        assert scheduler.last_epoch == 1 and [group["lr"] for group in opt.param_groups] == [0.005, 0.01]
        before = full_state_dict(other)
        load(other, None, root / "fresh")  # the model alone
        assert any(state for _, _, _, _, _, state in held(other, opt))
        assert not torch.equal(full_state_dict(other)["embed.weight"], before["embed.weight"])
    return full


def buffers_of_stages(rank, world_size, root):
    """A pipeline keeps modules of both ends on both ranks, of which one runs each; its buffer is the one that counts."""
    model = dense(1)
    for module in (model.embed, model.norm):
        module.register_buffer("seen", torch.zeros(1))
    model, opt = parallelize(model, two_groups(model), Plan(pp=2))
    model.embed.seen.fill_(2 + rank * 100)
    model.norm.seen.fill_(105 - rank * 100)
    full = full_state_dict(model)
    save(model, opt, root / "x")
    load(model, opt, root / "x")
    return [float(full["embed.seen"]), float(full["norm.seen"]), float(model.embed.seen), float(model.norm.seen)]


def test_buffers_of_pipeline_stages(tmp_path):
    assert spawn(2, buffers_of_stages, tmp_path) == [[2, 5, 2, 5]] * 2


@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_empty_state_extra_and_bits(tmp_path, backend):
    full = spawn(2, odds_and_ends, tmp_path, backend=backend)[1]
    plain = dense(5)
    plain.load_state_dict(full)
    assert torch.equal(plain.lm_head.weight, full["embed.weight"])


def gradients(rank, world_size, plans):
    found = {}
    for plan in plans:
        model, opt = make(plan, 1)
        step(model, opt, batch(0), cross_entropy, microbatches=2)
        found[plan] = full_gradients(model)
    return found


def test_full_gradients():
    plain = dense(1)
    idx, targets = batch(0)
    torch.nn.functional.cross_entropy(plain(idx).flatten(0, 1), targets.flatten()).backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    for world_size, plans in ((2, ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2", "pp=2,schedule=zbv", "tp=2,megatron_sp"]), (3, ["tp=3"])):
        for rank in spawn(world_size, gradients, plans):
            for plan, found in rank.items():
                assert found.keys() == expected.keys()
                for name, value in expected.items():
                    assert torch.allclose(found[name], value, rtol=1e-10, atol=1e-12), (plan, name)


def written_once(rank, world_size, root):
    model, opt = make("dp=2,zero=1,tp=2", 1)
    train(model, opt, [0])
    save(model, opt, root / "x")
    save(model, opt, root / "x")  # replaces it
    return True


def test_each_rank_writes_its_part(tmp_path):
    spawn(4, written_once, tmp_path)
    assert os.listdir(tmp_path) == ["x"]
    sizes = [os.path.getsize(tmp_path / "x" / f"__{rank}_0.distcp") for rank in range(4)]
    assert min(sizes) * 2 > max(sizes), sizes
    assert make("", 1) and sorted(os.listdir(tmp_path / "x")) == [".metadata", *(f"__{rank}_0.distcp" for rank in range(4))]


# -- errors --------------------------------------------------------------------------------------------------------------------------------


def wrong_shape(seed, dtype):
    torch.manual_seed(seed)
    return Llama(**{**SIZES, "vocab": 12}).to(dtype)


def fewer_layers(seed, dtype):
    torch.manual_seed(seed)
    return Llama(**{**SIZES, "layers": 3}).to(dtype)


def more_layers(seed, dtype):
    torch.manual_seed(seed)
    return Llama(**{**SIZES, "layers": 5}).to(dtype)


def untied(seed, dtype):
    torch.manual_seed(seed)
    return Llama(**SIZES).to(dtype)


ERRORS = [
    (wrong_shape, two_groups, "has shape .11, 12.*and .12, 12. here"),
    (fewer_layers, two_groups, "to which nothing in this model corresponds"),
    (more_layers, two_groups, "does not have 'layers.4"),
    (untied, lambda model: torch.optim.Adam(model.parameters()), "SGD, but the optimizer here is torch.optim.adam.Adam"),
    (untied, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), "has 2 parameter groups, the one here 1"),
    (
        untied,
        lambda model: two_groups(model.layers),
        "parameters are in other parameter groups.*embed.weight.* was in group 0, here it is in none",
    ),
]


def refusals(rank, world_size, root):
    model, opt = make("pp=2", 1, untied)
    train(model, opt, [0])
    save(model, opt, root / "good")
    for build, optimizer, message in ERRORS:
        other, other_opt = make("pp=2", 2, build, optimizer)
        before = held(other, other_opt)
        with pytest.raises(ValueError, match=message):
            load(other, other_opt, root / "good")
        for (_, _, _, _, old, _), (_, _, _, _, new, _) in zip(before, held(other, other_opt), strict=True):
            same(new, old)
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load(model, opt, root / "nowhere")
    with pytest.raises(ValueError, match="has not been through parallelize"):
        load(untied(1, torch.float64), None, root / "good")
    if rank == 0:
        (root / "other").mkdir()
        (root / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="is no checkpoint"):
        save(model, opt, root / "other")
    for function in (save, load):
        with pytest.raises(ValueError, match="different paths"):
            function(model, opt, root / f"rank{rank}")
    torch.distributed.barrier()
    whole_model = full_state_dict(model)
    train(model, opt, [1])
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(torch.distributed.checkpoint.FileSystemWriter, "write_data", lambda *_: 1 / 0)
        with pytest.raises(RuntimeError, match="save failed at .*rank 1: ZeroDivisionError"):
            save(model, opt, root / "good")
    if rank == 1:
        model.register_buffer("mine", torch.zeros(1))
    with pytest.raises(ValueError, match="mine"):
        load(model, opt, root / "good")
    if rank == 1:
        del model.mine
    load(model, opt, root / "good")  # the one before the failure
    for name, value in full_state_dict(model).items():
        same(value, whole_model[name])
    return True


def test_errors_on_every_rank(tmp_path):
    assert all(spawn(2, refusals, tmp_path))
    assert (tmp_path / "other" / "thesis.txt").read_text() == "mine"


def test_checkpoints_of_others(tmp_path):
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "foreign", no_dist=True)
    model, opt = make("", 1)
    with pytest.raises(ValueError, match="not written by parallel.save"):
        load(model, opt, tmp_path / "foreign")
