"""Values in an optimizer's groups that a program changes in place, on one rank: every step that follows is
refused, as if they were others, until all ranks have changed them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par

# kind: what all ranks begin with, how it is changed, its text before and after
VALUES: dict[str, tuple[Callable[[], Any], Callable[[Any], object], str, str]] = {
    "list": (lambda: [1, 2.5], lambda value: value.append(3), "(1, 2.5)", "(1, 2.5, 3)"),
    "empty list": (list, lambda value: value.append("x"), "()", "('x')"),
    "element": (lambda: [0.9, 0.99], lambda value: value.__setitem__(0, 0.5), "(0.9, 0.99)", "(0.5, 0.99)"),
    "list in a list": (lambda: [1, [2]], lambda value: value[1].append(3), "(1, (2))", "(1, (2, 3))"),
    "list in a tuple": (lambda: (1, [2]), lambda value: value[1].clear(), "(1, (2))", "(1, ())"),
    "dict": (lambda: {"a": 1}, lambda value: value.update(a=2), "{'a': 1}", "{'a': 2}"),
    "set": (lambda: {1}, lambda value: value.add(2), "{1}", "{1, 2}"),
    "tensor": (lambda: torch.tensor([1.0, 2.0]), lambda value: value.add_(1), "(1, 2)", "(2, 3)"),
    "array": (lambda: np.array([1, 2]), lambda value: value.__iadd__(1), "(1, 2)", "(2, 3)"),
}


def take(model: nn.Module, opt: torch.optim.Optimizer) -> str:
    """What the step said that raised, or nothing."""
    try:
        par.step(model, opt, (torch.ones(2, 3), torch.zeros(2, 3)), nn.functional.mse_loss)
    except ValueError as error:
        return str(error)
    return ""


def changed(rank: int, world_size: int, who: int, group: int) -> dict[str, list[str]]:
    """For each kind what steps said: as it was, changed on one rank, again, changed on all."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    opt = torch.optim.SGD([{"params": part.parameters()} for part in model], 0.1)
    par.parallelize(model, opt, par.Plan(dp=world_size))
    found = {}
    for kind, (make, change, _, _) in VALUES.items():
        value = opt.param_groups[group]["mine"] = make()
        said = [take(model, opt)]
        if rank == who:
            change(value)
        said += [take(model, opt), take(model, opt)]
        if rank != who:
            change(value)
        found[kind] = [*said, take(model, opt)]
    return found


@pytest.mark.parametrize(("who", "group"), [(0, 1), (1, 0)])
def test_a_value_that_one_rank_changes_in_place(who: int, group: int) -> None:
    for rank, found in enumerate(spawn(2, changed, who, group)):
        for kind, (first, second, again, last) in found.items():
            _, _, before, after = VALUES[kind]
            here, there = (after, before) if rank == who else (before, after)
            assert first == last == "" and second == again, kind
            assert second.startswith(
                f"[rank {rank}] step: the optimizer's mine of group {group} differs between ranks: "
                f"{here} here, {there} on rank {1 - rank}. "
            ), (kind, second)
