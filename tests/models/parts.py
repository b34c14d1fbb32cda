"""Parts of the configurations of tiny models."""

from typing import Any

from transformers import PreTrainedConfig

VOCABULARY, LENGTH, WINDOW = 40, 9, 4
"""A window is shorter than a segment."""

OPT = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_attention_heads": 4, "ffn_dim": 20,
    "num_hidden_layers": 3, "max_position_embeddings": 16, "word_embed_proj_dim": 24,
}  # fmt: skip
BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 24, "n_head": 4, "n_layer": 3}
LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 20,
    "num_hidden_layers": 3, "max_position_embeddings": 16, "num_key_value_heads": 2,
}  # fmt: skip
MOE = {
    "head_dim": 8, "moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 2,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip

HYBRID = {
    "head_dim": 8, "partial_rotary_factor": 0.5, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 3,
    "layer_types": ["full_attention", "linear_attention", "full_attention"],
}  # fmt: skip

LATENT = {
    "q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "num_key_value_heads": 4, "moe_intermediate_size": 12, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
ALPHA = {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 20.0, "factor": 1.0}
GRANITE = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.7,
    "logits_scaling": 5.0,
}  # fmt: skip
MAMBA = {
    "num_local_experts": 0, "shared_intermediate_size": 28, "mamba_n_heads": 6, "mamba_d_head": 8,
    "mamba_d_state": 5, "mamba_n_groups": 2, "mamba_chunk_size": 4,
}  # fmt: skip
GRANITE_EXPERTS = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["attention", "mamba", "attention"],
}  # fmt: skip
PLAIN = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Special tokens, where the library's own defaults lie outside of the vocabulary."""
GEMMA4 = {
    "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "sliding_window": WINDOW,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e3},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}  # fmt: skip
GEMMA4_EXPERTS = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"], "enable_moe_block": True,
    "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12,
}  # fmt: skip
GEMMA4_SMALL = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_kv_shared_layers": 1,
    "attention_k_eq_v": False, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": VOCABULARY,
    "use_double_wide_mlp": True,
}  # fmt: skip
GEMMA4_SHORT = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
CONVOLUTIONS = ["full_attention", "conv", "full_attention"]
FULL = ["full_attention"] * 3
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def config(kind: type[PreTrainedConfig], *options: dict[str, Any]) -> PreTrainedConfig:
    return kind(**{key: value for option in options for key, value in option.items()})
