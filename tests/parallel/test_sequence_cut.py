"""Where a model's sequence is cut, without ranks: each rank is given its positions of what one process has.
And what is done around it: blocks of attention in strips, masks, the eager attention of transformers.
"""

import itertools
import re
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from pycomm.groups import Group, even_sizes
from pycomm.parallel import Plan
from pycomm.parallel.models.config_view import ConfigView
from pycomm.parallel.sequence import attention, block, eager, ring, split, ulysses
from pycomm.parallel.sequence import mask as masks
from pycomm.parallel.sequence.sequence_split import MOST_WHOLE, SequenceSplit

PLANS = ["ring=2", "ring=3,zigzag=false", "ulysses=3", "ring=2,ulysses=2", "tp=2,ring=2", "tp=3,megatron_sp"]
LENGTH = 11


def ranks_of(plan):
    return itertools.product(range(plan.ring), range(plan.ulysses), range(plan.tp))


def made(text, place=(0, 0, 0)):
    """The SequenceSplit of one rank."""
    plan = Plan.parse(text)
    sizes = {"ring": plan.ring, "ulysses": plan.ulysses, "tp": plan.tp}
    groups = {
        name: Group(name, size, rank, None) for (name, size), rank in zip(sizes.items(), place, strict=True)
    }
    return SequenceSplit(types.SimpleNamespace(group=groups.get), plan, {})


def held(text, place, length=LENGTH):
    plan = Plan.parse(text)
    groups = Group("ring", plan.ring, place[0], None), Group("ulysses", plan.ulysses, place[1], None)
    return split.positions(length, *groups, plan.zigzag and plan.ring > 1)


@pytest.mark.parametrize("text", [text for text in PLANS if "megatron" not in text])
def test_what_a_block_is_given(text):
    """The hidden state and all that has its positions are cut alike; masks, and what has none, are not."""
    for place in ranks_of(Plan.parse(text)):
        at, sequence = held(text, place), made(text, place)
        x = torch.randn(2, LENGTH, 3)
        rotary, ids, row = (
            torch.randn(1, LENGTH, 4),
            torch.arange(2 * LENGTH).view(2, LENGTH),
            torch.rand(LENGTH),
        )
        mask, other = torch.ones(2, 1, LENGTH, LENGTH), torch.randn(2, 7)
        table = torch.randn(LENGTH, 5)
        entered = sequence.enter(
            True, True, (x, mask, other, 3), {"pos": (rotary, [ids]), "row": row, "t": table, "x": x}, x
        )
        assert sequence.length == LENGTH and sequence.piece == len(at)
        assert torch.equal(entered.hidden, x[:, at])
        assert entered.args[0] is entered.hidden is entered.kwargs["x"]
        assert entered.args[1] is mask and entered.args[2] is other and entered.args[3] == 3
        cos, (position,) = entered.kwargs["pos"]
        assert torch.equal(cos, rotary[:, at]) and torch.equal(position, ids[:, at])
        assert torch.equal(entered.kwargs["row"], row[at]) and torch.equal(entered.kwargs["t"], table[at])
        # the next block has the hidden state of this one, and the same tables
        again = sequence.enter(False, True, (entered.hidden,), {"pos": rotary}, entered.hidden)
        assert again.hidden is entered.hidden and again.kwargs["pos"] is cos
        rotary.add_(1)  # the table of the next forward, in the same memory
        for _ in range(2):
            later = sequence.enter(True, True, (x,), {"pos": rotary}, x)
            assert torch.equal(later.kwargs["pos"], rotary[:, at])
        short = held(text, place, 7)
        part = sequence.enter(True, True, (x[:, :7],), {"pos": rotary[:, :7]}, x[:, :7])
        assert torch.equal(part.hidden, x[:, short]) and torch.equal(part.kwargs["pos"], rotary[:, short])
        with pytest.raises(ValueError, match=r"a block is given a tensor \(7, 2, 7\) with T=7 in it"):
            sequence.enter(False, True, (x, torch.zeros(7, 2, 7)), {}, x)
        with pytest.raises(ValueError, match=r"\(2, 3, 7, 4\) with T=7"):
            sequence.enter(False, True, (x, torch.zeros(2, 3, 7, 4)), {}, x)


@pytest.mark.parametrize("text", PLANS)
def test_lengths_of_all_ranks(text):
    plan = Plan.parse(text)
    for length in (plan.ring * plan.ulysses, 5, LENGTH, 64):
        positions, pieces = [], 0
        for place in ranks_of(plan):
            sequence = made(text, place)
            assert sequence.local_length(length) == sequence.piece
            assert sequence.sizes == even_sizes(sum(sequence.sizes), plan.tp)
            if place[2] == 0:
                positions += held(text, place, length).tolist()
                assert sum(sequence.sizes) == len(held(text, place, length))
            pieces += sequence.piece
            if sequence.attention is not None:
                assert sequence.attention.length == length
            if sequence.degree > 1:
                with pytest.raises(ValueError, match=f"over {sequence.degree} ranks: a sequence of 1 leaves"):
                    sequence.begin(sequence.degree - 1) if sequence.degree == 2 else sequence.begin(1)
        assert sorted(positions) == list(range(length))
        assert pieces == length * (1 if "megatron" in text or plan.tp == 1 else plan.tp)


@pytest.mark.parametrize("text", ["ring=2", "tp=2,megatron_sp"])
def test_whole_for_a_moment(text):
    """Also after an error; with noise that is alike on all ranks, small, and gone afterwards."""
    changed = []
    for place in ranks_of(Plan.parse(text)):
        sequence, x = made(text, place), torch.ones(2, LENGTH, 3, dtype=torch.float64)
        before = sequence.degree, sequence.megatron, sequence.attention
        for noise in (0.0, 1e-3):
            with pytest.raises(KeyError), sequence.whole(noise):
                entered = sequence.enter(True, True, (x, 2), {}, x)
                assert sequence.modes() == [] and sequence.piece == LENGTH and sequence.is_whole
                assert entered.args[0] is entered.hidden and entered.args[1] == 2
                if noise:
                    changed.append(entered.hidden)
                else:
                    assert entered.hidden is x
                with pytest.raises(ValueError, match=f"{MOST_WHOLE + 1} positions are too many"):
                    sequence.begin(MOST_WHOLE + 1)
                sequence.begin(MOST_WHOLE)
                raise KeyError
            assert before == (sequence.degree, sequence.megatron, sequence.attention)
            assert (sequence.is_whole, sequence.noise) == (False, 0.0)
        sequence.begin(MOST_WHOLE + 1)
        assert len(sequence.modes()) == (2 if sequence.degree > 1 else 1)
    for each in changed:
        assert torch.equal(each, changed[0]) and 1e-4 < (each - 1).abs().max() < 1e-2


def test_targets_of_a_ranks_positions():
    text = "ring=2"
    for place in ranks_of(Plan.parse(text)):
        at, sequence = held(text, place), made(text, place)
        sequence.begin(LENGTH)
        y = torch.arange(2 * LENGTH).view(2, LENGTH)
        cut = sequence.cut_targets({"a": y, "b": (y[..., None].expand(-1, -1, 3), None, 5)})
        assert torch.equal(cut["a"], y[:, at]) and torch.equal(cut["b"][0][..., 2], y[:, at])
        assert cut["b"][1:] == (None, 5)
        for wrong in (y[0], y[:, 1:], torch.zeros(())):
            shape = re.escape(str(tuple(wrong.shape)))
            with pytest.raises(ValueError, match=rf"needs targets \(batch, T={LENGTH}.*got {shape}"):
                sequence.cut_targets([wrong])
        assert made("tp=2,megatron_sp").cut_targets([y[0]])[0] is not None


def of_model(sequence, logits, target):
    """As a model's own loss has it, after the blocks."""
    with sequence.modes()[0]:
        return F.cross_entropy(logits, target, None, None, -100, None, "none", 0.1)


@pytest.mark.parametrize("text", ["ring=2", "ulysses=3", "ring=2,ulysses=2"])
def test_targets_that_a_model_compares_itself(text):
    y = torch.arange(2 * LENGTH).view(2, LENGTH) % 5
    y[:, ::3] = -100
    logits = torch.randn(2, LENGTH, 5)
    whole = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none", label_smoothing=0.1)
    for place in ranks_of(Plan.parse(text)):
        at, sequence = held(text, place), made(text, place)
        sequence.begin(LENGTH)
        mine, right = logits[:, at], whole.view(2, LENGTH)[:, at].flatten()
        others = torch.zeros(2, LENGTH, dtype=torch.int64), torch.ones(2, 3), torch.zeros(2)
        for inputs in ((y,), {"x": others[0], "n": others[1], "y": [y, others[2]]}):
            sequence.note_inputs(inputs)
            flat = of_model(sequence, mine.flatten(0, 1), y.view(-1))
            torch.testing.assert_close(flat, right)
            channels = of_model(sequence, mine.transpose(1, 2), y)
            torch.testing.assert_close(channels.flatten(), right)
            with pytest.raises(ValueError, match=r"targets \(1, 2, 11\), which are not an input"):
                of_model(sequence, mine.permute(2, 0, 1)[None], y[None])
        for wrong in (y.t().reshape(-1), y.flip(1).flatten(), y.clone().flatten(), y.flatten()[1:]):
            with pytest.raises(ValueError, match="not an input of it as it was given.*loss_fn"):
                of_model(sequence, mine.flatten(0, 1), wrong)
        own = y[:, at].flatten()  # a target of this rank's positions is taken as it is
        torch.testing.assert_close(of_model(sequence, mine.flatten(0, 1), own), right)
        square = torch.arange(LENGTH**2).view(LENGTH, LENGTH) % 5
        sequence.note_inputs(square)
        of_rows = torch.randn(LENGTH, 5, len(at))
        assert of_model(sequence, of_rows, square).shape == (LENGTH, len(at))
        with pytest.raises(ValueError, match="not an input of it as it was given"):
            of_model(sequence, of_rows, square.t())  # the same memory, in another order


def test_views_to_the_whole_length():
    """As models write them that noted the shape of their input."""
    sequence = made("ring=2", (1, 0, 0))
    sequence.begin(LENGTH)
    piece, x = sequence.piece, torch.arange(2.0 * sequence.piece * 6).view(2, sequence.piece, 6)
    with sequence.modes()[0]:
        for shape in ((2, LENGTH, 3, 2), (-1, LENGTH, 6), (2, LENGTH, -1)):
            assert x.view(*shape).shape[1] == x.reshape(shape).shape[1] == piece
            assert torch.equal(x.view(shape).flatten(), x.flatten())
        assert x.view(2, -1).shape == (2, 6 * piece) and x.view(-1, 6).shape == (2 * piece, 6)
        assert x.transpose(0, 1).reshape(piece, 2, 6).shape == (piece, 2, 6)
        for shape in ((3, LENGTH, 6), (1, LENGTH, 12), (2, 4, LENGTH), (2 * LENGTH, 6)):
            with pytest.raises(RuntimeError, match="invalid for input"):
                x.view(shape)
        whole = torch.zeros(2, LENGTH, 6)
        assert whole.view(2, LENGTH, 3, 2).shape == (2, LENGTH, 3, 2)


def test_a_recomputation_is_over_when_it_ends():
    """Twice, with an error inside: the mode is active there only, with the length of its forward."""
    mode = attention.SequenceAttention(Group("ring", 2, 0, None), Group("ulysses", 1, 0, None), True)
    mode.length = 7
    _, again = mode.context_fn()
    mode.length = 9
    for _ in range(2):
        with pytest.raises(KeyError), again:
            assert mode.length == 7 and _get_current_function_mode_stack() == [mode]
            raise KeyError
        assert mode.length == 9 and _get_current_function_mode_stack() == []


# One block of attention ------------------------------------------------------------


def written_out(q, k, v, made_, seen):
    """Scores as the formula has them, in one piece."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = q @ k.mT * made_.scale
    if made_.cap is not None:
        scores = made_.cap * torch.tanh(scores / made_.cap)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen
    return scores.softmax(-1).nan_to_num(0.0) @ v


@pytest.mark.parametrize("strip", [1, 4, 13])
@pytest.mark.parametrize("cap", [None, 0.7])
def test_a_block_in_strips(monkeypatch, strip, cap):
    """Rows of queries some at a time, where a triangle, a mask of rows, or one row for all says what is seen;
    with rows that see nothing.
    """
    monkeypatch.setattr(block, "STRIP", strip)
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    triangle = torch.ones(13, 13, dtype=torch.bool).tril()
    rows = torch.rand(2, 4, 13, 13, generator=generator) < 0.4
    rows[0, :, 3] = rows[1, :, 12] = False
    seen = {"triangle": triangle, "rows": rows, "one row": rows[:, :1, 5:6], "numbers": draw(1, 4, 13, 13)}
    for kv_heads, (name, mask) in itertools.product((4, 2, 1), seen.items()):
        q, k, v = draw(2, 4, 13, 5), draw(2, kv_heads, 13, 5), draw(2, kv_heads, 13, 3)
        inputs = [x.requires_grad_() for x in (q, k, v)]
        right, pull = written_out(*inputs, block.Scores(0.3, cap), mask), draw(2, 4, 13, 3)
        grads = torch.autograd.grad(right, inputs, pull)
        plain = [x.detach() for x in inputs]
        causal, given = name == "triangle", None if name == "triangle" else mask
        out, lse = block.forward(*plain, causal, block.Scores(0.3, cap), given)
        found = block.backward(
            block.Rows(plain[0], out, lse, pull), *plain[1:], causal, block.Scores(0.3, cap), given
        )
        for mine, value in zip((out, *found), (right.detach(), *grads), strict=True):
            torch.testing.assert_close(mine, value, rtol=1e-11, atol=1e-12, msg=f"{name} {kv_heads}")


def test_rows_that_see_nothing_anywhere():
    """Merged with others that see nothing, and with one that sees something."""
    q, k, v = (torch.randn(1, 1, 2, 3, dtype=torch.float64) for _ in range(3))
    none = torch.tensor([[[[False, False], [True, True]]]])
    nothing, made_ = torch.zeros(1, 1, 2, 2, dtype=torch.bool), block.Scores(0.5)
    out, lse = block.forward(q, k, v, False, made_, nothing)
    assert not out.any() and (lse == -torch.inf).all()
    block.merge(out, lse, *block.forward(q, k, v, False, made_, nothing))
    assert not out.any() and (lse == -torch.inf).all()
    block.merge(out, lse, *block.forward(q, k, v, False, made_, none))
    right = F.scaled_dot_product_attention(q, k, v, scale=0.5)
    torch.testing.assert_close(out[:, :, 1], right[:, :, 1])
    assert not out[:, :, 0].any() and not out.isnan().any()


def test_the_type_that_is_summed_in():
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float32}
    assert {dtype: block.wide_dtype(dtype) for dtype in wide} == wide
    assert block.wide_dtype(torch.float64) == torch.float64
    parts, ranges = [torch.full((1, 1, 1, 1), value).bfloat16() for value in (256, 1, 1)], ((0, 1),) * 3
    assert ulysses._join_heads(parts, ranges).item() == 258  # 256 + 1 + 1 is 256 in 16 bits
    assert ulysses._join_heads(parts, ranges).dtype == torch.bfloat16
    apart = ulysses._join_heads(parts, ((0, 1), (1, 2), (2, 3)))
    assert apart.flatten().tolist() == [256, 1, 1]


# Heads, masks ------------------------------------------------------------


@pytest.mark.parametrize("q_heads, k_heads, parts", [(6, 2, 4), (6, 6, 4), (3, 1, 5), (8, 4, 3), (1, 1, 1)])
def test_heads_of_all_ranks(q_heads, k_heads, parts):
    shared = q_heads // k_heads
    queries, keys = ulysses._head_ranges(q_heads, k_heads, parts)
    assert [head for span in queries for head in range(*span)] == list(range(q_heads))
    for query, key in zip(queries, keys, strict=True):
        assert {head // shared for head in range(*query)} == set(range(*key))


def test_masks_of_heads_and_blocks():
    mask = masks.Mask(torch.arange(2 * 4 * 6 * 6.0).view(2, 4, 6, 6))
    assert torch.equal(masks.of_heads(mask, (1, 3)).values, mask.values[:, 1:3])
    single = masks.Mask(mask.values[:, :1])
    assert masks.of_heads(single, (1, 3)) is single
    rows = masks.Mask(mask.values[:, :, :1])
    found = masks.block_of(rows, ((0, 2), (4, 5)), ((1, 3),))
    assert torch.equal(found, mask.values[:, :, :1, 1:3])
    for values in (torch.zeros(1, 1, 6, 6, dtype=torch.bool), torch.full((1, 1, 6, 6), -torch.inf)):
        part = masks.block_of(masks.Mask(values), ((0, 6),), ((0, 6),))
        assert (part is None) == (values.dtype == torch.bool)
    for shape in ((1, 1, 1, 6), (2, 3, 6, 6)):
        assert masks.looks_like_mask(torch.zeros(shape), 6)
    for shape in ((1, 6, 6), (1, 1, 6, 5), (1, 1, 5, 6), (1, 1, 2, 6)):
        assert not masks.looks_like_mask(torch.zeros(shape), 6)
    q = torch.zeros(2, 4, 3, 5)
    for shape in ((6,), (1, 1, 1, 6, 6), (2, 3, 6, 6), (5, 6), (6, 5)):
        with pytest.raises(ValueError, match="1 or 2, 1 or 4, 1 or 6, 6"):
            masks.checked(torch.ones(shape, dtype=torch.bool), q, False, 6)
    for shape in ((6, 6), (1, 6), (4, 6, 6), (2, 1, 1, 6), (1, 4, 6, 6)):
        checked = masks.checked(torch.ones(shape, dtype=torch.bool), q, False, 6)
        assert checked.values.dim() == 4 and masks.checked(checked, q, True, 6) is checked
    assert masks.checked(torch.full((6, 6), -torch.inf), q, False, 6) is not None


def test_who_sends_what_around_the_ring():
    """Everyone has had every block once, its own first, and each comes from the rank before."""
    for size in (1, 2, 3, 4):
        spans = tuple(split.ring_spans(11, size, rank, True) for rank in range(size))
        specs = [
            ring._RingSpec(Group("ring", size, rank, None), spans, True, block.Scores(1.0))
            for rank in range(size)
        ]
        for rank, spec in enumerate(specs):
            assert sorted(spec.source(step) for step in range(size)) == list(range(size))
            assert spec.source(0) == rank
            for step in range(1, size):
                assert spec.source(step) == specs[rank - 1].source(step - 1)
        assert sum(specs[0].length(rank) for rank in range(size)) == 11


# The eager attention of transformers ------------------------------------------------------------


def own_eager(module, query, key, value, attention_mask, **given):
    return "own", given


class Eager(nn.Module):
    """As an attention module of transformers, in whose file eager_attention_forward stands."""

    def __init__(self, implementation="eager"):
        super().__init__()
        self.config = types.SimpleNamespace(_attn_implementation=implementation, heads=4)


@pytest.fixture
def its_file(monkeypatch):
    monkeypatch.setitem(globals(), "eager_attention_forward", own_eager)


class Attending(attention.SequenceAttention):
    """Notes what it is asked for."""

    def attend(self, query, key, value, attn_mask, options):
        self.asked = dict(options)
        return query


def test_eager_attention_goes_around_the_ranks(its_file):
    layer, other, plain = Eager(), Eager("sdpa"), nn.Linear(2, 2)
    before = layer.config
    eager.serve_eager([nn.Sequential(layer, plain), other])
    assert isinstance(layer.config, ConfigView) and layer.config._attn_implementation == eager.NAME
    assert before._attn_implementation == "eager" and layer.config.heads == 4
    assert not isinstance(other.config, ConfigView)
    q, k = torch.zeros(2, 4, 3, 5), torch.zeros(2, 2, 3, 5)
    assert eager.attend(layer, q, k, k, None, scaling=0.1) == ("own", {"scaling": 0.1})
    mode = Attending(Group("ring", 2, 0, None), Group("ulysses", 1, 0, None), True)
    with mode:
        for training in (False, True):
            layer.train(training)
            out, weights = eager.attend(layer, q, k, k, None, scaling=0.1, softcap=3.0, dropout=0.25)
            assert out.shape == (2, 3, 4, 5) and weights is None
            assert mode.asked == {
                "dropout_p": 0.25 if training else 0.0,
                "is_causal": False,
                "enable_gqa": True,
                "scale": 0.1,
                "softcap": 3.0,
                "sinks": None,
            }
        layer.sinks = torch.ones(4)
        eager.attend(layer, q, q, q, None)
        assert mode.asked["sinks"] is layer.sinks and mode.asked["enable_gqa"] is False
        for given, text in (({"output_attentions": True}, "weights"), ({"position_bias": q}, "learned bias")):
            with pytest.raises(ValueError, match=text):
                eager.attend(layer, q, k, k, None, **given)
