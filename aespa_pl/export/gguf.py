"""Write the format ``gguf``: one file for llama.cpp and all that is built on it.

Every matrix gets the smallest block type that holds it exactly; everything else keeps its type.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from torch import Tensor

from aespa_pl.algorithm.quantizer import QuantizedWeight
from aespa_pl.export.format import Format, ReadTensor, impossible
from aespa_pl.export.gguf_blocks import as_typed, smallest_type, zero_points
from aespa_pl.export.gguf_bytes import BlockType
from aespa_pl.export.gguf_library import dequantized, library_type
from aespa_pl.export.gguf_metadata import add_metadata, rope_factors
from aespa_pl.export.gguf_vocabulary import add_vocabulary, refuse_tokenizer
from aespa_pl.export.quantized import QuantizedModel
from aespa_pl.models.family import Projection, Role
from aespa_pl.models.headers import opened
from aespa_pl.models.hub import LICENCES
from aespa_pl.models.llama_cpp import architecture_of, unsupported_part
from aespa_pl.run.model_writer import copy_companions
from aespa_pl.storage.files import write_whole

FILE = "model.gguf"
ROPE_FACTORS = "rope_freqs.weight"
IDEAL_WIDTH = 256
"""A number of columns that every block type divides."""
PLAIN = {torch.float16: GGMLQuantizationType.F16, torch.bfloat16: GGMLQuantizationType.BF16}
"""The types of matrices that are not quantized; all others become F32."""


@dataclass(frozen=True)
class Gguf(Format):
    """Writes and reads a GGUF file."""

    embedding: Literal["keep", "q8_0"] = "q8_0"
    """Type of embedding and head; q8_0 rounds them to 8.5 bits a weight, as llama.cpp does."""

    name = "gguf"
    reader = "gguf"

    def refuse(self, model: QuantizedModel) -> None:
        """Refuse models that llama.cpp does not have, and matrices that no block type holds."""
        if part := unsupported_part(model.pretrained.config):
            raise impossible(
                model,
                self.name,
                part,
                "Use --format compressed-tensors (transformers, vLLM), or hf",
            )
        refuse_tokenizer(model.original)
        for name in _matrix_names(model):
            if _candidate(model, name) is None:
                columns = model.pretrained.tensors[name].shape[1]
                raise impossible(
                    model,
                    self.name,
                    f"no block type of llama.cpp holds {name} with {columns} columns",
                    "It holds 2 to 7 bits (8 where symmetric), per channel or in groups of a multiple "
                    "of 32, in rows of a multiple of 32. Use --format compressed-tensors, or hf",
                )

    def write(self, model: QuantizedModel, folder: Path, after_block: Callable[[], None]) -> None:
        """Write the file, one block in memory at a time."""
        copy_companions(model.original, folder, LICENCES)
        write_whole(folder / FILE, partial(self._write, model, after_block))

    def read(self, model: QuantizedModel, folder: Path) -> Iterator[ReadTensor]:
        """Read the file and dequantize every tensor."""
        tensors = {tensor.name: tensor for tensor in GGUFReader(folder / FILE).tensors}
        for name in _all_names(model):
            tensor = tensors[_gguf_name(model, name)]
            value = torch.tensor(dequantized(tensor.data, tensor.tensor_type))
            order = _row_order(model, name)
            if order is not None:
                value = torch.empty_like(value).index_copy_(0, order, value)
            yield ReadTensor(name, value, int(tensor.n_bytes))

    def remark(self, model: QuantizedModel) -> str | None:
        """Say which matrices have a larger block type because of their width, or of the group size."""
        larger: dict[str, dict[str, None]] = {}
        for index in range(model.block_count):
            for name, projections in model.matrix_names(index).items():
                kind, ideal = _exact_type(model, name), _ideal_type(model, name)
                if kind.bits > ideal.bits:
                    words = f"as {kind.words}: blocks of {ideal.words} have {ideal.columns} columns"
                    larger.setdefault(words, {}).update({p.name: None for p in projections})
        if not larger:
            return None
        kinds = "; ".join(f"{', '.join(names)} {words}" for words, names in larger.items())
        return f"{kinds}, and a row or group must be a multiple. --format compressed-tensors has no blocks"

    def expected(self, model: QuantizedModel, name: str, value: Tensor) -> Tensor:
        """Return the value in float32; rounded where embeddings are asked for in q8_0."""
        if self._rounds(model, name):
            kind = GGMLQuantizationType.Q8_0
            return torch.from_numpy(dequantized(gguf.quantize(_float32(value), kind), kind))
        return value.float()

    def rounded(self, model: QuantizedModel) -> str | None:
        """Name embedding and head, where they are rounded."""
        if not any(self._rounds(model, name) for name in model.embeddings):
            return None
        return "embedding and head are rounded to Q8_0 (8.5 bits a weight)"

    def _write(self, model: QuantizedModel, after_block: Callable[[], None], path: Path) -> None:
        writer = GGUFWriter(path, architecture_of(model.pretrained.config).name)
        add_metadata(writer, model, _mostly(model))
        add_vocabulary(writer, model.original, int(model.pretrained.config.vocab_size))
        factors = rope_factors(model.pretrained.config)
        if factors is not None:
            writer.add_tensor_info(
                ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes, GGMLQuantizationType.F32
            )
        for name in _all_names(model):
            kind, shape = self._type(model, name), model.pretrained.tensors[name].shape
            columns, size = GGML_QUANT_SIZES[kind]
            nbytes = math.prod(shape) // columns * size
            writer.add_tensor_info(
                _gguf_name(model, name), shape, np.dtype(np.float32), nbytes, kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for name, tensor in model.stem():
            writer.write_tensor_data(self._encoded(model, name, tensor))
        for index in range(model.block_count):
            block = model.block(index)
            for name in model.block_names(index):
                value = block.matrices.get(name)
                writer.write_tensor_data(
                    self._encoded(model, name, block.others[name] if value is None else value)
                )
            after_block()
        writer.close()

    def _encoded(
        self, model: QuantizedModel, name: str, value: Tensor | QuantizedWeight
    ) -> npt.NDArray[Any]:
        """Return the bytes of a tensor."""
        order = _row_order(model, name)
        if isinstance(value, QuantizedWeight):
            block_type = _exact_type(model, name)
            value = value if order is None else value.rows(order)
            return block_type.encode(as_typed(block_type.grid, model.bits_of(name), value))
        value = value if order is None else value[order]
        kind = self._type(model, name)
        if kind is GGMLQuantizationType.Q8_0:
            return gguf.quantize(_float32(value), kind)
        if kind is GGMLQuantizationType.F32:
            return _float32(value)
        return value.contiguous().view(torch.uint8).numpy()

    def _type(self, model: QuantizedModel, name: str) -> GGMLQuantizationType:
        stored = model.pretrained.tensors[name]
        if _is_quantized(model, name):
            return library_type(_exact_type(model, name))
        if self._rounds(model, name):
            return GGMLQuantizationType.Q8_0
        if len(stored.shape) == 1:  # llama.cpp adds and multiplies vectors in float32 only
            return GGMLQuantizationType.F32
        return PLAIN.get(model.dtype(name), GGMLQuantizationType.F32)

    def _rounds(self, model: QuantizedModel, name: str) -> bool:
        columns = GGML_QUANT_SIZES[GGMLQuantizationType.Q8_0][0]
        whole = model.pretrained.tensors[name].shape[-1] % columns == 0
        return self.embedding == "q8_0" and name in model.embeddings and whole


def _all_names(model: QuantizedModel) -> Iterator[str]:
    yield from model.stem_names()
    for index in range(model.block_count):
        yield from model.block_names(index)


def _matrix_names(model: QuantizedModel) -> Iterator[str]:
    for index in range(model.block_count):
        yield from model.matrix_names(index)


def _is_quantized(model: QuantizedModel, name: str) -> bool:
    return name.endswith(".weight") and bool(_projections(model, name))


def _candidate(model: QuantizedModel, name: str) -> BlockType | None:
    """Return the smallest block type that holds a quantized matrix exactly, None if there is none."""
    columns = model.pretrained.tensors[name].shape[1]
    return smallest_type(model.bits_of(name), columns, model.group_size, _zeros(model, name))


def _zeros(model: QuantizedModel, name: str) -> Collection[int]:
    """Return the zero points that a matrix has; of a symmetric grid without reading them."""
    if model.symmetric:
        return zero_points(model.bits_of(name), symmetric=True)
    path = f"{model.family.blocks_path}."
    index = int(name.removeprefix(path).partition(".")[0])
    with opened(model.run.block_file(index)) as file:
        tensors = [file.get_tensor(f"{p.name}.zero_point") for p in _projections(model, name)]
    return {zero for tensor in tensors for zero in tensor.unique().tolist()}


def _exact_type(model: QuantizedModel, name: str) -> BlockType:
    """Return the block type of a quantized matrix of a model that was not refused."""
    found = _candidate(model, name)
    if found is None:
        raise ValueError(f"no block type holds {name}")
    return found


def _ideal_type(model: QuantizedModel, name: str) -> BlockType:
    """Return the block type that a matrix would have if its width were no matter."""
    found = smallest_type(model.bits_of(name), IDEAL_WIDTH, None, _zeros(model, name))
    return found or _exact_type(model, name)


def _mostly(model: QuantizedModel) -> int:
    """Return what the file is called: by the type that most of a block's weights have."""
    weights: Counter[int] = Counter()
    for name in _matrix_names(model):
        weights[_exact_type(model, name).file_type] += math.prod(
            model.pretrained.tensors[name].shape
        )
    return weights.most_common(1)[0][0]


def _projections(model: QuantizedModel, name: str) -> tuple[Projection, ...]:
    """Return the projections that a weight or bias belongs to; none outside of quantized layers."""
    path = f"{model.family.blocks_path}."
    if not name.startswith(path):
        return ()
    index, _, module = name.removeprefix(path).rpartition(".")[0].partition(".")
    return model.matrix_names(int(index)).get(f"{path}{index}.{module}.weight", ())


def _row_order(model: QuantizedModel, name: str) -> Tensor | None:
    """Return the rows of a weight or bias in the order that llama.cpp wants, None if it is theirs."""
    projections = _projections(model, name)
    if not projections:
        return None
    layout, rows = model.layout, torch.arange(model.pretrained.tensors[name].shape[0])
    first = projections[0]
    if len(projections) > 1:  # [heads, parts, d_head] to [parts, heads, d_head]
        return rows.view(-1, len(projections), layout.head_dim).transpose(0, 1).flatten()
    architecture = architecture_of(model.pretrained.config)
    if architecture.rotates_neighbours and first.role in (Role.QUERY, Role.KEY):
        return rows.view(-1, 2, layout.head_dim // 2).transpose(1, 2).flatten()
    return None


def _gguf_name(model: QuantizedModel, name: str) -> str:
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


def _float32(value: Tensor) -> npt.NDArray[Any]:
    return value.float().contiguous().numpy()
