"""Write the format ``gguf``: one file for llama.cpp and all that is built on it.

Every matrix gets the smallest block type that holds it exactly; everything else keeps its type.
"""

import math
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from torch import Tensor

from aespa_pl.algorithm.grid_types import TypedWeight
from aespa_pl.algorithm.quantizer import QuantizedWeight
from aespa_pl.export.format import Format
from aespa_pl.export.gguf_bytes import BLOCK_TYPES, as_typed, padded
from aespa_pl.export.gguf_metadata import add_metadata, rope_factors
from aespa_pl.export.gguf_model import (
    candidate_type,
    column_order,
    exact_type,
    file_shape,
    file_tensors,
    file_type,
    gguf_names,
    ideal_type,
    in_column_order,
    in_float32,
    own_value,
    row_order,
    turned,
)
from aespa_pl.export.gguf_values import Q2_0, dequantized
from aespa_pl.export.gguf_vocabulary import ENDS, add_vocabulary, lost_end_tokens, unnamed_start
from aespa_pl.export.quantized import QuantizedModel, StoredTensor
from aespa_pl.models.hub import LICENCES
from aespa_pl.models.llama_cpp import OTHER_ORDER, architecture_of, crosses_heads, rounds_yarn
from aespa_pl.models.llama_cpp_limits import unsupported_part
from aespa_pl.models.llama_cpp_tokenizer import adds_spaces, unsupported_tokenizer
from aespa_pl.run.model_writer import copy_companions
from aespa_pl.storage.files import write_whole

FILE = "model.gguf"
PLAIN = {torch.float16: GGMLQuantizationType.F16, torch.bfloat16: GGMLQuantizationType.BF16}
"""The types of matrices that are not quantized; all others become F32."""


@dataclass(frozen=True)
class Gguf(Format):
    """Writes and reads a GGUF file."""

    embedding: Literal["keep", "q8_0"] | None = None
    """What becomes of an embedding and a head without types of their own; q8_0 rounds them to 8.5 bits a
    weight. None: q8_0 where rows are whole blocks of it. llama.cpp rounds them too, often to smaller ones."""

    name = "gguf"
    reader = "gguf"

    def obstacles(self, model: QuantizedModel) -> Iterator[tuple[str, str]]:
        """Yield models that llama.cpp does not have, and matrices that no block type holds."""
        lacking = unsupported_part(model.pretrained.config) or unsupported_tokenizer(model.original)
        if lacking is not None:
            yield lacking, _other_formats(model)
        if crosses_heads(model.pretrained.config, model.quantization):
            yield OTHER_ORDER, "Set quantization.group_size to a divisor of linear_value_head_dim"
        for part, name in model.parts.items():
            columns, kind = model.pretrained.tensors[name].shape[-1], model.stem_type(name)
            if self.embedding is not None and kind is not None:
                yield f"the run has its {part} in {kind}", "Leave --embedding out"
            elif self.embedding == "q8_0" and columns % BLOCK_TYPES["Q8_0"].grid.block != 0:
                yield f"rows of {columns} weights are no whole blocks of Q8_0", "Set --embedding keep"
        for place, names in file_tensors(model, model.names()).items():
            if 0 < sum(name in model.matrices for name in names) < len(names):
                why = f"some experts keep their weights, and llama.cpp has all of them in {place}"
                yield why, "Use --format hf, or give all experts of a run the same quantization.bits_of"
        for name in model.matrices:
            if candidate_type(model, name) is None:
                columns = model.pretrained.tensors[name].shape[1]
                yield (
                    f"no block type of llama.cpp holds {name} with {columns} columns",
                    "It holds 2 to 7 bits (8 where symmetric), per channel or in groups of a multiple "
                    f"of 32, in rows of a multiple of 32. {_other_formats(model)}",
                )

    def write(self, model: QuantizedModel, folder: Path, after_block: Callable[[], None]) -> None:
        """Write the file, one block in memory at a time."""
        copy_companions(model.original, folder, LICENCES)
        write_whole(folder / FILE, lambda path: self._write(model, path, after_block))

    def read(self, model: QuantizedModel, folder: Path) -> Iterator[tuple[str, Tensor, int]]:
        """Read the file and dequantize every tensor."""
        tensors = {tensor.name: tensor for tensor in GGUFReader(folder / FILE).tensors}
        begun: dict[str, Tensor] = {}  # those whose other rows are still to come
        for place, names in file_tensors(model, model.names()).items():
            tensor = tensors[place]
            data = tensor.data if len(names) > 1 else tensor.data[None]
            for name, one in zip(names, data, strict=True):
                value = turned(model, place, torch.tensor(dequantized(one, tensor.tensor_type)))
                if (columns := column_order(model, name)) is not None:
                    value = torch.empty_like(value).index_copy_(1, columns, value)
                shape, rows = model.pretrained.tensors[name].shape, row_order(model, name, place)
                if rows is not None:
                    whole = begun.pop(name, None)
                    whole = torch.empty(shape) if whole is None else whole
                    value = whole.index_copy_(0, rows, value.view(len(rows), *shape[1:]))
                places = gguf_names(model, name)
                if place != places[-1]:
                    begun[name] = value
                    continue
                size = sum(int(tensors[each].n_bytes) for each in places) // len(names)
                yield name, value.view(shape), size

    def remark(self, model: QuantizedModel) -> str | None:
        """Say which matrices have a larger block type because of their width, or of the group size.

        Also what reads a file with Q2_0, which llama.cpp has had for less time than the others.
        """
        larger: dict[str, dict[str, None]] = {}
        for name, (_, projections) in model.matrices.items():
            kind, ideal = exact_type(model, name), ideal_type(model, name)
            if kind.bits > ideal.bits:
                own, other = (f"{x.name} ({x.bits:g} bits a weight)" for x in (kind, ideal))
                words = f"as {own}: blocks of {other} have {ideal.grid.block} columns"
                named = {re.sub(r"expert_\d+", "experts'", p.name): None for p in projections}
                larger.setdefault(words, {}).update(named)
        remarks = []
        if rounds_yarn(model.pretrained.config):
            remarks.append("llama.cpp rounds the range of YaRN's frequencies, so long contexts differ there")
        if adds_spaces(model.original):
            remarks.append("llama.cpp puts a space behind each added token, the model's tokenizer does not")
        if start := unnamed_start(model.pretrained.tokenizer()):
            remarks.append(f"llama.cpp begins no text with {start}, as the model's tokenizer does")
        if lost := lost_end_tokens(model.original, int(model.pretrained.config.vocab_size)):
            ids = ", ".join(map(str, lost))
            remarks.append(
                f"a GGUF file names {len(ENDS)} tokens that end a text, llama.cpp may not stop at token {ids}"
            )
        if any(exact_type(model, name) is Q2_0 for name in model.matrices):
            remarks.append("Q2_0 is read by llama.cpp of v0.5.0 or later, and not yet by transformers")
        if larger:
            kinds = "; ".join(f"{', '.join(names)} {words}" for words, names in larger.items())
            advice = "and a row or group must be a multiple. --format compressed-tensors has no blocks"
            remarks.append(f"{kinds}, {advice}")
        return "; ".join(remarks) or None

    def expected(self, model: QuantizedModel, name: str, value: Tensor) -> Tensor:
        """Return the value in float32; rounded where embeddings are asked for in q8_0."""
        if self._rounds(model, name):
            kind = GGMLQuantizationType.Q8_0
            return torch.from_numpy(dequantized(gguf.quantize(_float32(value), kind), kind))
        return own_value(model, name, value)

    def rounded(self, model: QuantizedModel) -> str | None:
        """Name embedding and head, where they are rounded."""
        parts = [part for part, name in model.parts.items() if self._rounds(model, name)]
        if not parts:
            return None
        are = "are" if len(parts) > 1 else "is"
        return f"{' and '.join(parts)} {are} rounded to Q8_0 (8.5 bits a weight)"

    def begin(self, model: QuantizedModel, path: Path) -> GGUFWriter:
        """Write all that stands before the data: metadata, vocabulary, and what each tensor is."""
        writer = GGUFWriter(path, architecture_of(model.pretrained.config).name)
        add_metadata(writer, model, file_type(model))
        size = int(model.pretrained.config.vocab_size)
        add_vocabulary(writer, model.original, size, model.pretrained.tokenizer())
        if (factors := rope_factors(model.pretrained.config)) is not None:
            what = factors.shape, factors.dtype, factors.nbytes
            writer.add_tensor_info("rope_freqs.weight", *what, GGMLQuantizationType.F32)
        for place, (name, *others) in file_tensors(model, model.names()).items():
            kind, shape = self._type(model, name), model.pretrained.tensors[name].shape
            if (order := row_order(model, name, place)) is not None:
                shape = (len(order), *shape[1:])
            shape = file_shape(model, name, place, shape)
            if others:  # all experts in one tensor
                shape = (1 + len(others), *shape)
            columns, size = GGML_QUANT_SIZES[kind]
            nbytes = math.prod(shape) // columns * size
            writer.add_tensor_info(place, shape, np.dtype(np.float32), nbytes, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        return writer

    def _write(self, model: QuantizedModel, path: Path, after_block: Callable[[], None]) -> None:
        writer = self.begin(model, path)
        if (factors := rope_factors(model.pretrained.config)) is not None:
            writer.write_tensor_data(factors)
        for name in model.pretrained.stem_names():
            writer.write_tensor_data(self._encoded(model, name, model.stem(name)))
        for index in range(model.block_count):
            tensors = model.block(index)
            for place, names in file_tensors(model, model.pretrained.block_names(index)).items():
                each = [self._encoded(model, name, tensors[name], place) for name in names]
                writer.write_tensor_data(each[0] if len(each) == 1 else np.stack(each))
            after_block()
        writer.close()

    def _encoded(
        self, model: QuantizedModel, name: str, value: StoredTensor, place: str = ""
    ) -> npt.NDArray[Any]:
        """Return the bytes of a tensor, as far as it lies in ``place``."""
        if (order := row_order(model, name, place)) is not None:
            value = turned(model, place, value[order]) if isinstance(value, Tensor) else value.rows(order)
        value = in_column_order(model, name, value)
        if isinstance(value, TypedWeight):
            return BLOCK_TYPES[value.kind.name].encode(value)
        if isinstance(value, QuantizedWeight):
            block_type = exact_type(model, name)
            return block_type.encode(as_typed(block_type.grid, value))
        kind = self._type(model, name)
        if kind is GGMLQuantizationType.Q8_0:
            return gguf.quantize(_float32(value), kind)
        if kind is GGMLQuantizationType.F32:
            return _float32(own_value(model, name, value))
        return value.contiguous().view(torch.uint8).numpy()

    def _type(self, model: QuantizedModel, name: str) -> GGMLQuantizationType:
        if (kind := model.stem_type(name)) is not None:
            return GGMLQuantizationType(BLOCK_TYPES[kind].number)
        if name in model.matrices:
            return GGMLQuantizationType(exact_type(model, name).number)
        if self._rounds(model, name):
            return GGMLQuantizationType.Q8_0
        # llama.cpp adds and multiplies vectors in float32 only
        if len(model.pretrained.tensors[name].shape) == 1 or in_float32(gguf_names(model, name)[0]):
            return GGMLQuantizationType.F32
        return PLAIN.get(model.dtype(name), GGMLQuantizationType.F32)

    def _rounds(self, model: QuantizedModel, name: str) -> bool:
        whole = model.pretrained.tensors[name].shape[-1] % BLOCK_TYPES["Q8_0"].grid.block == 0
        asked = self.embedding != "keep" and name in model.parts.values()
        return asked and whole and model.stem_type(name) is None


def _other_formats(model: QuantizedModel) -> str:
    """Return what to do with a run whose model llama.cpp does not have."""
    if model.quantization.format != "uniform":
        return "Use --format hf"
    bits = f" --container_bits {4 if model.bits <= 4 else 8}" if len(model.matrix_bits) > 1 else ""
    return f"Use --format compressed-tensors{bits} (transformers, vLLM), or hf"


def _float32(value: Tensor) -> npt.NDArray[Any]:
    return value.float().contiguous().numpy()


def file_bytes(model: QuantizedModel) -> int:
    """Return the size of the file of a model whose matrices have block types.

    What stands before the data is written to a temporary file, because its size depends on the vocabulary.
    ``model`` need not have been quantized: only its settings and shapes are looked at.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "head.gguf"
        writer = Gguf().begin(model, path)
        writer.close()
        before = path.stat().st_size
    sizes = [info.nbytes for shard in writer.tensors for info in shard.values()]
    return sum(map(padded, (before, *sizes)))
