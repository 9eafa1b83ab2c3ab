"""Checkpoints of dtypes and optimizers: what is cast, what is refused, and all kinds of state."""

import itertools

import pytest
import torch
from checkpoint_cases import (
    compare,
    folder_of,
    held,
    make,
    quiet,  # noqa: F401
    reference_of,
    same,
    train,
    two_groups,
)
from tiers import tier
from torch_ranks import spawn

from pycomm.parallel import full_state_dict, load, save


def mixed_precision(rank, world_size, root):
    plans = [
        "dp=2",
        "dp=2,zero=1,precision=bf16",
        "dp=2,zero=3,precision=bf16",
        "dp=2,precision=bf16",
        "tp=2,precision=bf16",
    ]
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
        # computed with, and kept, in bfloat16 unless zero=3 has a master copy of it
        frozen = "layers.1.norm1.weight"
        for name, value in full_state_dict(model).items():
            narrow = torch.bfloat16 in (value.dtype, expected[name].dtype) and name == frozen
            same(
                value.bfloat16() if narrow else value, expected[name].bfloat16() if narrow else expected[name]
            )
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


@tier(slow=1)
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


@tier(slow=1)
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
            assert (
                torch.allclose(values, expected[key][0], rtol=1e-11, atol=1e-12)
                and state.keys() == expected[key][1].keys()
            ), (name, key)
            for part, value in state.items():
                other = expected[key][1][part]
                assert value is other is None or torch.allclose(value, other, rtol=1e-9, atol=1e-12), (
                    name,
                    key,
                    part,
                )
            reference[key] = (
                values,
                {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()},
            )
        train(model, opt, [2])
        references[name] = reference, {key: value.clone() for key, value in model.state_dict().items()}
    assert all(spawn(2, load_optimizers, tmp_path, references))
