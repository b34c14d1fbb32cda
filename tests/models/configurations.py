"""Configurations of tiny models, one of each kind that a family has to deal with."""

from collections.abc import Callable

from transformers import (
    BloomConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    Lfm2Config,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

from tests.models.mixtures import MIXTURES
from tests.models.parts import (
    ALPHA,
    BLOOM,
    CONVOLUTIONS,
    FULL,
    GEMMA4,
    GEMMA4_EXPERTS,
    GEMMA4_SMALL,
    GRANITE,
    GRANITE_EXPERTS,
    HYBRID,
    LLAMA,
    MAMBA,
    MIXED,
    OPT,
    PLAIN,
    WINDOW,
    config,
)

EXAMPLES: dict[str, Callable[[], PreTrainedConfig]] = {
    "opt": lambda: config(OPTConfig, OPT),
    "opt-350m": lambda: config(OPTConfig, OPT, {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "opt-bare": lambda: config(
        OPTConfig,
        OPT,
        {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    ),
    "bloom": lambda: config(BloomConfig, BLOOM),
    "bloom-post-residual": lambda: config(
        BloomConfig, BLOOM, {"apply_residual_connection_post_layernorm": True}
    ),
    "llama": lambda: config(
        LlamaConfig, LLAMA, {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}
    ),
    "llama-grouped": lambda: config(LlamaConfig, LLAMA, {"tie_word_embeddings": True}),
    "mistral-window": lambda: config(MistralConfig, LLAMA, {"sliding_window": WINDOW}),
    "mistral": lambda: config(MistralConfig, LLAMA, {"sliding_window": None, "head_dim": 8}),
    "qwen2": lambda: config(Qwen2Config, LLAMA),
    "qwen2-window": lambda: config(
        Qwen2Config, LLAMA, {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}
    ),
    "qwen3": lambda: config(Qwen3Config, LLAMA, {"head_dim": 8}),
    "qwen3-mixed": lambda: config(
        Qwen3Config,
        LLAMA,
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED},
    ),
    "granite": lambda: config(GraniteConfig, LLAMA, GRANITE),
    "granite4": lambda: config(
        GraniteMoeHybridConfig, LLAMA, GRANITE, MAMBA, {"layer_types": ["attention", "mamba", "attention"]}
    ),
    "granite4-dense": lambda: config(
        GraniteMoeHybridConfig,
        LLAMA,
        GRANITE,
        MAMBA,
        {"num_key_value_heads": 4, "position_embedding_type": "rope", "layer_types": ["attention"] * 3},
    ),
    "granite-moe": lambda: config(
        GraniteMoeConfig, LLAMA, GRANITE, {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "granite4-moe": lambda: config(GraniteMoeHybridConfig, LLAMA, GRANITE, MAMBA, GRANITE_EXPERTS),
    "smollm3": lambda: config(
        SmolLM3Config,
        LLAMA,
        PLAIN,
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "ministral3": lambda: config(
        Ministral3Config,
        LLAMA,
        PLAIN,
        {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 4,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "seed-oss": lambda: config(SeedOssConfig, LLAMA, {"head_dim": 8}),
    "seed-oss-biased": lambda: config(
        SeedOssConfig,
        LLAMA,
        {"head_dim": 8, "num_key_value_heads": 4, "attention_out_bias": True, "mlp_bias": True},
    ),
    "phi3-partial": lambda: config(
        Phi3Config,
        LLAMA,
        PLAIN,
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "partial_rotary_factor": 0.5,
            "sliding_window": WINDOW,
        },
    ),
    "phi3": lambda: config(
        Phi3Config,
        LLAMA,
        PLAIN,
        {
            "original_max_position_embeddings": 6,  # a segment is longer, and takes the long factors
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2],
                "long_factor": [1.0, 2.0, 4.0],
                "original_max_position_embeddings": 6,
            },
        },
    ),
    "gemma2": lambda: config(
        Gemma2Config,
        LLAMA,
        PLAIN,
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 5,
            "sliding_window": WINDOW,
            "layer_types": MIXED,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": lambda: config(
        Gemma3TextConfig,
        LLAMA,
        PLAIN,
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 5,
            "sliding_window": WINDOW,
            "layer_types": MIXED,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma4": lambda: config(
        Gemma4TextConfig, LLAMA, PLAIN, GEMMA4, {"layer_types": ["sliding_attention", *FULL[1:]]}
    ),
    "gemma4-small": lambda: config(Gemma4TextConfig, LLAMA, PLAIN, GEMMA4, GEMMA4_SMALL),
    "gemma4-moe": lambda: config(Gemma4TextConfig, LLAMA, PLAIN, GEMMA4, GEMMA4_EXPERTS),
    "gemma4-full": lambda: config(
        Gemma4UnifiedTextConfig, LLAMA, PLAIN, GEMMA4, {"layer_types": FULL, "final_logit_softcapping": 3.0}
    ),
    "olmo2": lambda: config(Olmo2Config, LLAMA, PLAIN, {"num_key_value_heads": 4}),
    "olmo3": lambda: config(
        Olmo3Config,
        LLAMA,
        PLAIN,
        {
            "sliding_window": WINDOW,
            "layer_types": MIXED,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "exaone4": lambda: config(Exaone4Config, LLAMA, {"sliding_window": WINDOW, "layer_types": MIXED}),
    "exaone4-full": lambda: config(Exaone4Config, LLAMA, {"sliding_window": None, "layer_types": FULL}),
    "glm": lambda: config(GlmConfig, LLAMA, PLAIN, {"head_dim": 8}),
    "glm4": lambda: config(Glm4Config, LLAMA, PLAIN, {"head_dim": 8}),
    "ernie4.5": lambda: config(Ernie4_5Config, LLAMA, {"head_dim": 8, "use_bias": True}),
    "hunyuan": lambda: config(HunYuanDenseV1Config, LLAMA, {"head_dim": 8, "rope_parameters": ALPHA}),
    "lfm2": lambda: config(Lfm2Config, LLAMA, {"num_key_value_heads": 4, "layer_types": CONVOLUTIONS}),
    "qwen3.5": lambda: config(Qwen3_5TextConfig, LLAMA, HYBRID, {"tie_word_embeddings": True}),
    **MIXTURES,
}
