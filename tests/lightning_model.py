"""The model, the data and the training in plain torch of what lightning_ranks.py trains under plans."""

import torch
import torch.nn.functional as F
from torch import nn

EPOCHS, ROWS, WHOLE = 2, 22, 8  # the last batch has 6 rows


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 20), nn.Linear(20, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(12, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))
        self.last = nn.Linear(16, 4)
        self.double()

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def data():
    generator = torch.Generator().manual_seed(1)
    shapes = (ROWS, 12), (ROWS, 4)
    return torch.utils.data.TensorDataset(
        *(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    )


def train(epochs=EPOCHS):
    """(parameters, steps, loss of all rows) of one process."""
    model, (inputs, targets), steps = Net(), data().tensors, 0
    opt = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    for _ in range(epochs):
        for x, y in zip(inputs.split(WHOLE), targets.split(WHOLE), strict=True):
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            steps += 1
        scheduler.step()
    return model.state_dict(), steps, F.mse_loss(model(inputs), targets).item()
