"""What the folder of a checkpoint holds, from config.json and the headers of its safetensors."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from aespa_pl.errors import UserError
from aespa_pl.models import MODEL_TYPES, unknown_model_type

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""The types that weights may be stored in, by their names in a header."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, and what the file's header says of it."""

    file: Path
    name: str
    """Its name in the file; checkpoints of base models lack the prefix of the causal-LM model."""
    shape: tuple[int, ...]
    dtype: str


def read_config(folder: Path) -> PreTrainedConfig:
    """Read config.json.

    Raises:
        UserError: It is missing or damaged, or names a ``model_type`` of no family.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"model.pretrained: no config.json in {folder}: give the folder of a Hugging Face "
            "checkpoint"
        )
    try:
        model_type = json.loads(path.read_text(encoding="utf-8")).get("model_type")
        if model_type not in MODEL_TYPES:
            raise unknown_model_type(model_type)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # the library's configurations raise whatever their checks raise
        raise UserError(
            f"model.pretrained: {path} cannot be read ({error}): copy it from the model's origin"
        ) from error
    return cast(PreTrainedConfig, config)


def refuse_no_tokenizer(folder: Path) -> None:
    """Raise UserError if no file of the folder can be a tokenizer."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"model.pretrained: no tokenizer in {folder}: expected one of "
            f"{', '.join(TOKENIZER_FILES)}; copy it from the model's origin"
        )


def shards(folder: Path) -> list[Path]:
    """Return the files that hold the model: those of the index, or the only one.

    Raises:
        UserError: One is missing, or the index is damaged.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            content = json.loads(index.read_text(encoding="utf-8"))
            names = sorted(set(content["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"model.pretrained: {index} is damaged ({error}): copy it from the model's origin"
            ) from error
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if not missing:
        return [folder / name for name in names]
    if not index.is_file() and any(folder.glob("*.bin")):
        raise UserError(
            f"model.pretrained: {folder} has weights in pickles (.bin) only: load the model with "
            "transformers, save it with save_pretrained, and give model.pretrained that folder"
        )
    raise UserError(
        f"model.pretrained: {', '.join(missing)} missing in {folder}: copy the weights from the "
        "model's origin"
    )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return what a file holds.

    Raises:
        UserError: The header is damaged, or the file is shorter or longer than it says.
    """
    with opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no Mapping
        return {
            name: StoredTensor(path, name, tuple(part.get_shape()), part.get_dtype())
            for name, part in slices.items()
        }


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; anything wrong with it is a UserError."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"model.pretrained: {path} is truncated or damaged ({error}): copy it anew from the "
            "model's origin (with git: git lfs pull)"
        ) from error


def locate(
    model: PreTrainedModel, stored: Mapping[str, StoredTensor], folder: Path
) -> dict[str, StoredTensor]:
    """Return where each tensor of the model's ``state_dict`` lies.

    Raises:
        UserError: One is missing, has another shape than the model's, or a type that is none of a
            model in full precision.
    """
    state = model.state_dict(keep_vars=True)
    prefix = f"{model.base_model_prefix}."
    found = {
        name: stored[candidate]
        for name in state
        for candidate in (name.removeprefix(prefix), name)
        if candidate in stored
    }
    shared = {id(state[name]): tensor for name, tensor in reversed(found.items())}
    located = {}
    for name, parameter in state.items():
        tensor = found.get(name) or shared.get(id(parameter))
        if tensor is None:
            raise UserError(
                f"model.pretrained: tensor {name} is missing in {folder}: config.json asks for it"
            )
        if tensor.shape != tuple(parameter.shape):
            raise UserError(
                f"model.pretrained: tensor {name} in {tensor.file} is {list(tensor.shape)}, but "
                f"config.json beside it asks for {list(parameter.shape)}: one of them is of "
                "another model"
            )
        if tensor.dtype not in DTYPES:
            raise UserError(
                f"model.pretrained: tensor {name} in {tensor.file} is stored as {tensor.dtype}: "
                f"expected {', '.join(DTYPES)}; is the checkpoint already quantized?"
            )
        located[name] = tensor
    return located
