"""Checkpoints from every plan to every plan.

The reference for the bits is the checkpoint as a plain model in one process reads it, compared with what each
rank held when it saved and what each rank holds after it has loaded; the reference for the next step is the
single process.
"""

import os

import torch
from checkpoint_cases import (
    compare,
    dense,
    folder_of,
    held,
    make,
    mixture,
    quiet,  # noqa: F401
    reference_of,
    same,
    train,
)
from tiers import tier
from torch_ranks import spawn

from pycomm.parallel import full_state_dict, load, save

PLANS = {
    1: [""],
    2: ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2", "pp=2,schedule=zbv"],
    3: ["dp=3,zero=2,bucket_mb=0.003", "tp=3"],
    4: ["dp=2,tp=2,zero=1", "pp=2,dp=2,zero=3"],
}


ALL = [plan for plans in PLANS.values() for plan in plans]


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
                    assert torch.allclose(value, after[name], rtol=1e-11, atol=1e-12), (
                        f"{source} -> {plan}: {name}"
                    )
    return True


def run_matrix(root, groups, build):
    """Saves under every plan, then loads each under every plan."""
    saved = {}
    for world_size, plans in groups.items():
        ranks = (
            [save_all(0, 1, plans, root, build)]
            if world_size == 1
            else spawn(world_size, save_all, plans, root, build)
        )
        for plan in plans:
            saved[plan] = [rank[plan] for rank in ranks]
    references = {}
    for plan, ranks in saved.items():
        model, opt = make("", 2, build)
        load(model, opt, root / folder_of(plan))
        reference = {
            name: (v, {k: s.clone() for k, s in state.items()})
            for name, (v, state) in reference_of(model, opt).items()
        }
        full = {name: value.clone() for name, value in model.state_dict().items()}
        for rank, (found, their_full) in enumerate(ranks):
            compare(found, reference, f"{plan} rank {rank}")
            assert their_full.keys() == full.keys(), their_full.keys() ^ full.keys()
            for name in full:
                same(their_full[name], full[name])
        train(model, opt, [2])
        references[plan] = (
            reference,
            full,
            {name: value.clone() for name, value in model.state_dict().items()},
        )
    single = references[""][2]
    for _, _, after in references.values():
        for name in single:
            torch.testing.assert_close(after[name], single[name], rtol=1e-10, atol=1e-11)
    for world_size, plans in groups.items():
        for plan in plans:
            arguments = [plan], root, references, build
            assert load_all(0, 1, *arguments) if world_size == 1 else spawn(world_size, load_all, *arguments)


@tier(slow=1)
def test_every_plan_to_every_plan(tmp_path):
    run_matrix(tmp_path, PLANS, dense)
    assert sorted(os.listdir(tmp_path)) == sorted(folder_of(plan) for plan in ALL)


@tier(slow=1)
def test_experts(tmp_path):
    run_matrix(tmp_path, {1: [""], 2: ["ep=2", "dp=2,zero=1"], 4: ["dp=2,ep=2,zero=3"]}, mixture)
