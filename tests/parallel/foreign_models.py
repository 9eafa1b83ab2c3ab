"""Small models of transformers and peft, in shapes that ranks do not divide, and what one process makes of
them; for test_tensor_foreign*.py.

Some compute a part in fp32 whatever they are given, where a last bit of fp64 may become one of fp32: their
RMS norms are replaced by torch's, which keep the dtype.
"""

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

import pycomm.parallel as par

ROWS, LENGTH, VOCABULARY, STEPS = 5, 7, 19, 2
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 21,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "use_cache": False}
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def _of(config, kind, **sizes):
    return getattr(hf, kind)(getattr(hf, config)(**sizes))


def llama():
    return _of("LlamaConfig", "LlamaForCausalLM", **GROUPED, attention_bias=True)


def phi3():
    return _of("Phi3Config", "Phi3ForCausalLM", **GROUPED)


def neox(heads=6):
    return _of("GPTNeoXConfig", "GPTNeoXForCausalLM", **{**SIZES, "num_attention_heads": heads}, **QUIET)


def bloom():
    quiet = {**QUIET, "n_layer": 2, "n_head": 6}
    return _of("BloomConfig", "BloomForCausalLM", **{**SIZES, **quiet})


def bert():
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _of("BertConfig", "BertForMaskedLM", **SIZES, **quiet)


def gpt2():
    sizes = {
        "vocab_size": VOCABULARY,
        "n_positions": 16,
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 6,
        "n_inner": 21,
    }
    rates = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "use_cache": False}
    return _of("GPT2Config", "GPT2LMHeadModel", **sizes, **rates, bos_token_id=1, eos_token_id=2)


def mixtral():
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    return _of("MixtralConfig", "MixtralForCausalLM", **GROUPED, **experts)


def qwen2_moe():
    """With an expert that all tokens use, and a gate of it, beside those that are chosen."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    sizes = {"moe_intermediate_size": 9, "shared_expert_intermediate_size": 13}
    return _of("Qwen2MoeConfig", "Qwen2MoeForCausalLM", **GROUPED, **experts, **sizes)


def gpt_oss():
    """Transposed, with biases, gates and features in turn; its router has a bias, which here leaves two of
    five experts without tokens.
    """
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    model = _of("GptOssConfig", "GptOssForCausalLM", **GROUPED, **experts, head_dim=4)
    for layer in model.model.layers:
        nn.init.constant_(layer.mlp.router.bias[3:], -1e4)
    return model


def opt():
    quiet = {"dropout": 0.0, "ffn_dim": 21, "word_embed_proj_dim": 24}
    return _of("OPTConfig", "OPTForCausalLM", **SIZES, **quiet)


def adapted(make, targets, **options):
    def build():
        import peft

        config = peft.LoraConfig(r=3, target_modules=targets, **{"lora_dropout": 0.0, **options})
        return peft.get_peft_model(make(), config)

    return build


class GatesApart(nn.Module):
    """Gates and features in turn, not in halves, so no rank has its part of both."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(24, 42), nn.Linear(21, 24)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).unflatten(-1, (-1, 2)).unbind(-1)
        return self.down_proj(F.silu(gate) * up)


def gates_apart():
    model = phi3()
    for layer in model.model.layers:
        layer.mlp = GatesApart()
    return model


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MODELS = {
    "LoRA": adapted(llama, ALL),
    "LoRA in part": adapted(llama, ["q_proj", "down_proj"], use_rslora=True),
    "LoRA of Conv1D": adapted(gpt2, ["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True, lora_bias=False),
    "LoRA with dropout": adapted(llama, ALL, lora_dropout=0.5),
    "DoRA": adapted(llama, ["q_proj", "o_proj"], use_dora=True),
    "LoRA with a bias": adapted(opt, ["fc2"], lora_bias=True),
    "gates apart": gates_apart,
    "phi3": phi3,
    "LoRA of phi3": adapted(phi3, ["qkv_proj", "gate_up_proj", "o_proj"]),
    "neox": neox,
    "bloom": bloom,
    "bert": bert,
    "mixtral": mixtral,
    "qwen2-moe": qwen2_moe,
    "gpt-oss": gpt_oss,
    "LoRA of mixtral": adapted(mixtral, ["q_proj", "v_proj"]),
}


def make(kind):
    torch.manual_seed(0)
    model = MODELS[kind]()
    for module in list(model.modules()):
        for name, norm in module.named_children():
            if hasattr(norm, "variance_epsilon"):
                own = nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)
                own.weight = norm.weight
                setattr(module, name, own)
    with torch.no_grad():
        for parameter in model.parameters():  # none is zero or one
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double().train()


def optimizer(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    inputs, labels = (torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2))
    return {"input_ids": inputs}, labels.masked_fill(
        torch.rand(ROWS, LENGTH, generator=generator) < 0.3, -100
    )


def loss_fn(output, targets):
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def alone(kind):
    """(losses, parameters) of one process."""
    model = make(kind)
    opt, losses = optimizer(model), []
    for inputs, targets in map(batch, range(STEPS)):
        loss = loss_fn(model(**inputs), targets)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def planned(kind, text):
    """A model and its optimizer under a plan, and {name: numbers here} before zero takes shards of them."""
    model = make(kind)
    model, opt = par.parallelize(model, optimizer(model), par.Plan.parse(text))
    return model, opt


def step(model, opt, number):
    return par.step(model, opt, batch(number), loss_fn, microbatches=2, clip=0.5).item()
