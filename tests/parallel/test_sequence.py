"""Sequence parallelism against F.scaled_dot_product_attention on the whole sequence, in fp64, in
one process.
"""

import functools
import itertools

import pytest
import torch
from sequence_cases import ROUNDINGS, check, close, make, mesh, table
from tiers import tier
from torch_ranks import spawn

from pycomm.parallel.ground import comm
from pycomm.parallel.sequence import block, ring, split, ulysses


def fake(size, rank, name="ring"):
    return comm.Group(name, size, rank, None)


# ---- which positions ----


@pytest.mark.parametrize("zigzag", [False, True])
def test_positions_cut_every_length(zigzag):
    for length, ring_size, ulysses_size in itertools.product((0, 1, 2, 5, 16, 23), (1, 2, 3), (1, 2, 3)):
        seen, sizes = [], []
        for r, u in itertools.product(range(ring_size), range(ulysses_size)):
            groups = fake(ring_size, r), fake(ulysses_size, u)
            mine = split.positions(length, *groups, zigzag)
            assert torch.equal(
                mine, split.positions(length, fake(ring_size, 0), fake(ulysses_size, 0), zigzag, r, u)
            )
            assert mine.dtype == torch.int64 and mine.tolist() == sorted(mine.tolist())
            assert (
                len(mine)
                == split.local_length(length, *groups, zigzag)
                == split.lengths(length, *groups, zigzag)[r][u]
            )
            full = torch.arange(length)
            assert torch.equal(split.cut(full, 0, split.spans(length, *groups, zigzag)), mine)
            seen += mine.tolist()
            sizes.append(len(mine))
        assert sorted(seen) == list(range(length))
        assert max(sizes) - min(sizes) <= 2


def test_positions_of_the_picture():
    parts = [split.positions(23, fake(2, r), fake(2, u), True).tolist() for r in (0, 1) for u in (0, 1)]
    assert parts == [[0, 1, 2, 3, 4, 5], [18, 19, 20, 21, 22], [6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17]]


@pytest.mark.parametrize("zigzag", [False, True])
def test_tiles_are_the_causal_mask(zigzag):
    for length, size in itertools.product((1, 5, 8, 23, 32), (1, 2, 3, 4)):
        held = [split.ring_spans(length, size, rank, zigzag) for rank in range(size)]
        at = [split.positions(length, fake(size, rank), fake(1, 0), zigzag) for rank in range(size)]
        for mine, theirs in itertools.product(range(size), repeat=2):
            mask = torch.zeros(len(at[mine]), len(at[theirs]), dtype=torch.bool)
            for tile in ring.tiles(held[mine], held[theirs], True):
                rows = mask[tile.start : tile.stop, : tile.keys]
                assert not rows.any()
                rows |= torch.ones_like(rows).tril_() if tile.causal else True
            assert torch.equal(mask, at[mine][:, None] >= at[theirs][None, :])


def test_zigzag_balances():
    size, length = 4, 64
    held = [split.ring_spans(length, size, rank, True) for rank in range(size)]
    for step in range(1, size):
        work = [
            sum((t.stop - t.start) * t.keys for t in ring.tiles(held[r], held[(r - step) % size], True))
            for r in range(size)
        ]
        assert work == [(length // size) ** 2 // 2] * size
        assert all(len(ring.tiles(held[r], held[(r - step) % size], True)) == 1 for r in range(size))


# ---- one block ----


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_block_and_merge(flash, causal, monkeypatch):
    monkeypatch.setattr(block, "STRIP", 5)
    if not flash:
        monkeypatch.setattr(block, "FLASH", None)
    made = block.Scores(0.5)
    for q_heads, k_heads in ((2, 2), (6, 2)):
        data = make((2, q_heads, k_heads, 13, 4, 4), torch.float64, causal)
        q, k, v, grad = data.inputs
        if causal:
            out, lse = block.forward(q, k, v, True, made)
            grads = block.backward(block.Rows(q, out, lse, grad), k, v, True, made)
        else:
            parts = [(k[:, :, rows], v[:, :, rows]) for rows in (slice(0, 4), slice(4, 5), slice(5, 13))]
            out, lse = block.forward(q, *parts[0], False, made)
            for part in parts[1:]:
                block.merge(out, lse, *block.forward(q, *part, False, made))
            rows = block.Rows(q, out, lse, grad)
            grads_of = [block.backward(rows, *part, False, made) for part in parts]
            dq, dk, dv = zip(*grads_of, strict=True)
            grads = sum(dq), torch.cat(dk, 2), torch.cat(dv, 2)
        close((out, *grads), data, "block")


# ---- the functions, in ranks ----


def written_out(q, k, v, *, is_causal, scale, enable_gqa):
    """A kernel of the user's own, for heads of equal number."""
    assert q.shape[1] == k.shape[1] and not enable_gqa and scale is None
    scores = q @ k.mT / q.shape[3] ** 0.5
    hidden = (
        torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        if is_causal
        else torch.zeros((), dtype=torch.bool)
    )
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def ulysses_body(rank, world_size, cases):
    group = comm.as_group(name="ulysses")
    for name, causal, data in cases:
        length = data.inputs[0].shape[2]
        held = split.spans(length, comm.ALONE, group, False)
        sizes = None if length == 13 else split.ulysses_sizes(length, comm.ALONE, group, False)
        options = {"is_causal": causal, "sizes": sizes, "attention": written_out if length == 16 else None}
        check(data, held, functools.partial(ulysses.ulysses_attention, group=group, **options), name)


def ring_body(rank, world_size, cases, without_flash=False):
    low = {torch.bfloat16: 0.5}  # one rounding of a result that is computed in fp32
    if without_flash:
        block.FLASH = None
    group = comm.as_group(name="ring")
    for (name, causal, data), zigzag in itertools.product(cases, (None, True, False)):
        length = data.inputs[0].shape[2]
        held = split.ring_spans(length, group.size, rank, causal if zigzag is None else zigzag)
        options = {"is_causal": causal, "zigzag": zigzag, "length": None if length == 13 else length}
        check(
            data,
            held,
            lambda q, k, v: ring.ring_attention(q, k, v, group, **options),  # noqa: B023
            f"{name} zigzag={zigzag}",
            low.get(data.inputs[0].dtype),
        )


def hybrid_body(rank, world_size, ring_size, cases):
    groups = mesh(world_size, ring_size)
    for name, causal, data in cases:
        length = data.inputs[0].shape[2]
        held = split.spans(length, *groups, causal)
        options = {"is_causal": causal, "length": None if length == 13 else length}
        ring_group, ulysses_group = groups
        attention = functools.partial(
            ring.ring_ulysses_attention, ring=ring_group, ulysses=ulysses_group, **options
        )
        check(data, held, attention, name)


WORLDS = [(1, "pycomm"), (2, "pycomm"), (3, "pycomm"), (4, "pycomm"), (3, "gloo")]


@tier(quick=1 / 5)
@pytest.mark.parametrize("world_size, backend", WORLDS)
def test_ulysses(world_size, backend):
    spawn(world_size, ulysses_body, table(ROUNDINGS), backend=backend)


@tier(quick=1 / 6)
@pytest.mark.parametrize("world_size, backend", WORLDS)
def test_ring(world_size, backend):
    spawn(world_size, ring_body, table(ROUNDINGS), backend=backend)


def test_ring_with_the_plain_kernel():
    spawn(3, ring_body, table([torch.float64]), True)


@tier(quick=1 / 5)
@pytest.mark.parametrize(
    "world_size, ring_size, backend",
    [(4, 2, "pycomm"), (4, 2, "gloo"), (8, 4, "pycomm"), (2, 1, "pycomm"), (2, 2, "pycomm")],
)
def test_hybrid(world_size, ring_size, backend):
    spawn(world_size, hybrid_body, ring_size, table([torch.float64]), backend=backend)


def large_scores_body(rank, world_size, data, roundings):
    group = comm.as_group(name="ring")
    held = split.ring_spans(12, group.size, rank, True)
    check(
        data,
        held,
        lambda q, k, v: ring.ring_attention(q, k, v, group, is_causal=True, length=12),
        "large scores",
        roundings,
    )


def test_ring_does_not_overflow():
    data = make((1, 2, 2, 12, 4, 4), torch.float64, True, factor=1e3)
    q, k = data.inputs[:2]
    assert (q @ k.mT).max() > 1e4  # exp overflows at 709
    # A score's error is that of its sum of products, and enters the exponent.
    score = (q.abs() @ k.abs().mT).max().item() * q.shape[3] ** -0.5
    spawn(3, large_scores_body, data, ROUNDINGS[torch.float64] * score)


def deterministic_body(rank, world_size, data):
    groups = mesh(world_size, 2)
    held = split.spans(31, *groups, True)
    runs = [
        check(
            data,
            held,
            lambda q, k, v: ring.ring_ulysses_attention(q, k, v, *groups, is_causal=True, length=31),
            "run",
        )
        for _ in range(5)
    ]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_same_bits_in_every_run():
    spawn(4, deterministic_body, make((2, 6, 2, 31, 8, 8), torch.float32, True))


# ---- what is sent ----


def traffic_body(rank, world_size):
    group = comm.as_group(name="sp")
    batch, heads, length, size = 2, 8, 16, 4
    local = length // world_size
    q, k, v = (torch.ones(batch, heads, local, size, requires_grad=True) for _ in range(3))
    one = batch * length * heads * size * 4 // world_size  # N h / P elements of 4 bytes
    with comm.count_traffic() as traffic:
        out = ulysses.ulysses_attention(q, k, v, group, sizes=[local] * world_size)
    assert traffic.calls() == traffic.calls("all_to_all") == (2 if world_size > 1 else 0)
    assert traffic.nbytes() == 4 * one * (world_size - 1) // world_size
    with comm.count_traffic() as traffic:
        out.sum().backward()
    assert traffic.calls() == traffic.calls("all_to_all") == (2 if world_size > 1 else 0)
    assert traffic.nbytes() == 4 * one * (world_size - 1) // world_size

    # two key heads for eight query heads: each is sent to the ranks that use it, half of them or more
    k, v = (torch.ones(batch, 2, local, size, requires_grad=True) for _ in range(2))
    with comm.count_traffic() as traffic:
        ulysses.ulysses_attention(q, k, v, group, sizes=[local] * world_size)
    row = batch * local * size * 4
    sent = sum(
        8 // world_size + 2 * (1 if world_size >= 2 else 2) for other in range(world_size) if other != rank
    )
    assert traffic.nbytes() == row * sent + one * (world_size - 1) // world_size

    # the ring: k and v of two key heads pass R-1 times; backward the same and their gradients
    with comm.count_traffic() as traffic:
        out = ring.ring_attention(q, k, v, group, is_causal=True, length=length)
    blocks = 2 * 2 * row * (world_size - 1)
    assert (traffic.calls(), traffic.calls("send"), traffic.nbytes()) == (
        world_size - 1,
        world_size - 1,
        blocks,
    )
    with comm.count_traffic() as traffic:
        out.sum().backward()
    assert (traffic.calls(), traffic.calls("send"), traffic.nbytes()) == (
        2 * (world_size - 1),
        2 * (world_size - 1),
        2 * blocks,
    )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_calls_and_bytes(world_size):
    spawn(world_size, traffic_body)


def order_body(rank, world_size):
    events = []

    def noted(function, what):
        def wrapper(*args, **kwargs):
            events.append(what)
            return function(*args, **kwargs)

        return wrapper

    comm.isend, comm.irecv = noted(comm.isend, "send"), noted(comm.irecv, "recv")
    block.forward, block.backward = noted(block.forward, "compute"), noted(block.backward, "compute")
    x = torch.ones(1, 2, 4, 2, requires_grad=True)
    out = ring.ring_attention(x, x, x, is_causal=True, length=12)
    post = ["send", "recv"] if rank % 2 == 0 else ["recv", "send"]
    assert events == [*post, "compute", *post, "compute", "compute"]
    events.clear()
    # keys and values as before; gradients follow from the first block of another rank on
    out.sum().backward()
    assert events == [*post, "compute", *post, "compute", *post, "compute", *post]


def test_blocks_travel_while_attention_is_computed():
    spawn(3, order_body)


# ---- errors ----


def errors_body(rank, world_size):
    group = comm.as_group(name="sp")
    x = torch.zeros(1, 4, 6, 2)
    both = [ulysses.ulysses_attention, ring.ring_attention]
    cases = [
        (both, (x, x[:, :, :5], x[:, :, :5]), {}, "lengths differ"),
        (both, (x, x[:, :3], x[:, :3]), {}, "multiple"),
        (both, (x, x, x.double()), {}, "one dtype"),
        (both, (x[0], x[0], x[0]), {}, "batch, heads"),
        (both, (x, x[..., :1], x), {}, "head size must agree"),
        ([ulysses.ulysses_attention], (x, x, x), {"sizes": [5, 5]}, "has 6 positions"),
        ([ring.ring_attention], (x, x, x), {"length": 10}, "has 6 positions"),
    ]
    for functions, tensors, options, words in cases:
        for function in functions:
            with pytest.raises(ValueError, match=words) as error:
                function(*tensors, group, **options)
            assert f"[rank {rank}/2 of sp]" in str(error.value)
    uneven = x[:, :, : 2 + 3 * rank]  # every rank learns of it, and none waits for the others
    with pytest.raises(
        ValueError, match=r"the ranks hold \[2, 5\] positions, a sequence of 7 is cut into \[3, 4\]"
    ):
        ring.ring_attention(uneven, uneven, uneven, group, is_causal=True)


def test_errors_name_the_rank_and_both_values():
    spawn(2, errors_body)
