"""Which kind of attention each block of a model has, as the library runs it."""

from transformers import PreTrainedConfig

FULL, SLIDING, LINEAR, CONVOLUTION = "full_attention", "sliding_attention", "linear_attention", "conv"
"""Names of the kinds in ``config.layer_types``."""
LISTED_KINDS = (
    "qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text", "olmo3", "exaone4", "gpt_oss", "qwen2_moe",
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "granitemoehybrid",
    "gemma4_text", "gemma4_unified_text",
)  # fmt: skip
"""Model types whose blocks have the kinds that ``config.layer_types`` lists."""
ONE_WINDOW = ("mistral", "ministral3", "phi3", "mixtral", "qwen3_moe")
"""Model types with one sliding window in all blocks, or in none; all others have none."""


def attention_kinds(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the kind of each block, a key of its family's masks."""
    if config.model_type in LISTED_KINDS:
        return tuple(config.layer_types)
    window = config.sliding_window if config.model_type in ONE_WINDOW else None
    return (FULL if window is None else SLIDING,) * int(config.num_hidden_layers)
