"""Names of the quantized layers of the tiny models, by projection."""

PARTS = ("gate", "up", "down")
LLAMA_LAYERS = (
    {
        "q_proj": "self_attn.q_proj",
        "k_proj": "self_attn.k_proj",
        "v_proj": "self_attn.v_proj",
        "o_proj": "self_attn.o_proj",
        "gate_proj": "mlp.gate_proj",
        "up_proj": "mlp.up_proj",
        "down_proj": "mlp.down_proj",
    }
    | {f"shared_expert_{part}_proj": f"mlp.shared_expert.{part}_proj" for part in PARTS}
    | {name: f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj")}
)
OPT_LAYERS = {name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")} | {
    "fc1": "fc1",
    "fc2": "fc2",
}
BLOOM_LAYERS = {
    "dense": "self_attention.dense",
    "dense_h_to_4h": "mlp.dense_h_to_4h",
    "dense_4h_to_h": "mlp.dense_4h_to_h",
}
PHI3_LAYERS = {name: LLAMA_LAYERS[name] for name in ("o_proj", "down_proj")}
GLM4_LAYERS = PHI3_LAYERS | {name: LLAMA_LAYERS[name] for name in ("q_proj", "k_proj", "v_proj")}
LFM2_LAYERS = {name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")}
LFM2_LAYERS |= {"in_proj": "conv.in_proj"} | {name: f"feed_forward.{name}" for name in ("w1", "w2", "w3")}
FUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "bloom": {"self_attention.query_key_value": ("query", "key", "value")},
    "phi3": {
        "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    },
    **{kind: {"mlp.gate_up_proj": ("gate_proj", "up_proj")} for kind in ("glm", "glm4")},
    # in each block one of both, which have one name
    **{
        kind: {"self_attn.out_proj": ("out_proj",), "conv.out_proj": ("out_proj",)}
        for kind in ("lfm2", "lfm2_moe")
    },
}
"""Projections of the layers that hold several, by model type."""
GATED: dict[str, tuple[str, ...]] = {"self_attn.q_proj": ("q_proj", "q_gate")}
"""Rows that are query and gate of a head in turn."""
LATENT = ("glm4_moe_lite", "deepseek_v2", "deepseek_v3")
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
FUSED |= dict.fromkeys(HYBRIDS, GATED)
HYBRID_LAYERS = {name: layer for name, layer in LLAMA_LAYERS.items() if name != "q_proj"}
PATHS = {"opt": "model.decoder.layers", "bloom": "transformer.h"}
LAYERS = {"opt": OPT_LAYERS, "bloom": BLOOM_LAYERS, "phi3": PHI3_LAYERS}
LAYERS |= {"glm": GLM4_LAYERS, "glm4": GLM4_LAYERS, "lfm2": LFM2_LAYERS, "lfm2_moe": LFM2_LAYERS}
LAYERS["granitemoehybrid"] = {
    name: LLAMA_LAYERS[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")
} | {"in_proj": "mamba.in_proj", "out_proj": "mamba.out_proj", "output_linear": "shared_mlp.output_linear"}
FUSED["granitemoehybrid"] = {"shared_mlp.input_linear": ("gate_proj", "up_proj")}
WITH_EXPERTS = "granitemoehybrid with experts"
LAYERS[WITH_EXPERTS] = {
    name: layer for name, layer in LAYERS["granitemoehybrid"].items() if name != "output_linear"
} | {"shared_expert_down_proj": "shared_mlp.output_linear"}
FUSED[WITH_EXPERTS] = {"shared_mlp.input_linear": ("shared_expert_gate_proj", "shared_expert_up_proj")}
IN_FILES = {
    ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
    ".block_sparse_moe.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
    ".block_sparse_moe.experts.down_proj": ".block_sparse_moe.output_linear.weight",
}
"""Names that Granite has in files, by those of the library."""
EXPERTS = {
    "gemma4_text": "experts",
    "granitemoe": "block_sparse_moe.experts",
    "lfm2_moe": "feed_forward.experts",
    WITH_EXPERTS: "block_sparse_moe.experts",
}
"""Names of the experts of a block, where they are others than most families'."""
LAYERS |= {
    kind: LLAMA_LAYERS | {f"shared_expert_{part}_proj": f"mlp.{shared}.{part}_proj" for part in PARTS}
    for kind, shared in {
        "glm4_moe": "shared_experts",
        "ernie4_5_moe": "shared_experts",
        "hunyuan_v1_moe": "shared_mlp",
        **dict.fromkeys(LATENT, "shared_experts"),
    }.items()
}
LATENT_NAMES = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
for kind in LATENT:
    LAYERS[kind] |= {name: f"self_attn.{name}" for name in LATENT_NAMES}
LAYERS |= dict.fromkeys(HYBRIDS, HYBRID_LAYERS)
LAYERS["gemma4_text"] = LLAMA_LAYERS | {n: n for n in ("per_layer_input_gate", "per_layer_projection")}
