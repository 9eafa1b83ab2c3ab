"""What save and load refuse, with every rank raising and nothing changed."""

import pytest
import torch
from checkpoint_cases import (
    SIZES,
    held,
    make,
    quiet,  # noqa: F401
    same,
    train,
    two_groups,
)
from models import Llama
from torch_ranks import spawn

from pycomm.parallel import full_state_dict, load, save


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


def exchanged(groups, **options):
    """The parameters of each group are in the other one."""
    first, second = (group["params"] for group in groups)
    return torch.optim.SGD([{**groups[0], "params": second}, {**groups[1], "params": first}], **options)


ERRORS = [
    (wrong_shape, two_groups, "has shape .11, 12.*and .12, 12. here"),
    (fewer_layers, two_groups, "to which nothing in this model corresponds"),
    (more_layers, two_groups, "does not have 'layers.4"),
    (
        untied,
        lambda model: torch.optim.Adam(model.parameters()),
        "SGD, but the optimizer here is torch.optim.adam.Adam",
    ),
    (
        untied,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "has 2 parameter groups, the one here 1",
    ),
    (
        untied,
        lambda model: two_groups(model, exchanged),
        "are in other parameter groups.* was in group [01] .* is in group [01] now.*takes the model",
    ),
    (
        untied,
        lambda model: two_groups(model.layers),
        "parameters are in other parameter groups.*embed.weight.* was in group 0 .* is in no group .*now",
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
        torch.distributed.checkpoint.save(
            {"x": torch.ones(2)}, checkpoint_id=tmp_path / "foreign", no_dist=True
        )
    model, opt = make("", 1)
    with pytest.raises(ValueError, match="not written by parallel.save"):
        load(model, opt, tmp_path / "foreign")
