"""Choose the block type of each quantized matrix of a run."""

import math
from collections import Counter
from collections.abc import Collection

from aespa_pl.export.gguf_blocks import smallest_type, zero_points
from aespa_pl.export.gguf_bytes import BLOCK_TYPES, BlockType
from aespa_pl.export.gguf_names import projections_of
from aespa_pl.export.quantized import QuantizedModel
from aespa_pl.models.headers import opened
from aespa_pl.models.llama_cpp_types import FILE_TYPES

IDEAL_WIDTH = 256
"""A number of columns that every block type divides."""


def is_quantized(model: QuantizedModel, name: str) -> bool:
    """Return whether a tensor is a quantized weight of a block."""
    return name.endswith(".weight") and bool(projections_of(model, name))


def candidate_type(model: QuantizedModel, name: str) -> BlockType | None:
    """Return the smallest block type that holds a quantized matrix exactly, None if there is none.

    Of a run with a format of llama.cpp it is the type that the run stored the matrix in.
    """
    if (kind := model.type_of(name)) is not None:
        return BLOCK_TYPES[kind]
    columns = model.pretrained.tensors[name].shape[1]
    return smallest_type(model.bits_of(name), columns, model.group_size, _zeros(model, name))


def _zeros(model: QuantizedModel, name: str) -> Collection[int]:
    """Return the zero points that a matrix has; of a symmetric grid without reading them."""
    if model.symmetric:
        return zero_points(model.bits_of(name), symmetric=True)
    path = f"{model.family.blocks_path}."
    index = int(name.removeprefix(path).partition(".")[0])
    with opened(model.run.block_file(index)) as file:
        tensors = [file.get_tensor(f"{p.name}.zero_point") for p in projections_of(model, name)]
    return {zero for tensor in tensors for zero in tensor.unique().tolist()}


def exact_type(model: QuantizedModel, name: str) -> BlockType:
    """Return the block type of a quantized matrix of a model that was not refused."""
    found = candidate_type(model, name)
    if found is None:
        raise ValueError(f"no block type holds {name}")
    return found


def ideal_type(model: QuantizedModel, name: str) -> BlockType:
    """Return the block type that a matrix would have if its width were no matter."""
    if model.type_of(name) is not None:
        return exact_type(model, name)
    found = smallest_type(model.bits_of(name), IDEAL_WIDTH, None, _zeros(model, name))
    return found or exact_type(model, name)


def file_type(model: QuantizedModel) -> int:
    """Return what the file is called: its mixture, or the type that most of a block's weights have."""
    if (number := FILE_TYPES.get(model.settings.quantization.format)) is not None:
        return number
    weights: Counter[int] = Counter()
    for name in model.all_matrix_names():
        weights[exact_type(model, name).file_type] += math.prod(
            model.pretrained.tensors[name].shape
        )
    return weights.most_common(1)[0][0]
