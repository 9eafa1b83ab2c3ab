"""More families, each under one plan of each axis: what docs/models.md lists below its table. They are too
many for every run of the tests.

    python tests/model_families/more.py [word ...]      families whose names have a word

Ends with 1 where something is wrong or has crashed. For those of timm: PYTHONPATH=build/vision.
"""

import ast
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from compare import AXES, LIMIT, outcomes  # noqa: E402
from families import (  # noqa: E402
    BERT,
    CLASSES,
    ENDS,
    EXPERTS,
    FAMILIES,
    GROUPED,
    LATENT,
    QWEN_EXPERTS,
    ROWS,
    SEQ2SEQ,
    SIZES,
    T5,
    VIT,
    Family,
    classified,
    cross,
    holes,
    ids,
    images,
    masked,
    named_images,
    of,
    pairs,
    text,
)
from vision import have_vision, timm_model  # noqa: E402


def named(kinds, base=None, settings=""):
    """kinds: the classes of the configuration and of the model. settings: "name=value ..." beside base."""
    config, kind = kinds.split()
    given = dict(each.split("=") for each in settings.split())
    values = {key: ast.literal_eval(value) for key, value in given.items()}
    return of(
        f"{config}Config", f"{config if kind.startswith('For') else ''}{kind}", **{**(base or {}), **values}
    )


def causal(name, settings="", base=GROUPED, **options):
    return Family(named(f"{name} ForCausalLM", base, settings), text, **options)


def of_masks(name, settings="", base=BERT):
    return Family(named(f"{name} ForMaskedLM", base, settings), masked)


def translating(kinds, blocks="model.decoder.layers", settings="", base=SEQ2SEQ):
    return Family(named(kinds, base, settings), pairs, blocks=blocks)


def of_images(name, settings, base=None, **options):
    return Family(named(f"{name} ForImageClassification", base, settings), named_images, **options)


def pictured(generator):
    pixels, targets = images(generator)
    return {"pixel_values": pixels}, targets


def logits_of(batch):
    """For models whose own loss is not known: the targets are given beside the inputs."""

    def made(generator):
        whole = batch(generator)
        labels = whole.pop("labels")
        return whole, labels

    return made


def of_logits(output, targets):
    return F.cross_entropy(output.logits.flatten(0, -2), targets.flatten())


def waves(generator):
    values = torch.randn(ROWS, 160, generator=generator, dtype=torch.float64)
    return {"input_values": values, "labels": torch.randint(0, CLASSES, (ROWS,), generator=generator)}


def spoken(generator):
    features = torch.randn(ROWS, 16, 8, generator=generator, dtype=torch.float64)
    return {"input_features": features, "labels": holes(ids(generator), generator)}


def timm_family(name, **settings):
    return Family(lambda: timm_model(name, num_classes=CLASSES, **settings), images, cross, vision=True)


TWO_NAMES = "n_positions=32 n_embd=24 n_layer=4 n_head=4 vocab_size=41 resid_pdrop=0.0 embd_pdrop=0.0"
OLD = f"{TWO_NAMES} attn_pdrop=0.0 use_cache=False"
AUDIO = (
    "hidden_size=24 intermediate_size=32 num_hidden_layers=4 num_attention_heads=4 conv_dim=[8,8] "
    "conv_kernel=[4,4] conv_stride=[4,4] num_feat_extract_layers=2 num_conv_pos_embeddings=4 "
    "num_conv_pos_embedding_groups=2 hidden_dropout=0.0 activation_dropout=0.0 attention_dropout=0.0 "
    "feat_proj_dropout=0.0 final_dropout=0.0 layerdrop=0.0 apply_spec_augment=False mask_time_prob=0.0 "
    "classifier_proj_size=16 num_labels=5 vocab_size=41"
)
WINDOWS = "image_size=16 patch_size=2 embed_dim=8 depths=[2,2] num_heads=[2,4] window_size=2 num_labels=5"
NEO = (
    "vocab_size=41 max_position_embeddings=32 hidden_size=24 num_layers=4 num_heads=4 window_size=4 "
    "attention_types=[[['global','local'],2]] resid_dropout=0.0 embed_dropout=0.0 attention_dropout=0.0 "
    "use_cache=False"
)
TRUE_ALIBI = "alibi=True multi_query=False parallel_attn=False use_cache=False"

MORE = {
    "electra": of_masks("Electra", "embedding_size=24"),
    "roberta": of_masks("Roberta", "pad_token_id=1"),
    "deberta-v2": of_masks(
        "DebertaV2", "relative_attention=True pos_att_type=['p2c','c2p'] position_biased_input=False"
    ),
    "distilbert": of_masks(
        "DistilBert", "vocab_size=41 dim=24 hidden_dim=32 n_layers=4 n_heads=4 dropout=0.0", base={}
    ),
    "albert, classes": Family(
        named("Albert ForSequenceClassification", BERT, "embedding_size=12 num_labels=5"), classified
    ),
    "xlnet": Family(
        named(
            "XLNet XLNetLMHeadModel", {}, "vocab_size=41 d_model=24 n_layer=4 n_head=4 d_inner=32 dropout=0.0"
        ),
        logits_of(masked),
        of_logits,
    ),
    "longformer": of_masks("Longformer", "attention_window=4 max_position_embeddings=64 pad_token_id=1"),
    "big_bird": of_masks("BigBird", "attention_type='original_full' max_position_embeddings=64"),
    "fnet": of_masks("FNet", base=SIZES, settings="hidden_dropout_prob=0.0"),
    "mobilebert": of_masks("MobileBert", "embedding_size=12 intra_bottleneck_size=12"),
    "modernbert": of_masks("ModernBert", "local_attention=4 global_attn_every_n_layers=2", SIZES),
    "mbart": translating("MBart ForConditionalGeneration"),
    "pegasus": translating("Pegasus ForConditionalGeneration"),
    "led": translating(
        "LED ForConditionalGeneration",
        "led.decoder.layers",
        "attention_window=4 max_encoder_position_embeddings=32 max_decoder_position_embeddings=32",
    ),
    "blenderbot": translating("Blenderbot ForConditionalGeneration"),
    "mt5": translating("MT5 ForConditionalGeneration", "decoder.block", base={**T5, **ENDS}),
    "prophetnet": translating(
        "ProphetNet ForConditionalGeneration",
        "prophetnet.decoder.layers",
        "vocab_size=41 hidden_size=24 encoder_ffn_dim=32 decoder_ffn_dim=32 num_encoder_layers=4 "
        "num_decoder_layers=4 num_encoder_attention_heads=4 num_decoder_attention_heads=4 dropout=0.0",
        {},
    ),
    "biogpt": causal("BioGpt", "hidden_dropout_prob=0.0 attention_probs_dropout_prob=0.0 layerdrop=0.0"),
    "nemotron": causal("Nemotron"),
    "gptj": causal("GPTJ", f"{OLD} rotary_dim=4", {}),
    "codegen": causal("CodeGen", f"{OLD.replace('n_embd=24', 'n_embd=32')} rotary_dim=4", {}),
    "gpt-neo": causal("GPTNeo", NEO, {}),
    "gpt-bigcode": causal("GPTBigCode", OLD, {}),
    "openai-gpt": Family(
        named("OpenAIGPT OpenAIGPTLMHeadModel", {}, f"{TWO_NAMES} attn_pdrop=0.0"),
        logits_of(masked),
        of_logits,
    ),
    "falcon, grouped": causal(
        "Falcon", "new_decoder_architecture=True num_kv_heads=2 use_cache=False", SIZES
    ),
    "falcon, alibi": causal("Falcon", TRUE_ALIBI, SIZES),
    "mpt": causal("Mpt", "vocab_size=41 d_model=24 n_layers=4 n_heads=4 max_seq_len=32 use_cache=False", {}),
    "starcoder2": causal("Starcoder2", "residual_dropout=0.0 embedding_dropout=0.0"),
    "cohere": causal("Cohere"),
    "cohere2, window": causal("Cohere2", "sliding_window=4"),
    "olmo2": causal("Olmo2"),
    "granite": causal("Granite", "logits_scaling=2.0 residual_multiplier=0.5 embedding_multiplier=3.0"),
    "phi": causal("Phi", "partial_rotary_factor=0.67 embd_pdrop=0.0 resid_pdrop=0.0"),
    "persimmon": causal("Persimmon", "partial_rotary_factor=0.67 hidden_dropout=0.0"),
    "stablelm": causal("StableLm", "hidden_dropout=0.0"),
    "gemma3": Family(
        of("Gemma3TextConfig", "Gemma3ForCausalLM", **GROUPED, head_dim=6, sliding_window=4), text
    ),
    "glm4": causal("Glm4", "head_dim=6"),
    "olmoe": causal("Olmoe", "num_experts=4 num_experts_per_tok=2", experts=True),
    "granitemoe": causal("GraniteMoe", base={**GROUPED, **EXPERTS}, experts=True),
    "phimoe": causal(
        "Phimoe", "router_jitter_noise=0.0 input_jitter_noise=0.0", {**GROUPED, **EXPERTS}, experts=True
    ),
    "deepseek-v2": causal("DeepseekV2", base={**GROUPED, **LATENT, "topk_method": "greedy"}, experts=True),
    "qwen3-next": causal(
        "Qwen3Next",
        "head_dim=6 shared_expert_intermediate_size=16 linear_num_key_heads=2 linear_num_value_heads=4 "
        "linear_key_head_dim=4 linear_value_head_dim=6 "
        "layer_types=['linear_attention','full_attention','linear_attention','full_attention']",
        {**GROUPED, **QWEN_EXPERTS},
        experts=True,
    ),
    "jamba": causal(
        "Jamba",
        "num_experts=4 num_experts_per_tok=2 attn_layer_period=2 attn_layer_offset=1 expert_layer_period=2 "
        "expert_layer_offset=1 mamba_d_state=4 mamba_dt_rank=4 mamba_d_conv=3",
        experts=True,
    ),
    "bamba": causal(
        "Bamba",
        "attn_layer_indices=[1,3] mamba_n_heads=4 mamba_d_head=12 mamba_d_state=4 mamba_chunk_size=4 "
        "mamba_n_groups=1",
    ),
    "mamba2": causal(
        "Mamba2",
        "vocab_size=41 hidden_size=24 state_size=4 num_hidden_layers=4 num_heads=4 head_dim=12 n_groups=1 "
        "chunk_size=4 use_cache=False",
        {},
    ),
    "rwkv": causal(
        "Rwkv",
        "vocab_size=41 hidden_size=24 num_hidden_layers=4 attention_hidden_size=24 intermediate_size=32 "
        "use_cache=False context_length=32",
        {},
    ),
    "recurrent_gemma": causal(
        "RecurrentGemma", "attention_window_size=4 lru_width=24 block_types=['recurrent','attention']"
    ),
    "swin": of_images("Swin", f"{WINDOWS} drop_path_rate=0.0"),
    "convnextv2": of_images(
        "ConvNextV2", "hidden_sizes=[8,16,24] depths=[1,4,1] num_stages=3 patch_size=2 num_labels=5"
    ),
    "dinov2": of_images("Dinov2", "", VIT),
    "deit": of_images("DeiT", "", VIT),
    "beit": of_images("Beit", "use_relative_position_bias=True drop_path_rate=0.0 use_mask_token=False", VIT),
    "wav2vec2": Family(named("Wav2Vec2 ForSequenceClassification", {}, AUDIO), waves),
    "hubert": Family(named("Hubert ForSequenceClassification", {}, AUDIO), waves),
    "speech_to_text": Family(
        of(
            "Speech2TextConfig",
            "Speech2TextForConditionalGeneration",
            **{key: value for key, value in SEQ2SEQ.items() if key != "max_position_embeddings"},
            **{"input_feat_per_channel": 8, "num_conv_layers": 1, "conv_kernel_sizes": [3]},
            **{"conv_channels": 16, "max_source_positions": 32, "max_target_positions": 32},
        ),
        spoken,
        blocks="model.decoder.layers",
    ),
    "mixer of timm": timm_family("mixer_s16_224", img_size=16),
    "swin of timm": timm_family(
        "swin_tiny_patch4_window7_224",
        **{"img_size": 16, "patch_size": 2, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 4)},
        window_size=2,
    ),
    "deit of timm": timm_family(
        "deit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=24, depth=4, num_heads=4
    ),
}


def main(words):
    torch.set_num_threads(1)
    FAMILIES.update(MORE)  # where ranks look for them
    bad = 0
    for name, family in MORE.items():
        if words and not any(word in name for word in words) or family.vision and not have_vision():
            continue
        for plan, outcome in outcomes(name, AXES, LIMIT * len(AXES)).items():
            bad += outcome.kind in ("wrong", "crash")
            print(f"{name:20} {plan:20} {outcome.kind:8} {outcome.text[:150]}", flush=True)
    return bad > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
