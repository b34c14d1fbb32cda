"""Configurations of the tiny models that are exported."""

from collections.abc import Callable
from typing import Any

from transformers import (
    BloomConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

VOCABULARY = 280
HEADS = 4
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
HYBRID = {
    "head_dim": 32, "partial_rotary_factor": 0.5, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "full_attention_interval": 2,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "num_key_value_heads": 4, "moe_intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 2,
    "routed_scaling_factor": 2.5, "tie_word_embeddings": False,
}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.05,
    "logits_scaling": 8.0,
}  # fmt: skip
GRANITE_4 = {
    **GRANITE, "logits_scaling": 0.7, "residual_multiplier": 0.8, "attention_multiplier": 1.0,
    "num_local_experts": 0, "shared_intermediate_size": 192, "mamba_n_heads": 8,
    "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 2,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
HUNYUAN = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
GEMMA4 = {
    "head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "sliding_window": 12, "final_logit_softcapping": 5.0,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def llama(kind: type[PreTrainedConfig] = LlamaConfig, **options: Any) -> PreTrainedConfig:
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "num_attention_heads": HEADS,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "tie_word_embeddings": True, "bos_token_id": 256,
        "eos_token_id": 257, "pad_token_id": 257,
    }  # fmt: skip
    return kind(**{**settings, **options})


def opt(**options: Any) -> PreTrainedConfig:
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "num_attention_heads": HEADS, "ffn_dim": 256,
        "num_hidden_layers": 2, "max_position_embeddings": 128, "word_embed_proj_dim": 128,
    }  # fmt: skip
    return OPTConfig(**{**settings, **options})


def bloom(**options: Any) -> PreTrainedConfig:
    settings = {"vocab_size": VOCABULARY, "hidden_size": 128, "n_head": HEADS, "n_layer": 2}
    return BloomConfig(**{**settings, **options})


# llama.cpp asks a model with phi3 in its name for special tokens: so it is "fused" here.
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": llama,
    "opt": opt,
    "bloom": bloom,
    "llama-block": lambda: llama(num_hidden_layers=1),  # one block: for the many combinations
    "opt-block": lambda: opt(num_hidden_layers=1),
    "bloom-block": lambda: bloom(n_layer=1),
    "llama-untied": lambda: llama(tie_word_embeddings=False),
    "llama-biased": lambda: llama(
        attention_bias=True, mlp_bias=True, num_key_value_heads=4, tie_word_embeddings=False
    ),
    "llama-wide": lambda: llama(hidden_size=256, intermediate_size=512),
    "llama-uneven": lambda: llama(hidden_size=96, intermediate_size=160),
    "llama-odd": lambda: llama(hidden_size=40, intermediate_size=72),
    "llama3": lambda: llama(rope_parameters=LLAMA_3),
    "llama-linear": lambda: llama(rope_parameters=LINEAR),
    "llama-yarn": lambda: llama(rope_parameters=YARN),
    # transformers ignores the share
    "llama-partial": lambda: llama(rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    "mistral": lambda: llama(MistralConfig, sliding_window=100),
    "llama-dynamic": lambda: llama(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "granite": lambda: llama(GraniteConfig, **GRANITE),
    "granite-moe": lambda: llama(GraniteMoeConfig, **GRANITE, num_local_experts=4, num_experts_per_tok=2),
    "granite4": lambda: llama(
        GraniteMoeHybridConfig, **GRANITE_4, num_hidden_layers=3, layer_types=["mamba", "attention", "mamba"]
    ),
    "granite4-moe": lambda: llama(
        GraniteMoeHybridConfig, **{**GRANITE_4, "num_local_experts": 4, "num_experts_per_tok": 4},
        layer_types=["mamba", "attention"],
    ),
    "granite4-dense": lambda: llama(
        GraniteMoeHybridConfig, **GRANITE_4, layer_types=["attention"] * 2, position_embedding_type="rope"
    ),
    "smollm3": lambda: llama(SmolLM3Config, num_hidden_layers=4),
    "smollm3-other": lambda: llama(SmolLM3Config, no_rope_layers=[0, 1]),
    "ministral3": lambda: llama(
        Ministral3Config, head_dim=32,
        rope_parameters={**YARN, "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "ministral3-betas": lambda: llama(
        Ministral3Config, head_dim=32,
        rope_parameters={**YARN, "beta_fast": 4.0, "beta_slow": 2.0, "llama_4_scaling_beta": 0.3},
    ),
    "ministral3-plain": lambda: llama(
        Ministral3Config, head_dim=32,
        rope_parameters={
            "rope_theta": 10000.0, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16,
        },
    ),
    "seed-oss": lambda: llama(SeedOssConfig, head_dim=64),
    "seed-oss-biased": lambda: llama(SeedOssConfig, head_dim=64, attention_out_bias=True),
    "fused": lambda: llama(Phi3Config),
    "fused-partial": lambda: llama(Phi3Config, partial_rotary_factor=0.75),
    "gemma2": lambda: llama(
        Gemma2Config, head_dim=32, query_pre_attn_scalar=32, sliding_window=12,
        attn_logit_softcapping=0.5, final_logit_softcapping=2.0,
    ),
    "gemma3": lambda: llama(
        Gemma3TextConfig, num_hidden_layers=3, head_dim=32, query_pre_attn_scalar=32,
        sliding_window=12, sliding_window_pattern=3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gemma4": lambda: llama(
        Gemma4TextConfig, **GEMMA4, num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "gemma4-moe": lambda: llama(
        Gemma4TextConfig, **GEMMA4, num_hidden_layers=3, enable_moe_block=True, num_experts=4,
        top_k_experts=2, moe_intermediate_size=64,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "gemma4-small": lambda: llama(
        Gemma4TextConfig, **{**GEMMA4, "attention_k_eq_v": False, "hidden_size_per_layer_input": 32},
        num_hidden_layers=6, num_kv_shared_layers=3, use_double_wide_mlp=True,
        vocab_size_per_layer_input=VOCABULARY,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    ),
    "gemma4-values": lambda: llama(
        Gemma4UnifiedTextConfig, **{**GEMMA4, "attention_k_eq_v": False}, tie_word_embeddings=False,
        num_key_value_heads=4,
    ),
    "gemma3-scaled": lambda: llama(Gemma3TextConfig, head_dim=32, query_pre_attn_scalar=20),
    "olmo2": lambda: llama(Olmo2Config, tie_word_embeddings=False, num_key_value_heads=4),
    "olmo3": lambda: llama(
        Olmo3Config, tie_word_embeddings=False, num_hidden_layers=4, sliding_window=12,
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "exaone4": lambda: llama(
        Exaone4Config, sliding_window=None, layer_types=["full_attention"] * 2
    ),
    "exaone4-mixed": lambda: llama(Exaone4Config, num_hidden_layers=4, sliding_window=12),
    "olmo3-odd": lambda: llama(
        Olmo3Config, tie_word_embeddings=False,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "glm": lambda: llama(GlmConfig, head_dim=32, tie_word_embeddings=False),
    "glm4": lambda: llama(Glm4Config, head_dim=64, tie_word_embeddings=False),
    "ernie4.5": lambda: llama(Ernie4_5Config, head_dim=64),
    "hunyuan": lambda: llama(HunYuanDenseV1Config, head_dim=64, rope_parameters=HUNYUAN),
    "lfm2": lambda: llama(
        Lfm2Config, num_hidden_layers=3, block_multiple_of=32,
        layer_types=["conv", "full_attention", "conv"],
    ),
    "glm4-moe": lambda: llama(
        Glm4MoeConfig, head_dim=32, moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2,
        n_shared_experts=2, routed_scaling_factor=4.0, use_qk_norm=True, attention_bias=True,
        tie_word_embeddings=False,
    ),
    "ernie4.5-moe": lambda: llama(
        Ernie4_5_MoeConfig, moe_intermediate_size=64, moe_num_experts=8, moe_k=2, moe_num_shared_experts=1
    ),
    "hunyuan-moe": lambda: llama(
        HunYuanMoEV1Config, head_dim=32, num_experts=8, moe_topk=8, rope_parameters=HUNYUAN
    ),
    "lfm2-moe": lambda: llama(
        Lfm2MoeConfig, num_hidden_layers=3, num_dense_layers=1, moe_intermediate_size=64, num_experts=8,
        num_experts_per_tok=2, layer_types=["conv", "full_attention", "conv"],
    ),
    "qwen2": lambda: llama(Qwen2Config),
    "qwen3": lambda: llama(Qwen3Config, head_dim=32),
    "qwen2-moe": lambda: llama(
        Qwen2MoeConfig, **EXPERTS, shared_expert_intermediate_size=96, tie_word_embeddings=False
    ),
    "qwen3-moe": lambda: llama(Qwen3MoeConfig, **EXPERTS, head_dim=32, norm_topk_prob=True),
    "qwen3-moe-mixed": lambda: llama(
        Qwen3MoeConfig, **EXPERTS, head_dim=32, norm_topk_prob=True, mlp_only_layers=[0]
    ),
    "qwen3.5": lambda: llama(Qwen3_5TextConfig, num_hidden_layers=3, **HYBRID),
    "qwen3.5-moe": lambda: llama(
        Qwen3_5MoeTextConfig, num_hidden_layers=3, **HYBRID, shared_expert_intermediate_size=96,
        **{**EXPERTS, "num_experts_per_tok": 8},  # no choice of experts that rounded activations could change
    ),
    "qwen3.5-grouped": lambda: llama(
        Qwen3_5TextConfig, num_hidden_layers=3, **{**HYBRID, "linear_num_value_heads": 6}
    ),
    "qwen3-next": lambda: llama(
        Qwen3NextConfig, num_hidden_layers=3, shared_expert_intermediate_size=96, norm_topk_prob=True,
        **{**HYBRID, "linear_num_value_heads": 4}, **{**EXPERTS, "num_experts_per_tok": 8},
    ),
    "gpt-oss": lambda: llama(
        GptOssConfig, head_dim=32, num_local_experts=8, num_experts_per_tok=8, sliding_window=12,
        tie_word_embeddings=False, rope_parameters=YARN,
    ),
    "gpt-oss-exact": lambda: llama(  # as its makers' files have it
        GptOssConfig, head_dim=32, num_local_experts=8, num_experts_per_tok=8, sliding_window=12,
        tie_word_embeddings=False, rope_parameters={**YARN, "truncate": False},
    ),
    "olmoe": lambda: llama(
        OlmoeConfig, tie_word_embeddings=False, num_key_value_heads=4, num_experts=4, num_experts_per_tok=2,
        intermediate_size=64,
    ),
    "minimax": lambda: llama(
        MiniMaxM2Config, head_dim=32, num_local_experts=8, num_experts_per_tok=2, intermediate_size=64,
        rotary_dim=16, tie_word_embeddings=False,
    ),
    "glm4-flash": lambda: llama(Glm4MoeLiteConfig, **LATENT, num_experts_per_tok=2),
    "deepseek-v2": lambda: llama(
        DeepseekV2Config, **{**LATENT, "q_lora_rank": None}, num_experts_per_tok=2, first_k_dense_replace=1,
        n_group=2, topk_group=1,  # of which topk_method greedy makes no use
    ),
    "deepseek-v3-yarn": lambda: llama(
        DeepseekV3Config, **LATENT, num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1,
        rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    ),
    "deepseek-v3": lambda: llama(
        DeepseekV3Config, **LATENT, num_experts_per_tok=2, first_k_dense_replace=1, n_group=2, topk_group=1
    ),
    "mixtral": lambda: llama(MixtralConfig, num_local_experts=4, num_experts_per_tok=2),
    "opt-350m": lambda: opt(do_layer_norm_before=False, word_embed_proj_dim=64),
    "bloom-post-residual": lambda: bloom(apply_residual_connection_post_layernorm=True),
}  # fmt: skip
