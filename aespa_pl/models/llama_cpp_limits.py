"""Say what of a model's config.json llama.cpp would run in another way.

Each entry was run (docs/export.md).
"""

import math
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from aespa_pl.models.block_kinds import CONVOLUTION, FULL, LINEAR, SLIDING, attention_kinds
from aespa_pl.models.experts import SPARSE, dense_blocks
from aespa_pl.models.llama_cpp import (
    ARCHITECTURES,
    Architecture,
    architecture_of,
    full_period,
    rope_parameters,
    rope_type,
    rounds_yarn,
)

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""The scalings of RoPE's frequencies that are written."""
USUAL_BETAS = 32.0, 1.0
"""YaRN's ``beta_fast`` and ``beta_slow`` where config.json has none, and in llama.cpp but for Ministral 3."""
ROPE_STEP = 4
"""The SmolLM3 of llama.cpp has no RoPE in each block whose number, from 1, is a multiple of this."""
LITE = 26, 27
"""Blocks of the models with latent attention whose queries llama.cpp takes to have no short vector."""
LARGEST = {"gemma2": 46, "gemma3_text": 62}
"""Blocks of the model whose queries llama.cpp divides by the root of ``d / n_h``, not of ``d_h``."""


def unsupported_part(config: PreTrainedConfig) -> str | None:
    """Return the part of config.json that llama.cpp would run differently; None if there is none."""
    if config.model_type not in ARCHITECTURES:
        return f"llama.cpp has no architecture for model_type {config.model_type}"
    architecture = architecture_of(config)
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if activation not in (None, architecture.activation):
        return f"llama.cpp runs {architecture.activation} where hidden_act is {activation}"
    if getattr(config, "apply_residual_connection_post_layernorm", False):
        return "llama.cpp ignores apply_residual_connection_post_layernorm"
    for name, value in architecture.only.items():
        if (stated := getattr(config, name, None)) != value:
            return f"llama.cpp has no {config.model_type} with {name} {stated}"
    return (
        _unsupported_experts(config)
        or _unsupported_heads(config, architecture)
        or _unsupported_kinds(config)
        or _unsupported_rope(config, architecture)
        or _unsupported_windows(config, architecture)
        or _unsupported_scores(config, architecture)
    )


def _unsupported_experts(config: PreTrainedConfig) -> str | None:
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        return "llama.cpp has experts in all blocks of a mixture of experts"
    blocks = config.num_hidden_layers
    if dense_blocks(config) >= blocks:
        return f"llama.cpp has no {config.model_type} without experts"
    if set((getattr(config, "mlp_layer_types", None) or [])[dense_blocks(config) :]) - {SPARSE}:
        return "llama.cpp has experts in all blocks but the first, mlp_layer_types in others"
    if getattr(config, "moe_layer_end_index", blocks - 1) != blocks - 1:
        return "llama.cpp has experts in the last blocks, moe_layer_end_index before them"
    if isinstance(chosen := getattr(config, "moe_topk", 1), list) and len(set(chosen)) > 1:
        return "llama.cpp routes to one number of experts in all blocks, moe_topk to several"
    return None


def _unsupported_heads(config: PreTrainedConfig, architecture: Architecture) -> str | None:
    if architecture.name == "olmoe" and config.num_key_value_heads != config.num_attention_heads:
        return "llama.cpp can't load an olmoe with grouped queries"
    if config.num_hidden_layers in LITE and getattr(config, "q_lora_rank", None) is not None:
        return f"llama.cpp has no q_lora_rank in a {config.model_type} of {config.num_hidden_layers} blocks"
    if not architecture.divides_width:
        return None
    heads, size = config.num_attention_heads, getattr(config, "head_dim", None)
    if size is not None and heads * size != config.hidden_size:
        what = f"head_dim {size} and {heads} heads in a width of {config.hidden_size}"
        return f"llama.cpp can't load a {config.model_type} with {what}"
    return None


def _unsupported_kinds(config: PreTrainedConfig) -> str | None:
    kinds = attention_kinds(config)
    # without attention llama.cpp does not fail, but ends the whole process
    if config.model_type in ("lfm2", "lfm2_moe") and set(kinds) != {CONVOLUTION, FULL}:
        return f"llama.cpp can't load a {config.model_type} without both convolutions and attention"
    if FULL not in kinds and config.model_type == "granitemoehybrid":
        return "llama.cpp can't load a granitemoehybrid without attention"
    rotation = getattr(config, "position_embedding_type", "rope")
    if architecture_of(config).name == "granitemoe" and rotation != "rope":
        return "llama.cpp has RoPE where a granitemoehybrid has experts and no Mamba blocks, config.json none"
    return _unsupported_linear(config) if hasattr(config, "linear_key_head_dim") else None


def _unsupported_linear(config: PreTrainedConfig) -> str | None:
    kinds = attention_kinds(config)
    if set(kinds) != {LINEAR, FULL}:
        return f"llama.cpp can't load a {config.model_type} without both linear and full attention"
    if config.linear_key_head_dim != config.linear_value_head_dim:
        return "llama.cpp has keys and values of linear attention of one size"
    if full_period(config) is None:
        return "llama.cpp has linear attention in all blocks but every n-th, layer_types in others"
    return None


def _unsupported_rope(config: PreTrainedConfig, architecture: Architecture) -> str | None:
    rope, kind = rope_parameters(config), rope_type(config)
    known = ("proportional",) if architecture.lists_blocks else ROPE_TYPES
    if kind not in known:
        return f"rope_type is {kind}, and llama.cpp has {' or '.join(known)}"
    if kind == "llama3" and not architecture.scales_each:
        return f"llama.cpp has no rope_type llama3 in a {config.model_type}"
    if kind == "yarn" and (reason := _unsupported_yarn(config, rope)) is not None:
        return reason
    every = [int((i + 1) % ROPE_STEP != 0) for i in range(config.num_hidden_layers)]
    if getattr(config, "no_rope_layers", every) != every:
        return f"llama.cpp leaves RoPE out of every {ROPE_STEP}th block, no_rope_layers of others"
    return _unsupported_sliding_rope(config)


def _unsupported_sliding_rope(config: PreTrainedConfig) -> str | None:
    stated = getattr(config, "rope_parameters", None) or {}
    if stated.get(SLIDING, {}).get("rope_type", "default") != "default":
        return "llama.cpp scales no frequencies in blocks with a sliding window"
    bases = [rope_parameters(config, of_kind).get("rope_theta") for of_kind in (FULL, SLIDING)]
    two = config.model_type == "gemma3_text" or architecture_of(config).lists_blocks
    if bases[0] != bases[1] and SLIDING in attention_kinds(config) and not two:
        return f"llama.cpp has one rope_theta in all blocks of a {config.model_type}, rope_parameters two"
    return None


def _unsupported_yarn(config: PreTrainedConfig, rope: Mapping[str, Any]) -> str | None:
    if not rope.get("factor"):
        return "llama.cpp wants the factor of yarn, which config.json does not have"
    if rounds_yarn(config) and config.model_type != "gpt_oss":
        return "llama.cpp rounds the range of yarn's frequencies, truncate false does not"
    betas = rope.get("beta_fast") or USUAL_BETAS[0], rope.get("beta_slow") or USUAL_BETAS[1]
    if betas != USUAL_BETAS and config.model_type != "ministral3":
        fast, slow = USUAL_BETAS
        return f"llama.cpp runs yarn with beta_fast {fast:g} and beta_slow {slow:g}, whatever a file says"
    usual = 1 + 0.1 * math.log(rope["factor"])
    mscales = {rope.get("mscale"), rope.get("mscale_all_dim")}
    known = mscales == {None} or (config.model_type == "ministral3" and mscales in ({0.0}, {1.0}))
    expected = 1.0 if mscales == {1.0} else usual  # llama.cpp takes mscale as 1
    if hasattr(config, "kv_lora_rank"):
        known, expected = len(mscales) == 1 and bool(rope.get("mscale")), 1.0
    if not known or abs((rope.get("attention_factor") or expected) - expected) > 1e-5:
        return "llama.cpp computes the attention_factor of yarn from its factor alone"
    return None


def _unsupported_windows(config: PreTrainedConfig, architecture: Architecture) -> str | None:
    kinds = attention_kinds(config)
    if not architecture.windows and len(set(kinds) - {LINEAR, CONVOLUTION}) > 1:
        return f"llama.cpp has no sliding windows in some blocks of a {config.model_type}"
    only = architecture.window_blocks
    if only is not None and (SLIDING in kinds) != (only == len(kinds)):
        return f"llama.cpp has sliding windows in a {config.model_type} of {only} blocks alone"
    if architecture.windows and not architecture.lists_blocks and full_period(config) is None:
        return "llama.cpp has windows in all blocks but every n-th, layer_types in others"
    windowed = config.model_type in ("gpt_oss", "gemma2") or architecture.lists_blocks
    if windowed and SLIDING not in kinds:
        return f"llama.cpp has no {config.model_type} without sliding windows"
    # in transformers the window's being stated decides, in llama.cpp its being used
    if config.model_type == "exaone4" and config.sliding_window is not None and SLIDING not in kinds:
        return "llama.cpp has RoPE in an EXAONE 4 without sliding blocks, and sliding_window takes it away"
    return None


def _unsupported_scores(config: PreTrainedConfig, architecture: Architecture) -> str | None:
    for cap in ("attn_logit", "final_logit"):
        if (getattr(config, f"{cap}_softcapping", None) is not None) != (cap in architecture.caps):
            return f"llama.cpp runs {config.model_type} with another {cap}_softcapping"
    if (squared := getattr(config, "query_pre_attn_scalar", None)) is not None:
        large = LARGEST[config.model_type] == config.num_hidden_layers
        expected = config.hidden_size // config.num_attention_heads if large else config.head_dim
        if squared != expected:
            return f"llama.cpp runs query_pre_attn_scalar {expected}, not {squared}"
    return None
