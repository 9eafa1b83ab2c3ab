"""What the kernels of a group share (context.py), and the room that launches ask for, with the group and the
device played by others.
"""

import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from oracle import draw

from pycomm.errors import CommTimeoutError, MismatchError
from pycomm.fused import context, form, launch, machine, ranks
from pycomm.fused.config import Config
from pycomm.fused.kernels import signal
from pycomm.fused.problem import Problem

HERE = machine.Machine(90, 1, 132, "")
TILE = Config(32, 16, 16)
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


class Peers:
    """A communicator of ranks that all say the same, but where `others` says something else."""

    def __init__(self, rank=1, world_size=3):
        self.rank, self.world_size, self.timeout, self.others, self.asked = rank, world_size, 2.0, {}, []

    def exchange(self, communicator, value):
        self.asked.append(value)
        return [self.others.get(rank, value) for rank in range(self.world_size)]

    def empty(self, shape, dtype, device):
        return torch.zeros(shape, dtype=dtype, device=device)

    def peer_addresses(self, tensor):
        return [tensor.data_ptr() + rank for rank in range(self.world_size)]


@pytest.fixture
def peers(monkeypatch):
    found = Peers()
    monkeypatch.setattr(context, "exchange", found.exchange)
    return found


def shared(peers, device="cpu", here=HERE):
    return context.Context(peers, device, here)


def problem(op=GATHER, **changes):
    pieces = {"sizes": (3, 0, 2)} if op in (GATHER, SCATTER) else {}
    return Problem(op, 5, 40, 24, torch.float32, 3, 1, **pieces)._replace(**changes)


# --- room --------------------


def test_a_block_grows_by_what_is_asked_and_never_shrinks(peers):
    """By flags, by staging, by both; what fits is left as it is; a fresh block has no launch behind it."""
    mine, seen = shared(peers), []
    for number, (flags, nbytes) in enumerate(
        [(1, 1), (2000, 9), (7, 9000), (2000, 9000), (3000, 20000), (5, 5)]
    ):
        block, _ = mine.enter(problem(n=number), TILE, flags, nbytes)
        assert block.flags >= flags and block.staging >= nbytes and mine.launches == number + 1
        assert block.flags % 1024 == block.staging % 4096 == 0
        assert block.tensor.numel() == 4096 + 2 * (4 * block.flags + block.staging)
        assert block.table.tolist() == peers.peer_addresses(block.tensor)
        assert block.local.tolist() == [0] * 4
        if seen and block is not seen[-1]:
            assert block.flags >= seen[-1].flags and block.staging >= seen[-1].staging
        seen.append(block)
    assert [a is b for a, b in zip(seen, seen[1:], strict=False)] == [False, False, True, False, True]


def test_halves_of_a_block_lie_apart():
    block = context.Block(None, None, None, 1024, 8192)
    ends = [(block.staging_offset + half * block.half, block.half) for half in range(2)]
    for start, _ in ends:
        assert start % 16 == 0 and start - 4 * block.flags >= context.WORD_BYTES
    assert ends[0][0] + block.staging <= ends[1][0] - 4 * block.flags
    assert ends[1][0] + block.staging <= 4096 + 2 * (4 * block.flags + block.staging)
    assert context.WORD_BYTES == 4 * 3 * signal.MAX_RANKS.value == 4 * 3 * context.MAX_RANKS
    assert context.Block(None, None, None, 1 << 29, 0).wide == (True, True)
    assert context.Block(None, None, None, 1024, (1 << 31) - 4096).wide == (False, True)
    assert context.Block(None, None, None, 1024, (1 << 31) - 8192).wide == (False, False)


def test_where_pieces_begin_is_of_one_cut(peers):
    """The same sizes with other dimensions inside, and other sizes, have their own; the first is kept."""
    mine = shared(peers)
    cuts = [((3, 0, 2), 1), ((3, 0, 2), 4), ((2, 0, 3), 4), ((3, 0, 2), 1)]
    found = [mine.spans_of(problem(sizes=sizes, inner=inner)) for sizes, inner in cuts]
    assert [each.tolist() for each in found] == [[0, 3, 3, 5], [0, 12, 12, 20], [0, 8, 8, 20], [0, 3, 3, 5]]
    assert found[3] is found[0] and found[0].dtype == torch.int32


class Asked(Exception):
    """What a launch asks for."""


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
@pytest.mark.parametrize("one_shot", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_room_that_a_launch_asks_for(save, activation, one_shot, dtype, monkeypatch):
    """What the heads of kernels/ say of flags and staging: of ragged tiles, of the longest piece."""
    monkeypatch.setattr(launch, "fitting", lambda problem, config, save: config)

    def enter(*arguments):
        raise Asked(*arguments[2:])

    def asked(op, rows, *operands):
        cut = {"sizes": (35, 0, 20), "outer": 2, "inner": 3} if op != REDUCE else {}
        one = Problem(op, rows, 40, 9, dtype, 3, 1, activation, False, **cut)
        config = TILE._replace(one_shot=one_shot)
        with pytest.raises(Asked) as found:
            getattr(launch, op)(one, SimpleNamespace(enter=enter), *operands, None, config, save=save)
        return found.value.args

    size, item, panels = 32 * 16, dtype.itemsize, 2 if activation == "swiglu" else 1
    a, b = draw(0, 330, 9, dtype=dtype), draw(1, 9, 40 * panels, dtype=dtype)
    longest = 210 + -210 % (16 // item)
    row_tiles, column_tiles = -(-210 // 32), 3
    assert asked(GATHER, 330, a, b) == (3 * row_tiles, 3 * longest * 9 * item)
    slots = row_tiles * column_tiles * panels
    assert asked(SCATTER, 330, a, b) == (3 * slots, 3 * slots * size * item)
    tiles = 11 * column_tiles  # of 330 rows
    if one_shot:
        assert asked(REDUCE, 330, a, b) == (3 * tiles * panels, 3 * tiles * panels * size * item)
    else:
        kept = panels if save and activation else 0
        flags, staged = 3 * -(-tiles // 3) * panels, 3 * -(-tiles // 3) * panels + tiles * (1 + kept)
        assert asked(REDUCE, 330, a, b) == (flags + tiles, staged * size * item)


def test_programs_of_each_role(monkeypatch):
    """On a shared device all fit into the rank's share; else who waits has ids behind those that work."""
    for programs in (3, 4, 9, 64, 132):
        for movers in (0, 1, 2, 16, 1024):
            for others in (1, 2):
                config = TILE._replace(movers=movers)
                found = launch.roles(config, SimpleNamespace(programs=programs, shares_device=True), others)
                assert min(found) >= 1 and found.multipliers + others * found.movers <= programs
                found = launch.roles(config, SimpleNamespace(programs=programs, shares_device=False), others)
                assert found.movers == max(1, movers)
                assert found.multipliers == (programs - found.movers if found.movers < programs else programs)


@pytest.mark.parametrize("numel", [0, 3, 4, 5, 8])
def test_a_is_padded_to_whole_units(numel):
    """The kernel reads 16 bytes at a time; what is behind the end must be there, and no NaN."""
    memory = torch.full((12,), float("nan"))
    for first in (0, 1):
        a = memory[first : first + numel].copy_(torch.arange(numel)).view(-1, 1)
        whole = launch._whole_units(a, 4)
        assert whole.data_ptr() % 16 == 0 and whole.numel() >= max(4, numel) and whole.numel() % 4 == 0
        assert whole.flatten()[:numel].tolist() == list(range(numel)) and not whole.isnan().any()
        assert (whole is a) == (numel in (4, 8) and first == 0)


def test_operands_of_a_launch(monkeypatch):
    """A bias whose columns are no neighbours is made dense; what was not measured is the default."""
    taken = []
    monkeypatch.setattr(
        launch, "matmul", lambda *values, **options: taken.append((values, options)) or (1, 2)
    )
    bias = draw(0, 16)[::2]
    one = Problem("matmul", 4, 8, 8, torch.float32, 1, 0, "relu", True)
    fused = SimpleNamespace(name="fused", config=None)
    found = form.run(one, fused, draw(1, 4, 8), draw(2, 8, 8), bias, ranks.ALONE, save=True)
    ((_, _, _, given, config), options) = taken[0]
    assert given.is_contiguous() and torch.equal(given, bias) and options == {"save": True}
    assert config == form.default("matmul", torch.float32, 80, 1, 1, "relu") and found[:2] == (1, 2)


@pytest.mark.parametrize(
    ("major", "op", "dtype", "warps", "bound"),
    [
        (8, "matmul", torch.float16, 8, 255),
        (8, REDUCE, torch.float32, 4, 200),
        (9, SCATTER, torch.float16, 8, None),
        (10, SCATTER, torch.bfloat16, 4, 255),
        (12, REDUCE, torch.float16, 8, 255),
        (10, REDUCE, torch.float32, 8, None),
        (10, GATHER, torch.float16, 8, None),
    ],
)
def test_options_of_the_compiler(major, op, dtype, warps, bound, monkeypatch):
    launch._options.cache_clear()
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    config = TILE._replace(warps=warps, stages=5)
    try:
        found = launch._compiled_for(
            problem(op, dtype=dtype), config, None, False, torch.device("cuda", 7), a_mode=0, b_mode=0
        )
    finally:
        launch._options.cache_clear()
    del found["TILE"]
    assert found == {"num_warps": warps, "num_stages": 5} | ({"maxnreg": bound} if bound else {})


# --- what ranks compare --------------------

BASE = Problem(GATHER, 5, 40, 24, torch.float32, 3, 0, "gelu", True, 2, 3, (3, 0, 2), ())
OTHER = dict(
    op=SCATTER, m=6, n=41, k=25, dtype=torch.float16, activation="relu", bias=False, outer=3, inner=2,
    sizes=(2, 0, 3),
)  # fmt: skip


@pytest.mark.parametrize("field", OTHER)
def test_ranks_that_differ_in_any_field_find_out(field, peers):
    """The rank that differs is named, with both texts; nothing is launched."""
    other = BASE._replace(**{field: OTHER[field]})
    text = context.describe(other, TILE, 7, 9)
    assert text != context.describe(BASE, TILE, 7, 9)
    for peer in (0, 2):
        peers.others = {peer: text}
        mine = shared(peers)
        place = re.escape(f"[rank 1/3] {GATHER} #0: ")
        with pytest.raises(
            MismatchError, match=f"{place}.* here, .* on rank {peer}. All ranks must"
        ) as found:
            mine.enter(BASE._replace(rank=1), TILE, 7, 9)
        assert text in str(found.value) and mine.block is None and mine.launches == 0
        assert (found.value.rank, found.value.world_size, found.value.op) == (1, 3, GATHER)
        assert (found.value.sequence, found.value.peer) == (0, peer)


@pytest.mark.parametrize("field", Config._fields)
def test_a_configuration_is_compared_in_each_field(field):
    value = getattr(TILE, field)
    changed = TILE._replace(**{field: not value if isinstance(value, bool) else 2 * value})
    assert context.describe(BASE, TILE, 7, 9) != context.describe(BASE, changed, 7, 9)


def test_room_and_shards_are_compared_and_ranks_are_not():
    texts = {context.describe(BASE, TILE, *room) for room in ((7, 9), (8, 9), (7, 10))}
    texts |= {context.describe(BASE._replace(shards=(4, 5, 6)), TILE, 7, 9)}
    assert len(texts) == 4
    found = [BASE._replace(rank=rank, n=rank, shards=(0, 1, 2)).shared() for rank in range(3)]
    assert found[0] == found[1] == found[2] and found[0].n == 2


def test_a_problem_is_compared_once_and_has_its_own_mark(peers):
    mine = shared(peers)
    first = [mine.enter(problem(n=n), TILE, 1, 1)[1] for n in (8, 9, 8)]
    assert first[0] == first[2] != first[1] and len(peers.asked) == 2
    assert all(0 <= mark < 1 << 31 for mark in first)
    assert mine.enter(problem(n=8, rank=2), TILE, 1, 1)[1] == first[0] and len(peers.asked) == 2
    assert mine.enter(problem(n=8), TILE, 1, 2)[1] != first[0] and len(peers.asked) == 3


# --- errors that launches leave --------------------


@pytest.mark.parametrize("peer", [0, 2, 31])
@pytest.mark.parametrize(("code", "what"), [(1, "the launch"), (2, "tiles"), (3, "the result of a tile")])
def test_a_wait_in_vain_is_said_at_every_later_call(code, what, peer, peers):
    mine = shared(peers)
    mine.enter(problem(), TILE, 1, 1)
    mine.record[0] = peer + code * context.MAX_RANKS
    for op in (GATHER, REDUCE):
        with pytest.raises(CommTimeoutError) as found:
            mine.enter(problem(op), TILE, 1, 1)
        assert str(found.value).startswith(
            f"[rank 1/3] {GATHER} #1: a launch before this waited for {what} of rank {peer} for about 2 s. "
        )
        assert found.value.peer == peer and found.value is mine.broken and mine.launches == 1


@pytest.mark.parametrize("known", [True, False])
def test_another_problem_of_a_peer_is_said_with_both(known, peers):
    mine = shared(peers)
    marks = [mine.enter(problem(n=n), TILE, 1, 1)[1] for n in (8, 9)]
    theirs = marks[1] if known else 12345
    mine.record[:3] = torch.tensor([2 + context.OTHER * context.MAX_RANKS, marks[0], theirs])
    with pytest.raises(MismatchError) as found:
        mine.check(GATHER)
    text = str(found.value)
    assert f"computed {context.describe(problem(n=8).shared(), TILE, 1, 1)}, on rank 2 " in text
    assert ("n=9" in text) == known and ("another problem" in text) != known and found.value.peer == 2


def test_waits_are_bounded(peers):
    """About the group's timeout, whatever it is; never without a limit, and a number of 32 bits."""
    mine, looks = shared(peers), []
    for timeout in (1e-9, 2.0, 1e8):
        mine.timeout = timeout
        looks.append(mine.limit)
    assert looks == [1, 4000, 2**31 - 1]


def test_more_ranks_than_words_are_refused():
    with pytest.raises(ValueError, match=r"\[rank 4/33\] fused kernels: at most 32 ranks"):
        shared(Peers(4, 33))
    assert shared(Peers(31, 32)).world_size == 32


# --- streams --------------------


def test_calls_run_one_after_the_other_in_any_stream(peers, monkeypatch):
    """A call in another stream waits for the event of the one before; one in the same stream need not."""
    waits, current = [], []

    class Event:
        def record(self, stream):
            self.stream = stream.name

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_event(self, event):
            waits.append((self.name, event.stream))

    a, b = Stream("a"), Stream("b")
    mine = shared(peers)
    mine.device = torch.device("cuda", 0)
    mine.block = context.Block(None, None, None, 1024, 4096)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == "capture")
    for stream in (a, a, b, b, a):
        current.append(stream)
        mine.enter(problem(), TILE, 1, 1)
        mine.leave()
    assert waits == [("b", "a"), ("a", "b")]
    current.append("capture")  # there the order is the stream's; its block is kept
    for _ in range(2):
        mine.enter(problem(), TILE, 1, 1)
        mine.leave()
    assert mine.captured == [mine.block] and len(waits) == 2 and mine.stream is a
    with pytest.raises(ValueError, match="#7: the first call with a problem of this size cannot be captured"):
        mine.enter(problem(n=7), TILE, 2000, 1)
