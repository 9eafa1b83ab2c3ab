"""What parallelize() leaves behind to notice what the user does between calls: which parameters are trained
(zero/trained.py), what was written to them (zero/writes.py), the optimizer's hyperparameters. Buckets that
are made later, for parameters that were frozen, also change which of them another stage has too (ties).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from pycomm.parallel.checkpoint.agree import exchange_over
from pycomm.parallel.ground.hyperparameters import Hyperparameters
from pycomm.parallel.pipeline.apply import not_to_train
from pycomm.parallel.pipeline.ties import Tie, make_ties
from pycomm.parallel.zero.trained import Held, Names, Trained
from pycomm.parallel.zero.writes import Writes

if TYPE_CHECKING:
    import torch

    from pycomm.parallel.building.alike import Given
    from pycomm.parallel.building.cut import Cut
    from pycomm.parallel.building.describe import Described
    from pycomm.parallel.data.reducer import Reducer
    from pycomm.parallel.ground.mesh import Mesh
    from pycomm.parallel.parts import Original
    from pycomm.parallel.zero.optimizer import Owner
    from pycomm.parallel.zero.shards import Shards
    from pycomm.parallel.zero.units import Units

__all__ = ["Built", "Noticed", "notice"]


class Built(NamedTuple):
    """What parallelize() has made, as in parts.py. owner: of the optimizer."""

    mesh: Mesh
    device: torch.device
    described: Described
    reducers: dict[int, Reducer]
    shards: dict[int, tuple[Shards, ...]]
    owner: Owner | None
    units: Units | None


class Noticed(NamedTuple):
    """As in parts.py."""

    ties: list[Tie]
    trained: Trained
    writes: Writes
    hyperparameters: Hyperparameters


def notice(given: Given, original: Original, cut: Cut, built: Built) -> Noticed:
    mesh, device, described, reducers, shards, owner, units = built
    model, plan = given.model, given.plan
    ask = functools.partial(exchange_over, mesh.world, device)
    ties: list[Tie] = []
    writes = Writes(model, described.infos, str(plan), ask)

    def survey() -> None:
        """Now, and when there are more buckets."""
        ties[:] = make_ties(reducers, described.stages_of, cut.stages.placement)
        writes.survey([each for stage in shards.values() for each in stage])

    survey()
    names = Names(
        original.first_name,
        original.trained,
        tuple(f"{moe}.experts." for moe in original.moe_names) if plan.ep > 1 else (),
        not_to_train(original.names, cut.sides, cut.stages, plan),
    )
    held = Held(plan, mesh.world.rank, described.infos_of, reducers, shards, owner, units, survey)
    trained = Trained(model.named_parameters(remove_duplicate=False), names, held, ask)
    return Noticed(ties, trained, writes, Hyperparameters(given.opt, ask))
