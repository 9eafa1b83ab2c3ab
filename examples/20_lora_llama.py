"""LoRA of a Llama of transformers under a plan: loaded from sharded safetensors, trained, saved.

    python examples/20_lora_llama.py

    made here once        model-00001-of-00003.safetensors ...   random weights, in files as the hub has them
    every rank            the model and its adapters on meta: no memory
    par.parallelize       reads from the files what this rank holds, and initialises the adapters
    save_pretrained       adapter/adapter_model.safetensors      written by rank 0; one process loads it

Needs transformers and peft; nothing is downloaded. Losses and adapter are those of from_pretrained.
"""

import functools
import tempfile

import torch
import torch.nn.functional as F
from common import on_ranks, same, say
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, logging

import pycomm.parallel as par

load = functools.partial(LlamaForCausalLM.from_pretrained, dtype=torch.float64)
VOCAB, LENGTH, ROWS, STEPS = 96, 20, 8, 5
SIZES = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])


def adapted(model: LlamaForCausalLM) -> tuple[PeftModel, torch.optim.AdamW]:
    lora = get_peft_model(model, LORA).double()
    return lora, torch.optim.AdamW([p for p in lora.parameters() if p.requires_grad], lr=0.02)


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(VOCAB, (STEPS, ROWS, 1), generator=generator)
    rows = (starts + torch.arange(LENGTH)) % VOCAB  # they count up, each from another number on
    return [{"input_ids": tokens, "labels": tokens} for tokens in rows]


def train_alone(folder: str, state: dict[str, torch.Tensor]) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer = adapted(load(folder))
    losses: list[torch.Tensor] = []
    model.load_state_dict(adapters_of(state), strict=False)
    for batch in batches():
        logits = model(input_ids=batch["input_ids"]).logits
        losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return [loss.item() for loss in losses], adapters_of(model.state_dict())


def adapters_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if "lora" in name}


def main(plan: str, folder: str) -> None:
    with torch.device("meta"):
        made = adapted(LlamaForCausalLM(LlamaConfig.from_pretrained(folder)))
    model, optimizer = par.parallelize(*made, plan, weights=folder)
    expected, right = train_alone(folder, par.full_state_dict(model))
    losses = [par.step(model, optimizer, batch, microbatches=2).item() for batch in batches()]
    model.save_pretrained(f"{folder}/adapter")
    saved = adapters_of(PeftModel.from_pretrained(load(folder), f"{folder}/adapter").state_dict())
    difference = max(same(losses, expected), *(same(saved[name], value) for name, value in right.items()))
    say(f"{plan:18} loss {losses[0]:.4f} -> {losses[-1]:.4f}; {len(saved)} adapters trained and saved")
    say(f"{plan:18} equals one process: losses differ by {difference:.0e}")


if __name__ == "__main__":
    logging.disable_progress_bar()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, use_cache=False, **SIZES)
        LlamaForCausalLM(config).double().save_pretrained(folder, max_shard_size="300KB")
        for plan in ("dp=2,tp=2", "dp=2,pp=2,zero=1"):
            on_ranks(4, main, plan, folder)
