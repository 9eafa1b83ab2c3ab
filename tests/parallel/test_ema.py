"""par.ema: averages of the values over the updates, against torch's AveragedModel in one process."""

import copy

import equality
import pytest
import torch
from models import GPT
from odd_models import cross, tokens
from tiers import tier
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.checkpoint.ema import _blend
from pycomm.parallel.ground.averages import Shadow
from pycomm.parallel.parts import parts_of

STEPS, DECAY = 3, 0.7
LIMIT = 1e-10


def make():
    torch.manual_seed(0)
    model = GPT(dim=16, heads=2, hidden=20, layers=4).double()
    model.norm.bias.requires_grad_(False)
    model.register_buffer("mark", torch.zeros(3, dtype=torch.float64))
    model.register_buffer("count", torch.tensor(10))
    return model


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def warm(updates):
    return min(0.9, (1 + updates) / (10 + updates))


def torch_warm(averages, values, updates):
    get_ema_multi_avg_fn(warm(int(updates)))(averages, values, updates)


# decay of par.ema -> multi_avg_fn of AveragedModel
DECAYS = {"ema": (DECAY, get_ema_multi_avg_fn(DECAY)), "warm": (warm, torch_warm), "swa": (None, None)}


def change(model, step):
    """What the program of a user may do to buffers."""
    model.mark.fill_(step)
    model.count += 7


def alone(kind="ema", buffers=True, steps=STEPS):
    """(values, average, its loss) of one process."""
    model = make()
    opt = sgd(model)
    average = AveragedModel(model, multi_avg_fn=DECAYS[kind][1], use_buffers=buffers)
    average.update_parameters(model)
    for step in range(steps):
        x, y = tokens(step)
        opt.zero_grad()
        cross(model(x), y).backward()
        opt.step()
        change(model, step)
        average.update_parameters(model)
    with torch.no_grad():
        loss = cross(average.module(tokens(9)[0]), tokens(9)[1]).item()
    return copy.deepcopy(model.state_dict()), average.module.state_dict(), loss


def begin(text, kind="ema", with_ema=True, **options):
    model = make()
    model, opt = par.parallelize(model, sgd(model), text)
    ema = par.ema(model, DECAYS[kind][0], **{"buffers": True, **options}) if with_ema else None
    if ema is not None:
        ema.update()
    return model, opt, ema


def train(model, opt, ema, steps):
    for step in steps:
        par.step(model, opt, tokens(step), microbatches=2)
        change(model, step)
        if ema is not None:
            ema.update()


def same(found, expected, where):
    assert found.keys() == expected.keys(), where
    for name, value in expected.items():
        assert equality.relative(found[name], value) < LIMIT, (*where, name)


def raises(pattern, call, *args, **kwargs):
    with pytest.raises(ValueError, match=pattern):
        call(*args, **kwargs)


def bits(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[n], v) for n, v in expected.items())


TWO = (
    *("dp=2", "dp=2,zero=1", "dp=2,zero=2,bucket_mb=0.004", "dp=2,zero=3", "tp=2", "tp=2,megatron_sp"),
    *("pp=2", "pp=2,schedule=zbv", "ring=2", "ulysses=2"),
)
FOUR = (
    "dp=2,tp=2",
    "dp=2,tp=2,zero=3",
    "dp=2,pp=2,zero=1",
    "ring=2,ulysses=2,zero=2",
    "tp=2,pp=2,megatron_sp",
)


def averaged(rank, world_size, texts, kind, options):
    found = []
    for text in texts:
        model, opt, ema = begin(text, kind, **options)
        train(model, opt, ema, range(STEPS))
        before = par.full_state_dict(model)
        with ema.applied():
            loss = par.evaluate(model, tokens(9)).item()
            average = par.full_state_dict(model)
        assert bits(par.full_state_dict(model), before), text
        train(model, opt, None, [STEPS])
        found.append((before, average, loss, par.full_state_dict(model)))
    return found


@tier(quick=1 / 5, slow=1 / 2)
@pytest.mark.parametrize(
    ("texts", "kind", "options"),
    [
        (TWO[:5], "ema", {}),
        (FOUR[:3], "ema", {"buffers": False}),
        (FOUR[3:], "ema", {}),
        (TWO[5:], "warm", {"frozen": False}),
        (TWO[:5], "swa", {"buffers": False, "frozen": False}),
    ],
)
def test_equals_averaged_model(texts, kind, options):
    buffers = options.get("buffers", True)
    state, average, loss = alone(kind, buffers)
    later = alone(kind, buffers, STEPS + 1)[0]
    for found in spawn(par.Plan.parse(texts[0]).world_size, averaged, texts, kind, options):
        for text, (its_state, its_average, its_loss, its_later) in zip(texts, found, strict=True):
            same(its_state, state, (text, "state"))
            same(its_average, average, (text, "average"))
            same(its_later, later, (text, "later"))
            assert abs(its_loss - loss) < LIMIT * loss, text


def by_hand(rank, world_size, texts):
    """An average over model.parameters() without par.ema."""
    found = []
    for text in texts:
        model, opt, _ = begin(text, with_ema=False)
        average = [p.detach().clone() for p in model.parameters()]

        def exchange(model=model, average=average):
            with torch.no_grad():
                for a, p in zip(average, model.parameters(), strict=True):
                    kept = p.clone()
                    p.copy_(a)
                    a.copy_(kept)

        for step in range(STEPS):
            train(model, opt, None, [step])
            for a, p in zip(average, model.parameters(), strict=True):
                a.lerp_(p.detach(), 1 - DECAY)
        exchange()
        loss, averaged = par.evaluate(model, tokens(9)).item(), par.full_state_dict(model)
        exchange()
        train(model, opt, None, [STEPS])
        found.append((averaged, loss, par.full_state_dict(model)))
    return found


WHOLE = tuple(text for text in TWO if "zero=3" not in text)  # where parameters are not empty between steps


@tier(quick=1 / 2)
@pytest.mark.parametrize("texts", [("dp=2,zero=1", "pp=2"), (*WHOLE[2:5], *WHOLE[7:])])
def test_an_average_by_hand(texts):
    average, loss = alone(buffers=False)[1:]
    later = alone(steps=STEPS + 1)[0]
    for found in spawn(2, by_hand, texts):
        for text, (its_average, its_loss, its_later) in zip(texts, found, strict=True):
            same(its_average, average, (text, "average"))
            same(its_later, later, (text, "later"))
            assert abs(its_loss - loss) < LIMIT * loss, text


def begun_whole(rank, world_size):
    """A parameter that is frozen lies whole on each rank, and in a bucket once it is trained."""
    model, opt, ema = begin("dp=2,zero=1")
    average = parts_of(model).averages.all["ema"]
    train(model, opt, ema, [0])
    with ema.applied():
        full = par.full_state_dict(model)
    names = dict.fromkeys(shadow.name for shadow in average.shadows)
    average.shadows = [
        Shadow(name, 0, full[name].numel(), full[name].clone()) for name in reversed(list(names))
    ]
    train(model, opt, ema, range(1, STEPS))
    with ema.applied():
        found = par.full_state_dict(model)
    average.shadows = average.shadows[1:]
    raises("the parameters were cut again", ema.update)
    return found


def test_parameters_that_begin_to_be_trained():
    average = alone()[1]
    for found in spawn(2, begun_whole):
        same(found, average, ())


PARTLY = ("blocks.1.", "blocks.2.")  # frozen at first


def frozen_partly():
    model = make()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(PARTLY))
    return model


def unfreeze(model, step):
    """Weights of two modules, of which each rank may have frozen ones beside them."""
    for module in ((), (model.blocks[1].ln_1, model.blocks[2].mlp), (model.blocks[1].mlp,))[step]:
        module.requires_grad_(True)


def partly(rank, world_size, texts):
    found = []
    for text in texts:
        model = frozen_partly()
        model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), text)
        ema, mean = par.ema(model, DECAY), par.ema(model, None, name="mean")
        for step in range(3):
            unfreeze(model, step)
            par.step(model, opt, tokens(step), cross)
            ema.update()
            if step != 1:
                mean.update()
        for average in (ema, mean):
            with average.applied():
                found.append((text, par.full_state_dict(model)))
    return found


def test_some_frozen_parameters_begin_to_be_trained():
    """Under zero=3 they lie in shards with others, which are cut anew."""
    model = frozen_partly()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = [AveragedModel(model, multi_avg_fn=DECAYS[kind][1]) for kind in ("ema", "swa")]
    for step in range(3):
        unfreeze(model, step)
        cross(model(tokens(step)[0]), tokens(step)[1]).backward()
        opt.step()
        opt.zero_grad()
        for average in expected if step != 1 else expected[:1]:
            average.update_parameters(model)
    for found in spawn(2, partly, ("dp=2,zero=1", "dp=2,zero=3")):
        for number, (text, state) in enumerate(found):
            same(state, expected[number % 2].module.state_dict(), (text, number))


def save_under(rank, world_size, text, path, kind):
    model, opt, ema = begin(text, kind)
    train(model, opt, ema, range(2))
    saving = par.save(model, opt, path, extra=2, asynchronous=True)
    train(model, opt, ema, [2])
    saving.wait()


def resume_under(rank, world_size, texts, path, kind):
    found = []
    for text in texts:
        model, opt, ema = begin(text, kind)
        assert par.load(model, opt, path) == 2 and ema.updates == 3
        train(model, opt, ema, [2])
        with ema.applied():
            average = par.full_state_dict(model)
        found.append((par.full_state_dict(model), average))
    return found


PAIRS = [
    ("dp=2,zero=1", ("dp=2,zero=3", "tp=2", "pp=2", "dp=2,zero=1"), "warm"),
    ("dp=2,tp=2,zero=3", ("dp=2,pp=2,zero=1", "ring=2,ulysses=2,zero=2"), "swa"),
    ("pp=2,schedule=zbv", ("dp=2", "tp=2,megatron_sp", "dp=2,zero=2"), "ema"),
]


@tier(quick=1 / 3, slow=1 / 2)
@pytest.mark.parametrize(("first", "then", "kind"), PAIRS)
def test_resume_under_another_plan(first, then, kind, tmp_path):
    state, average, _ = alone(kind)
    size = par.Plan.parse(first).world_size
    spawn(size, save_under, first, tmp_path / "saved", kind)
    for found in spawn(size, resume_under, then, tmp_path / "saved", kind):
        for text, (its_state, its_average) in zip(then, found, strict=True):
            same(its_state, state, (text, "state"))
            same(its_average, average, (text, "average"))


def in_bf16(rank, world_size, texts, path):
    """The average is of the fp32 master copies; bits stay through a checkpoint."""
    found = []
    for text in texts:
        model = make().float()
        model, opt = par.parallelize(model, sgd(model), f"{text},precision=bf16")
        ema = par.ema(model, DECAY)
        expected = {name: value.clone() for name, value in par.full_state_dict(model).items()}
        ema.update()
        for step in range(STEPS):
            par.step(model, opt, tokens(step))
            ema.update()
            for name, value in par.full_state_dict(model).items():
                if value.is_floating_point():
                    expected[name].lerp_(value, 1 - DECAY)
        before, loss = par.full_state_dict(model), par.evaluate(model, tokens(9)).item()
        with ema.applied():
            average, its_loss = par.full_state_dict(model), par.evaluate(model, tokens(9)).item()
        assert loss == par.evaluate(model, tokens(9)).item() != its_loss
        trained = {name for name, p in model.named_parameters() if name != "norm.bias"}
        assert all(average[name].dtype == torch.float32 for name in trained)
        assert bits(par.full_state_dict(model), before), text
        assert all(torch.equal(average[name], expected[name]) for name in trained), text
        par.save(model, opt, path / text)
        par.step(model, opt, tokens(5))
        ema.update()
        par.load(model, opt, path / text)
        with ema.applied():
            assert bits(par.full_state_dict(model), average), text
        found.append(text)
    return found


@tier(slow=1)
def test_master_copies(tmp_path):
    spawn(2, in_bf16, ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2"], tmp_path)


def bitwise(rank, world_size, texts):
    """A training with an average that is applied in between, and one without; errors and nesting inside."""
    for text in texts:
        plain = begin(text, with_ema=False)[:2]
        train(*plain, None, range(4))
        model, opt, ema = begin(text)
        other = par.ema(model, None, name="mean")
        train(model, opt, ema, range(2))
        other.update()
        train(model, opt, ema, [2])
        with pytest.raises(KeyError), ema.applied():
            first = par.full_state_dict(model)
            with other.applied():
                assert not bits(par.full_state_dict(model), first)
                with other.applied():
                    assert par.evaluate(model, tokens(9)) > 0
                model.mark = torch.ones(5, dtype=torch.float64)  # a forward may put another buffer there
                with pytest.raises(ValueError, match="is applied already"), ema.applied():
                    pass
            assert bits(par.full_state_dict(model), first)
            model.mark.fill_(7.0)
            raise KeyError
        assert model.mark[0] == 2.0 and model.mark.shape == (3,)
        train(model, opt, ema, [3])
        assert bits(par.full_state_dict(model), par.full_state_dict(plain[0])), text


@tier(quick=1 / 2)
@pytest.mark.parametrize("texts", [("dp=2,zero=1", "dp=2,zero=3"), ("dp=2", "dp=2,zero=2", "tp=2", "pp=2")])
def test_training_goes_on_with_the_same_bits(texts):
    spawn(2, bitwise, texts)


def refusals(rank, world_size, path):
    model, opt, ema = begin("dp=2,zero=1")
    par.save(model, opt, path / "with")
    ema.remove()
    raises("does not belong to this model", ema.update)
    par.save(model, opt, path / "without")
    raises("call parallel.ema\\(model, decay\\)", AveragedModel, model)
    raises("decay is 1.5", par.ema, model, 1.5)
    raises("decay is 'x'", par.ema, model, "x")
    raises("without '/'", par.ema, model, name="a/b")
    raises("rank 0 has called it with", par.ema, model, 0.5 + rank / 10)
    par.load(model, opt, path / "with")
    raises("was loaded without its average 'ema'", par.ema, model)
    par.load(model, opt, path / "without")
    ema = par.ema(model, lambda updates: -1.0)
    raises("has an average 'ema' already", par.ema, model)
    raises("has no average 'ema'", par.load, model, opt, path / "without")
    raises("has buffers, and the one here has none", par.load, model, opt, path / "with")
    ema.update()
    raises("decay is -1.0", ema.update)
    few = par.ema(model, frozen=False, name="few")
    par.save(model, opt, path / "few")
    model.norm.bias.requires_grad_(True)
    raises("'norm.bias' was frozen when the average 'few' was made", few.update)
    raises("'norm.bias' was frozen when the average 'few' was made", few.applied().__enter__)
    raises("'norm.bias' was frozen when the average 'few' was made", par.save, model, opt, path / "other")
    model.norm.bias.requires_grad_(False)
    few.remove()
    few = par.ema(model, name="few")
    raises("made with frozen=False, and has no 'norm.bias'", par.load, model, opt, path / "few")
    few.remove()
    ema.decay = DECAY
    with ema.applied():
        raises("save .*averaged values", par.save, model, opt, path / "inside")
        raises("load: the model has the averaged", par.load, model, opt, path / "with")
        raises("step: the model has the averaged", par.step, model, opt, tokens(0))
        raises("ema.update: the model has", ema.update)
        raises("ema.remove: the model has", ema.remove)
        par.save(model, None, path / "model")
    if rank == 0:
        ema.update()
    raises("call ema.update\\(\\) on every rank", par.save, model, opt, path / "other")
    raises("call ema.update\\(\\) on every rank", ema.applied().__enter__)
    if rank == 1:
        ema.update()
    few = par.ema(model, lambda updates: 0.5, name="few")
    few.update()
    few.decay = 0.25 + rank / 2
    few.update()
    raises(r"'few': \(2, 0.25\).* on rank 0 and .*'few': \(2, 0.75\).* on rank 1", few.applied().__enter__)
    assert torch.isfinite(par.step(model, opt, tokens(0)))
    raises("has not been through parallelize", par.ema, make())


def test_refusals(tmp_path):
    spawn(2, refusals, tmp_path)


def in_recovery(rank, world_size):
    model = make()
    run = par.resilient(model, sgd(model), "dp=2")
    raises("belongs to parallel.resilient", par.ema, model)
    run.close()


def test_resilient_has_none():
    spawn(2, in_recovery)


@pytest.mark.parametrize("decay", [0.7, 0.0, 1.0, None])
def test_the_arithmetic_of_torch(decay):
    """Of every kind of number at once, over several updates, the first of which copies."""
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.int32]

    class Holder(torch.nn.Module):
        def __init__(self, step):
            super().__init__()
            for number, dtype in enumerate(kinds):
                values = torch.arange(-3, 5) * (step + 1) + 7 * number
                self.register_buffer(f"b{number}", values.to(dtype))

    functions = {"multi_avg_fn": None if decay is None else get_ema_multi_avg_fn(decay)}
    theirs = AveragedModel(Holder(0), use_buffers=True, **functions)
    ours = [buffer.clone() for buffer in Holder(0).buffers()]
    for step in range(4):
        now = Holder(step)
        theirs.update_parameters(now)
        _blend(list(zip(ours, now.buffers(), strict=True)), decay, step)
        for mine, other in zip(ours, theirs.module.buffers(), strict=True):
            torch.testing.assert_close(mine, other)  # of the same dtype; whole numbers are equal
            assert decay is None or torch.equal(mine, other), (mine, other)
