"""Translate names and layouts of the families into llama.cpp's, for its GGUF files.

Source: llama.cpp's ``src/llama-arch.cpp`` and ``src/models``; each entry was run (docs/export.md).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from transformers import PreTrainedConfig

from aespa_pl.models.block_kinds import CONVOLUTION, FULL, LINEAR, SLIDING, attention_kinds
from aespa_pl.settings import QuantizationSettings


@dataclass(frozen=True)
class Architecture:
    """Describes one architecture of llama.cpp."""

    name: str
    moves_pairs: bool = False
    """Whether RoPE turns columns 2i and 2i + 1 of a head where transformers turns i and i + d_h/2."""
    divides_fused: bool = False
    """Fused projections follow one another there; in transformers' weights their rows alternate by heads."""
    activation: str = "silu"
    """Name in config.json of the only activation that llama.cpp has for this architecture."""
    windows: bool = False
    """Whether llama.cpp has sliding windows for it."""
    window_blocks: int | None = None
    """Number of blocks of the only model in which it has them; None: of all."""
    norm_offset: float = 0.0
    """What the weights of norms are stored with in addition to transformers' (Gemma: 1)."""
    caps: tuple[str, ...] = ()
    """Caps of scores and logits in config.json that it has; each must be a number."""
    only: Mapping[str, bool | float | tuple[float, ...]] = field(default_factory=dict)
    """The values that it has of entries of config.json; of others it has all."""
    scales_each: bool = False
    """Whether it has a factor for each frequency of RoPE, as LLaMA 3 has."""
    divides_width: bool = False
    """Whether its heads have ``hidden_size / num_attention_heads`` columns each, whatever head_dim is."""
    moves_heads: bool = False
    """Whether the value heads of linear attention have an order of their own there."""


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
UNBIASED = {"attention_bias": False}
LLAMA = Architecture("llama", moves_pairs=True, scales_each=True)
GEMMA = Architecture(
    "gemma3", activation="gelu_pytorch_tanh", windows=True, norm_offset=1.0, only={**TIED, **UNBIASED}
)
OLMO = Architecture("olmo2", windows=True, only={**UNTIED, **UNBIASED}, divides_width=True)
HYBRID = Architecture("qwen35", norm_offset=1.0, moves_heads=True, only=UNBIASED)
ARCHITECTURES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "ministral3": Architecture("mistral3", moves_pairs=True),
    "granite": replace(LLAMA, name="granite"),
    "granitemoehybrid": replace(
        LLAMA,
        name="granitehybrid",
        only={"mamba_proj_bias": False, "mamba_conv_bias": True, "time_step_limit": (0.0, math.inf)},
    ),
    "smollm3": Architecture("smollm3", moves_pairs=True, only={**UNBIASED, "mlp_bias": False}),
    "phi3": Architecture("phi3", divides_width=True),
    "seed_oss": Architecture("seed_oss", only={"attention_out_bias": False, "mlp_bias": False}),
    "qwen2": Architecture("qwen2", divides_width=True),
    "qwen3": Architecture("qwen3", only=UNBIASED),
    "gemma2": replace(GEMMA, name="gemma2", caps=("attn_logit", "final_logit")),
    "gemma3_text": GEMMA,
    "olmo2": OLMO,
    "olmo3": OLMO,
    "exaone4": Architecture("exaone4", windows=True, window_blocks=64, scales_each=True, divides_width=True),
    "glm": Architecture("chatglm", divides_width=True),
    "glm4": Architecture("glm4"),
    "ernie4_5": Architecture("ernie4_5", only={"use_bias": False}),
    "hunyuan_v1_dense": Architecture("hunyuan-dense", only=UNBIASED),
    "lfm2": Architecture("lfm2", only={"conv_bias": False}),
    "lfm2_moe": Architecture(
        "lfm2moe",
        only={
            **TIED,
            "conv_bias": False,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
        },
    ),
    "ernie4_5_moe": Architecture("ernie4_5-moe", only={"use_bias": False, "moe_layer_interval": 1}),
    "hunyuan_v1_moe": Architecture("hunyuan-moe", only=UNBIASED),
    "glm4_moe": Architecture("glm4moe", only={"n_group": 1}),
    "qwen2_moe": Architecture("qwen2moe", only={**UNTIED, "norm_topk_prob": False}, divides_width=True),
    "qwen3_moe": Architecture("qwen3moe", only={**UNBIASED, "norm_topk_prob": True}),
    "mixtral": LLAMA,
    "gpt_oss": Architecture(
        "gpt-oss", windows=True, only={**UNTIED, "attention_bias": True, "swiglu_limit": 7.0}
    ),
    "qwen3_next": Architecture("qwen3next", norm_offset=1.0, only={**UNBIASED, "norm_topk_prob": True}),
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": replace(HYBRID, name="qwen35moe"),
    "bloom": Architecture("bloom", activation="gelu", divides_fused=True),
}
"""llama.cpp's architectures by ``model_type``; a type that is missing has none."""
OTHER_ORDER = (
    "llama.cpp has the value heads of linear attention in another order, and groups of out_proj's columns "
    "would cross them"
)

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""The scalings of RoPE's frequencies that are written."""
USUAL_BETAS = 32.0, 1.0
"""YaRN's ``beta_fast`` and ``beta_slow`` where config.json has none, and in llama.cpp but for Ministral 3."""
PARTIAL = ("phi3", "glm", "glm4", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Models with RoPE in a part of each head; in others transformers ignores ``partial_rotary_factor``."""
DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""Names in config.json of the number of blocks before those with experts."""
ROPE_STEP = 4
"""The SmolLM3 of llama.cpp has no RoPE in each block whose number, from 1, is a multiple of this."""
LARGEST = {"gemma2": 46, "gemma3_text": 62}
"""Blocks of the model whose queries llama.cpp divides by the root of ``d / n_h``, not of ``d_h``."""
ANY_LENGTH = 2048
"""Context length that is written for a model without a limit of positions (ALiBi)."""


def architecture_of(config: PreTrainedConfig) -> Architecture:
    """Return llama.cpp's architecture of a model that ``unsupported_part`` found nothing in."""
    found = ARCHITECTURES[config.model_type]
    if found.name == "granitehybrid" and LINEAR not in attention_kinds(config):
        return ARCHITECTURES["granite"]
    return found


def unsupported_part(config: PreTrainedConfig) -> str | None:
    """Return the part of config.json that llama.cpp would run differently; None if there is none."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        return f"llama.cpp has no architecture for model_type {config.model_type}"
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
    if max(getattr(config, name, 0) for name in DENSE) >= blocks:
        return f"llama.cpp has no {config.model_type} without experts"
    if getattr(config, "moe_layer_end_index", blocks - 1) != blocks - 1:
        return "llama.cpp has experts in the last blocks, moe_layer_end_index before them"
    if isinstance(chosen := getattr(config, "moe_topk", 1), list) and len(set(chosen)) > 1:
        return "llama.cpp routes to one number of experts in all blocks, moe_topk to several"
    return None


def _unsupported_heads(config: PreTrainedConfig, architecture: Architecture) -> str | None:
    heads, size = config.num_attention_heads, getattr(config, "head_dim", None)
    if architecture.divides_width and size is not None and heads * size != config.hidden_size:
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


def other_heads(config: PreTrainedConfig) -> bool:
    """Return whether llama.cpp has the value heads of linear attention in an order of its own."""
    architecture = ARCHITECTURES.get(config.model_type)
    moves = architecture is not None and architecture.moves_heads and LINEAR in attention_kinds(config)
    return moves and bool(config.linear_num_key_heads != config.linear_num_value_heads)


def crosses_heads(config: PreTrainedConfig, settings: QuantizationSettings) -> bool:
    """Return whether groups of columns would not lie within a head whose place differs in llama.cpp."""
    typed = settings.format != "uniform"
    return other_heads(config) and (typed or config.linear_value_head_dim % (settings.group_size or 1) != 0)


def _unsupported_rope(config: PreTrainedConfig, architecture: Architecture) -> str | None:
    rope, kind = rope_parameters(config), rope_type(config)
    if kind not in ROPE_TYPES:
        return f"rope_type {kind} is none of {', '.join(ROPE_TYPES)}"
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
    if bases[0] != bases[1] and SLIDING in attention_kinds(config) and config.model_type != "gemma3_text":
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
    if architecture.windows and full_period(config) is None:
        return "llama.cpp has windows in all blocks but every n-th, layer_types in others"
    if config.model_type in ("gpt_oss", "gemma2") and SLIDING not in kinds:
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


def full_period(config: PreTrainedConfig) -> int | None:
    """Return the n of a model whose every n-th block alone has full attention, 0: none; None: no n fits."""
    full = [kind == FULL for kind in attention_kinds(config)]
    period = full.index(True) + 1 if True in full else 0
    expected = [period > 0 and (i + 1) % period == 0 for i in range(len(full))]
    return period if full == expected else None


def rope_parameters(config: PreTrainedConfig, kind: str = FULL) -> dict[str, Any]:
    """Return the parameters of RoPE in blocks of a kind; empty without RoPE."""
    stated = getattr(config, "rope_parameters", None) or {}
    return cast(dict[str, Any], stated.get(kind, stated))


def rounds_yarn(config: PreTrainedConfig) -> bool:
    """Return whether llama.cpp rounds the range of YaRN's frequencies, and transformers does not."""
    return rope_type(config) == "yarn" and not rope_parameters(config).get("truncate", True)


def rope_type(config: PreTrainedConfig) -> str:
    """Return the scaling of RoPE's frequencies."""
    stated = str(rope_parameters(config).get("rope_type", "default"))
    return stated if _alpha(config) is None else "default"


def rope_base(config: PreTrainedConfig, head_dim: int) -> float:
    """Return the base of RoPE's frequencies."""
    factor = (_alpha(config) or 1.0) ** (head_dim / (head_dim - 2))
    return float(rope_parameters(config)["rope_theta"] * factor)


def _alpha(config: PreTrainedConfig) -> float | None:
    """Return what scales the base of Hunyuan's RoPE, which its files call dynamic; None: nothing."""
    rope = rope_parameters(config)
    dynamic = (
        config.model_type in ("hunyuan_v1_dense", "hunyuan_v1_moe") and rope.get("rope_type") == "dynamic"
    )
    return rope.get("alpha") or None if dynamic else None


def context_length(config: PreTrainedConfig) -> int:
    """Return the longest context that llama.cpp runs as transformers does.

    Where llama.cpp has no sliding window, it is the window: within the first window there is none.
    """
    names = ["max_position_embeddings", "seq_length"]
    if not architecture_of(config).windows and SLIDING in attention_kinds(config):
        names += ["sliding_window"]
    stated = (getattr(config, name, None) for name in names)
    return min((int(length) for length in stated if length), default=ANY_LENGTH)
