"""What the examples share: a small GPT, ranks to run on, and the single process that every strategy is
compared with.

Not an example itself: see examples/04_naive_data_parallel.py and those after it, which begin with `from
common import ...` (examples/common.py is found because Python looks in the folder of the script that it
runs).

The model is plain torch and knows nothing of ranks. Numbers are float64, so that results which agree to
TOLERANCE are the same computation and not merely close.
"""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pycomm.testing import run_ranks

VOCAB, LENGTH, ROWS, STEPS = 50, 24, 12, 4
TOLERANCE = 1e-10
LIMIT = 3600.0  # seconds of an example

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, (rows, length)
Numbers: TypeAlias = torch.Tensor | float | list[float]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_head, self.n_embd = heads, width
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
            for part in self.c_attn(x).split(self.n_embd, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). mlp: another feed-forward, such as a mixture
    of experts.
    """

    def __init__(self, width: int, heads: int, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = mlp or nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens (batch, T) -> logits (batch, T, vocab). Learned positions; the head is tied to the token
    embedding. mlp makes the feed-forward of each block.
    """

    def __init__(
        self,
        vocab: int = VOCAB,
        length: int = LENGTH,
        layers: int = 4,
        width: int = 24,
        heads: int = 3,
        mlp: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, mlp() if mlp else None) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(layers: int = 4, mlp: Callable[[], nn.Module] | None = None) -> tuple[GPT, torch.optim.AdamW]:
    """The same model, with its optimizer, on every rank and in every call."""
    torch.manual_seed(0)
    model = GPT(layers=layers, mlp=mlp).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batches(steps: int = STEPS) -> Iterator[Batch]:
    """One for each step, the same on every rank; a step() gives each rank its part."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        rows = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
        yield rows[:, :-1], rows[:, 1:]


def train_alone(steps: int = STEPS, mlp: Callable[[], nn.Module] | None = None) -> list[float]:
    """The losses of a plain torch training loop in one process."""
    model, optimizer = make(mlp=mlp)
    losses = []
    for inputs, targets in batches(steps):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(actual: Numbers, expected: Numbers) -> float:
    """The largest difference, relative to the largest number. Raises AssertionError above TOLERANCE."""
    ours, right = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (actual, expected))
    difference = ((ours - right).abs().max() / right.abs().max()).item()
    assert difference <= TOLERANCE, f"differs by {difference:.1e} from the single process"
    return difference


def say(text: object) -> None:
    """Prints on rank 0 alone."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def on_ranks(world_size: int, main: Callable[..., None], *args: object, hosts: str | None = None) -> None:
    """Runs main(*args) on world_size ranks: this process is one of them under torchrun, else they are forked
    from it, on simulated hosts where `hosts` says so ("2x2"). One rank is this process."""
    if world_size == 1:
        main(*args)
        return
    if not dist.is_torchelastic_launched():
        # the first optimizer imports half a second of modules: once, and not on every rank
        torch.optim.SGD([torch.zeros(1)], lr=0.1)
        run_ranks(
            world_size, _rank, main, args, mode="processes", timeout=LIMIT, backend="pycomm", hosts=hosts
        )
        return
    dist.init_process_group("pycomm")
    if dist.get_world_size() != world_size:
        raise SystemExit(f"this is for {world_size} ranks: torchrun --nproc-per-node {world_size} ...")
    main(*args)
    dist.destroy_process_group()


def _rank(rank: int, main: Callable[..., None], args: tuple[object, ...]) -> None:
    main(*args)
