"""The models that people have run under every plan. A new one is one line of FAMILIES.

Small configurations with random weights: nothing is loaded from anywhere. Four blocks, so that two stages of
two chunks have one each; sizes that tp=2 divides. No dropout: masks are drawn per rank, so a run with dropout
is right but not equal.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from vision import have_vision, timm_model, torchvision_model

__all__ = ["FAMILIES", "Family", "families"]

ROWS, LENGTH, VOCABULARY, CLASSES = 6, 8, 41, 5


class Family(NamedTuple):
    make: Callable  # () -> the model, in fp32
    batch: Callable  # (generator) -> a batch as par.step takes it
    loss: Callable | None = None  # (output, targets) -> mean; None: the model's own
    blocks: str | None = None  # Plan(blocks=...), where the list cannot be told from others
    vision: bool = False  # needs build/vision
    microbatches: int = 2
    experts: bool = False  # which plans with ep deal

    def takes(self, text):
        """Whether a plan, as text, is for it."""
        return self.experts or "ep=2" not in text.split(",")


# Batches ---------------------------------------------------------------


def ids(generator, length=LENGTH):
    return torch.randint(3, VOCABULARY, (ROWS, length), generator=generator)


def holes(labels, generator):
    """Some targets count nothing, unevenly over rows."""
    return labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.3, -100)


def text(generator):
    """What a collator for causal language models gives: labels are the inputs."""
    inputs = ids(generator)
    return {"input_ids": inputs, "labels": holes(inputs, generator)}


def padded(generator):
    batch = text(generator)
    lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def pairs(generator):
    """Source and target of an encoder-decoder."""
    return {"input_ids": ids(generator, 6), "labels": holes(ids(generator), generator)}


def masked(generator):
    return {"input_ids": ids(generator), "labels": holes(ids(generator), generator)}


def classified(generator):
    return {
        "input_ids": ids(generator),
        "labels": torch.randint(0, CLASSES, (ROWS,), generator=generator),
    }


def sound(generator):
    features = torch.randn(ROWS, 8, 16, generator=generator, dtype=torch.float64)
    return {"input_features": features, "labels": holes(ids(generator), generator)}


def images(generator):
    pixels = torch.randn(ROWS, 3, 16, 16, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(0, CLASSES, (ROWS,), generator=generator)


def named_images(generator):
    pixels, labels = images(generator)
    return {"pixel_values": pixels, "labels": labels}


def tokens(generator):
    inputs = ids(generator)
    return inputs, holes(inputs, generator)


def cross(output, targets):
    output = output[0] if isinstance(output, tuple) else output
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


# Models of transformers ------------------------------------------------

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "use_cache": False}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "dropout": 0.0,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "use_cache": False,
}
BERT = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VIT = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": CLASSES,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def of(config, kind, attention=None, **sizes):
    """transformers' class `kind` with its config."""

    def make():
        settings = getattr(hf, config)(**sizes)
        if attention:
            settings._attn_implementation = attention
        settings._experts_implementation = "eager"  # the others do not compute in fp64
        return getattr(hf, kind)(settings)

    return make


def decoder(name, **sizes):
    return of(f"{name}Config", f"{name}ForCausalLM", **{**GROUPED, **sizes})


def gpt2():
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 24, "n_layer": 4, "n_head": 4}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **rates, **ends))


def lora():
    import peft

    model = decoder("Llama")()
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zeros, behind which no fault of the other factor could be seen
            nn.init.normal_(parameter, std=0.1)
    return adapted


def recomputed():
    model = decoder("Llama")()
    model.gradient_checkpointing_enable()
    return model


# Models of torch.nn ----------------------------------------------------


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        layer = nn.TransformerEncoderLayer(24, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, inputs):
        return self.head(self.encoder(self.embedding(inputs)))


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.transformer = nn.Transformer(24, 4, 4, 4, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, inputs):
        source = self.embedding(inputs)
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], dtype=source.dtype)
        return self.head(self.transformer(source, source.roll(1, 1), tgt_mask=mask, tgt_is_causal=True))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.lstm = nn.LSTM(24, 24, 2, batch_first=True)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, inputs):
        return self.head(self.lstm(self.embedding(inputs))[0])


class NanoBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        parts = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (p.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(rows, length, width))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """The shape of a well-known small GPT: positions are made in the forward, the head is tied, and it
    returns its loss beside the logits.
    """

    def __init__(self):
        super().__init__()
        modules = {"wte": nn.Embedding(VOCABULARY, 24), "wpe": nn.Embedding(32, 24)}
        blocks = nn.ModuleList(NanoBlock(24, 4) for _ in range(4))
        self.transformer = nn.ModuleDict({**modules, "h": blocks, "ln_f": nn.LayerNorm(24)})
        self.lm_head = nn.Linear(24, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        nn.init.normal_(self.lm_head.weight, std=1 / math.sqrt(24))

    def forward(self, idx, targets=None):
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def group_norm(channels):
    return nn.GroupNorm(2, channels)


def resnet(norm=None):
    return lambda: torchvision_model("resnet18", num_classes=CLASSES, norm_layer=norm)


def torchvision_vit():
    sizes = {"image_size": 16, "patch_size": 4, "num_layers": 4, "num_heads": 4, "hidden_dim": 24}
    from torchvision.models.vision_transformer import VisionTransformer

    model = VisionTransformer(**sizes, mlp_dim=32, num_classes=CLASSES)
    nn.init.normal_(model.heads.head.weight, std=0.1)
    return model


def timm_vit():
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 4, "num_heads": 4}
    return timm_model("vit_tiny_patch16_224", **sizes, num_classes=CLASSES)


NEXT = {"hidden_sizes": [8, 16, 24], "depths": [1, 4, 1], "num_stages": 3, "patch_size": 2}
WHISPER = {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32}
T5 = {"d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 4, "num_heads": 4, "dropout_rate": 0.0}
ENDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
OPT = {"ffn_dim": 32, "dropout": 0.0, "word_embed_proj_dim": 24}
NEOX = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **{"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
}
LLAMA4 = {"head_dim": 6, "intermediate_size_mlp": 32, "num_local_experts": 4, "num_experts_per_tok": 1}
MAMBA = {"hidden_size": 24, "state_size": 4, "num_hidden_layers": 4, "time_step_rank": 4}
QWEN_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

FAMILIES = {
    "llama": Family(decoder("Llama"), text),
    "llama, tied": Family(decoder("Llama", tie_word_embeddings=True), text),
    "llama, eager": Family(decoder("Llama", attention="eager"), text),
    "llama, padded": Family(decoder("Llama"), padded),
    "llama, LoRA": Family(lora, text),
    "llama, recomputed by itself": Family(recomputed, text),
    "gpt2": Family(gpt2, text),
    "qwen3": Family(decoder("Qwen3", head_dim=6), text),
    "mistral, window": Family(decoder("Mistral", sliding_window=4), text),
    "gemma2": Family(decoder("Gemma2", head_dim=6, sliding_window=4), text),
    "phi3": Family(decoder("Phi3"), text),
    "gpt-neox": Family(of("GPTNeoXConfig", "GPTNeoXForCausalLM", **SIZES, **NEOX), text),
    "falcon, one key head": Family(of("FalconConfig", "FalconForCausalLM", **SIZES, use_cache=False), text),
    "bloom": Family(of("BloomConfig", "BloomForCausalLM", **SIZES, n_layer=4, n_head=4), text),
    "mixtral": Family(decoder("Mixtral", **EXPERTS), text, experts=True),
    "qwen2-moe": Family(
        decoder("Qwen2Moe", **QWEN_EXPERTS, shared_expert_intermediate_size=16), text, experts=True
    ),
    "qwen3-moe": Family(decoder("Qwen3Moe", **QWEN_EXPERTS, head_dim=6), text, experts=True),
    "gpt-oss": Family(
        decoder("GptOss", **EXPERTS, head_dim=6, sliding_window=4, attention="eager"), text, experts=True
    ),
    "deepseek-v3": Family(decoder("DeepseekV3", **LATENT), text, experts=True),
    "llama4": Family(
        of("Llama4TextConfig", "Llama4ForCausalLM", **GROUPED, **LLAMA4, attention_chunk_size=4), text
    ),
    "mamba": Family(
        of("MambaConfig", "MambaForCausalLM", **MAMBA, vocab_size=VOCABULARY, use_cache=False), text
    ),
    "opt": Family(decoder("OPT", **OPT), text),
    "bert, masked": Family(of("BertConfig", "BertForMaskedLM", **BERT), masked),
    "bert, classes": Family(
        of("BertConfig", "BertForSequenceClassification", **BERT, num_labels=CLASSES), classified
    ),
    "albert, shared layers": Family(
        of("AlbertConfig", "AlbertForMaskedLM", **BERT, embedding_size=12), masked
    ),
    "t5": Family(of("T5Config", "T5ForConditionalGeneration", **T5, **ENDS), pairs, blocks="decoder.block"),
    "bart": Family(
        of("BartConfig", "BartForConditionalGeneration", **SEQ2SEQ), pairs, blocks="model.decoder.layers"
    ),
    "marian": Family(of("MarianConfig", "MarianMTModel", **SEQ2SEQ), pairs, blocks="model.decoder.layers"),
    "whisper": Family(
        of("WhisperConfig", "WhisperForConditionalGeneration", **SEQ2SEQ, **WHISPER),
        sound,
        blocks="model.decoder.layers",
    ),
    "vit": Family(of("ViTConfig", "ViTForImageClassification", **VIT), named_images),
    "vit of timm": Family(timm_vit, images, cross, vision=True),
    "vit of torchvision": Family(torchvision_vit, images, cross, vision=True),
    "convnext": Family(
        of("ConvNextConfig", "ConvNextForImageClassification", **NEXT, num_labels=CLASSES), named_images
    ),
    "resnet, BatchNorm": Family(
        resnet(),
        images,
        cross,
        vision=True,
        microbatches=1,  # its statistics are those of a microbatch, in one process too
    ),
    "resnet, GroupNorm": Family(resnet(group_norm), images, cross, vision=True),
    "LSTM": Family(Recurrent, tokens, cross),
    "nn.Transformer": Family(Translator, tokens, cross, blocks="transformer.decoder.layers"),
    "nn.TransformerEncoder": Family(TextEncoder, tokens, cross),
    "nanoGPT": Family(NanoGPT, tokens, cross),
}


def families():
    """Those that can be made here."""
    return {name: family for name, family in FAMILIES.items() if not family.vision or have_vision()}
