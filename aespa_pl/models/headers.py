"""Read what a model's folder says before any weight is read: its model, and where which tensors lie."""

import copy
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from aespa_pl.errors import UserError
from aespa_pl.models import MODEL_TYPES, family_of, unknown_model_type
from aespa_pl.models.experts import Part
from aespa_pl.models.multimodal import MULTIMODAL, text_config

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types that weights may be stored in, by their names in a header."""
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Names of the file with a model's weights, the preferred first; with ``.index.json`` it names shards."""
POINTER = b"version https://git-lfs"
"""Beginning of the file that git leaves where the content was not fetched."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
COUNTS = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")


@dataclass(frozen=True)
class StoredTensor:
    """Says where a tensor lies, with its shape and type as the header of the file has them."""

    file: Path
    name: str
    """Name in the file; files of base models lack the prefix of the causal-LM model."""
    shape: tuple[int, ...]
    dtype: str
    part: Part | None = None
    """Part of it that the tensor is, whose shape this is; None: all."""

    @property
    def bytes(self) -> int:
        """Return the bytes of the values."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def taken(self, part: Part | None) -> "StoredTensor":
        """Return a part of this tensor, which is whole. Raises UserError where it has no such part."""
        if part is None:
            return self
        whole = torch.empty(self.shape, device="meta")
        try:
            return replace(self, part=part, shape=tuple(part.of(whole).shape))
        except (IndexError, RuntimeError) as error:
            raise UserError(
                f"model.pretrained: tensor {self.name} in {self.file} is {list(self.shape)}, which does not "
                f"hold the experts that config.json beside it asks for ({error}): one of them is of another "
                "model"
            ) from error

    def read(self, file: Any) -> Tensor:
        """Return the values from the file that is open."""
        if self.part is None:
            return cast(Tensor, file.get_tensor(self.name))
        # as a block has it that was quantized: products with other strides round in another way
        return self.part.of(file.get_slice(self.name)).contiguous()


def read_config(folder: Path) -> PreTrainedConfig:
    """Read config.json, and raise UserError unless it describes a model that can be quantized.

    Of a multimodal model it is the configuration of the text model.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"model.pretrained: no config.json in {folder}: give the folder of a Hugging Face model"
        )
    try:
        model_type = json.loads(path.read_text(encoding="utf-8")).get("model_type")
        if model_type not in (*MODEL_TYPES, *MULTIMODAL):
            raise unknown_model_type(model_type)
        config = text_config(folder)
        if config.model_type not in MODEL_TYPES:
            raise unknown_model_type(config.model_type, whole=model_type)
    except UserError:
        raise
    except Exception as error:  # the library's configurations raise whatever their checks raise
        reason = " ".join(str(error).split())
        raise UserError(
            f"model.pretrained: {path} cannot be read ({reason}): copy it from the model's origin"
        ) from error
    _refuse_unsound(config)
    return config


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model of a configuration without weights: all on the meta device."""
    config = copy.deepcopy(config)
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    family_of(config).unfuse(model)
    return cast(PreTrainedModel, model.eval().requires_grad_(requires_grad=False))


def _refuse_unsound(config: PreTrainedConfig) -> None:
    """Refuse a configuration that the library reads, but whose model can't be made or can't run.

    The library checks few of a configuration's values. So its model is made, and its first block
    run, on the meta device: that takes no memory and finds what the library itself stumbles over.
    """
    for name in COUNTS:
        if (given := getattr(config, name)) < 1:
            raise UserError(f"model.pretrained: {name} in config.json is {given}: expected 1 or more")
    try:
        _try(config)
    except UserError:
        raise
    except Exception as error:  # the library's models raise whatever their parts raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            "model.pretrained: transformers can't run the model that config.json describes "
            f"({reason}): copy config.json from the model's origin, or install a transformers that is newer "
            f"than {transformers.__version__}"
        ) from error


def _try(config: PreTrainedConfig) -> None:
    """Run the first block of each layout, and the head, on two tokens without values."""
    family = family_of(config)
    model, layouts = skeleton(config), family.layouts(config)
    blocks = list(cast(nn.Module, model.get_submodule(family.blocks_path)).children())
    firsts = {layout: layouts.index(layout) for layout in layouts}
    for layout, index in firsts.items():
        for projection in layout.projections:
            rows, columns = blocks[index].get_parameter(f"{projection.module}.weight").shape
            if not rows * columns:
                raise ValueError(f"{projection.name} is {rows} x {columns}")
        if layout.heads % (keys := layout.key_value_heads):
            raise ValueError(f"{layout.heads} query heads can't share {keys} key/value heads")
    positions = family.positions(config)
    if positions is not None and positions < 2:
        raise ValueError(f"max_position_embeddings is {positions}")
    hidden = torch.zeros(1, 2, family.stream_width(config))  # [B, L, w]
    # Masks and rotations are made on the CPU: kinds of RoPE look at the values of positions.
    family.restore_buffers(model, hidden.device)
    arguments = _without_values(family.arguments(model, hidden))
    output = hidden.to("meta")
    for index in firsts.values():
        output = family.run_block(blocks[index], output, arguments)
    family.head(model, output)


def _without_values(value: Any) -> Any:
    """Return a block's arguments with all tensors on the meta device."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {name: _without_values(inner) for name, inner in value.items()}
    return tuple(map(_without_values, value)) if isinstance(value, tuple) else value


def refuse_no_tokenizer(folder: Path) -> None:
    """Refuse a folder without a tokenizer that this installation can read."""
    present = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        of_code = next((file.name for file in sorted(folder.glob("*.tiktoken"))), None)
        advice = "copy it from the model's origin"
        if of_code is not None:  # such code is never run
            advice = f"{of_code} is read by code of the model alone: take a copy of it with tokenizer.json"
        raise UserError(
            f"model.pretrained: no tokenizer in {folder}: expected one of "
            f"{', '.join(TOKENIZER_FILES)}; {advice}"
        )
    if present == ["tokenizer.model"] and find_spec("sentencepiece") is None:
        # transformers would ask for tiktoken, which can't read it either
        raise UserError(
            f"model.pretrained: the tokenizer in {folder} is a tokenizer.model alone, which needs "
            "the package sentencepiece: pip install sentencepiece, or copy tokenizer.json from the "
            "model's origin"
        )


def shards(folder: Path) -> list[Path]:
    """Return the files that hold the model: safetensors, or pickles (.bin) where there are none.

    UserError is raised where one is missing, or an index is damaged.
    """
    for whole in WEIGHTS:
        index = folder / f"{whole}.index.json"
        if index.is_file() or (folder / whole).is_file():
            # where both are left from two savings, transformers takes the whole file
            names = [whole] if (folder / whole).is_file() else _names_in(index)
            break
    else:
        names = [WEIGHTS[0]]
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UserError(
            f"model.pretrained: {', '.join(missing)} missing in {folder}: copy the weights from "
            "the model's origin"
        )
    return [folder / name for name in names]


def _names_in(index: Path) -> list[str]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        names = set(content["weight_map"].values())
        if not names or any(not name or Path(name).name != name for name in names):
            raise ValueError("weight_map must name files beside it")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise UserError(
            f"model.pretrained: {index} is damaged ({error}): copy it from the model's origin"
        ) from error
    return sorted(names)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return where the tensors of a safetensors file lie, by their names in it; raise as ``opened`` does."""
    with opened(path) as file:
        slices = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118 - no Mapping
        return {n: StoredTensor(path, n, tuple(part.get_shape()), part.get_dtype()) for n, part in slices}


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; raise UserError where it can't be read, or is truncated or damaged."""
    try:
        with path.open("rb"):  # the library words a missing permission like damage
            pass
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise UserError(
            f"model.pretrained: {path} cannot be read ({error.strerror or error}): correct its "
            "permissions, or copy it again from the model's origin"
        ) from error
    except SafetensorError as error:
        with path.open("rb") as file:
            is_pointer = file.read(len(POINTER)) == POINTER
        fetch = "fetch its content with git lfs pull" if is_pointer else "copy it again from its origin"
        raise UserError(f"model.pretrained: {path} is truncated or damaged ({error}): {fetch}") from error


def locate(
    model: PreTrainedModel, stored: Mapping[str, StoredTensor], folder: Path
) -> dict[str, StoredTensor]:
    """Return where each tensor of the model's ``state_dict`` lies.

    UserError is raised where one is missing, or has another shape, or a type that is not among ``DTYPES``.
    """
    state = model.state_dict(keep_vars=True)
    prefix, family = f"{model.base_model_prefix}.", family_of(model.config)
    named = {
        name: stored[candidate].taken(part)
        for name in state
        for place, part in reversed(family.places(name))
        for candidate in (place.removeprefix(prefix), place)
        if candidate in stored
    }
    shared = {id(state[name]): tensor for name, tensor in reversed(named.items())}
    located = {}
    for name, parameter in state.items():
        tensor = named.get(name) or shared.get(id(parameter))
        if tensor is None:
            raise UserError(
                f"model.pretrained: tensor {name} is missing in {folder}, but config.json "
                "asks for it: copy weights and config.json from the same origin"
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
                f"expected {', '.join(DTYPES)}; is the model quantized already?"
            )
        located[name] = tensor
    return located
