"""Quantize embedding and head where a format of llama.cpp has a block type for them."""

import torch
from safetensors.torch import load_file
from torch import Tensor

from aespa_pl.algorithm.grid_types import TYPES, TypedWeight
from aespa_pl.algorithm.refit import rounded_rows
from aespa_pl.run.context import Context
from aespa_pl.storage.files import write_tensors

ROWS = 4096
"""Rows that are rounded together."""


def stem_tensors(context: Context) -> dict[str, Tensor]:
    """Return what the run's model has outside its blocks, in the types that the original is stored in.

    The blocks to come are quantized after this embedding. Its numbers wait in a file of the run, which is
    written once; where the original's types are narrower, the model folder has its values rounded.
    """
    pretrained, run = context.source.pretrained, context.run
    tensors = {n: pretrained.tensor(n) for n in pretrained.stem_names(context.source.family)}
    types = {
        name: TYPES[kind]
        for part, name in pretrained.embeddings().items()
        if (kind := context.settings.types.get(part)) is not None
    }
    if types and not run.stem_file.is_file():
        numbers: dict[str, Tensor] = {}
        for name, grid_type in types.items():
            parts = [rounded_rows(W, grid_type) for W in tensors[name].to(context.device).split(ROWS)]
            numbers |= {f"{name}.{field}": value for field, value in _joined(parts).items()}
        write_tensors(run.stem_file, {key: value.cpu() for key, value in numbers.items()}, {})
    if types:
        stored = load_file(run.stem_file)
        for name, grid_type in types.items():
            weight = TypedWeight.read(stored, name, grid_type).weight()
            tensors[name] = weight.to(tensors[name].dtype)
    return tensors


def _joined(parts: list[TypedWeight]) -> dict[str, Tensor]:
    """Return the tensors of the rows of several parts, by field."""
    tensors = [part.tensors() for part in parts]
    return {field: torch.cat([part[field] for part in tensors]) for field in tensors[0]}
