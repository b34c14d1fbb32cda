"""Give the tensors of a model the names, and the order of rows, that llama.cpp has for them."""

from functools import cache

import gguf
import torch
from torch import Tensor

from aespa_pl.export.quantized import QuantizedModel
from aespa_pl.models.family import Projection, Role
from aespa_pl.models.llama_cpp import architecture_of


def projections_of(model: QuantizedModel, name: str) -> tuple[Projection, ...]:
    """Return the projections that a weight or bias belongs to; none outside of quantized layers."""
    path = f"{model.family.blocks_path}."
    if not name.startswith(path):
        return ()
    index, _, module = name.removeprefix(path).rpartition(".")[0].partition(".")
    return model.matrix_names(int(index)).get(f"{path}{index}.{module}.weight", ())


def row_order(model: QuantizedModel, name: str) -> Tensor | None:
    """Return the rows of a weight or bias in the order that llama.cpp wants, None if it is theirs."""
    projections = projections_of(model, name)
    if not projections:
        return None
    layout, rows = model.layout(), torch.arange(model.pretrained.tensors[name].shape[0])
    first = projections[0]
    if len(projections) > 1:  # [heads, parts, d_head] to [parts, heads, d_head]
        return rows.view(-1, len(projections), layout.head_dim).transpose(0, 1).flatten()
    architecture = architecture_of(model.pretrained.config)
    if architecture.rotates_neighbours and first.role in (Role.QUERY, Role.KEY):
        return rows.view(-1, 2, layout.head_dim // 2).transpose(1, 2).flatten()
    return None


def gguf_name(model: QuantizedModel, name: str) -> str:
    """Return the name of a tensor in llama.cpp."""
    names = _name_map(architecture_of(model.pretrained.config).name, model.block_count)
    prefix = model.family.blocks_path.partition(".")[0]
    for candidate in (name, name.removeprefix(f"{prefix}.")):
        if found := names.get_name(candidate, (".weight", ".bias")):
            return found
    raise KeyError(f"gguf has no name for {name}")


@cache
def _name_map(architecture: str, blocks: int) -> gguf.TensorNameMap:
    kinds = {text: kind for kind, text in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(kinds[architecture], blocks)
