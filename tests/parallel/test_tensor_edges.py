"""Sublayers that are cut, one at a time, and what happens at their edges: against the same module in one
process, with every rank's results.
"""

import gc
import re
import weakref

import pytest
import torch
import torch.nn.functional as F
from tensor_models import Adapted, Experts, FusedAttention, FusedGrouped, Llama, Sizes, SwiGlu, make
from torch import nn
from torch_ranks import spawn

from pycomm.groups import Group, as_group, even_sizes
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.streams import Stream
from pycomm.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabShard,
    cross_entropy,
    edges,
    parallelize_tensor,
)
from pycomm.parallel.tensor.slices import cut
from pycomm.parallel.tensor.stream_edges import switch_at_edges
from pycomm.parallel.tensor.tables import cut_table
from pycomm.parallel.tensor.whole_sequence import WholeSequence


def near(found, right, what=""):
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}")


def draw(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(module, call, x):
    """Output, gradient of x, and of the parameters by name, where all elements are pulled unlike."""
    x = x.clone().requires_grad_()
    out = call(module, x)
    pull = draw(*out.shape, seed=9)
    (out * pull).sum().backward()
    return out.detach(), x.grad, {name: p.grad for name, p in module.named_parameters()}


# Tables ------------------------------------------------------------


class Table(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 3


TABLES = [(7, None), (7, 0), (7, 3), (7, 6), (7, 2), (2, 1), (2, 0), (3, -1), (1, 0)]  # rows, padding


def tables_body(rank, world_size):
    group, found = as_group(None, "tp"), []
    for rows, padding in TABLES:
        torch.manual_seed(2)
        table = Table(rows, 3, padding_idx=padding).double()
        ids = torch.arange(2 * rows).reshape(2, rows) % rows
        right = gradients(table, lambda module, _: module(ids), torch.zeros(1).double())  # noqa: B023
        weight, table.weight.grad = table.weight, None
        cut_table(table, group, cut)
        start = sum(even_sizes(rows, world_size)[:rank])
        stop = start + even_sizes(rows, world_size)[rank]
        assert torch.equal(table.weight, weight[start:stop]) and table.num_embeddings == stop - start
        mine = gradients(table, lambda module, _: module(ids), torch.zeros(1).double())  # noqa: B023
        near(mine[0], right[0], (rows, padding))
        near(mine[2]["weight"], right[2]["weight"][start:stop], (rows, padding))
        for wrong in (ids + 1, ids - 1):
            with pytest.raises(IndexError, match=f"from {int(wrong.min())} to .* there are {rows} rows"):
                table(wrong)
        assert table(ids[:, :0]).shape == (2, 0, 3)
        found.append(mine[0])
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_tables_with_a_forward_of_their_own(world_size):
    """The padding row's gradient is zero on its rank, and no other row's."""
    results = spawn(world_size, tables_body)
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[-1], strict=True))


# The loss ------------------------------------------------------------


def losses_body(rank, world_size):
    """Vocabularies of fewer words than ranks too."""
    group = as_group(None, "tp")
    for vocab, shift, masked, ignored in (
        (2, -1e3, False, -100),
        (1, -1e4, False, -100),
        (7, -1e4, False, 0),
        (7, 1e4, False, 6),
        (7, 0.0, True, 3),
        (5, 0.0, True, -100),
    ):
        case = vocab, shift, masked, ignored
        whole = draw(9, vocab, seed=vocab) + shift
        targets = torch.arange(9) % vocab
        if masked:  # words that cannot be, on the first and on the last rank
            whole[::2, 0] = whole[1::2, -1] = -torch.inf
            targets = torch.where(targets == 0, 1, torch.where(targets == vocab - 1, 1, targets))
        whole.requires_grad_()
        right = F.cross_entropy(whole, targets, ignore_index=ignored)
        (3 * right).backward()
        sizes = even_sizes(vocab, world_size)
        start = sum(sizes[:rank])
        mine = whole.detach()[:, start : start + sizes[rank]].clone().requires_grad_()
        logits = mine * 1
        logits.vocab_shard = VocabShard(group, start, start + sizes[rank], vocab)
        loss = cross_entropy(logits, targets, ignore_index=ignored)
        (3 * loss).backward()
        torch.testing.assert_close(loss, right, rtol=1e-9, atol=1e-9, msg=str(case))
        near(mine.grad, whole.grad[:, start : start + sizes[rank]], case)
        low = logits.detach().bfloat16()
        low.vocab_shard = logits.vocab_shard
        with torch.autocast("cpu", torch.bfloat16):
            assert cross_entropy(low, targets, ignore_index=ignored).dtype == torch.float32
        with pytest.raises(ValueError, match=rf"in 0\.\.{vocab - 1} or be ignore_index={ignored}"):
            cross_entropy(logits, torch.full_like(targets, vocab + 1), ignore_index=ignored)


@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_of_extreme_logits_and_ignored_words(world_size):
    spawn(world_size, losses_body)


# Inputs ------------------------------------------------------------


class Changing(nn.Module):
    """Changes its input between the layers that read it; it is given a number, so it cannot be tried."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(4, 6), nn.Linear(4, 6)
        self.down_proj = nn.Linear(6, 4)

    def forward(self, x, factor):
        gate = self.gate_proj(x)
        return self.down_proj(gate * self.up_proj(x.mul_(factor)))


class Sloped(FusedAttention):
    """Is given a bias of each head: (rows x heads, 1, T)."""

    def forward(self, x, alibi):
        B, T, C = x.size()
        q, k, v = (
            t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(self.n_embd, 2)
        )
        bias = alibi.view(B, self.n_head, 1, T)
        y = F.scaled_dot_product_attention(q, k, v, bias)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


def cut_of(module, group, sequence=None):
    """The module as the only block of a model."""
    model = nn.Module()
    model.blocks = nn.ModuleList([module])
    done = parallelize_tensor(model, group, blocks="blocks", sequence=sequence)
    return {name.removeprefix("blocks.0."): layout for name, layout in done.layouts.items()}


def names_body(rank, world_size):
    """A group that a user gives is the one of tp, by name; and torch's errors stay torch's."""
    model = make(lambda: Torchs(20, 5), {})
    parallelize_tensor(model, torch.distributed.group.WORLD)
    x = draw(1, 3, 20)
    with comm.count_traffic() as traffic:
        model(x)
    assert {(call.op, call.group) for call in traffic.log} == {("all_reduce", "tp")}
    layers = ColumnParallelLinear(20, 5, gather_output=False), RowParallelLinear(20, 5)
    with comm.count_traffic() as traffic:
        [layer(x.float()) for layer in layers]
        VocabParallelEmbedding(7, 2, group=torch.distributed.group.WORLD)(torch.arange(7))
    assert [call.group for call in traffic.log] == ["tp", "tp"]
    with pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
        model.attn(x, x, x, is_causal=True)


def test_the_name_of_the_group():
    spawn(2, names_body)


def pieces_body(rank, world_size):
    group, length = as_group(None, "tp"), 7
    sequence = Sizes()
    sequence.sizes = even_sizes(length, world_size)
    x, alibi = draw(2, length, 20), draw(10, 1, length, seed=4)
    piece = lambda tensor: comm.split_dim(tensor, 1, sequence.sizes, group)  # noqa: E731
    cases = {
        "attention": (lambda: FusedAttention(20, 5), {}, ("c_proj.bias",)),
        "slopes": (lambda: Sloped(20, 5), {"alibi": alibi}, ("c_proj.bias",)),
        "fused": (lambda: FusedGrouped(20), {}, ("o_proj.bias",)),
        "head by head": (lambda: FusedGrouped(20, by_head=True), {}, ("dense.bias",)),
        "gates": (lambda: SwiGlu(20, 11), {}, ()),
        "adapters": (lambda: Adapted(20, 11), {}, ("down.base_layer.bias",)),
        "torch's": (lambda: Torchs(20, 5), {}, ("attn.out_proj.bias", "norm.weight", "norm.bias")),
    }
    for name, (build, given, partial) in cases.items():
        run = lambda module, x: module(x, **given)  # noqa: E731, B023
        right = gradients(make(build, {}), run, x)
        for cuts in (False, True):
            module = make(build, {})
            layouts = cut_of(module, group, sequence if cuts else None)
            out, x_grad, grads = gradients_of_piece(module, run, piece(x) if cuts else x, piece, cuts)
            near(out, piece(right[0]) if cuts else right[0], name)
            near(x_grad, piece(right[1]) if cuts else right[1], name)
            for key, grad in grads.items():
                whole_factor = re.search("up.lora_A|down.lora_B", key) is not None
                assert layouts[key].partial == (cuts and key in partial or whole_factor), (name, key)
                if layouts[key].partial:
                    comm.all_reduce(grad, group)
                elif layouts[key].overlap:  # kv heads that several ranks hold
                    full = torch.zeros_like(right[2][key])
                    layouts[key].put(full, grad)
                    comm.all_reduce(full, group)
                    grad = layouts[key].take(full)
                near(grad, layouts[key].take(right[2][key]), (name, cuts, key))


class Torchs(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attn, self.norm = nn.MultiheadAttention(width, heads, batch_first=True), nn.LayerNorm(width)

    def forward(self, x):
        length = x.shape[1]
        y = self.norm(x)
        return x + self.attn(y, y, y, need_weights=False)[0] * (1 if length else 0)


def gradients_of_piece(module, call, x, piece, cuts):
    """As gradients(), where this rank's piece is pulled as it is in the whole."""
    x = x.clone().requires_grad_()
    out = call(module, x)
    pull = draw(2, 7, out.shape[2], seed=9)
    (out * (piece(pull) if cuts else pull)).sum().backward()
    return out.detach(), x.grad, {name: p.grad for name, p in module.named_parameters()}


def test_sublayers_alone_and_on_pieces():
    spawn(3, pieces_body)


def experts_body(rank, world_size):
    """Rows and positions in one dimension; x, and the weights of the routes, have gradients."""
    group, sequence = as_group(None, "tp"), Sizes()
    sequence.sizes = even_sizes(5, world_size)
    rows = lambda tensor: tensor.flatten(0, 1)  # noqa: E731
    piece = lambda tensor: comm.split_dim(tensor, 1, sequence.sizes, group)  # noqa: E731
    chosen = torch.randint(0, 3, (2, 5, 2), generator=torch.Generator().manual_seed(2))
    given, pull = (draw(2, 5, 4), draw(2, 5, 2, seed=3)), draw(2, 5, 4, seed=4)

    def run(module, take):
        x, weights = (take(tensor).clone().requires_grad_() for tensor in given)
        out = module(rows(x), rows(take(chosen)), rows(weights))
        (out * rows(take(pull))).sum().backward()
        return [out.detach().view_as(x), x.grad, weights.grad], dict(module.named_parameters())

    right, of_right = run(make(Experts, {}), lambda tensor: tensor)
    for cuts in (None, sequence, None):
        module = make(Experts, {})
        layouts, take = cut_of(module, group, cuts), piece if cuts else lambda tensor: tensor
        found, parameters = run(module, take)
        for mine, value in zip(found, right, strict=True):
            near(mine, take(value))
        for name, parameter in parameters.items():
            assert layouts[name].dim is not None
            near(parameter.grad, layouts[name].take(of_right[name].grad), name)
    on_meta = module(*(tensor.to("meta") for tensor in (rows(given[0]), rows(chosen), rows(given[1]))))
    assert on_meta.is_meta and on_meta.shape == (10, 4)
    module.forward.inner = lambda *_: torch.zeros(2) @ torch.zeros(3)
    with pytest.raises(ValueError, match=rf"\[rank {rank}/3\] blocks.0 does not run on its part.*replicate"):
        run(module, lambda tensor: tensor)


def test_experts_alone_and_on_pieces():
    spawn(3, experts_body)


def written_body(rank, world_size):
    group = as_group(None, "tp")
    sequence, x = Sizes(), draw(2, 5, 4)
    sequence.sizes = even_sizes(5, world_size)
    right = make(Changing, {})(x.clone(), -2).detach()
    piece = lambda tensor: comm.split_dim(tensor, 1, sequence.sizes, group)  # noqa: E731
    for cuts in (None, sequence):
        module = make(Changing, {})
        assert cut_of(module, group, cuts)["up_proj.weight"].dim == 0
        with torch.no_grad():
            for _ in range(2):  # and the next call is given another tensor, perhaps at the same place
                given = piece(x).clone() if cuts else x.clone()
                near(module(given, -2), piece(right) if cuts else right)


def test_an_input_that_is_written_between_two_layers():
    spawn(2, written_body)


def leak_body(rank, world_size):
    """Nothing keeps the hidden state, or its graph, once the caller has let it go."""
    group, kept = as_group(None, "tp"), []
    for build in (lambda: SwiGlu(6, 5), lambda: sequential(), lambda: Llama().layers[0].attn):
        module = make(build, {})
        cut_of(module, group)
        x = draw(1, 3, 18 if hasattr(module, "q_proj") else 6).requires_grad_()
        hidden = x * 2
        seen = weakref.ref(hidden)
        out = module(hidden)
        del hidden
        out.sum().backward()
        del out
        gc.collect()
        kept.append(seen() is not None)
    return kept


def sequential():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))


def test_the_last_input_is_not_kept():
    assert spawn(2, leak_body) == [[False] * 3] * 2


# The whole sequence, where a module needs all tokens ------------------------------------------------------


def whole_body(rank, world_size):
    group, sequence = as_group(None, "tp"), Sizes()
    sequence.sizes = even_sizes(7, world_size)
    whole, mask, ids = draw(2, 7, 4), torch.ones(7, 7).double(), torch.arange(7)[None]
    mine = comm.split_dim(whole, 1, sequence.sizes, group).clone().requires_grad_()
    seen = []

    def inner(query, key, mask, ids, other=None):
        seen.append((query is key, tuple(query.shape), tuple(mask.shape), tuple(ids.shape), other is query))
        return query * torch.arange(1.0, 8).double()[:, None] + key.sum(), query.sum((1, 2)), None

    for give_piece in (True, False):
        forward = WholeSequence(inner, group, sequence, give_piece)
        out, sums, nothing = forward(mine, mine, mask, ids, other=mine)
        assert seen.pop() == (True, (2, 7, 4), (7, 7), (1, 7), True) and nothing is None
        right = whole * torch.arange(1.0, 8).double()[:, None] + whole.sum()
        near(out, comm.split_dim(right, 1, sequence.sizes, group) if give_piece else right)
        near(sums, whole.sum((1, 2)))
        mine.grad = None
        out.sum().backward()
        grad = torch.arange(1.0, 8).double()[:, None] + 2 * 7 * 4
        near(mine.grad, comm.split_dim(grad.expand(2, 7, 4), 1, sequence.sizes, group), give_piece)
    single = WholeSequence(lambda x: x * 2, group, sequence, True)
    near(single(mine), mine * 2)
    near(WholeSequence(lambda x: x * 2, group, sequence, False)(x=mine), whole * 2)
    with pytest.raises(
        ValueError, match=rf"\[rank {rank}/{world_size}\] the head: input of shape \(2, 9, 4\)"
    ):
        forward(torch.zeros(2, 9, 4), mine, mask, ids)
    sequence.is_whole = True
    near(forward(whole, whole, mask, ids)[0], right)


def test_modules_that_are_given_the_whole_sequence():
    spawn(3, whole_body)


# Which random numbers are drawn where ------------------------------------------------------------


class Recorded:
    """The streams of a rank, of which only the changes are noted."""

    cut = True

    def __init__(self):
        self.seen = []

    def switch(self, stream):
        self.seen.append(stream)


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.torchs, self.fused, self.mlp = Torchs(20, 5), FusedAttention(20, 5), sequential()
        self.gates, self.free, self.odd = SwiGlu(20, 7), nn.Linear(20, 6), nn.Linear(6, 20)

    def forward(self, x):
        return self.odd(self.mlp(self.free(self.gates(self.fused(self.torchs(x))))))


def streams_body(rank, world_size):
    group, own, shared = as_group(None, "tp"), Stream.OWN, Stream.SHARED
    model = nn.Module()
    model.blocks = nn.ModuleList([make(Everything, {})])
    parallelize_tensor(
        model, group, blocks="blocks", rules={"blocks.0.free": "column", "blocks.0.odd": "row"}
    )
    streams = Recorded()
    switch_at_edges(model, streams, False)
    for _ in range(2):
        model.blocks[0](draw(1, 2, 20))
    assert streams.seen == [own, shared, own, shared, own, own, shared, own, shared] * 2
    quiet = Recorded()
    quiet.cut = False
    switch_at_edges(model, quiet, False)
    model.blocks[0](draw(1, 2, 20))
    assert quiet.seen == []


def test_streams_change_at_the_edges():
    """torch's attention, fused attention, gates (two layers by columns), an MLP; and not at single layers,
    whose input and output are whole.
    """
    spawn(2, streams_body)


def megatron_streams_body(rank, world_size):
    model, sequence = nn.Module(), Sizes()
    sequence.sizes = even_sizes(3, world_size)
    model.blocks = nn.ModuleList([make(lambda: Torchs(20, 5), {}), make(lambda: FusedAttention(20, 5), {})])
    parallelize_tensor(
        model, as_group(None, "tp"), blocks="blocks", sequence=sequence, rules={"blocks.0.attn": "replicate"}
    )
    streams = Recorded()
    switch_at_edges(model, streams, True)
    x = comm.split_dim(draw(1, 3, 20), 1, sequence.sizes, as_group(None, "tp"))
    for block in model.blocks:
        block(x)
    return streams.seen


def test_streams_under_megatron_sp_change_where_the_sequence_is_whole():
    assert spawn(2, megatron_streams_body) == [[Stream.SHARED, Stream.OWN]] * 2


# Errors ------------------------------------------------------------


def test_pieces_of_rows_and_positions():
    sequence = Sizes()
    sequence.sizes = [3, 2, 0]
    for rank in (0, 1):
        group = Group("tp", 3, rank, None)
        here = sequence.sizes[rank]
        pieces = edges.flat_pieces(torch.zeros(4 * here, 5), sequence, group, "what")
        assert pieces == (0, [12, 8, 0])
        for shape in ((4 * here + 1, 5), (4, here, 5)):
            with pytest.raises(ValueError, match=rf"\[rank {rank}/3\] what: .* {here} of 5") as error:
                edges.flat_pieces(torch.zeros(shape), sequence, group, "what")
            assert str(shape) in str(error.value)
    with pytest.raises(ValueError, match="0 of 5. Use the model without megatron_sp, or longer sequences"):
        edges.flat_pieces(torch.zeros(4, 5), sequence, Group("tp", 3, 2, None), "what")
    group = Group("tp", 3, 1, None)
    for by_token in (False, True):
        source = edges.SublayerInput(group, sequence, by_token)
        output = edges.SublayerOutput(group, sequence, source)
        assert source._pieces(torch.zeros(2, 2, 4), sequence) == (1, [3, 2, 0])
        assert output._pieces(torch.zeros(2, 5, 4), sequence) == (1, [3, 2, 0])
        with pytest.raises(ValueError, match=r"\[rank 1/3\] output .*\(2, 4, 4\).* whole sequence, 5"):
            output._pieces(torch.zeros(2, 4, 4), sequence)
        if by_token:
            assert source._pieces(torch.zeros(6, 4), sequence) == (0, [9, 6, 0])
            assert output._pieces(torch.zeros(15, 4), sequence) == (0, [9, 6, 0])
        else:
            with pytest.raises(ValueError, match="input of a tensor-parallel sublayer"):
                source._pieces(torch.zeros(6, 4), sequence)
            with pytest.raises(ValueError, match="output of a tensor-parallel sublayer"):
                output._pieces(torch.zeros(15, 4), sequence)
    sequence.is_whole = True
    assert edges.now_cut(sequence) is None and source.sequence is None and output.sequence is None
