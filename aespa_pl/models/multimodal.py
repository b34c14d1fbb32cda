"""Take the text model out of a multimodal one, such as Gemma 3 4B: its configuration, its names in files."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aespa_pl.storage.files import read_json

Value = TypeVar("Value")

MULTIMODAL = (
    "gemma3", "gemma4", "gemma4_unified", "mistral3", "qwen3_5", "qwen3_5_moe", "lfm2_vl", "smolvlm",
    "internvl",
)  # fmt: skip
"""The ``model_type`` values whose text model runs on text as the whole model does; ``text_config`` has it."""
PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""What names of the text model begin with in files of the whole, and as a model of its own."""
TIED, PACKED = "tie_word_embeddings", "quantization_config"
SHARED = ("dtype", "torch_dtype", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id")
"""What config.json may state of the whole that holds for the text model."""


def whole_type(folder: Path) -> str | None:
    """Return the ``model_type`` of a folder's multimodal model; None where it has a text model alone."""
    found = str(read_json(folder / "config.json").get("model_type"))
    return found if found in MULTIMODAL else None


def text_config(config: PreTrainedConfig, content: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the configuration of the text model, which is ``config`` itself where it is no multimodal one.

    ``content`` is that of config.json.
    """
    if config.model_type not in MULTIMODAL:
        return config
    text, whole = cast(PreTrainedConfig, config.get_text_config(decoder=True)), cast(Any, config)
    stated = (part[TIED] for part in (content, content.get("text_config") or {}) if TIED in part)
    text.tie_word_embeddings = next(stated, whole.tie_word_embeddings)
    if (packed := getattr(config, PACKED, None)) is not None:
        setattr(text, PACKED, packed)
    return text


def text_content(config: PreTrainedConfig, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json of the text model says, given its configuration and the whole's config.json."""
    return {
        **{key: content[key] for key in SHARED if key in content},
        **(content.get("text_config") or {}),
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]],
        "model_type": config.model_type,
        TIED: config.tie_word_embeddings,
    }


def text_options(config: PreTrainedConfig, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by which transformers loads the text model alone; none where it is the whole."""
    if config.model_type not in MULTIMODAL or PACKED in content:
        return {}
    names = {f"^{re.escape(old)}": new for old, new in PREFIXES.items()}
    return {"config": text_config(config, content), "key_mapping": names}


def text_names(stored: Mapping[str, Value]) -> dict[str, Value]:
    """Return tensors of a multimodal model, those of its text model under the names that it has alone."""
    return {_text_name(name): tensor for name, tensor in stored.items()}


def _text_name(name: str) -> str:
    for old, new in PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
