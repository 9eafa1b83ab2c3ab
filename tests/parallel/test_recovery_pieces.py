"""The parts of a recovery by themselves, and deaths one after the other in one run."""

import contextlib
import dataclasses
import gc
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

import pycomm
import pycomm.parallel as par
from pycomm.parallel.ground.plan import AXES
from pycomm.parallel.ground.streams import Stream
from pycomm.parallel.parts import parts_of
from pycomm.parallel.recovery import crew as crews
from pycomm.parallel.recovery import holdings, neighbours, snapshot, training
from pycomm.parallel.recovery.crew import Crew
from pycomm.parallel.recovery.holdings import Generation, Holdings
from pycomm.parallel.recovery.memory import CopyMemory, OwnMemory
from pycomm.parallel.recovery.pristine import Pristine
from pycomm.parallel.recovery.snapshot import LEAP, Dealer, Own, Piece, own_at, part_of, set_streams
from pycomm.parallel.recovery.store import CrewStore
from pycomm.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1]))
import recovery_kills as kills  # noqa: E402

pytestmark = pytest.mark.timeout(120)
LIMIT, WAIT = 100.0, 7.0


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_the_store_of_a_crew_names_the_process_that_died(dead):
    """Of the first, one in the middle and the last of those after rank 0."""
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    members = [subprocess.Popen(waits, stdin=subprocess.PIPE) for _ in range(3)]
    store = CrewStore(lambda mine: [mine, *((member.pid, None) for member in members)], 0)
    try:
        assert not store.check(["key"])
        members[dead].kill()
        members[dead].wait()
        with pytest.raises(pycomm.PeerError, match=f"^process {members[dead].pid}, a rank of the crew, died"):
            store.check(["key"])
    finally:
        store.close()
        for member in members:
            member.communicate()


def small():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def rows(number):
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(number)).double()
    return x, x[:, :3]


def test_deaths_one_after_the_other(tmp_path):
    """Each time all wait for as many as the first plan has; eval mode stays; one generation of memories."""
    steps = 4

    def rank_main(rank):
        gc.freeze()  # what the parent has: a recovery collects
        asked = []

        def grow(crew, at_least, timeout):
            asked.append((at_least, timeout))
            return False

        Crew.grow = grow
        model, opt = small()
        model[1].eval()
        store = dist.FileStore(str(tmp_path / "replacements"), -1)
        options = {"snapshot_every": 2, "store": store, "wait": WAIT, "timeout": LIMIT}
        run, plans = par.resilient(model, opt, "dp=3,zero=1", **options), []
        for number in run.steps(steps):
            if (rank, number) in ((0, 1), (2, 3)):
                run.leave()
                return None
            loss = run.step(rows(number), mse_loss)
            modes = [module.training for module in model]
            plans.append((str(run.plan), run.recoveries, len(run._holdings.generations), modes))
        return asked, plans, loss.item(), [p.tolist() for p in par.full_state_dict(model).values()]

    found = run_ranks(3, rank_main, mode="processes", backend="pycomm", timeout=LIMIT)
    assert found[0] is None and found[2] is None
    asked, plans, loss, values = found[1]
    assert asked == [(1, WAIT), (2, WAIT)]
    named = {3: "dp=3,zero=1", 2: "dp=2,zero=1", 1: str(par.Plan(zero=1))}
    assert plans == [(named[n], 3 - n, 1, [True, False, True]) for n in (3, 2, 2, 1)]
    model, opt = small()
    for number in range(steps):
        opt.zero_grad()
        expected = mse_loss(model(rows(number)[0]), rows(number)[1])
        expected.backward()
        opt.step()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for value, right in zip(values, model.parameters(), strict=True):
        torch.testing.assert_close(
            torch.tensor(value, dtype=torch.float64), right.detach(), rtol=0, atol=1e-12
        )


# --- the model before parallelize() ---------------------------------------------------------------


def test_model_and_optimizer_are_as_before_twice():
    """Names, devices, ties, groups, the user's hooks; modes and hyperparameters as they are now."""
    model, _ = kills.make()
    groups = [{"params": list(model.blocks.parameters())}]
    groups += [{"params": [p for n, p in model.named_parameters() if "blocks" not in n], "lr": 0.5}]
    opt = torch.optim.AdamW(groups, lr=0.1)
    calls = []
    opt.register_step_pre_hook(lambda *_: calls.append(1))
    names = {id(p): name for name, p in model.named_parameters()}
    grouped = [[names[id(p)] for p in group["params"]] for group in opt.param_groups]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    methods = dict(vars(opt))
    pristine = Pristine(model, opt)
    for turn in range(2):
        par.parallelize(model, opt, par.Plan(zero=1))
        pristine.note_hooks()
        with pytest.raises(ValueError, match="in a group with lr=0"):
            opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        par.step(model, opt, kills.batch(turn))
        assert len(calls) == turn + 1
        model.blocks[turn].eval()
        opt.param_groups[turn]["lr"] = 7.0 + turn
        pristine.reset()
        assert {name: p.shape for name, p in model.named_parameters()} == shapes
        names = {id(p): name for name, p in model.named_parameters()}
        assert [[names[id(p)] for p in group["params"]] for group in opt.param_groups] == grouped
        assert not opt.state and "_parallel" not in model.__dict__
        assert [module.training for module in model.blocks] == [False, turn == 0]
        assert set(vars(opt)) == set(methods) | {"_own_loop", "step"}  # which take no other turn
        assert len(opt._optimizer_step_pre_hooks) == 1
        for method in ("zero_grad", "state_dict", "load_state_dict", "add_param_group"):
            assert method not in vars(opt)
    assert [group["lr"] for group in opt.param_groups] == [7.0, 8.0]


class Uncopyable(torch.nn.Linear):
    def __deepcopy__(self, memo):
        raise TypeError("a lock")


def test_what_cannot_be_made_again_is_refused():
    model = torch.nn.Sequential(Uncopyable(2, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"Sequential cannot be copied, .* under another plan: TypeError"):
        par.resilient(model, opt)
    run = par.resilient(*kills.make())
    with pytest.raises(ValueError, match="whose snapshots do not contain averages"):
        par.ema(run.model, 0.9)
    run.close()


# --- snapshots ------------------------------------------------------------------------------------


def parts_at(text, seed=5, **place):
    """Of a rank that has drawn nothing."""
    mesh = SimpleNamespace(coordinate=lambda axis: place.get(axis, 0))
    states = {
        stream: (torch.Generator().manual_seed(seed + i).get_state(), None) for i, stream in enumerate(Stream)
    }
    streams = SimpleNamespace(states=states)
    return SimpleNamespace(mesh=mesh, plan=par.Plan.parse(text), streams=streams, device=torch.device("cpu"))


def own_of(text, **place):
    """Of the rank at this place, whose streams are its own."""
    coordinates = {axis: place.get(axis, 0) for axis in AXES}
    return Own(coordinates, {"of": (text, tuple(coordinates.values()))}, f"program {coordinates}")


def source_of(text, number=3):
    plan = par.Plan.parse(text)
    owns = [
        own_of(text, dp=d, pp=p, tp=t) for p in range(plan.pp) for d in range(plan.dp) for t in range(plan.tp)
    ]
    return SimpleNamespace(owns=owns, number=number)


@pytest.mark.parametrize(
    ("before", "now", "place", "expected"),
    [
        ("dp=3", "dp=2", {"dp": 1}, {"dp": 1}),
        ("dp=2", "dp=3", {"dp": 2}, {}),  # a copy of the first
        ("dp=2,tp=2", "dp=3,tp=2", {"dp": 2, "tp": 1}, {"tp": 1}),
        ("tp=2", "tp=4", {"tp": 3}, {}),  # no such part: the first
        ("dp=2,pp=2", "pp=2", {"pp": 1}, {"pp": 1}),
    ],
)
def test_whose_place_a_rank_takes(before, now, place, expected):
    coordinates = {axis: expected.get(axis, 0) for axis in AXES}
    assert own_at(parts_at(now, **place), source_of(before)).coordinates == coordinates
    assert part_of(parts_at(now, **place)) == tuple(place.get(axis, 0) for axis in AXES if axis != "dp")


def seeds(parts):
    generator = torch.Generator()
    return [generator.set_state(state).initial_seed() for state, _ in parts.streams.states.values()]


def test_random_streams_go_on_or_are_new():
    """They go on where all places were there before; else none begins again with numbers that were drawn:
    other ones after each snapshot, the same distance between ranks, so that tp still shares.
    """
    parts = parts_at("dp=2,tp=2", dp=1, tp=1)
    set_streams(parts, source_of("dp=3,tp=2"))
    assert parts.streams.states["of"] == ("dp=3,tp=2", tuple({"dp": 1, "tp": 1}.get(a, 0) for a in AXES))
    seen = set()
    for number in (0, 3, 4):
        found = []
        for seed in (5, 40):
            parts = parts_at("dp=3", seed, dp=2)
            set_streams(parts, source_of("dp=2,tp=2", number))
            found += seeds(parts)
        assert found == [seed + LEAP * (number + 1) for seed in (5, 6, 40, 41)]
        assert not seen & set(found) and not {5, 6, 40, 41} & set(found)
        seen |= set(found)


def test_each_rank_writes_about_as_many_bytes(monkeypatch):
    """A rank that holds a piece sends it, once; if all hold all, the counts differ by one at most."""
    sizes = [40, 36, 30, 12, 11, 10, 5, 5, 3, 1]
    common = [Piece(f"model/{i}", (0,), (size,), (size,), torch.float64) for i, size in enumerate(sizes)]
    alone = [Piece(f"optim/{rank}", (rank,), (7,), (21,), torch.float32) for rank in range(3)]
    told = [[*common, alone[rank], Piece("step", None, (), (), None)] for rank in range(3)]
    monkeypatch.setattr(snapshot, "exchange", lambda parts, value: told)
    written = []
    for rank in range(3):
        world = SimpleNamespace(world=SimpleNamespace(rank=rank))
        dealer = Dealer(SimpleNamespace(opt=None, mesh=world))
        dealer.deal(told[rank])
        assert alone[rank] in dealer.mine and dealer.known == told[rank]
        written.append(dealer.mine)
    every = [piece for mine in written for piece in mine]
    assert len(every) == len(set(every)) == len(common) + 3 + 1
    loads = [sum(snapshot._nbytes(piece) for piece in mine) for mine in written]
    assert max(loads) - min(loads) <= 8 * 12 < sum(loads) / 8


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ({}, None),
        ({b"a": {0: (4, 5)}}, None),  # no rank has b
        ({b"a": {0: (4, 5)}, b"b": {0: (5,), 1: (4,)}}, 5),
        ({b"a": {0: (4, 5)}, b"b": {1: (4,)}}, 4),
        ({b"a": {0: (4,), 2: (5,)}, b"b": {1: (5,), 0: (4,)}, b"c": {0: (9,)}}, 5),  # c is of others
        ({b"a": {0: (6,)}, b"b": {1: (5,)}}, None),
        ({b"a": {0: ()}, b"b": {1: (5,)}}, None),
    ],
)
def test_the_last_number_that_is_whole(held, expected):
    found = {
        token: {rank: (None, list(some)) for rank, some in ranks.items()} for token, ranks in held.items()
    }
    assert holdings._last_whole([b"a", b"b"], found) == expected
    assert holdings._last_whole([], found) is None


class Wire:
    """A Communicator between two ranks, of which first one has its turn and then the other."""

    def __init__(self):
        self.messages = []

    def send(self, tensor, rank, tag):
        self.messages.append((rank, tag, tensor.clone()))

    def recv(self, tensor, rank, tag, timeout=None):
        if tag == neighbours.ANSWER:
            tensor.fill_(1)
            return
        _, sent, value = self.messages.pop(0)
        assert sent == tag and value.shape == tensor.shape
        tensor.copy_(value)


@pytest.mark.parametrize("piece", [0, -1, 1, 7, 1 << 22])
def test_a_copy_in_pieces_of_any_size(piece, monkeypatch):
    """Also where the last piece is a single byte, or none is left for it. The end is answered, too."""
    memory, copy, wire = OwnMemory(), CopyMemory(b"0123456789abcdef"), Wire()
    memory.write(3, "about", [("values", torch.arange(90.0))])
    start, end = memory.extent(3).span
    size = piece if piece > 1 else end - start + piece if piece < 1 else 501
    monkeypatch.setattr(neighbours, "PIECE", size)
    neighbours.send_slot(wire, memory, 3, 1)
    assert len(wire.messages) == 1 + -(-(end - start) // size)
    assert neighbours.receive_slot(wire, copy, 0)
    (about, ((key, place),)) = copy.catalog(3)
    assert (about, key, wire.messages[-1][2].tolist()) == ("about", "values", [1])
    assert torch.equal(copy.tensor_at(place, (90,), torch.float32), torch.arange(90.0))
    wire.messages = [(1, neighbours.DATA, torch.full((6,), neighbours.END))]
    assert not neighbours.receive_slot(wire, copy, 0) and len(wire.messages) == 1


def choosing(comm, written):
    """What each rank finds. written: {writer: the numbers in its memory}; each rank is on its own host."""
    crew = Crew(comm, None, 30.0)
    crew.hosts = list(range(comm.world_size))
    own = OwnMemory() if comm.rank in written else None
    piece = Piece(f"extra of {comm.rank}", None, (), (), None)
    for number in written.get(comm.rank, ()):
        about = Own({axis: comm.rank for axis in AXES}, {}, f"program of {comm.rank} in {number}")
        own.write(number, about, [((piece, 2), b"%d!" % number)])
    tokens = [token for token in crew.exchange(own and own.token) if token]
    held = Holdings()
    held.generations = [Generation(1, tokens, {own.token: own} if own else {}, own, None)]
    if comm.rank == 0:  # one that the others have not begun
        held.generations.append(Generation(2, [b"n" * 16, b"m" * 16], {}, None, None))
    source = held.choose(crew)
    places = {
        key: place.memory.bytes_at(place.place, place.nbytes) for (key, _), place in source.places.items()
    }
    return source.number, [own.program for own in source.owns], places


def test_the_last_whole_snapshot_is_fetched_by_every_host():
    """Also by one that has written nothing, and each from who has it; in the order of the writers."""
    found = run_ranks(4, choosing, {0: (4, 6), 1: (4,), 3: (4, 6)})
    programs = [f"program of {rank} in 4" for rank in (0, 1, 3)]
    places = {f"extra of {rank}": b"4!" for rank in (0, 1, 3)}
    assert found == [(4, programs, places)] * 4
    for error in run_ranks(2, choosing, {0: (4,), 1: (5,)}, fail=False):
        assert isinstance(error, RuntimeError) and "no snapshot is whole" in str(error)


@pytest.mark.timeout(30)
def test_a_memory_that_ends_too_early_is_refused():
    with pytest.raises(OSError, match="ends before what it says that it has"):
        OwnMemory().bytes_at(1 << 45, 10)


# --- the crew -------------------------------------------------------------------------------------


class Grows:
    """A Communicator whose grow() ends at its limit while `late` is true."""

    rank, world_size = 0, 2

    def __init__(self):
        self.late, self.asked = True, []

    def grow(self, store, at_least, timeout):
        self.asked.append((at_least, timeout))
        if self.late:
            raise pycomm.CommTimeoutError("nobody came")
        return self


def test_who_did_not_come_is_passed_over_once(monkeypatch):
    """Tickets of processes that did not come in time count no more, until others have come."""
    tickets = [3]
    monkeypatch.setattr(crews.Communicator, "waiting", lambda store: tickets[0])
    comm = Grows()
    crew = Crew(comm, "store", 1.0)
    assert crew.waiting() == 3 and not crew.grow(1)
    assert crew.waiting() == 0
    tickets[0] = 5
    assert crew.waiting() == 2 and not crew.grow(2, 0.5)
    assert crew.waiting() == 0
    tickets[0], comm.late = 6, False
    assert crew.grow(1) and crew.waiting() == 6
    crew.grow_to(2, WAIT), crew.grow_to(1, WAIT), crew.grow_to(4, 0.0)
    assert len(comm.asked) == 3
    crew.grow_to(5, WAIT)
    assert comm.asked == [(1, crews.JOINING), (2, 0.5), (1, crews.JOINING), (3, WAIT)]
    alone = Crew(comm, None, 1.0)
    alone.grow_to(5, WAIT)
    assert alone.waiting() == 0 and len(comm.asked) == 4


class Shrinks:
    """A Communicator whose shrink() raises these errors, one after the other."""

    rank, world_size = 0, 3

    def __init__(self, *errors):
        self.errors, self.limits = list(errors), []

    def shrink(self, timeout):
        self.limits.append(timeout)
        if self.errors:
            raise self.errors.pop(0)
        return "smaller"


def late(text="rank 1 did not come", op="all_gather"):
    return pycomm.CommTimeoutError(text, op=op)


@pytest.mark.parametrize(
    ("errors", "calls", "words"),
    [
        ((), 1, None),
        ((late(), late()), 3, None),  # as many as there are others
        ((late(), late(), late()), 3, "did not come"),
        ((late("rank 2 lives. Call shrink() again"),), 1, "rank 2 lives. It hangs, or gave up the training"),
        ((late(op="shrink"),), 1, "rank 1 did not come"),
        ((late(), pycomm.AbortedError("left out")), 2, "left out"),
    ],
)
def test_an_agreement_is_tried_again_as_often_as_ranks_can_be_lost(errors, calls, words):
    comm = Shrinks(*errors)
    crew = Crew(comm, None, 20.0)
    if words is None:
        crew.shrink()
        assert crew.comm == "smaller"
    else:
        with pytest.raises(pycomm.CommError, match=re.escape(words)):
            crew.shrink()
    assert len(comm.limits) == calls and len(set(comm.limits)) == 1


def test_what_a_crew_tells(monkeypatch):
    """Every rank's object, long and short ones; rank 0's on all; hosts by their numbers."""
    values = [{"rank": rank, "text": "x" * (1000 * rank)} for rank in range(3)]
    monkeypatch.setattr(crews, "host_mark", lambda: "same")

    def rank_main(comm):
        crew = Crew(comm, None, 1.0)
        told, first = crew.exchange(values[comm.rank]), crew.tell(values[comm.rank])
        last = crew.tell([comm.rank, None][comm.rank > 0])
        crew.look()
        return (
            told,
            first,
            last,
            crew.hosts,
            [crew.is_here(rank) for rank in range(3)],
            (crew.rank, crew.size),
        )

    for rank, found in enumerate(run_ranks(3, rank_main)):
        assert found == (values, values[0], 0, [0, 0, 0], [True] * 3, (rank, 3))


def test_answers_of_the_same_axes_are_taken_over():
    """None of other axes, and none where a rank has just come."""
    model, opt = par.parallelize(*small())
    taken = []
    parts = dataclasses.replace(parts_of(model), checks=SimpleNamespace(take_over=taken.append))
    for before in (None, (par.Plan(dp=2), "of two"), (par.Plan(tp=2), "of tp"), (par.Plan(zero=1), "of one")):
        training._take_over_answers(parts, before)
    assert taken == ["of one"]


def test_parts_of_a_run_are_those_of_its_plan():
    """weights=, hyperparameters of the beginning, `active`, and options that are refused."""
    model, opt = kills.make()
    run = par.resilient(model, opt, lambda ranks: f"dp={ranks}", snapshot_every=1)
    assert (str(run.plan), run.active, run.done, run.repeats) == (str(par.Plan()), True, 0, False)
    assert parts_of(model).opt is opt and run.model is model and run.opt is opt
    with contextlib.closing(run), pytest.raises(ValueError, match="opt=None, snapshot_every=3, wait=0.0"):
        par.resilient(model, None, snapshot_every=3)
