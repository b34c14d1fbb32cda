"""Configurations of tiny models with experts, but for Granite's and Gemma's."""

from collections.abc import Callable

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    HunYuanMoEV1Config,
    Lfm2MoeConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tests.models.parts import ALPHA, CONVOLUTIONS, HYBRID, LATENT, LLAMA, MIXED, MOE, PLAIN, WINDOW, config

MIXTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-moe": lambda: config(Qwen3MoeConfig, LLAMA, MOE),
    "qwen3-moe-dense-first": lambda: config(
        Qwen3MoeConfig, LLAMA, MOE, {"mlp_only_layers": [0], "norm_topk_prob": True}
    ),
    "qwen2-moe": lambda: config(Qwen2MoeConfig, LLAMA, MOE, {"shared_expert_intermediate_size": 16}),
    "qwen3-next": lambda: config(
        Qwen3NextConfig, LLAMA, MOE, HYBRID, {"num_key_value_heads": 4, "shared_expert_intermediate_size": 16}
    ),
    "qwen3.5-moe": lambda: config(
        Qwen3_5MoeTextConfig, LLAMA, MOE, HYBRID, {"shared_expert_intermediate_size": 16}
    ),
    "glm4-moe": lambda: config(
        Glm4MoeConfig,
        LLAMA,
        {
            "head_dim": 8,
            "moe_intermediate_size": 12,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
        },
    ),
    "ernie4.5-moe": lambda: config(
        Ernie4_5_MoeConfig,
        LLAMA,
        {"moe_intermediate_size": 12, "moe_num_experts": 6, "moe_k": 2, "use_bias": True},
    ),
    "hunyuan-moe": lambda: config(
        HunYuanMoEV1Config,
        LLAMA,
        {"head_dim": 8, "num_experts": 4, "moe_topk": [2, 1, 2], "rope_parameters": ALPHA},
    ),
    "lfm2-moe": lambda: config(
        Lfm2MoeConfig,
        LLAMA,
        {
            "num_key_value_heads": 4,
            "layer_types": CONVOLUTIONS,
            "moe_intermediate_size": 12,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
        },
    ),
    "olmoe": lambda: config(
        OlmoeConfig, LLAMA, PLAIN, {"num_key_value_heads": 4, "num_experts": 6, "num_experts_per_tok": 2}
    ),
    "minimax": lambda: config(
        MiniMaxM2Config,
        LLAMA,
        {"head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 4},
    ),
    "glm4-flash": lambda: config(Glm4MoeLiteConfig, LLAMA, LATENT),
    "deepseek-v2": lambda: config(
        DeepseekV2Config, LLAMA, LATENT, {"q_lora_rank": None, "first_k_dense_replace": 1}
    ),
    "deepseek-v3": lambda: config(
        DeepseekV3Config, LLAMA, LATENT, {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    ),
    "mixtral": lambda: config(MixtralConfig, LLAMA, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": lambda: config(
        GptOssConfig,
        LLAMA,
        PLAIN,
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": MIXED,
            "swiglu_limit": 1.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 4,
                "truncate": False,
            },
        },
    ),
}
