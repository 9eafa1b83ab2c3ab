"""Random numbers of a model on many ranks: who draws the same ones, and that nothing is drawn twice."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from pycomm.parallel.ground.plan import AXES, Plan
from pycomm.parallel.ground.streams import RandomStreams, Stream

SIZES = {"pp": 2, "dp": 2, "ep": 3, "ring": 2, "ulysses": 2, "tp": 3}


def streams_of(plan, place, seed=11):
    """place: coordinate of this rank along each axis."""
    mesh = SimpleNamespace(
        plan=plan,
        group=lambda axis: SimpleNamespace(size=getattr(plan, axis), rank=place[axis]),
        coordinate=place.__getitem__,
    )
    return RandomStreams(mesh, seed, torch.device("cpu"))


def draws(streams, *kinds):
    """A forward that changes to these streams, one after the other, and draws a number from each."""
    found = []
    with streams.active():
        for kind in kinds:
            streams.switch(kind)
            found.append(torch.rand(()).item())
    return found


def places():
    for numbers in itertools.product(*(range(SIZES[axis]) for axis in AXES)):
        yield dict(zip(AXES, numbers, strict=True))


def test_only_ranks_of_tp_share_and_only_one_of_their_streams():
    plan, shared, own = Plan(**SIZES), {}, []
    for place in places():
        first, second = draws(streams_of(plan, place), Stream.SHARED, Stream.OWN)
        shared.setdefault(first, []).append(place)
        own.append(second)
    groups = [{tuple(place[axis] for axis in AXES[:-1]) for place in some} for some in shared.values()]
    assert all(len(some) == SIZES["tp"] for some in shared.values()) and all(len(g) == 1 for g in groups)
    assert len({*own, *shared}) == plan.world_size + plan.world_size // SIZES["tp"]


def test_streams_go_on_and_keep_what_the_other_has_drawn():
    """As if each had its own generator, over several forwards; the user's generator is unchanged."""
    kinds = [Stream.SHARED, Stream.OWN, Stream.OWN, Stream.SHARED, Stream.OWN]
    streams = streams_of(Plan(tp=2), dict.fromkeys(AXES, 0))
    alone = {}
    for kind in Stream:
        streams_alone = streams_of(Plan(tp=2), dict.fromkeys(AXES, 0))
        alone[kind] = iter(draws(streams_alone, *[kind] * 20))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for _ in range(3):
        assert draws(streams, *kinds) == [next(alone[kind]) for kind in kinds]
        assert torch.equal(torch.get_rng_state(), before) and streams.current is None
    streams.switch(Stream.OWN)  # outside of a forward
    assert streams.current is None and torch.equal(torch.get_rng_state(), before)


def test_a_forward_that_raises_moves_its_stream():
    streams = streams_of(Plan(tp=2), dict.fromkeys(AXES, 0))
    seen = []
    for _ in range(2):
        with pytest.raises(ArithmeticError), streams.active():
            seen.append(torch.rand(()).item())
            streams.switch(Stream.OWN)
            seen.append(torch.rand(()).item())
            raise ArithmeticError
    assert len(set(seen)) == 4 and streams.current is None


def test_a_recomputation_has_the_streams_of_then_and_leaves_those_of_now():
    streams = streams_of(Plan(tp=2), dict.fromkeys(AXES, 1))
    with streams.active():
        torch.rand(3)
        streams.switch(Stream.OWN)
        again, state = streams.recomputation(), torch.get_rng_state()
        first = [torch.rand(()).item()]
        streams.switch(Stream.SHARED)
        first.append(torch.rand(()).item())
    now = {kind: value[0].clone() for kind, value in streams.states.items()}
    for _ in range(2):  # a gradient in a loss makes torch recompute twice
        with streams.kept():
            torch.set_rng_state(state)  # as torch's checkpoint does
            with again:
                second = [torch.rand(()).item()]
                streams.switch(Stream.SHARED)
                second.append(torch.rand(()).item())
        assert second == first and streams.current is None
        assert all(torch.equal(streams.states[kind][0], value) for kind, value in now.items())


def test_other_seeds_and_other_sizes_of_tp():
    for tp in (1, 2, 5):
        plan = Plan(dp=2, tp=tp)
        assert streams_of(plan, dict.fromkeys(AXES, 0)).cut is (tp > 1)
        some = [
            draws(streams_of(plan, {**dict.fromkeys(AXES, 0), "dp": dp, "tp": t}, seed), Stream.SHARED)[0]
            for seed in (0, 1000)
            for dp in range(2)
            for t in range(tp)
        ]
        assert len(set(some)) == 4, some
