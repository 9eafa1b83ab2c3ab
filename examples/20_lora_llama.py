"""LoRA of a Llama of transformers under a plan: loaded from sharded safetensors, trained, saved.

    python examples/20_lora_llama.py
    torchrun --nproc-per-node 4 examples/20_lora_llama.py --plan dp=2,tp=2

    made here once        small-llama/  model-00001-of-00003.safetensors ...   as the hub's files are
    every rank            from_pretrained, get_peft_model, parallelize         one line more than without
    par.step              labels = input_ids: the class's own loss
    save_pretrained       adapter/  adapter_model.safetensors                  written by rank 0; one process
                                                                               loads it with peft

Needs transformers and peft. The weights are random: nothing is downloaded. Every plan is compared with plain
torch in one process, on the losses and on the adapter that was saved.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import on_ranks, same, say
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import pycomm.parallel as par

PLANS = "dp=2,tp=2", "dp=2,pp=2,zero=1"
VOCAB, LENGTH, ROWS, STEPS = 96, 20, 8, 5
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"], "lora_dropout": 0.0}


def make_files(folder):
    """A Llama with random weights, in several files."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=64, use_cache=False, **sizes, **heads)
    LlamaForCausalLM(config).double().save_pretrained(folder, max_shard_size="300KB")


def make(folder):
    torch.manual_seed(0)  # of the adapters
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model = get_peft_model(model, LoraConfig(**LORA)).double()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=0.02)


def batches():
    """Rows that count up, each from another number on."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        starts = torch.randint(VOCAB, (ROWS, 1), generator=generator)
        tokens = (starts + torch.arange(LENGTH)) % VOCAB
        yield {"input_ids": tokens, "labels": tokens}


def train_alone(folder):
    """(losses, adapter) of plain torch."""
    model, optimizer = make(folder)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        logits = model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, adapter_of(model)


def adapter_of(model):
    return {name: value.detach() for name, value in model.named_parameters() if "lora" in name}


def main(text, folder):
    plan = par.Plan.parse(text)
    if dist.get_rank() == 0:
        make_files(folder)
    dist.barrier()
    expected, right = train_alone(folder)
    model, optimizer = par.parallelize(*make(folder), plan)
    losses = [par.step(model, optimizer, batch, microbatches=2).item() for batch in batches()]
    assert losses[-1] < losses[0]
    difference = same(losses, expected)
    model.save_pretrained(folder / "adapter")
    loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    saved = adapter_of(PeftModel.from_pretrained(loaded, folder / "adapter"))
    difference = max(difference, *(same(saved[name], value) for name, value in right.items()))
    files = len(list(folder.glob("*.safetensors")))
    say(
        f"{text:18} loaded from {files} files, {len(saved)} adapters trained and saved; loss "
        f"{losses[0]:.4f} -> {losses[-1]:.4f}; differs from one process by {difference:.0e}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", action="append", help="instead of those in this file; may be repeated")
    parser.add_argument("--folder", type=Path, help="for the files; a temporary one without")
    args = parser.parse_args()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        for plan in args.plan or PLANS:
            base = args.folder or Path(temporary)
            on_ranks(par.Plan.parse(plan).world_size, main, plan, base / plan.replace(",", "-"))
