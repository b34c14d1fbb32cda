"""Translate names and layouts of the families into llama.cpp's, for its GGUF files.

Source: llama.cpp's ``src/llama-arch.cpp`` and ``src/models``; each entry was run (docs/export.md).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from transformers import PreTrainedConfig

from aespa_pl.models.block_kinds import FULL, LINEAR, SLIDING, attention_kinds
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
    lists_blocks: bool = False
    """Whether a file lists which blocks have windows, and blocks without them have heads of another size."""
    window_blocks: int | None = None
    """Number of blocks of the only model in which it has them; None: of all."""
    norm_offset: float = 0.0
    """What the weights of norms are stored with in addition to transformers' (Gemma: 1)."""
    caps: tuple[str, ...] = ()
    """Caps of scores and logits in config.json that it has; each must be a number."""
    only: Mapping[str, bool | float | str | tuple[float, ...]] = field(default_factory=dict)
    """The values that it has of entries of config.json; of others it has all."""
    scales_each: bool = False
    """Whether it has a factor for each frequency of RoPE, as LLaMA 3 has."""
    divides_width: bool = False
    """Whether its heads have ``hidden_size / num_attention_heads`` columns each, whatever head_dim is."""
    sigmoid: bool | None = None
    """Whether experts have sigmoids as scores, not a softmax, where dense blocks may come before them."""
    moves_heads: bool = False
    """Whether the value heads of linear attention have an order of their own there."""


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
UNBIASED = {"attention_bias": False}
LLAMA = Architecture("llama", moves_pairs=True, scales_each=True)
GRANITE_MOE = replace(LLAMA, name="granitemoe")
"""What Granite 3 with experts, and Granite 4 with experts and attention alone, are there."""
GEMMA = Architecture(
    "gemma3", activation="gelu_pytorch_tanh", windows=True, norm_offset=1.0, only={**TIED, **UNBIASED}
)
GEMMA4 = replace(
    GEMMA, name="gemma4", norm_offset=0.0, caps=("final_logit",), lists_blocks=True, only=UNBIASED
)
OLMO = Architecture("olmo2", windows=True, only={**UNTIED, **UNBIASED}, divides_width=True)
HYBRID = Architecture("qwen35", norm_offset=1.0, moves_heads=True, only=UNBIASED)
LATENT = Architecture("deepseek2", sigmoid=True, only={**UNBIASED, "rope_interleave": True})
ARCHITECTURES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "ministral3": Architecture("mistral3", moves_pairs=True),
    "granite": replace(LLAMA, name="granite"),
    "granitemoe": GRANITE_MOE,
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
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
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
        sigmoid=True,
        only={
            **TIED,
            "conv_bias": False,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
        },
    ),
    "ernie4_5_moe": Architecture(
        "ernie4_5-moe", sigmoid=False, only={"use_bias": False, "moe_layer_interval": 1}
    ),
    "hunyuan_v1_moe": Architecture("hunyuan-moe", only=UNBIASED),
    "glm4_moe": Architecture("glm4moe", sigmoid=True, only={"n_group": 1}),
    "glm4_moe_lite": LATENT,
    "deepseek_v2": replace(
        LATENT,
        sigmoid=False,
        only={**UNBIASED, "mlp_bias": False, "norm_topk_prob": False, "topk_method": "greedy"},
    ),
    "deepseek_v3": LATENT,
    "qwen2_moe": Architecture("qwen2moe", only={**UNTIED, "norm_topk_prob": False}, divides_width=True),
    "olmoe": Architecture("olmoe", only={**UNTIED, **UNBIASED, "norm_topk_prob": False}),
    "qwen3_moe": Architecture("qwen3moe", only={**UNBIASED, "norm_topk_prob": True}),
    "mixtral": LLAMA,
    "gpt_oss": Architecture(
        "gpt-oss", windows=True, only={**UNTIED, "attention_bias": True, "swiglu_limit": 7.0}
    ),
    "minimax_m2": Architecture("minimax-m2", sigmoid=True, only=UNTIED),
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

PARTIAL = ("phi3", "glm", "glm4", "glm4_moe", "minimax_m2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Models with RoPE in a part of each head; in others transformers ignores ``partial_rotary_factor``."""
ANY_LENGTH = 2048
"""Context length that is written for a model without a limit of positions (ALiBi)."""


def architecture_of(config: PreTrainedConfig) -> Architecture:
    """Return llama.cpp's architecture of a model; KeyError where it has none."""
    found = ARCHITECTURES[config.model_type]
    if found.name == "granitehybrid" and LINEAR not in attention_kinds(config):
        return GRANITE_MOE if config.num_local_experts else ARCHITECTURES["granite"]
    return found


def other_heads(config: PreTrainedConfig) -> bool:
    """Return whether llama.cpp has the value heads of linear attention in an order of its own."""
    architecture = ARCHITECTURES.get(config.model_type)
    moves = architecture is not None and architecture.moves_heads and LINEAR in attention_kinds(config)
    return moves and bool(config.linear_num_key_heads != config.linear_num_value_heads)


def crosses_heads(config: PreTrainedConfig, settings: QuantizationSettings) -> bool:
    """Return whether groups of columns would not lie within a head whose place differs in llama.cpp."""
    typed = settings.format != "uniform"
    return other_heads(config) and (typed or config.linear_value_head_dim % (settings.group_size or 1) != 0)


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
