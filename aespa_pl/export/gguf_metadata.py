"""Write the hyperparameters of a model in the words of GGUF."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy.typing as npt
import torch
from gguf import GGML_QUANT_VERSION, ExpertGatingFuncType, GGUFWriter, RopeScalingType
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aespa_pl.export.model_card import public_source
from aespa_pl.export.quantized import QuantizedModel
from aespa_pl.models.block_kinds import CONVOLUTION, FULL, LINEAR, SLIDING, attention_kinds
from aespa_pl.models.family import PER_LAYER
from aespa_pl.models.llama_cpp import (
    PARTIAL,
    architecture_of,
    context_length,
    full_period,
    rope_base,
    rope_parameters,
    rope_type,
)
from aespa_pl.models.llama_cpp_types import COUNTED

NUMBERS: dict[str, Callable[[GGUFWriter, float], None]] = {
    "rms_norm_eps": GGUFWriter.add_layer_norm_rms_eps,
    "norm_eps": GGUFWriter.add_layer_norm_rms_eps,
    "layer_norm_epsilon": GGUFWriter.add_layer_norm_eps,
    "attention_multiplier": GGUFWriter.add_attention_scale,
    "embedding_multiplier": GGUFWriter.add_embedding_scale,
    "residual_multiplier": GGUFWriter.add_residual_scale,
    "logits_scaling": GGUFWriter.add_logit_scale,
    "attn_logit_softcapping": GGUFWriter.add_attn_logit_softcapping,
    "final_logit_softcapping": GGUFWriter.add_final_logit_softcapping,
}
"""Functions that write a norm's epsilon, multipliers and caps, by their names in config.json."""
NO_ROTATION = 1e30
"""What llama.cpp divides the frequency of columns by that are not rotated."""


def add_metadata(writer: GGUFWriter, model: QuantizedModel, file_type: int) -> None:
    """Write what llama.cpp builds the model from."""
    config, layout = model.pretrained.config, model.layouts[0]
    writer.add_name(Path(model.settings.model.pretrained).name or model.original.name)
    writer.add_context_length(context_length(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(model.block_count)
    writer.add_feed_forward_length(_feed_forward_length(model))
    _add_experts(writer, model)
    writer.add_head_count(layout.heads)
    kinds, architecture = attention_kinds(config), architecture_of(config)
    if architecture.name in COUNTED or architecture.lists_blocks:
        of_blocks = zip(kinds, model.layouts, strict=True)
        writer.add_head_count_kv(
            [each.key_value_heads * (kind in (FULL, SLIDING)) for kind, each in of_blocks]
        )
    else:
        writer.add_head_count_kv(1 if layout.latent else layout.key_value_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(file_type)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    _add_provenance(writer, model)
    for field, add in NUMBERS.items():
        if (value := getattr(config, field, None)) is not None:
            add(writer, value)
    if CONVOLUTION in kinds:
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if LINEAR in kinds:
        (_add_mamba if hasattr(config, "mamba_d_state") else _add_linear_attention)(writer, config)
    if hasattr(config, "mamba_d_state"):  # its word for whether there is RoPE
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    full = layout
    if architecture.lists_blocks:
        full = model.layouts[kinds.index(FULL)]
        _add_sliding_blocks(writer, config, model.layouts[kinds.index(SLIDING)].head_dim)
    else:
        _add_windows(writer, config)
    if rope_parameters(config):
        _add_rope(writer, config, full.head_dim)


def _add_experts(writer: GGUFWriter, model: QuantizedModel) -> None:
    """Write what differs between mixtures of experts, and which blocks have one."""
    config, mixtures = model.pretrained.config, enumerate(layout.mixture for layout in model.layouts)
    first, mixture = next(((i, each) for i, each in mixtures if each is not None), (0, None))
    if mixture is None:
        return
    writer.add_expert_count(mixture.count)
    writer.add_expert_used_count(mixture.chosen)
    writer.add_expert_feed_forward_length(_columns(model, first, f"{mixture.experts}.0.down_proj"))
    if mixture.shared is not None:
        length = _columns(model, first, f"{mixture.shared}.down_proj")
        writer.add_expert_shared_feed_forward_length(length)
    if (sigmoid := architecture_of(config).sigmoid) is not None:
        kinds = ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SIGMOID if sigmoid else kinds.SOFTMAX)
        writer.add_leading_dense_block_count(first)
        shared = (getattr(config, name, 0) for name in ("n_shared_experts", "moe_num_shared_experts"))
        writer.add_expert_shared_count(max(shared))
        writer.add_expert_weights_norm(getattr(config, "norm_topk_prob", True))
        writer.add_expert_weights_scale(getattr(config, "routed_scaling_factor", 1.0))
        writer.add_interleave_moe_layer_step(1)
        groups = getattr(config, "n_group", None) or 1
        if sigmoid and groups > 1:  # the others that state groups choose among all experts
            writer.add_expert_group_count(groups)
            writer.add_expert_group_used_count(config.topk_group)


def _feed_forward_length(model: QuantizedModel) -> int | list[int]:
    """Return the columns of the last matrix of dense blocks; config.json has none, or others, of some."""
    layout = model.layouts[0]
    if layout.mixture is not None:
        return int(model.pretrained.config.intermediate_size)
    (*_, last) = (group for group in layout.groups if group.name not in PER_LAYER)
    if layout.groups[-1] == last:
        return _columns(model, 0, last.projections[0].module)
    return [_columns(model, index, last.projections[0].module) for index in range(model.block_count)]


def _columns(model: QuantizedModel, index: int, module: str) -> int:
    """Return the columns of a linear layer of a block."""
    return model.pretrained.tensors[f"{model.family.block_prefix(index)}{module}.weight"].shape[1]


def _add_linear_attention(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(cast(int, full_period(config)))
    # positions of text, height and width, which are all the same in text
    writer.add_rope_dimension_sections([*rope_parameters(config).get("mrope_section", [11, 11, 10]), 0])


def _add_mamba(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)


def _add_sliding_blocks(writer: GGUFWriter, config: PreTrainedConfig, head_dim: int) -> None:
    """Write which blocks have windows, the size of their heads, and what the smaller models have."""
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == SLIDING for kind in attention_kinds(config)])
    writer.add_key_length_swa(head_dim)
    writer.add_value_length_swa(head_dim)
    writer.add_rope_dimension_count_swa(head_dim)
    writer.add_shared_kv_layers(getattr(config, "num_kv_shared_layers", 0))
    writer.add_embedding_length_per_layer_input(getattr(config, "hidden_size_per_layer_input", None) or 0)


def _add_windows(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    period = full_period(config)
    if architecture_of(config).windows and period is not None and period != 1:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(period)


def _add_rope(writer: GGUFWriter, config: PreTrainedConfig, head_dim: int) -> None:
    rope, kind = rope_parameters(config), rope_type(config)
    writer.add_rope_freq_base(rope_base(config, head_dim))
    writer.add_rope_freq_base_swa(rope_parameters(config, SLIDING)["rope_theta"])
    share = rope.get("partial_rotary_factor", 1.0) if config.model_type in PARTIAL else 1.0
    if hasattr(config, "kv_lora_rank"):
        _add_latent(writer, config)
    else:
        writer.add_rope_dimension_count(int(head_dim * share))
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    beta = rope.get("llama_4_scaling_beta")
    if kind == "yarn" or beta is not None:
        length = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(length)
    if kind == "yarn":
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)
        if (of_all := rope.get("mscale_all_dim")) is not None:
            # elsewhere llama.cpp itself multiplies by the 0.1 of YaRN's logarithm
            writer.add_rope_scaling_yarn_log_mul(of_all * (0.1 if hasattr(config, "kv_lora_rank") else 1))
    if beta is not None:
        writer.add_attn_temperature_scale(beta)


def _add_latent(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    """Write the sizes of latent attention, which llama.cpp runs with one key and value for all heads."""
    latent, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    writer.add_q_lora_rank(config.q_lora_rank or 0)
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rotated)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config.qk_nope_head_dim + rotated)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(rotated)


def _add_provenance(writer: GGUFWriter, model: QuantizedModel) -> None:
    """Write how the weights were made: version, settings, and calibration without folders of this machine."""
    calibration = asdict(model.settings.data.calibration)
    calibration["source"] = public_source(calibration["source"])
    writer.add_string("aespa_pl.version", str(model.run.fingerprint.get("version of aespa-pl")))
    writer.add_string("aespa_pl.quantization", json.dumps(asdict(model.quantization)))
    writer.add_string("aespa_pl.calibration", json.dumps(calibration))


def rope_factors(config: PreTrainedConfig) -> npt.NDArray[Any] | None:
    """Return what RoPE's frequencies are divided by, ``[d_h / 2]`` float32; None where by nothing.

    LLaMA 3's scaling differs from frequency to frequency, and llama.cpp reads it as a tensor. Gemma 4's is in
    the blocks with full attention alone, and leaves most frequencies at 0.
    """
    kind, of_blocks = rope_type(config), architecture_of(config).lists_blocks
    if kind != "llama3" and not of_blocks:
        return None
    options: dict[str, Any] = {"layer_type": FULL} if of_blocks else {}
    scaled, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **options)
    exponents = torch.arange(0, 2 * len(scaled), 2).float() / (2 * len(scaled))
    plain = rope_parameters(config)["rope_theta"] ** -exponents
    factors: npt.NDArray[Any] = (plain / scaled).clamp(max=NO_ROTATION).float().numpy()
    return factors
