"""Loops that users write themselves, for test_own_loop.py. A use is a program: it is given a World, which is
one process or the ranks of a plan, and returns tensors by name.
"""

import pytest
import torch
import torch.nn.functional as F
from models import GPT
from odd_models import cross
from torch import nn
from torch.utils.checkpoint import checkpoint

import pycomm.parallel as par

STEPS, ROWS = 3, 8


class World:
    """text: of a plan; None: one process."""

    def __init__(self, text=None):
        self.plan = None if text is None else par.Plan.parse(text)

    def parallelize(self, model, make_optimizer=None, after=None):
        """after: what another plan than this world's model has, where there are several ranks."""
        opt = None if make_optimizer is None else make_optimizer(model.parameters())
        if self.plan is None:
            return model, opt
        return par.parallelize(model, opt, self.plan if after is None else after)

    def rows(self, *tensors):
        """Rows of this data rank."""
        if self.plan is not None:
            rank = torch.distributed.get_rank() // self.plan.tp
            tensors = [tensor.chunk(self.plan.dp)[rank] for tensor in tensors]
        return tensors if len(tensors) > 1 else tensors[0]

    def clip(self, model, limit):
        if self.plan is None:
            return nn.utils.clip_grad_norm_(model.parameters(), limit)
        return par.clip_grad_norm_(model, limit)

    def state(self, *models):
        states = [m.state_dict() if self.plan is None else par.full_state_dict(m) for m in models]
        return {f"{place}.{name}": v for place, state in enumerate(states) for name, v in state.items()}


def gpt(seed=0):
    torch.manual_seed(seed)
    return GPT(dim=16, heads=2, hidden=20, layers=2).double()


class Net(nn.Module):
    """Of numbers; branches may stay unused."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__()
        self.first, self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.double()

    def forward(self, x, which=0):
        x = torch.tanh(self.first(x))
        return self.a(x) if which == 0 else self.b(x)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.3)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def words(step, rows=ROWS):
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(0, 29, (rows, 7), generator=generator) for _ in range(2))


def numbers(step):
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def trained(world, change=None, make_optimizer=adamw, model=None):
    """The plain loop. change(model, opt, step): between backward and step."""
    model, opt = world.parallelize(model or gpt(), make_optimizer)
    for step in range(STEPS):
        x, y = world.rows(*words(step))
        cross(model(x), y).backward()
        if change is not None:
            change(model, opt, step)
        opt.step()
        opt.zero_grad()
    return world.state(model)


# Uses --------------------------------------------------------------


def plain(world):
    return trained(world)


def clipped(world):
    return trained(world, lambda model, opt, step: world.clip(model, 0.1))


def clipped_by_torch(world):
    return trained(world, lambda model, opt, step: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def read_gradients(world):
    model, _ = world.parallelize(gpt(), adamw)
    x, y = world.rows(*words(0))
    cross(model(x), y).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def scaled_gradients(world):
    return trained(world, lambda model, opt, step: [p.grad.mul_(0.5) for p in model.parameters()])


def set_gradients(world):
    def change(model, opt, step):
        for p in model.parameters():
            p.grad = p.grad * 0.5

    return trained(world, change)


def dropped_gradients(world):
    def change(model, opt, step):
        for name, p in model.named_parameters():
            if "blocks.0" in name and step != 1:
                p.grad = None

    return trained(world, change)


def gradients_of_autograd(world):
    model, opt = world.parallelize(Net(0), sgd)
    x = world.rows(numbers(0))
    held = [p for name, p in model.named_parameters() if "first" in name]
    for p, grad in zip(held, torch.autograd.grad(model(x).square().mean(), held), strict=True):
        p.grad = grad
    opt.step()
    return world.state(model)


def scaler(world):
    model, opt = world.parallelize(gpt(), adamw)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1)
    for step in range(STEPS):
        x, y = world.rows(*words(step))
        loss = cross(model(x), y) * (float("inf") if step == 1 and x is not None else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return {**world.state(model), "scale": torch.tensor(scaler.get_scale())}


def accumulated(world):
    """Over batches of uneven rows."""
    model, opt = world.parallelize(gpt(), sgd)
    for step in range(STEPS):
        for part, rows in enumerate((8, 4, 12)):
            x, y = world.rows(*words(10 * step + part, rows))
            (cross(model(x), y) * rows / 24).backward()
        opt.step()
        opt.zero_grad()
    return world.state(model)


def never_cleared(world):
    """zero_grad in several ways, and not at all; evaluated in between."""
    model, opt = world.parallelize(gpt(), sgd)
    for step in range(5):
        x, y = world.rows(*words(step))
        loss = cross(model(x), y)
        model.eval()
        with torch.no_grad():
            loss_now = cross(model(x), y)
        model.train()
        assert torch.allclose(loss_now, loss)
        loss.backward()
        opt.step()
        if step == 1:
            opt.zero_grad(set_to_none=False)
        elif step == 3:
            model.zero_grad()
    return world.state(model)


def two_forwards(world):
    model, opt = world.parallelize(gpt(), adamw)
    for step in range(STEPS):
        x, y = world.rows(*words(step))
        first, second = model(x), model(y)
        (cross(first, y) + cross(second, x)).backward()
        opt.step()
        opt.zero_grad()
    return world.state(model)


def unused(world):
    model, opt = world.parallelize(Net(3), adamw)
    for step in range(4):
        model(world.rows(numbers(step)), step % 2).square().mean().backward()
        opt.step()
        opt.zero_grad(set_to_none=step != 1)
    return world.state(model)


def raising(world):
    """In a backward, and between a backward and its step."""

    def fail(grad):
        raise KeyError

    def failing(module, given, out):
        out.register_hook(fail)

    model, opt = world.parallelize(gpt(), adamw)
    for step in range(STEPS):
        x, y = world.rows(*words(step))
        if step == 1:
            hook = model.blocks[0].register_forward_hook(
                lambda module, given, out: out.register_hook(fail) and None
            )
            with pytest.raises(KeyError):
                cross(model(x), y).backward()
            hook.remove()
            if world.plan is not None:
                with pytest.raises(ValueError, match="the last backward raised"):
                    opt.step()
            opt.zero_grad()
        cross(model(x), y).backward()
        if step != 2:
            opt.step()
        opt.zero_grad()
    return world.state(model)


def by_closure(world):
    model, opt = world.parallelize(gpt(), sgd)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    for step in range(STEPS):
        x, y = world.rows(*words(step))

        def closure(x=x, y=y):
            opt.zero_grad()
            loss = cross(model(x), y)
            loss.backward()
            return loss

        assert opt.step(closure) is not None
        schedule.step()
    return world.state(model)


def recomputed(world):
    model = gpt()
    for block in model.blocks:
        block.forward = (lambda forward: lambda x: checkpoint(forward, x, use_reentrant=True))(block.forward)
    return trained(world, model=model)


def part_of_the_model(world):
    model, opt = world.parallelize(Net(1), adamw)
    for step in range(STEPS):
        model.a(model.first(world.rows(numbers(step)))).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return world.state(model)


def penalty(world):
    model, opt = world.parallelize(gpt(), adamw)
    for step in range(STEPS):
        x, y = world.rows(*words(step))
        (cross(model(x), y) + 0.01 * sum(p.square().sum() for p in model.parameters())).backward()
        opt.step()
        opt.zero_grad()
    return world.state(model)


def compiled(world):
    model, opt = world.parallelize(gpt(), adamw)
    run = torch.compile(model, backend="aot_eager")
    for step in range(STEPS):
        x, y = world.rows(*words(step))
        cross(run(x), y).backward()
        opt.step()
        opt.zero_grad()
    return world.state(model)


def with_steps(world):
    """par.step and a loop of the user's own by turns."""
    model, opt = world.parallelize(gpt(), adamw)
    for step in range(4):
        if step % 2 and world.plan is not None:
            x, y = world.rows(*words(step))
            cross(model(y), x).backward()  # which step() drops
            par.step(model, opt, words(step), cross, microbatches=2)
            with pytest.raises(ValueError, match="no gradients but those of parallel.step"):
                opt.step()
        else:
            x, y = world.rows(*words(step))
            cross(model(x), y).backward()
            opt.step()
        opt.zero_grad()
    return world.state(model)


def gan(world):
    """The generator's loss flows through the discriminator, whose gradients of it are dropped."""
    (maker, of_maker), (judge, of_judge) = world.parallelize(Net(1), adamw), world.parallelize(Net(2), sgd)
    for step in range(STEPS):
        z, x = world.rows(numbers(step), numbers(100 + step))
        fake = maker(z)
        of_judge.zero_grad()
        (F.softplus(-judge(x)).mean() + F.softplus(judge(fake.detach())).mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        of_maker.step()
    return world.state(maker, judge)


def gan_of_steps(world):
    """Through par.step: the discriminator is called in the loss of the generator."""
    (maker, of_maker), (judge, of_judge) = world.parallelize(Net(1), adamw), world.parallelize(Net(2), sgd)

    def step_of(model, opt, batch, loss_fn):
        if world.plan is not None:
            return par.step(model, opt, batch, loss_fn)
        opt.zero_grad()
        loss_fn(model(batch[0]), batch[1]).backward()
        return opt.step()

    for step in range(STEPS):
        z, x = numbers(step), numbers(100 + step)
        step_of(judge, of_judge, (x, x), lambda out, y: F.softplus(-out).mean())
        step_of(maker, of_maker, (z, z), lambda out, y: F.softplus(-judge(out)).mean())
        of_judge.zero_grad()
    return world.state(maker, judge)


def freezing(world):
    """Frozen at the beginning and trained later, the other way round, and by turns."""
    model = gpt()
    model.blocks[0].requires_grad_(False)
    model, opt = world.parallelize(model, adamw)
    for step in range(4):
        model.blocks[0].requires_grad_(step > 0)
        model.blocks[1].ln_1.requires_grad_(step != 2)
        x, y = world.rows(*words(step))
        cross(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return world.state(model)


def distillation(world):
    teacher, (model, opt) = gpt(1).requires_grad_(False), world.parallelize(gpt(2), adamw)
    teacher, _ = world.parallelize(teacher.eval())
    for step in range(STEPS):
        x, y = world.rows(*words(step))
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        out = model(x)
        (F.kl_div(out.log_softmax(-1), wanted, reduction="batchmean") + cross(out, y)).backward()
        opt.step()
        opt.zero_grad()
    return world.state(model)


def preferences(world):
    """DPO: two forwards of the model, two of its reference, which has another plan."""
    other = None if world.plan is None else par.Plan(tp=2) if world.plan.tp == 2 else par.Plan(dp=2)
    if world.plan is not None and world.plan.world_size > 2:
        other = par.Plan(dp=2, tp=2)
    model, opt = world.parallelize(gpt(1), adamw)
    reference, _ = world.parallelize(gpt(1).eval(), after=other)

    def likelihood(model, x, y):
        return model(x).log_softmax(-1).gather(-1, y[..., None]).sum((1, 2))

    for step in range(STEPS):
        x, y = world.rows(*words(step))
        pairs = (y, (y + 3) % 29)
        with torch.no_grad():
            known = [likelihood(reference, x, each) for each in pairs]
        good, bad = (likelihood(model, x, each) - k for each, k in zip(pairs, known, strict=True))
        (-F.logsigmoid(0.1 * (good - bad)).mean()).backward()
        opt.step()
        opt.zero_grad()
    return world.state(model)
