"""Parts of a step, an evaluation and a generation by themselves, without ranks: what they compare between
ranks, and what they put back after an error.
"""

import contextlib
import itertools
import re
import sys
from types import SimpleNamespace

import models
import pytest
import torch
from torch import nn

import pycomm.parallel as par
from pycomm.groups import Group
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.batch import Microbatch
from pycomm.parallel.pipeline.absent import absent_like
from pycomm.parallel.run import generate, own_loop, passes, replicas, scaling, updates
from pycomm.parallel.run.loss import _without_gradient, _without_values, sharded_logits
from pycomm.parallel.run.prepare import Options
from pycomm.parallel.run.written_buffers import WrittenBuffers

CPU, NAN, INF = torch.device("cpu"), torch.nan, torch.inf

# Random numbers, forwards, switches: put back ---------------------------------------------------


def shared(own, first):
    """(inside, afterwards): the next random numbers of a rank with the seed `own` in generate()'s loop."""

    def broadcast(tensor, src, group):
        assert src == 0
        kept = torch.get_rng_state()
        torch.manual_seed(first)
        tensor.copy_(torch.get_rng_state())
        torch.set_rng_state(kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "broadcast", broadcast)
        torch.manual_seed(own)
        with contextlib.suppress(ZeroDivisionError):
            with generate._random_numbers_of_first(Group("tp", 2, 1, None), CPU):
                inside = torch.rand(3)
                1 / 0  # noqa: B018
    return inside, torch.rand(3)


def drawn(seed):
    return torch.rand(6, generator=torch.Generator().manual_seed(seed)).chunk(2)


def test_random_numbers_in_a_loop_of_generate():
    """Rank 0's for all. They go on where they are the rank's own, so a second call gives other tokens; else
    the rank has its own again.
    """
    for own, expected in ((3, drawn(3)), (4, (drawn(3)[0], drawn(4)[0]))):
        for found, right in zip(shared(own, 3), expected, strict=True):
            assert torch.equal(found, right), own


class Decoder(nn.Module):
    """As transformers' are, as far as the loop sees."""

    config = SimpleNamespace(is_encoder_decoder=False)

    def forward(self, input_ids, more=None):
        return input_ids


def looped(model, wrapped):
    parts = SimpleNamespace(model=model, stage_model=None, units=None)
    if wrapped:  # as the wrappers of a plan lie on it
        model.forward = lambda *args, **kwargs: type(model).forward(model, *args, **kwargs)
    return generate._Loop(parts, comm.ALONE)


@pytest.mark.parametrize("wrapped", [False, True])
def test_forwards_are_put_back_after_a_generation_that_raises(wrapped):
    model = Decoder()
    loop, before = looped(model, wrapped), model.__dict__.get("forward")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), loop.installed():
            assert model.__dict__["forward"] is not before
            assert model.forward.__wrapped__.__code__ is Decoder.forward.__code__  # generate() looks at it
            with pytest.raises(KeyError), loop._as_it_was():
                assert model.forward(3) == 3
                raise KeyError
            1 / 0  # noqa: B018
        assert model.__dict__.get("forward") is before and model(5) == 5


def test_a_clock_of_its_own_is_refused_wherever_it_is_given():
    model = Decoder()
    model.generation_config = SimpleNamespace(max_time=None)
    parts, two = (
        SimpleNamespace(model=model, plan="tp=2", split=None, stage_model=None),
        Group("tp", 2, 0, None),
    )
    timed = SimpleNamespace(max_time=0.5)
    generate._check(parts, two, (), {})
    generate._check(parts, comm.ALONE, (), {"max_time": 1.0})
    for args, kwargs in (((), {"max_time": 1.0}), ((1, timed), {}), ((), {"generation_config": timed})):
        with pytest.raises(ValueError, match=r"max_time=.*Plan\(tp=2\).*max_new_tokens"):
            generate._check(parts, two, args, kwargs)
    model.generation_config = timed
    with pytest.raises(ValueError, match="max_time"):
        generate._check(parts, two, (), {})


def test_inputs_grow_to_two_positions_for_each_rank():
    """What came behind is a copy of the last position, positions go on, and other tensors stay."""
    given = {
        "input_ids": torch.tensor([[4, 5, 6], [7, 8, 9]]),
        "position_ids": torch.tensor([[0, 1, 2]] * 2),
        "inputs_embeds": torch.arange(6.0).view(1, 3, 2),
        "other": torch.zeros(2, 2),
        "flag": True,
    }
    assert generate._longer(given, 3, 3) is given and generate._longer(given, 3, 2) is given
    found = generate._longer(given, 3, 5)
    assert found["input_ids"].tolist() == [[4, 5, 6, 6, 6], [7, 8, 9, 9, 9]]
    assert found["position_ids"].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert found["inputs_embeds"].tolist() == [[[0, 1], [2, 3], [4, 5], [4, 5], [4, 5]]]
    assert found["other"] is given["other"] and found["flag"] is True and given["input_ids"].shape == (2, 3)


@pytest.mark.parametrize("degree", [None, 2, 3])
def test_every_rank_of_a_cut_sequence_has_two_positions(degree, monkeypatch):
    """The whole text goes through predict() without keys, and each logit has its own position."""
    seen, split = [], None if degree is None else SimpleNamespace(degree=degree)

    def predict(parts, inputs):
        seen.append(inputs)
        return torch.arange(float(inputs["input_ids"].shape[1])).expand(2, -1)[..., None]

    outputs = SimpleNamespace(CausalLMOutputWithPast=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "transformers.modeling_outputs", outputs)
    monkeypatch.setattr(generate, "run_prediction", predict)
    parts = SimpleNamespace(model=Decoder(), stage_model=1, units=None, split=split, plan="")
    loop = generate._Loop(parts, comm.ALONE)
    for length in (1, 4, 7):
        given = {"input_ids": torch.ones(2, length), "logits_to_keep": 1, "past_key_values": 3, "more": None}
        with loop.installed():
            logits = loop._predicted((), given).logits
        assert logits[0, :, 0].tolist() == list(range(length))
        inputs = seen[-1]
        assert inputs["input_ids"].shape[1] == max(length, 2 * (degree or 0))
        assert inputs["use_cache"] is False and inputs["return_dict"] is True
        assert ("logits_to_keep" in inputs) is (degree is None) and "past_key_values" not in inputs
        assert given["input_ids"].shape == (2, length)
    for more in ({"output_attentions": True}, {"output_hidden_states": True}):
        with pytest.raises(ValueError, match="has the logits alone"):
            loop._predicted((), given | more)


def test_logits_are_whole_again_after_an_error():
    head = SimpleNamespace(sharded_output=False)
    for loss_fn, cut in ((par.cross_entropy, True), (len, False), (None, False), (par.cross_entropy, True)):
        with pytest.raises(ZeroDivisionError), sharded_logits(head, loss_fn):
            assert head.sharded_output is cut
            1 / 0  # noqa: B018
        assert head.sharded_output is False
    with sharded_logits(None, par.cross_entropy):
        pass


def test_a_step_that_raised_leaves_nothing_for_the_next():
    called = []
    parts = SimpleNamespace(
        window=SimpleNamespace(discard=lambda: called.append("window")),
        units=SimpleNamespace(forget_orders=lambda: called.append("units")),
        deferred=SimpleNamespace(forget=lambda: called.append("deferred")),
    )
    passes.forget_passes(parts)
    assert sorted(called) == ["deferred", "units", "window"]
    passes.forget_passes(SimpleNamespace(window=parts.window, units=None, deferred=None))
    assert called.count("window") == 2


def test_the_balance_of_experts_after_a_forward_that_raised():
    moes = [SimpleNamespace(aux_scale=scale) for scale in (1.0, 0.5)]
    own = SimpleNamespace(parts=SimpleNamespace(moes=moes), gradients=SimpleNamespace(ranks=4))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), own_loop.OwnLoop._balanced(own):
            assert [moe.aux_scale for moe in moes] == [4.0, 2.0]
            1 / 0  # noqa: B018
        assert [moe.aux_scale for moe in moes] == [1.0, 0.5]


def test_rows_that_stand_in_count_again_after_an_error():
    moes, mesh = [SimpleNamespace(is_counted=True) for _ in range(2)], SimpleNamespace(counts_rows=True)
    parts = SimpleNamespace(moes=moes, mesh=mesh)
    for counts in (False, True, False):
        with pytest.raises(ZeroDivisionError), passes.uncounted(parts, Microbatch(0, 0, counts=counts)):
            assert [mesh.counts_rows, *(moe.is_counted for moe in moes)] == [counts] * 3
            1 / 0  # noqa: B018
        assert [mesh.counts_rows, *(moe.is_counted for moe in moes)] == [True] * 3


def test_the_cache_of_casts_is_as_before():
    for before in (True, False):
        torch.set_autocast_cache_enabled(before)
        with pytest.raises(ZeroDivisionError), passes._without_cached_casts():
            assert not torch.is_autocast_cache_enabled()
            1 / 0  # noqa: B018
        assert torch.is_autocast_cache_enabled() is before
    torch.set_autocast_cache_enabled(True)


def test_for_which_inputs_stages_agree_again():
    """Other shapes, dtypes, plain values, names and modes are asked for by themselves; other numbers not."""
    model = nn.Linear(2, 2)
    parts, x = SimpleNamespace(model=model), torch.zeros(2, 3)

    def key(inputs):
        return passes._key(parts, Microbatch(inputs, None))

    same = [({"x": x, "n": 1}, {"x": x + 1, "n": 1}), (x, x * torch.nan)]
    other = [
        (x, x[:1]),
        (x, x.long()),
        ({"x": x}, {"y": x}),
        ((x, 1), (x, 2)),
        ((x, True), (x, False)),
        (x, (x,)),
    ]
    assert all(key(a) == key(b) and hash(key(a)) == hash(key(b)) for a, b in same)
    assert all(key(a) != key(b) for a, b in other)
    before = key(x)
    assert before != (model.eval(), key(x))[1] and before == (model.train(), key(x))[1]


# Numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [-1.0, -0.5, float("nan"), -float("inf")])
def test_a_largest_norm_that_is_none(clip):
    with pytest.raises(ValueError, match=re.escape(f"clip={clip!r}")):
        Options(None, clip=clip)


@pytest.mark.parametrize("clip", [None, 0, -0.0, 1e-320, 3, float("inf")])
def test_a_largest_norm(clip):
    assert Options(None, clip=clip).clip is clip


def test_the_factor_of_a_norm():
    """As torch's clip_grad_norm_: nothing where the norm is small; nan and inf come through."""
    for norm, clip in itertools.product(
        (0.0, 1e-320, 0.3, 1.0, 7.0, torch.inf, torch.nan), (0.0, 0.3, 1.0, torch.inf)
    ):
        factor = updates.clip_factor(torch.tensor(norm, dtype=torch.float64), clip)
        right = min(clip / (norm + 1e-6), 1.0)  # of nan the first
        assert (1.0 if factor is None else factor.item()) == pytest.approx(right, rel=1e-15, nan_ok=True)


def test_a_scaler_goes_as_in_one_process():
    """It halves with what was found, grows after the good steps that it was made with, and nothing before."""
    mine = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    right = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    own, found = scaling.Scaling(mine, par.Plan(), CPU), []
    assert own.is_on and own.scale == 8.0
    for bad in (False, True, False, False, True, True, False, False, False):
        weight = nn.Parameter(torch.ones(1))
        opt = torch.optim.SGD([weight], lr=0.1)
        right.scale((weight * (torch.inf if bad else 1.0)).sum()).backward()
        right.step(opt)
        right.update()
        own.end(bad)
        assert own.scale == right.get_scale() and mine.state_dict() == right.state_dict()
        found.append(own.scale)
    assert len(set(found)) > 2
    off = scaling.Scaling(torch.amp.GradScaler("cpu", enabled=False), par.Plan(), CPU)
    assert not off.is_on and off.scale == 1.0 and not scaling.Scaling(None, par.Plan(), CPU).is_on
    with pytest.raises(ValueError, match="takes a torch.amp.GradScaler, not a float"):
        scaling.Scaling(8.0, par.Plan(), CPU)


# Compared between ranks ------------------------------------------------------------------------


class Mesh:
    """Of rank `rank` of pp stages times dp."""

    def __init__(self, rank, pp, dp):
        self.rank, self.pp, self.dp = rank, pp, dp
        self.world = Group("world", pp * dp, rank, None)

    def group(self, axis):
        return Group(axis, self.pp, self.coordinate(axis), None)

    def coordinate(self, axis):
        assert axis == "pp"
        return self.rank // self.dp


class Parts:
    """That can be a key of a weak table."""

    def __init__(self, rank, pp, dp):
        self.mesh, self.device, self.moes = Mesh(rank, pp, dp), CPU, ()
        self.model = nn.Module()
        for name in ("a", "b", "far"):
            self.model.register_buffer(name, torch.zeros(3))
        self.model.far = absent_like(torch.empty(3, device="meta"), "far", CPU)
        self.model.norm = nn.BatchNorm1d(3)


def written(pp, dp, write):
    """[what check() says] of all ranks, after write(rank, model)."""
    ranks = [Parts(rank, pp, dp) for rank in range(pp * dp)]
    watched = [WrittenBuffers(parts) for parts in ranks]
    for rank, parts in enumerate(ranks):
        write(rank, parts.model)
    sums, said = torch.stack([each.numbers() for each in watched]).sum(0), []
    for each in watched:
        try:
            each.check(sums)
            said.append(None)
        except ValueError as error:
            said.append(str(error))
    return said


def by_stage(rank, model):
    (model.a if rank < 2 else model.b).add_(1 + rank // 2)


def test_buffers_that_ranks_write():
    """Stages may write what they like; ranks of one stage the same. Each rank names what it has written."""
    fine = (
        by_stage,
        lambda rank, model: None,
        lambda rank, model: model.a.add_(torch.nan),
        lambda rank, model: model.norm.running_mean.add_(rank),
        lambda rank, model: setattr(model, "a", torch.ones(4 + rank)),  # a table for another shape
        lambda rank, model: setattr(model, "a", torch.ones(3)),
    )
    for write in fine:
        assert written(2, 2, write) == [None] * 4, write
    for last in range(4):
        found = written(2, 2, lambda rank, model, last=last: by_stage(rank + 2 * (rank == last), model))
        for rank, said in enumerate(found):
            assert said.startswith(f"[rank {rank}] step: the forward writes a buffer"), (last, said)
            assert "('a')" in said or "('b')" in said
    said = written(1, 2, lambda rank, model: (model.a.add_(rank), model.b.add_(1)))
    assert all("(one of 'a', 'b')" in each for each in said)
    assert all(written(1, 3, lambda rank, model: model.b.copy_(torch.tensor([0.0, -0.0, rank == 2]))))


def info(name, layout_dim=None):
    return SimpleNamespace(name=name, layout=SimpleNamespace(dim=layout_dim))


def test_copies_of_tied_weights_are_compared_part_by_part():
    """Of what tp has cut each rank's part with the same part on other stages; what is whole together."""
    for dim, differing in ((0, None), (None, None), (0, 3), (None, 0), (0, 0)):
        total = torch.zeros(2 * 2 * 3, dtype=torch.float64)
        for rank in range(4):  # pp, tp
            tp = rank % 2
            parts = SimpleNamespace(
                infos=[info("other"), info("tied", dim), info("more", 0)],
                plan=SimpleNamespace(tp=2),
                mesh=SimpleNamespace(coordinate=lambda axis, tp=tp: tp),
            )
            own = 100 + (tp if dim == 0 else 0) + (rank == differing)
            marks = dict(zip(map(id, parts.infos), (7 + rank, own, 50 + tp), strict=True))
            given = type("Marks", (), {"__getitem__": lambda self, of, m=marks: m[id(of)]})()
            total += replicas._numbers_of_ties(parts, given, ["more", "tied"])
        unlike = [
            bool(replicas.differ(row[1].item(), row[2].item(), int(row[0])))
            for row in total.view(2, 2, 3).flatten(0, 1)
        ]
        if differing is None:
            assert not any(unlike), dim
        else:
            assert unlike == [
                False,
                False,
                *(place == (differing % 2 if dim == 0 else 0) for place in range(2)),
            ]


# One process ---------------------------------------------------------------------------------


class Takes(nn.Module):
    """A model that takes names, draws no random numbers and changes its tokens in place."""

    def __init__(self):
        super().__init__()
        self.inner = models.GPT(layers=1)

    def forward(self, idx, scale=None):
        out = self.inner(idx)
        return out if scale is None else out * scale[:, None, None]


def loss(out, y):
    return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())


CALLS = {
    "step": lambda model, opt, batch: par.step(model, opt, batch, loss, microbatches=2),
    "waits": lambda model, opt, batch: par.step(model, opt, batch, loss, update=False),
    "evaluate": lambda model, opt, batch: par.evaluate(model, batch, loss, metrics={"again": loss}),
    "predict": lambda model, opt, batch: par.predict(model, batch, microbatches=3),
    "describe": lambda model, opt, batch: par.describe(model),
    "full_state_dict": lambda model, opt, batch: par.full_state_dict(model),
    "grad_norm": lambda model, opt, batch: par.grad_norm(model),
}


def test_what_a_call_leaves_of_the_users():
    """Batch, random numbers, modes, hooks: as before each call, whatever came before it."""
    torch.manual_seed(0)
    model = Takes()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    par.parallelize(model, opt, "")
    idx = torch.randint(0, 37, (6, 5))
    batch = {"idx": idx, "scale": torch.tensor([1.0, -0.0, 2.0, 1e-40, 3.0, 1.0]), "labels": idx.clone()}
    held = {key: (value, value.clone()) for key, value in batch.items()}
    for name in (*CALLS, *reversed(CALLS), "step"):
        for training in (True, False):
            model.train(training)
            random, modes = torch.get_rng_state(), [module.training for module in model.modules()]
            names = {key: set(vars(module)) for key, module in model.named_modules()}
            CALLS[name](model, opt, batch)
            assert torch.equal(torch.get_rng_state(), random), name
            assert modes == [module.training for module in model.modules()], name
            assert torch.is_grad_enabled() and torch.is_autocast_cache_enabled(), name
            assert names == {key: set(vars(module)) for key, module in model.named_modules()}, name
            assert list(batch) == list(held), name
            for key, (value, copy) in held.items():
                assert batch[key] is value and torch.equal(value, copy), (name, key)
                assert not value.requires_grad, (name, key)


def test_what_a_stage_leaves_under_autocast_has_the_dtype_that_is_expected():
    """Of the model's own; other tensors, and all without autocast, stay as they are."""
    given = tuple(torch.ones(2, dtype=dtype) for dtype in (torch.bfloat16, torch.float64, torch.int64))
    parts = SimpleNamespace(device=CPU, model=nn.Linear(2, 2))
    assert passes.handed_on(parts, given) is given
    with torch.autocast("cpu", torch.bfloat16):
        found = passes.handed_on(parts, given)
    assert [each.dtype for each in found] == [torch.float32, torch.float64, torch.int64]


def test_outputs_of_rows_that_do_not_count():
    """Only tensors of real numbers lose their gradient, or their values; a gradient of nan is zero too."""
    x = torch.tensor([1.0, NAN, INF], requires_grad=True)
    others = (3, None, "a", torch.tensor([1, 2]))
    for function, kept in ((_without_gradient, x), (_without_values, torch.zeros(3))):
        assert all(function(each) is each for each in others)
        assert torch.equal(function(x).nan_to_num(), kept.nan_to_num())
        (gradient,) = torch.autograd.grad(function(x), x, torch.tensor([1.0, NAN, INF]))
        assert gradient.tolist() == [0, 0, 0]
