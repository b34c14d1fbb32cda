"""Models that llama.cpp would run otherwise than transformers are refused, with what is in the way."""

from typing import Any

import pytest

from aespa_pl.models.llama_cpp_limits import unsupported_part
from tests.export.configurations import LINEAR, LLAMA_3, YARN
from tests.export.runs import CONFIGS


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt-oss", {"swiglu_limit": 5.0}, "llama.cpp has no gpt_oss with swiglu_limit 5.0"),
        ("gpt-oss", {"layer_types": ["full_attention"] * 2}, "no gpt_oss without sliding windows"),
        ("qwen3-next", {"norm_topk_prob": False}, "no qwen3_next with norm_topk_prob False"),
        # the rest was seen to fail, or to differ, in llama.cpp
        *(
            (name, {"attention_bias": True}, "with attention_bias True")
            for name in (
                *("qwen3", "qwen3-moe", "gemma2", "gemma3", "olmo2", "olmo3", "smollm3"),
                *("qwen3-next", "qwen3.5", "qwen3.5-moe"),
            )
        ),
        *(
            (name, {"head_dim": 64}, "with head_dim 64 and 4 heads in a width of 128")
            for name in ("qwen2", "qwen2-moe", "olmo2", "olmo3", "exaone4", "fused")
        ),
        *(
            (name, {"layer_types": [f"{kind}_attention"] * 3}, "without both linear and full attention")
            for name in ("qwen3-next", "qwen3.5", "qwen3.5-moe")
            for kind in ("linear", "full")
        ),
        ("smollm3", {"mlp_bias": True}, "llama.cpp has no smollm3 with mlp_bias True"),
        ("ernie4.5", {"use_bias": True}, "llama.cpp has no ernie4_5 with use_bias True"),
        ("hunyuan", {"attention_bias": True}, "llama.cpp has no hunyuan_v1_dense with attention_bias True"),
        ("lfm2-moe", {"num_dense_layers": 3}, "llama.cpp has no lfm2_moe without experts"),
        ("glm4-moe", {"n_group": 2}, "llama.cpp has no glm4_moe with n_group 2"),
        ("ernie4.5-moe", {"moe_layer_interval": 2}, "no ernie4_5_moe with moe_layer_interval 2"),
        (
            "ernie4.5-moe",
            {"moe_layer_end_index": 0, "moe_layer_start_index": 0},
            "moe_layer_end_index before them",
        ),
        ("hunyuan-moe", {"moe_topk": [8, 4]}, "moe_topk to several"),
        ("olmoe", {"num_key_value_heads": 2}, "an olmoe with grouped queries"),
        ("minimax", {"tie_word_embeddings": True}, "no minimax_m2 with tie_word_embeddings True"),
        ("glm4-flash", {"rope_interleave": False}, "no glm4_moe_lite with rope_interleave False"),
        ("glm4-flash", {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types in others"),
        ("glm4-flash", {"mlp_layer_types": ["dense"] * 2}, "llama.cpp has no glm4_moe_lite without experts"),
        ("deepseek-v2", {"topk_method": "group_limited_greedy"}, "with topk_method group_limited_greedy"),
        ("deepseek-v3", {"num_hidden_layers": 27}, "no q_lora_rank in a deepseek_v3 of 27 blocks"),
        *(
            ("deepseek-v3", {"rope_parameters": {**YARN, **mscales}}, "its factor alone")
            for mscales in ({}, {"mscale": 1.0, "mscale_all_dim": 0.5})
        ),
        ("granite4-moe", {"layer_types": ["full_attention"] * 2}, "and no Mamba blocks, config.json none"),
        *(
            ("lfm2", {"layer_types": [kind] * 3}, "a lfm2 without both convolutions and attention")
            for kind in ("conv", "full_attention")
        ),
        *(
            (name, {"rope_parameters": LLAMA_3}, "llama.cpp has no rope_type llama3 in a " + name)
            for name in ("smollm3", "qwen2", "qwen3", "olmo2", "gemma2")
        ),
        ("llama", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, "its factor alone"),
        ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.0}}, "its factor alone"),
        *(
            ("ministral3", {"rope_parameters": {**YARN, **mscales}}, "its factor alone")
            for mscales in (
                {"mscale": 2.0, "mscale_all_dim": 2.0},
                {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.1386294},
            )
        ),
        (
            "llama",
            {"rope_parameters": {**YARN, "truncate": False}},
            "yarn's frequencies, truncate false does not",
        ),
        ("llama", {"rope_parameters": {**YARN, "factor": None}}, "yarn, which config.json does not have"),
        *(
            (name, {"rope_parameters": {**YARN, **betas}}, "beta_slow 1, whatever a file says")
            for name in ("llama", "gpt-oss")
            for betas in ({"beta_fast": 4.0}, {"beta_slow": 2.0})
        ),
        (
            "gemma3",
            {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), LINEAR)},
            "llama.cpp scales no frequencies in blocks with a sliding window",
        ),
        (
            "olmo3",
            {
                "rope_parameters": {
                    "full_attention": YARN,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                }
            },
            "llama.cpp has one rope_theta in all blocks of a olmo3, rope_parameters two",
        ),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, "no gemma2 without sliding windows"),
        ("gemma4", {"layer_types": ["full_attention"] * 3}, "no gemma4_text without sliding windows"),
        ("gemma4", {"final_logit_softcapping": None}, "another final_logit_softcapping"),
        (
            "exaone4",
            {"num_hidden_layers": 64, "layer_types": ["full_attention"] * 64},
            "sliding windows in a exaone4 of 64 blocks alone",
        ),
        ("exaone4", {"sliding_window": 12}, "blocks, and sliding_window takes it away"),
    ],
)
def test_models_that_llama_cpp_runs_otherwise_are_named(
    name: str, changes: dict[str, Any], message: str
) -> None:
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    assert (unsupported_part(config) or "").endswith(message)
