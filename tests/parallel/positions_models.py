"""Models that look at other positions, in their blocks and in their own code, and how they are tried."""

import torch
import torch.nn.functional as F
import transformers as hf
from models import Attention, Block
from odd_models import Plain, gpt
from torch import nn


class Convolution(Block):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x):
        return super().forward(x + self.conv(x.transpose(1, 2)).transpose(1, 2))


class Shift(Block):
    def forward(self, x):
        return super().forward(x + F.pad(x, (0, 0, 1, 0))[:, :-1])


class Positions(Block):
    """Worked out from the length of what comes in."""

    def forward(self, x):
        return super().forward(x * (1 + 0.1 * torch.arange(x.shape[1], dtype=x.dtype)[:, None]))


class Average(Block):
    def forward(self, x):
        return super().forward(x - x.mean(1, keepdim=True))


class Asleep(Block):
    """The branch that shifts begins with nothing."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.branch = nn.Linear(16, 16)
        nn.init.zeros_(self.branch.weight)
        nn.init.zeros_(self.branch.bias)

    def forward(self, x):
        return super().forward(x) + self.branch(F.pad(x, (0, 0, 1, 0))[:, :-1])


class Unheard(nn.Module):
    """Attention of its own under names that nobody knows."""

    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.mixer = Attention(dim, heads)
        self.mixer.wild = self.mixer.c_attn
        self.mixer.card = self.mixer.c_proj
        del self.mixer.c_attn, self.mixer.c_proj
        self.mixer.forward = self.mix
        self.norm = nn.LayerNorm(dim)

    def mix(self, x):
        q, k, v = self.mixer.wild(x).split(16, dim=2)
        return self.mixer.card((q @ k.transpose(1, 2)).softmax(-1) @ v)

    def forward(self, x):
        return x + self.mixer(self.norm(x))


def sizes(**more):
    return {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, **more}


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OF_TRANSFORMERS = ("gpt-neox", "llama", "gpt2", "mixtral")
MODELS = {
    "convolution": lambda: Plain(Convolution),
    "shift": lambda: Plain(Shift),
    "positions": lambda: Plain(Positions),
    "average": lambda: Plain(Average),
    "asleep": lambda: Plain(Asleep),
    "unheard": lambda: Plain(Unheard),
    "gpt-neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**sizes(num_attention_heads=2))),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**sizes(num_attention_heads=2))),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=29, n_embd=16, n_layer=2, n_head=2, **NO_DROPOUT)
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(  # its products of experts are not there in fp64
        hf.MixtralConfig(**sizes(num_attention_heads=2, num_key_value_heads=2, num_local_experts=3))
    ),
    "plain": gpt,
}


class Kept(Plain):
    """Blocks keep a number of what they have seen, and the model returns their sum."""

    class Block(Block):
        def forward(self, x):
            x = super().forward(x)
            self.aux = x.square().mean()
            return x

    def __init__(self):
        super().__init__(self.Block)

    def forward(self, idx):
        return super().forward(idx), sum(block.aux for block in self.blocks)


class Draws(Plain):
    """Blocks that draw random numbers in eval mode, too."""

    class Block(Block):
        def forward(self, x):
            return super().forward(F.dropout(x, 0.2, True))

    def __init__(self):
        super().__init__(self.Block)


class Between(Plain):
    """What `do` makes of the hidden state in front of block `at`; 4 is behind the last one."""

    def __init__(self, do, at):
        super().__init__(layers=4)
        self.do, self.at = do, at

    def run_blocks(self, x):
        for index, block in enumerate(self.blocks):
            x = block(self.do(x) if index == self.at else x)
        return self.do(x) if self.at == 4 else x


def mean(x):
    return x - x.mean(1, keepdim=True)


def shifted(x):
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


def by_length(x):
    return x / x.shape[1]
