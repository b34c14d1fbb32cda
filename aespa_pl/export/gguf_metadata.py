"""Write the hyperparameters of a model in the words of GGUF."""

import json
from dataclasses import asdict
from typing import Any

import numpy.typing as npt
import torch
from gguf import GGML_QUANT_VERSION, GGUFWriter, RopeScalingType
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aespa_pl.export.model_card import public_source
from aespa_pl.export.quantized import QuantizedModel
from aespa_pl.models.llama_cpp import context_length, rope_type


def add_metadata(writer: GGUFWriter, model: QuantizedModel, file_type: int) -> None:
    """Write what llama.cpp builds the model from."""
    config, layout = model.pretrained.config, model.layout()
    writer.add_name(model.original.name)
    writer.add_context_length(context_length(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(model.block_count)
    writer.add_feed_forward_length(
        getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    )
    writer.add_head_count(layout.heads)
    writer.add_head_count_kv(layout.key_value_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(file_type)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    _add_provenance(writer, model)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    rope = getattr(config, "rope_parameters", None)
    if rope:
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(layout.head_dim)
        writer.add_key_length(layout.head_dim)
        writer.add_value_length(layout.head_dim)
        if rope_type(config) == "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])


def _add_provenance(writer: GGUFWriter, model: QuantizedModel) -> None:
    """Write how the weights were made: version, settings, and calibration without folders of this machine."""
    calibration = asdict(model.settings.data.calibration)
    known = {
        "version": model.run.fingerprint.get("version of aespa-pl"),
        "quantization": json.dumps(asdict(model.settings.quantization)),
        "calibration": json.dumps({**calibration, "source": public_source(calibration["source"])}),
    }
    for key, value in known.items():
        writer.add_string(f"aespa_pl.{key}", str(value))


def rope_factors(config: PreTrainedConfig) -> npt.NDArray[Any] | None:
    """Return what RoPE's frequencies are divided by, ``[d_h / 2]`` float32; None where by nothing.

    LLaMA 3's scaling differs from frequency to frequency, and llama.cpp reads it as a tensor.
    """
    if rope_type(config) != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    head_dim = 2 * len(scaled)
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    plain = config.rope_parameters["rope_theta"] ** -exponents
    factors: npt.NDArray[Any] = (plain / scaled).float().numpy()
    return factors
