"""What a checkpoint holds beside values: buffers, empty state, the caller's extra; who writes what."""

import os

import pytest
import torch
from checkpoint_cases import (
    batch,
    dense,
    held,
    make,
    quiet,  # noqa: F401
    train,
    two_groups,
)
from torch_ranks import spawn

from pycomm.parallel import (
    Plan,
    cross_entropy,
    full_gradients,
    full_state_dict,
    load,
    parallelize,
    save,
    step,
)


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
    assert (
        torch.equal(full["layers.3.mark"].signbit(), torch.tensor([True, False, False]))
        and full["layers.3.mark"][1].isnan()
    )
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
    """A pipeline keeps modules of both ends on both ranks, of which one runs each; its buffer is the one that
    counts.
    """
    model = dense(1)
    for module in (model.embed, model.norm):
        module.register_buffer("seen", torch.zeros(1))
    model, opt = parallelize(model, two_groups(model), Plan(pp=2))
    model.embed.seen.fill_(2 + rank * 100)
    model.norm.seen.fill_(105 - rank * 100)
    full = full_state_dict(model)
    save(model, opt, root / "x")
    load(model, opt, root / "x")
    return [
        float(full["embed.seen"]),
        float(full["norm.seen"]),
        float(model.embed.seen),
        float(model.norm.seen),
    ]


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


GRADIENTS = [
    (3, ["tp=3,zero=2", "tp=3"]),  # kv heads that two ranks have
    (2, ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2", "pp=2,schedule=zbv", "tp=2,megatron_sp"]),
]


@pytest.mark.parametrize(
    ("world_size", "plans"), [GRADIENTS[0], pytest.param(*GRADIENTS[1], marks=pytest.mark.slow)]
)
def test_full_gradients(world_size, plans):
    plain = dense(1)
    idx, targets = batch(0)
    torch.nn.functional.cross_entropy(plain(idx).flatten(0, 1), targets.flatten()).backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
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
    assert make("", 1) and sorted(os.listdir(tmp_path / "x")) == [
        ".metadata",
        *(f"__{rank}_0.distcp" for rank in range(4)),
    ]
