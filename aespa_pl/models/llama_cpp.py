"""How llama.cpp names and arranges the families: what its GGUF files need to know of a model.

Source: llama.cpp's ``src/llama-arch.cpp`` and ``src/models``; each entry was run (docs/export.md).
"""

from dataclasses import dataclass

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Architecture:
    """One architecture of llama.cpp."""

    name: str
    rotates_neighbours: bool = False
    """RoPE turns columns 2i and 2i + 1 of a head; in transformers' weights the pair is i and i + d_h/2."""
    activation: str = "silu"
    """The only activation that llama.cpp has for it, in the words of config.json."""


ARCHITECTURES = {
    "llama": Architecture("llama", rotates_neighbours=True),
    "mistral": Architecture("llama", rotates_neighbours=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "bloom": Architecture("bloom", activation="gelu"),
}
"""By ``model_type``; a type that is missing has no architecture there."""

ROPE_TYPES = ("default", "linear", "llama3")
"""The scalings of RoPE's frequencies that are written exactly."""


ANY_LENGTH = 2048
"""What a model without a limit of positions (ALiBi) is said to be made for."""


def architecture_of(config: PreTrainedConfig) -> Architecture:
    """Return llama.cpp's architecture of a model that ``unsupported_part`` found nothing in."""
    return ARCHITECTURES[config.model_type]


def unsupported_part(config: PreTrainedConfig) -> str | None:
    """Return what of config.json llama.cpp would run in another way, None if nothing."""
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
