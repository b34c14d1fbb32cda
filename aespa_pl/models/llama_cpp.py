"""Translate names and layouts of the families into llama.cpp's, for its GGUF files.

Source: llama.cpp's ``src/llama-arch.cpp`` and ``src/models``; each entry was run (docs/export.md).
"""

from dataclasses import dataclass

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Architecture:
    """Describes one architecture of llama.cpp."""

    name: str
    rotates_neighbours: bool = False
    """RoPE turns columns 2i and 2i + 1 of a head; in transformers' weights the pair is i and i + d_h/2."""
    activation: str = "silu"
    """Name in config.json of the only activation that llama.cpp has for this architecture."""


ARCHITECTURES = {
    "llama": Architecture("llama", rotates_neighbours=True),
    "mistral": Architecture("llama", rotates_neighbours=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "bloom": Architecture("bloom", activation="gelu"),
}
"""llama.cpp's architectures by ``model_type``; a type that is missing has none."""

ROPE_TYPES = ("default", "linear", "llama3")
"""The scalings of RoPE's frequencies that are written exactly."""


ANY_LENGTH = 2048
"""Context length that is written for a model without a limit of positions (ALiBi)."""


def architecture_of(config: PreTrainedConfig) -> Architecture:
    """Return llama.cpp's architecture of a model that ``unsupported_part`` found nothing in."""
    return ARCHITECTURES[config.model_type]


def unsupported_part(config: PreTrainedConfig) -> str | None:
    """Return the part of config.json that llama.cpp would run differently; None if there is none."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        return f"llama.cpp has no architecture for model_type {config.model_type}"
    activation = getattr(config, "hidden_act", architecture.activation)
    if activation != architecture.activation:
        return f"llama.cpp runs {architecture.activation} where hidden_act is {activation}"
    if getattr(config, "apply_residual_connection_post_layernorm", False):
        return "llama.cpp ignores apply_residual_connection_post_layernorm"
    kind = rope_type(config)
    if kind not in ROPE_TYPES:
        return f"rope_type {kind} is none of {', '.join(ROPE_TYPES)}"
    return None


def rope_type(config: PreTrainedConfig) -> str:
    """Return the scaling of RoPE's frequencies."""
    return str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))


def context_length(config: PreTrainedConfig) -> int:
    """Return the longest context that llama.cpp runs as transformers does.

    llama.cpp has no sliding window for these architectures; within the first window there is none.
    """
    stated = (
        getattr(config, name, None)
        for name in ("max_position_embeddings", "seq_length", "sliding_window")
    )
    return min((int(length) for length in stated if length), default=ANY_LENGTH)
