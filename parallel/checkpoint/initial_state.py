"""The state of an optimizer that has taken no step, for what is read into tensors that must be there already
(torch.distributed.checkpoint.load).

torch's get_optimizer_state_dict makes it by a step with zero gradients, after which a count of steps is 1 and
NAdam's product has moved: a training that loads it would differ from one that starts. Here it is what the
optimizer itself begins with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Start", "initial_state"]


class Start(NamedTuple):
    """One tensor of the state. like: it has the shape and dtype of the parameter, else 0-dim and float32."""

    like: bool
    value: float = 0.0


_ZEROS, _COUNT = Start(like=True), Start(like=False)
_MOMENTS = {"step": _COUNT, "exp_avg": _ZEROS, "exp_avg_sq": _ZEROS}


def initial_state(opt: torch.optim.Optimizer, group: Mapping[str, object]) -> dict[str, Start]:
    """By its key. Raises ValueError for an optimizer whose beginning is not known."""
    optim, rate = torch.optim, group.get("lr", 0.0)
    kind, lr = type(opt), rate.item() if isinstance(rate, torch.Tensor) else rate
    assert isinstance(lr, (int, float))
    starts: dict[type, dict[str, Start]] = {
        optim.SGD: {"momentum_buffer": _ZEROS} if group.get("momentum") else {},
        optim.Adamax: {"step": _COUNT, "exp_avg": _ZEROS, "exp_inf": _ZEROS},
        optim.NAdam: {**_MOMENTS, "mu_product": Start(False, 1.0)},
        optim.RAdam: _MOMENTS,
        optim.Adadelta: {"step": _COUNT, "square_avg": _ZEROS, "acc_delta": _ZEROS},
        optim.ASGD: {"step": _COUNT, "eta": Start(False, lr), "mu": Start(False, 1.0), "ax": _ZEROS},
        optim.Rprop: {"step": _COUNT, "prev": _ZEROS, "step_size": Start(True, lr)},
        optim.Adagrad: {},  # it has state from the beginning
        optim.RMSprop: {
            "step": _COUNT,
            "square_avg": _ZEROS,
            **({"momentum_buffer": _ZEROS} if group.get("momentum") else {}),
            **({"grad_avg": _ZEROS} if group.get("centered") else {}),
        },
    }
    starts[optim.Adam] = starts[optim.AdamW] = {
        **_MOMENTS,
        **({"max_exp_avg_sq": _ZEROS} if group.get("amsgrad") else {}),
    }
    if kind not in starts or group.get("dampening") and group.get("momentum"):
        raise ValueError(
            f"state_dict(model, opt): this {kind.__name__} has not taken a step, and the state with which it "
            "begins is not known. Call it after the first step, or use par.save and par.load"
        )
    return starts[kind]
