"""Take the text model out of a multimodal one, such as Gemma 3 4B: its configuration, its names in files."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase, TokenizersBackend
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aespa_pl.storage.files import read_json

Value = TypeVar("Value")

ONE_POSITION = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
"""The ``model_type`` that text models of some wholes have when they are alone. Each token has three positions
in the whole, which are the same in text."""
MULTIMODAL = (
    "gemma3", "gemma4", "gemma4_unified", "mistral3", "qwen3_5", "qwen3_5_moe", "lfm2_vl", "smolvlm",
    "internvl", *ONE_POSITION,
)  # fmt: skip
"""The ``model_type`` values whose text model runs on text as the whole model does; ``text_config`` has it."""
PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""What names of the text model begin with in files of the whole, and as a model of its own."""
CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
TEXT, CLASS = "text_config", "tokenizer_class"
TIED, PACKED, TYPE = "tie_word_embeddings", "quantization_config", "dtype"
SHARED = (TYPE, "torch_dtype", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id")
"""What config.json may state of the whole that holds for the text model."""
OF_CLASS = ("model_type", "architectures", "transformers_version")
"""What a configuration states of its class."""


def whole_type(folder: Path) -> str | None:
    """Return the ``model_type`` of a folder's multimodal model; None where it has a text model alone."""
    found = str(read_json(folder / CONFIG).get("model_type"))
    return found if found in MULTIMODAL else None


def text_config(folder: Path) -> PreTrainedConfig:
    """Return the configuration of a folder's text model, by the library's classes.

    Whether the head is the embedding is what config.json states, or else what text models of the kind have.
    """
    config = cast(PreTrainedConfig, AutoConfig.from_pretrained(folder, trust_remote_code=False))
    if config.model_type not in MULTIMODAL:
        return config
    text, content = cast(PreTrainedConfig, config.get_text_config(decoder=True)), read_json(folder / CONFIG)
    if (kind := ONE_POSITION.get(config.model_type)) is not None:
        of_whole = {name: value for name, value in text.to_dict().items() if name not in OF_CLASS}
        rope = of_whole["rope_parameters"].items()
        of_one = {name: value for name, value in rope if not name.startswith(("mrope", "type"))}
        text = AutoConfig.for_model(kind, **of_whole | {"rope_parameters": of_one})
    if TIED in content:
        text.tie_word_embeddings = content[TIED]
    for name in (TYPE, PACKED):
        if (stated := getattr(config, name, None)) is not None:
            setattr(text, name, stated)
    return text


def text_files(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> dict[str, dict[str, Any]]:
    """Return the content of files that a text model has in the place of the whole's, by name.

    ``config`` is its configuration, ``tokenizer`` the whole's; the folder has the whole's files.
    """
    content = read_json(folder / CONFIG)
    text: dict[str, Any] = content.get(TEXT) or {}
    if content["model_type"] in ONE_POSITION:
        text = json.loads(config.to_json_string())
    architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    own = {"architectures": architectures, "model_type": config.model_type, TIED: config.tie_word_embeddings}
    files = {CONFIG: text | {key: content[key] for key in SHARED if content.get(key) is not None} | own}
    # for some wholes (Qwen3.5) the library takes another class than the one that is stated
    used = type(tokenizer).__name__
    if type(tokenizer) is not TokenizersBackend and (folder / TOKENIZER).is_file():
        stated = read_json(folder / TOKENIZER)
        if str(stated.get(CLASS, used)).removesuffix("Fast") != used:
            files[TOKENIZER] = stated | {CLASS: used}
    return files


def states_head(folder: Path) -> bool:
    """Tell whether config.json states if the head is the embedding; else files do that have no head."""
    content = read_json(folder / CONFIG)
    return any(TIED in part for part in (content, content.get(TEXT) or {}))


def text_options(folder: Path) -> dict[str, Any]:
    """Return the options by which transformers loads the text model alone; none where it is the whole."""
    if whole_type(folder) is None:
        return {}
    names = {f"^{re.escape(old)}": new for old, new in PREFIXES.items()}
    return {"config": text_config(folder), "key_mapping": names}


def text_name(name: str) -> str:
    """Return the name that a tensor of a whole's text model has alone; of other parts, the name itself."""
    for old, new in PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def text_names(stored: Mapping[str, Value]) -> dict[str, Value]:
    """Return tensors of a multimodal model, those of its text model under the names that it has alone."""
    return {text_name(name): tensor for name, tensor in stored.items()}


def parts_of(names: Iterable[str]) -> str:
    """Return the parts of a whole that tensors are in, given their names, for messages."""
    return ", ".join(sorted({name.removeprefix("model.").partition(".")[0] for name in names}))
