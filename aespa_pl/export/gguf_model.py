"""Tell what each tensor of a model is in llama.cpp: its name, the order of its rows, its block type."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cache

import gguf
import torch
from torch import Tensor

from aespa_pl.algorithm.quantizer import QuantizedWeight
from aespa_pl.export.gguf_bytes import BLOCK_TYPES, BlockType, smallest_type, zero_points
from aespa_pl.export.quantized import QuantizedModel, StoredTensor
from aespa_pl.models.family import Role
from aespa_pl.models.headers import opened
from aespa_pl.models.llama_cpp import architecture_of, other_heads
from aespa_pl.models.llama_cpp_types import FILE_TYPES

OTHER_NAMES = {
    ".layer_scalar": ".layer_scalar.weight",
    ".dt_bias": ".dt_proj.bias", ".sinks": ".sinks.weight", ".gate.moe_statics.": ".moe_statics.",
    ".e_score_correction_bias": ".e_score_correction.bias", ".expert_bias": ".expert_bias.bias",
    ".shared_mlp.output_linear.": ".mlp.down_proj.", ".shared_mlp.shared.": ".mlp.shared_expert.",
    ".shared_mlp.experts.": ".mlp.experts.", ".shared_mlp.router.": ".mlp.router.",
    ".block_sparse_moe.experts.": ".mlp.experts.", ".block_sparse_moe.router.": ".mlp.router.",
}  # fmt: skip
"""Parts of names that the library gguf knows in another form."""
UNNAMED = {
    "experts.gate_proj.weight": "ffn_gate_exps.weight", "experts.up_proj.weight": "ffn_up_exps.weight",
    "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
}  # fmt: skip
"""Tensors of a block of Gemma 4 that the library gguf has no names for, and llama.cpp has."""
GATE_AND_UP = ".shared_mlp.input_linear.weight"
"""What the name of a matrix of Granite 4 ends with that llama.cpp has in two."""
KEYS_AND_VALUES = ".kv_b_proj.weight"
"""What the name of a matrix of latent attention ends with that llama.cpp has in two."""
IDEAL_WIDTH = 256
"""A number of columns that every block type divides."""


def row_order(model: QuantizedModel, name: str, place: str = "") -> Tensor | None:
    """Return the rows of a weight or bias in the order that llama.cpp wants, None if it is theirs.

    ``place`` names the tensor of the file where several have rows of one.
    """
    if name.endswith(GATE_AND_UP):
        return torch.arange(model.pretrained.tensors[name].shape[0]).chunk(2)[int(".ffn_up." in place)]
    if name.endswith(KEYS_AND_VALUES):  # [heads, keys then values]
        config, rows = model.pretrained.config, torch.arange(model.pretrained.tensors[name].shape[0])
        keys, values = rows.view(model.layouts[0].heads, -1).tensor_split([config.qk_nope_head_dim], 1)
        return (keys if _turned(place) else values).flatten()
    projections = model.projections_of(name)
    if (order := _value_heads(model, name)) is not None or not projections:
        return order
    layout, rows = model.layouts[0], torch.arange(model.pretrained.tensors[name].shape[0])
    first = projections[0]
    architecture = architecture_of(model.pretrained.config)
    if architecture.divides_fused and first.fused[1] > 1:  # [heads, parts, d_head] to [parts, heads, d_head]
        return rows.view(-1, len(projections), layout.head_dim).transpose(0, 1).flatten()
    if architecture.moves_pairs and first.role in (Role.QUERY, Role.KEY):
        return rows.view(-1, 2, layout.head_dim // 2).transpose(1, 2).flatten()
    return None


def _value_heads(model: QuantizedModel, name: str) -> Tensor | None:
    """Return the order of the rows of linear attention that belong to value heads, behind those of others.

    In transformers those of a key head follow one another; in llama.cpp the first of all key heads do.
    """
    config, kind = model.pretrained.config, name.rpartition(".linear_attn.")[2].removesuffix(".weight")
    if ".linear_attn." not in name or kind in ("norm", "out_proj") or not other_heads(config):
        return None
    size = 1 if kind in ("in_proj_b", "in_proj_a", "A_log", "dt_bias") else config.linear_value_head_dim
    others = 0
    if kind in ("in_proj_qkv", "conv1d"):
        others = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    rows = torch.arange(values * size).view(keys, values // keys, size).transpose(0, 1).flatten()
    return torch.cat((torch.arange(others), others + rows))


def column_order(model: QuantizedModel, name: str) -> Tensor | None:
    """Return the columns of a matrix in the order that llama.cpp wants, None if it is theirs."""
    if not name.endswith(".linear_attn.out_proj.weight"):
        return None
    return _value_heads(model, name.replace("out_proj", "in_proj_z"))


def in_column_order(model: QuantizedModel, name: str, value: StoredTensor) -> StoredTensor:
    """Return a tensor with its columns in llama.cpp's order; groups lie within a head."""
    order = column_order(model, name)
    if order is not None and isinstance(value, Tensor):
        return value[:, order]
    if order is None or not isinstance(value, QuantizedWeight):
        return value
    size, groups = value.group_size, value.scale.shape[1]
    of_groups = order[::size] // size if groups > 1 else torch.zeros(1, dtype=torch.long)
    return replace(
        value,
        integers=value.integers[:, order],
        scale=value.scale[:, of_groups],
        zero_point=value.zero_point[:, of_groups],
    )


def _turned(place: str) -> bool:
    """Return whether a matrix has the columns of each head before its rows: keys of latent attention."""
    return place.endswith("attn_k_b.weight")


def turned(model: QuantizedModel, place: str, value: Tensor) -> Tensor:
    """Return a matrix of the file as it lies there, or back again; most lie as they are.

    Keys of latent attention are ``[heads * keys, latent]`` here and ``[heads, latent, keys]`` there.
    """
    if not _turned(place):
        return value
    return value.unflatten(0, (model.layouts[0].heads, -1)).mT if value.dim() == 2 else value.mT.flatten(0, 1)


def own_value(model: QuantizedModel, name: str, value: Tensor) -> Tensor:
    """Return a tensor that is not quantized as llama.cpp has it, in float32, norms with the 1 they add."""
    if name.endswith(".A_log"):  # the decay of linear attention, and of Mamba
        return -value.float().exp()
    of_norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return value.float() + (architecture_of(model.pretrained.config).norm_offset if of_norm else 0.0)


def file_tensors(model: QuantizedModel, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the tensors that each one of the file is made of, by its name: of experts, that of all."""
    found: dict[str, list[str]] = {}
    for name in names:
        for place in gguf_names(model, name):
            found.setdefault(place, []).append(name)
    return found


def gguf_names(model: QuantizedModel, name: str) -> tuple[str, ...]:
    """Return the tensors of the file that have rows of one of the model, of which there are few."""
    if name.endswith(KEYS_AND_VALUES):
        return tuple(gguf_name(model, name.replace(".kv_b_", f".{kind}_b_")) for kind in ("k", "v"))
    if not name.endswith(GATE_AND_UP):
        return (gguf_name(model, name),)
    block = name.removesuffix(GATE_AND_UP)
    return tuple(gguf_name(model, f"{block}.mlp.{kind}_proj.weight") for kind in ("gate", "up"))


def in_float32(name: str) -> bool:
    """Return whether llama.cpp has a matrix in float32: routers, convolutions, rules of linear attention."""
    large = (".ssm_in.weight", ".ssm_out.weight")
    small = ("ffn_gate_inp", "exp_probs_b", ".shortconv.conv.")
    return any(part in name for part in small) or (".ssm_" in name and not name.endswith(large))


def file_shape(model: QuantizedModel, name: str, place: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that a tensor of the model has in the file, rows first."""
    if name.endswith(KEYS_AND_VALUES):
        heads, (rows, latent) = model.layouts[0].heads, shape
        return (heads, latent, rows // heads) if _turned(place) else (heads, rows // heads, latent)
    if name.endswith((".mamba.A_log", ".mamba.D")):
        return (*shape, 1)
    if name.endswith(".mamba.norm.weight"):
        groups = int(model.pretrained.config.mamba_n_groups)
        return (groups, shape[0] // groups)
    if in_float32(place):  # the gate of a shared expert is a vector there, a convolution a matrix
        return tuple(size for size in shape if size > 1)
    return shape


def gguf_name(model: QuantizedModel, name: str) -> str:
    """Return the name of a tensor in llama.cpp, where all experts of a block are in one."""
    name = re.sub(r"\.experts\.\d+\.", ".experts.", name)
    for part, other in OTHER_NAMES.items():
        name = name.replace(part, other)
    block, _, rest = name.removeprefix(f"{model.family.blocks_path}.").partition(".")
    if rest in UNNAMED:
        return f"blk.{block}.{UNNAMED[rest]}"
    names = _name_map(architecture_of(model.pretrained.config).name, model.block_count)
    prefix = model.family.blocks_path.partition(".")[0]
    for candidate in (name, name.removeprefix(f"{prefix}.")):
        if known := names.get_name(candidate, (".weight", ".bias")):
            return known
    raise KeyError(f"gguf has no name for {name}")


@cache
def _name_map(architecture: str, blocks: int) -> gguf.TensorNameMap:
    kinds = {text: kind for kind, text in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(kinds[architecture], blocks)


def candidate_type(model: QuantizedModel, name: str) -> BlockType | None:
    """Return the smallest block type that holds a quantized matrix exactly, None if there is none."""
    if (kind := model.type_of(name)) is not None:  # of a run with a format of llama.cpp
        return BLOCK_TYPES[kind]
    columns, (bits, zeros) = model.pretrained.tensors[name].shape[1], _integers(model, name)
    return smallest_type(bits, columns, model.quantization.group_size, zeros)


def _integers(model: QuantizedModel, name: str) -> tuple[int, Collection[int]]:
    """Return the most bits and all zero points that a tensor of the file has, or of the one it is part of."""
    if name not in model.found:
        index, (projection, *_) = model.matrices[name]
        together = [name]
        if projection.expert is not None:
            names = filter(model.matrices.__contains__, model.pretrained.block_names(index))
            together = file_tensors(model, names)[gguf_name(model, name)]
        integers = max(map(model.bits_of, together)), _zeros(model, together)
        model.found.update(dict.fromkeys(together, integers))
    return model.found[name]


def _zeros(model: QuantizedModel, together: Sequence[str]) -> Collection[int]:
    """Return the zero points of matrices of a block; of a symmetric grid without reading them."""
    if model.quantization.symmetric:
        return {zero for n in together for zero in zero_points(model.bits_of(n), symmetric=True)}
    index, _ = model.matrices[together[0]]
    projections = [p for n in together for p in model.matrices[n][1]]
    with opened(model.run.block_file(index)) as file:
        tensors = [file.get_tensor(f"{p.name}.zero_point") for p in projections]
    return {zero for tensor in tensors for zero in tensor.unique().tolist()}


def exact_type(model: QuantizedModel, name: str) -> BlockType:
    """Return the block type of a quantized matrix of a model that was not refused."""
    if (kind := candidate_type(model, name)) is None:
        raise ValueError(f"no block type holds {name}")
    return kind


def ideal_type(model: QuantizedModel, name: str) -> BlockType:
    """Return the block type that a matrix would have if its width were no matter."""
    if model.type_of(name) is not None:
        return exact_type(model, name)
    bits, zeros = _integers(model, name)
    ideal = smallest_type(bits, IDEAL_WIDTH, None, zeros)
    return ideal or exact_type(model, name)


def file_type(model: QuantizedModel) -> int:
    """Return what the file is called: its mixture, or the type that most of a block's weights have."""
    if (number := FILE_TYPES.get(model.quantization.format)) is not None:
        return number
    weights = Counter[int]()
    for name in model.matrices:
        weights[exact_type(model, name).file_type] += math.prod(model.pretrained.tensors[name].shape)
    return weights.most_common(1)[0][0]
