"""Several documents in a row of a batch, kept apart by their positions, under a plan.

    python examples/26_packing.py

    tokens         a b c d | e f g | h i j k l      three documents, no padding
    position_ids   0 1 2 3   0 1 2   0 1 2 3 4      begin anew: transformers lets no document see another
    targets        b c d -   f g -   i j k l -      the last token of a document has none (-100)

transformers makes this mask only where the model keeps no keys: use_cache=False, as below. With True each
document sees the ones in front of it, in one process and under every plan alike. One process trains here on
the documents one by one; plans train on packed rows, and losses and weights are equal.

The mask is dense, one number for each pair of tokens. attn_implementation="flash_attention_2", which needs a
GPU and flash-attn, reads lengths from position_ids and makes none, under plans without ring and ulysses:
these two see F.scaled_dot_product_attention alone. Needs transformers.
"""

import torch
import torch.nn.functional as F
from common import on_ranks, same, say
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import pycomm.parallel as par

VOCAB, STEPS = 40, 4
PLANS = ("dp=2", "dp=2,zero=3", "tp=2,megatron_sp", "pp=2", "ring=2", "ulysses=2")
LENGTHS = ((4, 3, 5), (7, 5), (2, 9, 1), (12,))  # of the documents of each row


def make() -> tuple[LlamaForCausalLM, torch.optim.SGD]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, use_cache=False, **sizes)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.2)


def documents(step: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [[torch.randint(VOCAB, (n,), generator=generator) for n in row] for row in LENGTHS]


def packed(step: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rows = documents(step)
    ids = torch.stack([torch.cat(row) for row in rows])
    positions = torch.stack([torch.cat([torch.arange(len(each)) for each in row]) for row in rows])
    ends = [torch.cat([F.pad(each[1:], (0, 1), value=-100) for each in row]) for row in rows]
    return {"input_ids": ids, "position_ids": positions}, torch.stack(ends)


def loss_fn(out: CausalLMOutputWithPast, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.logits.flatten(0, 1), targets.flatten())


def one_by_one() -> tuple[list[float], dict[str, torch.Tensor]]:
    (model, opt), losses = make(), []
    for step in range(STEPS):
        apart = [each[None] for row in documents(step) for each in row if len(each) > 1]
        logits = torch.cat([model(input_ids=each[:, :-1]).logits[0] for each in apart])
        loss = F.cross_entropy(logits, torch.cat([each[0, 1:] for each in apart]))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def main() -> None:
    expected, right = one_by_one()
    for plan in PLANS:
        model, opt = par.parallelize(*make(), plan)
        losses = [par.step(model, opt, packed(step), loss_fn).item() for step in range(STEPS)]
        weights = par.full_state_dict(model)
        difference = max(same(losses, expected), *(same(weights[name], right[name]) for name in right))
        say(f"{plan:17} {len(LENGTHS)} rows equal {sum(map(len, LENGTHS))} documents: {difference:.0e}")


if __name__ == "__main__":
    on_ranks(2, main)
