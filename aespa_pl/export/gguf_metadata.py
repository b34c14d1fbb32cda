"""Write the hyperparameters and the tokenizer of a model in the words of GGUF.

The names of the tokenizer's rules are in ``models/llama_cpp_tokenizer.py``.
"""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy.typing as npt
import torch
from gguf import (
    GGML_QUANT_VERSION,
    ExpertGatingFuncType,
    GGUFWriter,
    RopeScalingType,
    SpecialVocab,
    TokenType,
)
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aespa_pl.export.model_card import public_source
from aespa_pl.export.quantized import QuantizedModel
from aespa_pl.models.block_kinds import CONVOLUTION, FULL, LINEAR, SLIDING, attention_kinds
from aespa_pl.models.llama_cpp import (
    PARTIAL,
    architecture_of,
    context_length,
    full_period,
    rope_base,
    rope_parameters,
    rope_type,
)
from aespa_pl.models.llama_cpp_tokenizer import SPACE, read_tokenizer, splitting_rule, steps_before_merges
from aespa_pl.models.llama_cpp_types import COUNTED

# it warns of templates for pairs of texts, which Gemma has, and which nothing here is made of
logging.getLogger("gguf.vocab").setLevel(logging.ERROR)

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


ROUTERS = {
    "glm4_moe": ExpertGatingFuncType.SIGMOID, "lfm2_moe": ExpertGatingFuncType.SIGMOID,
    "ernie4_5_moe": ExpertGatingFuncType.SOFTMAX,
}  # fmt: skip
"""Scores of experts, by the ``model_type`` of models whose first blocks may be dense."""
ENDS = ("eos", "eot", "eom")
"""llama.cpp's names of tokens that end a text."""
NEVER = (TokenType.UNUSED, TokenType.CONTROL)
"""Types of tokens that no text has, the least likely in a model's output first."""


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
    kinds = attention_kinds(config)
    if architecture_of(config).name in COUNTED:
        writer.add_head_count_kv([layout.key_value_heads * (kind in (FULL, SLIDING)) for kind in kinds])
    else:
        writer.add_head_count_kv(layout.key_value_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(file_type)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    _add_provenance(writer, model)
    for field, add in NUMBERS.items():
        if (value := getattr(config, field, None)) is not None:
            add(writer, value)
    _add_windows(writer, config)
    if CONVOLUTION in kinds:
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if LINEAR in kinds:
        (_add_mamba if config.model_type == "granitemoehybrid" else _add_linear_attention)(writer, config)
    if config.model_type == "granitemoehybrid":  # its word for whether there is RoPE
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    if rope_parameters(config):
        _add_rope(writer, config, layout.head_dim)


def _add_experts(writer: GGUFWriter, model: QuantizedModel) -> None:
    """Write what differs between mixtures of experts, and which blocks have one."""
    config, mixtures = model.pretrained.config, [layout.mixture for layout in model.layouts]
    first = next((i for i, mixture in enumerate(mixtures) if mixture is not None), None)
    if first is None or (mixture := mixtures[first]) is None:
        return
    writer.add_expert_count(mixture.count)
    writer.add_expert_used_count(mixture.chosen)
    writer.add_expert_feed_forward_length(_columns(model, first, f"{mixture.experts}.0.down_proj"))
    if mixture.shared is not None:
        length = _columns(model, first, f"{mixture.shared}.down_proj")
        writer.add_expert_shared_feed_forward_length(length)
    if config.model_type in ROUTERS:
        writer.add_expert_gating_func(ROUTERS[config.model_type])
        writer.add_leading_dense_block_count(getattr(config, "moe_layer_start_index", first))
        writer.add_expert_shared_count(getattr(config, "n_shared_experts", 0))
        writer.add_expert_weights_norm(getattr(config, "norm_topk_prob", True))
        writer.add_expert_weights_scale(getattr(config, "routed_scaling_factor", 1.0))
        writer.add_interleave_moe_layer_step(getattr(config, "moe_layer_interval", 1))


def _feed_forward_length(model: QuantizedModel) -> int:
    """Return the columns of the last matrix of a dense block; config.json has none, or others, of some."""
    layout = model.layouts[0]
    if layout.mixture is not None:
        return int(model.pretrained.config.intermediate_size)
    return _columns(model, 0, layout.groups[-1].projections[0].module)


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
            writer.add_rope_scaling_yarn_log_mul(of_all)
    if beta is not None:
        writer.add_attn_temperature_scale(beta)


def _add_provenance(writer: GGUFWriter, model: QuantizedModel) -> None:
    """Write how the weights were made: version, settings, and calibration without folders of this machine."""
    calibration = asdict(model.settings.data.calibration)
    calibration["source"] = public_source(calibration["source"])
    writer.add_string("aespa_pl.version", str(model.run.fingerprint.get("version of aespa-pl")))
    writer.add_string("aespa_pl.quantization", json.dumps(asdict(model.quantization)))
    writer.add_string("aespa_pl.calibration", json.dumps(calibration))


def rope_factors(config: PreTrainedConfig) -> npt.NDArray[Any] | None:
    """Return what RoPE's frequencies are divided by, ``[d_h / 2]`` float32; None where by nothing.

    LLaMA 3's scaling differs from frequency to frequency, and llama.cpp reads it as a tensor.
    """
    if rope_type(config) != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(0, 2 * len(scaled), 2).float() / (2 * len(scaled))
    plain = rope_parameters(config)["rope_theta"] ** -exponents
    factors: npt.NDArray[Any] = (plain / scaled).float().numpy()
    return factors


class _SpecialTokens(SpecialVocab):
    """Knows a model's special tokens; a number of -1 in config.json, which the library refuses, is none.

    The library reads one EOS; further tokens that end a text get the other names that llama.cpp has for such.
    """

    def __init__(self, folder: Path, size: int, *, load_merges: bool = False) -> None:
        super().__init__(folder, load_merges=load_merges, n_vocab=size)
        known = self.special_token_ids
        self.lost: list[int] = []
        """Ids that end a text, and that no name is left for."""
        for token in _end_tokens(folder):
            if not 0 <= token < size or token in map(known.get, ENDS):
                continue
            if (name := next((name for name in ENDS if name not in known), None)) is None:
                self.lost.append(token)
            else:
                known[name] = token

    def _set_special_token(self, typ: str, tid: Any) -> None:
        if not isinstance(tid, int) or tid >= 0:
            super()._set_special_token(typ, tid)

    def add_never(self, types: list[TokenType]) -> None:
        """Let a token that a model never means be the EOS, if there is none.

        llama.cpp would otherwise end a text at an ordinary token: the one with id 11, or 2 of SentencePiece.
        """
        unused, control = ([i for i, other in enumerate(types) if other == kind] for kind in NEVER)
        bos = self.special_token_ids.get("bos")
        candidates = [*unused, *([] if bos is None else [bos]), *control]
        if candidates:
            self.special_token_ids.setdefault("eos", candidates[0])


def _end_tokens(folder: Path) -> list[int]:
    """Return the ids that end a text in transformers, by generation_config.json, else by config.json."""
    for name in ("generation_config.json", "config.json"):
        try:
            stated = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError):  # transformers passes over such a file too
            continue
        if stated not in (None, []):
            return stated if isinstance(stated, list) else [stated]
    return []


def lost_end_tokens(folder: Path, size: int) -> list[int]:
    """Return the ids of tokens that end a text in transformers, and that a GGUF file has no name for."""
    return _SpecialTokens(folder, size).lost if len(_end_tokens(folder)) >= len(ENDS) else []


def unnamed_start(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the tokens that each text begins with, unless it is BOS alone: a GGUF file asks for no other."""
    ids, plain = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    start = ids[: ids.index(plain[0])] if plain and plain[0] in ids else []
    return "" if start == [tokenizer.bos_token_id] else "".join(tokenizer.convert_ids_to_tokens(start))


def add_vocabulary(writer: GGUFWriter, folder: Path, size: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write tokens, merges, special tokens and template of a tokenizer that llama.cpp has.

    ``folder`` has its files, and ``tokenizer`` is what transformers makes of them.
    """
    content = read_tokenizer(folder)
    model = content["model"]
    added = {token["content"]: token for token in content.get("added_tokens", [])}
    vocabulary = {**model["vocab"], **{text: token["id"] for text, token in added.items()}}
    kinds = {True: TokenType.CONTROL, False: TokenType.USER_DEFINED}
    types = {text: kinds[token["special"]] for text, token in added.items()}
    texts = {number: text for text, number in vocabulary.items()}
    tokens = [texts.get(i, f"[PAD{i}]") for i in range(size)]
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(model["merges"], tokens))
        steps = steps_before_merges(content)  # some split a text as if a space came before it
        writer.add_add_space_prefix(any(map(_prepends_space, steps)))
        # in an added token that is written as it is, llama.cpp would not turn the sign back into a space
        types = {text: kind for text, kind in types.items() if added[text]["special"] or SPACE not in text}
        types = {**{t: TokenType.BYTE for t in tokens if re.fullmatch("<0x..>", t)}, **types}
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(str(splitting_rule(content)))
    writer.add_token_list(tokens)
    known = (types.get(token, TokenType.NORMAL) for token in tokens)
    of_rows = [kind if i in texts else TokenType.UNUSED for i, kind in enumerate(known)]
    writer.add_token_types(of_rows)
    special = _SpecialTokens(folder, size, load_merges=not model.get("byte_fallback"))
    special.add_never(of_rows)
    if isinstance(tokenizer.chat_template, str):  # of two files with one, the library takes the other
        special.chat_template = tokenizer.chat_template
    # of what a file does not say, llama.cpp decides by the name of the splitting rule
    ids = tokenizer("a")["input_ids"]
    special.add_special_token |= {
        "bos": ids[:1] == [tokenizer.bos_token_id], "eos": ids[-1:] == [tokenizer.eos_token_id]
    }  # fmt: skip
    special.add_to_gguf(writer, quiet=True)


def _prepends_space(step: dict[str, Any]) -> bool:
    """Return whether a step before the merges puts a space before a text; older files have no scheme."""
    kind = step["type"]
    return bool(kind == "Prepend" or (kind == "Metaspace" and step.get("prepend_scheme") != "never"))


def _scores(merges: list[Any], tokens: list[str]) -> list[float]:
    """Return scores by which llama.cpp, which joins the pair of the highest first, merges in this order."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault("".join(pair), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]
