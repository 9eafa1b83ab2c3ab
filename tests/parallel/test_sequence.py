"""Sequence parallelism against F.scaled_dot_product_attention on the whole sequence, in fp64, in one process."""

import itertools

import pytest
import torch
import torch._dynamo  # noqa: F401  (checkpoint imports it at its first recomputation; once here instead of in every rank)
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_ranks import spawn

from pycomm.parallel import comm
from pycomm.parallel.sequence import attention, block, ring, split, ulysses

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}

# (batch, query heads, key heads, length, head size, value head size)
SHAPES = [
    (2, 4, 4, 16, 8, 8),
    (1, 3, 3, 23, 5, 5),
    (2, 6, 2, 13, 4, 4),
    (1, 6, 3, 17, 8, 3),
    (1, 1, 1, 9, 4, 4),
    (2, 5, 1, 7, 2, 2),
    (1, 2, 2, 3, 4, 4),
    (1, 2, 1, 1, 4, 4),
]


def make(shape, dtype, causal, seed=0):
    """(q, k, v, gradient of out) in dtype, and (out, dq, dk, dv) of the whole sequence from the same values in fp64."""
    batch, q_heads, k_heads, length, size, v_size = shape
    generator = torch.Generator().manual_seed(seed)
    shapes = [(q_heads, size), (k_heads, size), (k_heads, v_size), (q_heads, v_size)]
    inputs = [torch.randn(batch, heads, length, width, generator=generator, dtype=torch.float64).to(dtype) for heads, width in shapes]
    q, k, v = (x.double().requires_grad_() for x in inputs[:3])
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return inputs, (out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3].double()))


def close(actual, expected, name, limit=None):
    """Largest error relative to the largest value of the whole expected tensor (actual is a piece of it, so it is given as a pair)."""
    piece, largest = expected
    assert actual.shape == piece.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(piece.shape)}"
    limit = LIMITS[actual.dtype] if limit is None else limit
    error = (actual.double() - piece).abs().max().item() if piece.numel() else 0.0
    assert error <= limit * largest, f"{name}: error {error / largest:.2e} of the largest value, limit {limit}"


def check(data, held, function, name, limit=None):
    """Runs function(q, k, v) on this rank's piece, forward and backward."""
    inputs, expected = data
    q, k, v, grad = (split.cut(x, 2, held) for x in inputs)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = function(q, k, v)
    results = (out, *torch.autograd.grad(out, (q, k, v), grad))
    for actual, whole, what in zip(results, expected, ("out", "dq", "dk", "dv"), strict=True):
        close(actual.detach(), (split.cut(whole, 2, held), max(whole.abs().max().item(), 1e-3)), f"{name} {what}", limit)
    return results


def table(dtypes):
    cases = itertools.product(SHAPES, dtypes, (False, True))
    return [(f"{shape} {str(dtype)[6:]} causal={causal}", causal, make(shape, dtype, causal)) for shape, dtype, causal in cases]


def mesh(world_size, ring_size):
    """(ring, ulysses) with ulysses inside, each with a process group."""
    ulysses_size = world_size // ring_size
    device_mesh = dist.device_mesh.init_device_mesh("cpu", (ring_size, ulysses_size), mesh_dim_names=("ring", "ulysses"))
    return tuple(comm.as_group(device_mesh.get_group(name), name) for name in ("ring", "ulysses"))


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
            assert torch.equal(mine, split.positions(length, fake(ring_size, 0), fake(ulysses_size, 0), zigzag, r, u))
            assert mine.dtype == torch.int64 and mine.tolist() == sorted(mine.tolist())
            assert len(mine) == split.local_length(length, *groups, zigzag) == split.lengths(length, *groups, zigzag)[r][u]
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
        work = [sum((t.stop - t.start) * t.keys for t in ring.tiles(held[r], held[(r - step) % size], True)) for r in range(size)]
        assert work == [(length // size) ** 2 // 2] * size
        assert all(len(ring.tiles(held[r], held[(r - step) % size], True)) == 1 for r in range(size))


# ---- one block ----


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_block_and_merge(flash, causal, monkeypatch):
    monkeypatch.setattr(block, "STRIP", 5)
    if not flash:
        monkeypatch.setattr(block, "FLASH", None)
    for q_heads, k_heads in ((2, 2), (6, 2)):
        inputs, expected = make((2, q_heads, k_heads, 13, 4, 4), torch.float64, causal)
        q, k, v, grad = inputs
        if causal:
            out, lse = block.forward(q, k, v, True, 0.5)
            grads = block.backward(grad, q, k, v, out, lse, True, 0.5)
        else:
            parts = [(k[:, :, rows], v[:, :, rows]) for rows in (slice(0, 4), slice(4, 5), slice(5, 13))]
            out, lse = block.forward(q, *parts[0], False, 0.5)
            for part in parts[1:]:
                block.merge(out, lse, *block.forward(q, *part, False, 0.5))
            dq, dk, dv = zip(*(block.backward(grad, q, *part, out, lse, False, 0.5) for part in parts), strict=True)
            grads = sum(dq), torch.cat(dk, 2), torch.cat(dv, 2)
        for actual, whole in zip((out, *grads), expected, strict=True):
            close(actual, (whole, whole.abs().max().item()), "block")


# ---- the functions, in ranks ----


def written_out(q, k, v, *, is_causal, scale, enable_gqa):
    """A kernel of the user's own, for heads of equal number."""
    assert q.shape[1] == k.shape[1] and not enable_gqa and scale is None
    scores = q @ k.mT / q.shape[3] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) if is_causal else torch.zeros((), dtype=torch.bool)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def ulysses_body(rank, world_size, cases):
    group = comm.as_group(name="ulysses")
    for name, causal, data in cases:
        length = data[0][0].shape[2]
        held = split.spans(length, comm.ALONE, group, False)
        sizes = None if length == 13 else split.ulysses_sizes(length, comm.ALONE, group, False)
        options = {"is_causal": causal, "sizes": sizes, "attention": written_out if length == 16 else None}
        check(data, held, lambda q, k, v: ulysses.ulysses_attention(q, k, v, group, **options), name)  # noqa: B023


def ring_body(rank, world_size, cases, without_flash=False):
    limits = {torch.bfloat16: 2**-8}  # one rounding of an exact result, relative to the largest value, and a little
    if without_flash:
        block.FLASH = None
    group = comm.as_group(name="ring")
    for (name, causal, data), zigzag in itertools.product(cases, (None, True, False)):
        length = data[0][0].shape[2]
        held = split.ring_spans(length, group.size, rank, causal if zigzag is None else zigzag)
        options = {"is_causal": causal, "zigzag": zigzag, "length": None if length == 13 else length}
        limit = limits.get(data[0][0].dtype)
        check(data, held, lambda q, k, v: ring.ring_attention(q, k, v, group, **options), f"{name} zigzag={zigzag}", limit)  # noqa: B023


def hybrid_body(rank, world_size, ring_size, cases):
    groups = mesh(world_size, ring_size)
    for name, causal, data in cases:
        length = data[0][0].shape[2]
        held = split.spans(length, *groups, causal)
        options = {"is_causal": causal, "length": None if length == 13 else length}
        check(data, held, lambda q, k, v: ring.ring_ulysses_attention(q, k, v, *groups, **options), name)  # noqa: B023


WORLDS = [(1, "pycomm"), (2, "pycomm"), (3, "pycomm"), (4, "pycomm"), (3, "gloo")]


@pytest.mark.parametrize("world_size, backend", WORLDS)
def test_ulysses(world_size, backend):
    spawn(world_size, ulysses_body, table(LIMITS), backend=backend)


@pytest.mark.parametrize("world_size, backend", WORLDS)
def test_ring(world_size, backend):
    spawn(world_size, ring_body, table(LIMITS), backend=backend)


def test_ring_with_the_plain_kernel():
    spawn(3, ring_body, table([torch.float64]), True)


@pytest.mark.parametrize(
    "world_size, ring_size, backend", [(4, 2, "pycomm"), (4, 2, "gloo"), (8, 4, "pycomm"), (2, 1, "pycomm"), (2, 2, "pycomm")]
)
def test_hybrid(world_size, ring_size, backend):
    spawn(world_size, hybrid_body, ring_size, table([torch.float64]), backend=backend)


def large_scores_body(rank, world_size, data):
    group = comm.as_group(name="ring")
    held = split.ring_spans(12, group.size, rank, True)
    check(data, held, lambda q, k, v: ring.ring_attention(q, k, v, group, is_causal=True, length=12), "large scores", 1e-8)


def test_ring_does_not_overflow():
    inputs, _ = make((1, 2, 2, 12, 4, 4), torch.float64, True)
    q, k, v = (x.clone().requires_grad_() for x in (inputs[0] * 1e3, inputs[1] * 1e3, inputs[2]))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (q @ k.mT).max() > 1e4  # exp overflows at 709; scores of 1e6 have an error of 1e-10
    expected = (out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3]))
    spawn(3, large_scores_body, ([q.detach(), k.detach(), v.detach(), inputs[3]], expected))


def deterministic_body(rank, world_size, data):
    groups = mesh(world_size, 2)
    held = split.spans(31, *groups, True)
    runs = [
        check(data, held, lambda q, k, v: ring.ring_ulysses_attention(q, k, v, *groups, is_causal=True, length=31), "run") for _ in range(5)
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
    sent = sum(8 // world_size + 2 * (1 if world_size >= 2 else 2) for other in range(world_size) if other != rank)
    assert traffic.nbytes() == row * sent + one * (world_size - 1) // world_size

    # the ring: k and v of two key heads pass R-1 times; backward the same and their gradients
    with comm.count_traffic() as traffic:
        out = ring.ring_attention(q, k, v, group, is_causal=True, length=length)
    blocks = 2 * 2 * row * (world_size - 1)
    assert (traffic.calls(), traffic.calls("send"), traffic.nbytes()) == (world_size - 1, world_size - 1, blocks)
    with comm.count_traffic() as traffic:
        out.sum().backward()
    assert (traffic.calls(), traffic.calls("send"), traffic.nbytes()) == (2 * (world_size - 1), 2 * (world_size - 1), 2 * blocks)


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
    out.sum().backward()  # keys and values as before; gradients follow from the first block of another rank on
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
    with pytest.raises(ValueError, match=r"the ranks hold \[2, 5\] positions, a sequence of 7 is cut into \[3, 4\]"):
        ring.ring_attention(uneven, uneven, uneven, group, is_causal=True)


def test_errors_name_the_rank_and_both_values():
    spawn(2, errors_body)


# ---- models ----


class Attention(nn.Module):
    def __init__(self, hidden, heads, k_heads):
        super().__init__()
        self.size = hidden // heads
        self.qkv = nn.Linear(hidden, (heads + 2 * k_heads) * self.size)
        self.out = nn.Linear(hidden, hidden)
        self.heads, self.k_heads = heads, k_heads

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (-1, self.size)).transpose(1, 2).split([self.heads, self.k_heads, self.k_heads], 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.k_heads)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Stock(nn.Module):
    """torch's own layer, whose attention is one call of F.multi_head_attention_forward."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(hidden, heads, 2 * hidden, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x, src_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype), is_causal=True)


def layers(kind):
    torch.manual_seed(0)
    made = [Stock(16, 4) if kind == "stock" else Attention(16, 4, 2) for _ in range(2)]
    return nn.ModuleList(made).double()


def run(model, x, how, mode=None):
    for layer in model:
        if how == "plain":
            x = layer(x)
        else:
            options = {"context_fn": mode.context_fn} if how == "context_fn" else {}
            x = checkpoint(layer, x, use_reentrant=how == "reentrant", **options)
    return x


def model_body(rank, world_size, ring_size, kind, expected):
    groups = mesh(world_size, ring_size)
    zigzag = ring_size > 1
    for how in ("plain", "context_fn", "inside", "reentrant", "both"):
        model = layers(kind)
        mode = attention.SequenceAttention(*groups, zigzag)
        outs, parts = [], []
        for x, grad, _ in expected["batches"]:  # both forwards first, as in a pipeline: lengths differ in the recomputations
            held = split.spans(x.shape[1], *groups, zigzag)
            mode.length = x.shape[1]
            with mode:
                outs.append(run(model, split.cut(x, 1, held).clone().requires_grad_(), "context_fn" if how == "both" else how, mode))
            parts.append((held, split.cut(grad, 1, held)))
            if how in ("inside", "reentrant", "both"):
                with mode:
                    outs[-1].backward(parts[-1][1])
        if how in ("plain", "context_fn"):
            torch.autograd.backward(outs, [grad for _, grad in parts])
        assert mode.calls == (4 if how == "plain" else 8)
        for out, (held, _), (_, _, whole) in zip(outs, parts, expected["batches"], strict=True):
            close(out.detach(), (split.cut(whole, 1, held), whole.abs().max().item()), f"{how} out")
        for parameter, whole in zip(model.parameters(), expected["grads"], strict=True):
            dist.all_reduce(parameter.grad)
            close(parameter.grad, (whole, whole.abs().max().item()), f"{how} gradient")
    with torch.no_grad(), mode:  # torch's fast path for inference must not go past the mode
        x, _, whole = expected["batches"][-1]
        out = run(model.eval(), split.cut(x, 1, held), "plain")
        close(out, (split.cut(whole, 1, held), whole.abs().max().item()), "inference")


@pytest.mark.parametrize("kind", ["own", "stock"])
@pytest.mark.parametrize("world_size, ring_size", [(1, 1), (3, 1), (3, 3), (4, 2)])
def test_model_under_the_mode(kind, world_size, ring_size):
    model = layers(kind)
    generator = torch.Generator().manual_seed(1)
    batches = []
    for length in (11, 14):
        x, grad = (torch.randn(2, length, 16, generator=generator, dtype=torch.float64) for _ in range(2))
        out = run(model, x, "plain")
        out.backward(grad)
        batches.append((x, grad, out.detach()))
    expected = {"batches": batches, "grads": [parameter.grad for parameter in model.parameters()]}
    spawn(world_size, model_body, ring_size, kind, expected)


def bare_checkpoint_body(rank, world_size, data):
    group = comm.as_group(name="ulysses")
    mode = attention.SequenceAttention(comm.ALONE, group, False)
    mode.length = 9

    def function(q, k, v):
        with mode:
            return checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False, context_fn=mode.context_fn)

    check(data, split.spans(9, comm.ALONE, group, False), function, "checkpointed")


def test_checkpoint_of_nothing_but_attention():
    """Rank 2 has no heads and saves nothing in attention itself: it must not end the recomputation before the exchanges."""
    spawn(3, bare_checkpoint_body, make((1, 2, 2, 9, 4, 4), torch.float64, False))


def autocast_body(rank, world_size, data):
    inputs, expected = data
    group = comm.as_group(name="ring")
    mode = attention.SequenceAttention(group, comm.ALONE, True)
    mode.length = 13
    held = split.ring_spans(13, world_size, rank, True)
    q, k, v, _ = (split.cut(x, 2, held) for x in inputs)
    with mode, torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.scaled_dot_product_attention(q, k.bfloat16(), v, is_causal=True)
        low = F.scaled_dot_product_attention(q[0], k[0], v[0], is_causal=True)
    assert out.dtype == low.dtype == torch.bfloat16 and torch.equal(out[0], low)
    close(out, (split.cut(expected[0], 2, held), expected[0].abs().max().item()), "autocast")


def test_autocast_and_three_dimensions():
    spawn(2, autocast_body, make((2, 3, 3, 13, 4, 4), torch.float32, True))


def test_the_mode_refuses_what_it_cannot_split():
    mode = attention.SequenceAttention(comm.ALONE, comm.ALONE, False)
    x = torch.zeros(1, 4, 6, 2)
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    y = torch.zeros(1, 6, 8)
    cases = [
        (lambda: F.scaled_dot_product_attention(x, x, x), "not known"),
        (lambda: F.scaled_dot_product_attention(x, x, x, torch.ones(6, 6, dtype=torch.bool)), r"attn_mask of shape \(6, 6\)"),
        (lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), "dropout_p=0.1"),
        (lambda: F.scaled_dot_product_attention(x, x[:, :, :4], x[:, :, :4]), "lengths differ"),
        (lambda: F.scaled_dot_product_attention(x, x[:, :2], x[:, :2]), "enable_gqa=True"),
        (lambda: F.scaled_dot_product_attention(x[:, :, :3], x[:, :, :3], x[:, :, :3]), "has 3 positions"),
        (lambda: F.scaled_dot_product_attention(x[0, 0], x[0, 0], x[0, 0]), "must be"),
        (lambda: layer(y, y, y), "need_weights=False"),
    ]
    with mode:
        for number, (call, words) in enumerate(cases):
            with pytest.raises(ValueError, match=words) as error:
                call()
            assert "rank 0/1" in str(error.value)
            mode.length = 6 if number == 0 else mode.length
        assert F.scaled_dot_product_attention(x, x, x).shape == x.shape
    assert mode.calls == 3  # refused by shape after it was counted, twice, and the last
