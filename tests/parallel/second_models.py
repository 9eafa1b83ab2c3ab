"""Models and losses that differentiate by themselves: forces of a potential, the gradient penalty of a
critic, a step of meta-learning.
"""

import models
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

ATOMS, DIM = 5, 12


class Smooth(nn.Module):
    """A block without attention."""

    def __init__(self, hidden=20):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, hidden), nn.Linear(hidden, DIM)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Attending(models.Block):
    """With the attention of torch that has a second derivative."""

    def __init__(self):
        super().__init__(DIM, 2, 20)

    def forward(self, x):
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(x)


class OverRows(Smooth):
    """What it gives for a row hangs on all of them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x):
        normal = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(torch.tanh(self.up(normal)))


class Energy(nn.Module):
    """(rows, atoms, 3) -> (rows,)"""

    def __init__(self, block=Smooth):
        super().__init__()
        self.enter = nn.Linear(3, DIM)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.leave = nn.Linear(DIM, 1)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x).sum((1, 2))


class Potential(Energy):
    """Energy and forces: the gradient in the model."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = super().forward(x)
            (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -gradient


class Critic(Energy):
    """The gradient in the loss."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        return super().forward(x), x


class Learner(nn.Module):
    """Each row is a task: a step on its first half, the prediction of the second."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, DIM), nn.Tanh(), nn.Linear(DIM, 1))

    def forward(self, x, y):
        half = x.shape[1] // 2
        names, values = zip(*self.net.named_parameters(), strict=True)
        found = []
        for points, wanted in zip(x, y, strict=True):
            loss = F.mse_loss(self.net(points[:half])[:, 0], wanted[:half])
            gradients = torch.autograd.grad(loss, values, create_graph=True)
            moved = [value - 0.1 * gradient for value, gradient in zip(values, gradients, strict=True)]
            found.append(functional_call(self.net, dict(zip(names, moved, strict=True)), points[half:])[:, 0])
        return torch.stack(found)


class Embedded(nn.Module):
    """A GPT that also returns its embeddings, for a penalty on their gradient."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(29, DIM)
        self.blocks = nn.ModuleList(Attending() for _ in range(3))
        self.head = nn.Linear(DIM, 29)

    def forward(self, idx):
        x = first = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        return self.head(x), first


def atoms(step, rows=7):
    generator = torch.Generator().manual_seed(step)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = draw(rows, ATOMS, 3)
    return x, {"energy": draw(rows), "forces": draw(rows, ATOMS, 3)}


def tasks(step, rows=7):
    x, y = atoms(step, rows)
    return {"x": x, "y": y["forces"][..., 0]}, y["forces"][:, ATOMS // 2 :, 1]


def forces(out, y):
    energy, force = out
    return F.mse_loss(energy, y["energy"]) + F.mse_loss(force, y["forces"])


def penalty(out, y):
    score, x = out
    (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.mean() + 10 * (gradient.flatten(1).norm(dim=1) - 1).square().mean()


def smooth(out, y):
    """Cross-entropy, and how much it hangs on each embedding."""
    logits, first = out
    each = F.cross_entropy(logits.transpose(1, 2), y, reduction="none")
    (gradient,) = torch.autograd.grad(each.sum(), first, create_graph=True)
    return each.mean() + gradient.square().sum(-1).mean()


def first_only(out, y):
    """A gradient as a number, without a graph: how much the two terms weigh."""
    score, x = out
    (gradient,) = torch.autograd.grad(score.sum(), x, retain_graph=True)
    return (score * gradient.flatten(1).norm(dim=1)).mean()


def squares(out, y):
    return F.mse_loss(out, y)


def few_tokens(step, rows=7):
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(0, 29, (rows, 6), generator=generator)
    return x, torch.randint(0, 29, (rows, 6), generator=generator)
