"""Models, optimizers and batches that are not the plain ones, for the tests of steps."""

import models
import torch
import torch.nn.functional as F
from torch import nn

STEPS, LENGTH = 3, 7


def tokens(step, rows=13):
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randint(0, 29, (rows, LENGTH), generator=generator) for _ in range(2))
    y[torch.rand(rows, LENGTH, generator=generator) < 0.4] = -100
    y[0] = y[5:8] = -100  # rows, and with them ranks and microbatches, that count nothing
    return x, y


def named(step):
    x, y = tokens(step)
    return {"idx": x, "labels": y}


def numbers(step, rows=7):
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(rows, 9, generator=generator, dtype=torch.float64) for _ in range(2))


def cross(out, y):
    return F.cross_entropy(out.flatten(0, -2), y.flatten())


# Models ------------------------------------------------------------


def gpt():
    return models.GPT(dim=16, heads=2, hidden=20, layers=3)


def lora():
    model = gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("blocks.1.attn" in name or "blocks.2.mlp" in name)
    return model


def unused():
    model = gpt()
    model.blocks[1].spare, model.spare = nn.Linear(3, 3), nn.Linear(2, 5)
    return model


class Plain(nn.Module):
    """An embedding, blocks one after the other, a head."""

    def __init__(self, block=models.Block, layers=2):
        super().__init__()
        self.tok = nn.Embedding(29, 16)
        self.blocks = nn.ModuleList(block(16, 2, 20) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 29)

    def run_blocks(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, idx):
        return self.head(self.norm(self.run_blocks(self.tok(idx))))


class TwoResults(models.Block):
    def forward(self, x):
        x = super().forward(x)
        return x, x.square().mean((1, 2), keepdim=True)


class OneUsed(Plain):
    """Blocks return a second tensor with a gradient, as attention weights are, that nobody uses."""

    def __init__(self):
        super().__init__(TwoResults, 4)

    def run_blocks(self, x):
        self.sums = []
        for block in self.blocks:
            x, square = block(x)
            self.sums.append(square)
        return x


class LastUsed(OneUsed):
    """That of the last block alone."""

    def forward(self, idx):
        return super().forward(idx) * (1 + self.sums[-1])


class Positions(nn.Module):
    """A parameter that lies in the module which holds the blocks."""

    def __init__(self, layers=3):
        super().__init__()
        self.tok, self.pos = nn.Embedding(29, 16), nn.Parameter(torch.randn(1, 12, 16))
        self.blocks = nn.ModuleList(models.Block(16, 2, 20) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 29)

    def forward(self, idx):
        x = self.tok(idx) + self.pos[:, : idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sequential():
    return nn.Sequential(
        nn.Embedding(29, 16),
        *[models.Block(16, 2, 20) for _ in range(3)],
        nn.LayerNorm(16),
        nn.Linear(16, 29),
    )


class NormedBlock(nn.Module):
    """Two kinds of BatchNorm: one that averages all batches, and one without weights, far from zero. No bias
    before them: its gradient is zero but for rounding, which Adam would make large.
    """

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6, momentum=None)
        self.pool, self.plain = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6, affine=False)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))) + x
        return x + self.plain(self.pool(x.mean((2, 3))) + 30)[:, :, None, None]


class ReluNorm(nn.BatchNorm1d):
    """A norm and what follows it in one, as libraries of image models have it."""

    def forward(self, x):
        return torch.relu(super().forward(x))


class ActivatedNorm(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(9, 9), ReluNorm(9), nn.Linear(9, 9))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.blocks = nn.ModuleList(NormedBlock() for _ in range(3))
        self.head = nn.Linear(6, 9)

    def forward(self, x):
        x = self.norm(input=self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def pictures(step, rows=13):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 1, 7, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, 9, generator=generator, dtype=torch.float64)


class TiedHead(Positions):
    """A head whose weight is tied and whose bias belongs to another module, as BERT's."""

    def __init__(self):
        super().__init__()
        self.pos = nn.Parameter(torch.zeros(1, 12, 16), requires_grad=False)
        self.end = nn.Module()
        self.end.bias, self.end.head = nn.Parameter(torch.randn(29)), nn.Linear(16, 29)
        self.end.head.bias, self.end.head.weight = self.end.bias, self.tok.weight
        del self.head

    def forward(self, idx):
        x = self.tok(idx)
        for block in self.blocks:
            x = block(x)
        return self.end.head(self.norm(x))


class PairBlock(models.Block):
    """Returns a tuple, and makes a tensor of its own without asking for the device of its input."""

    def forward(self, x):
        return super().forward(x + 0.01 * torch.arange(x.shape[1])[:, None]), None


class Pairs(Positions):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(PairBlock(16, 2, 20) for _ in range(3))

    def forward(self, idx):
        x = self.tok(idx) + self.pos[:, : idx.shape[1]]
        for block in self.blocks:
            x = block(x)[0]
        return self.head(self.norm(x))


class Backwards(Positions):
    """Runs its blocks in another order than they are registered in."""

    def forward(self, idx):
        x = self.tok(idx)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(self.norm(x))


class Tangle(nn.Module):
    """No list of blocks; a weight in three modules; two dtypes, whole numbers, nothing, and a scalar among
    the parameters.
    """

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.out = nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9)
        self.b.weight = self.c.weight = self.a.weight
        self.single = nn.Linear(9, 9)
        self.whole = nn.Parameter(torch.arange(5), requires_grad=False)
        self.nothing, self.scale = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(1.3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def double(self):
        super().double()
        self.single.float()
        return self

    def forward(self, x):
        self.count += 1
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        x = x + self.single(self.c(x).float()).double()
        return self.out(x) * self.scale


def matrices():
    return nn.Sequential(*[nn.Sequential(nn.Linear(9, 9, bias=False), nn.Tanh()) for _ in range(4)])


# Optimizers ------------------------------------------------------------


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)


def some(model):
    return torch.optim.AdamW([p for name, p in model.named_parameters() if "mlp" in name], lr=0.01)


def groups(model):
    kinds = [[p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False)]
    return torch.optim.AdamW(
        [{"params": kinds[0], "weight_decay": 0.2}, {"params": kinds[1], "lr": 0.003}], lr=0.01
    )


def scheduled(model):
    opt = groups(model)
    opt.schedules = [torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)]
    return opt


def named_optimizer(name, **options):
    def make(model):
        return getattr(torch.optim, name)(model.parameters(), **{"lr": 0.01, **options})

    make.__name__ = name
    return make
