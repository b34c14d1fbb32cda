"""Write and read formats that are a Hugging Face folder: safetensors with packed weights, and config.json.

``hf`` and ``gptq``, which need no library, are here. ``gptq`` is GPTQModel's checkpoint format ``gptq_v2``
without reordered columns. Its source is GPTQModel's TorchLinear: integers as a dense stream of bits in int32
along the input channels, zero points the same along the output channels.
"""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from aespa_pl.algorithm.quantizer import QuantizedWeight, StoredWeight
from aespa_pl.export.format import Format, joins_experts
from aespa_pl.export.quantized import QuantizedModel
from aespa_pl.models.experts import Part
from aespa_pl.models.headers import opened
from aespa_pl.models.llama_cpp_limits import unsupported_part
from aespa_pl.models.llama_cpp_tokenizer import lacking_tokenizer
from aespa_pl.models.multimodal import whole_type
from aespa_pl.run.model_writer import ModelWriter
from aespa_pl.run.schema import DESCRIPTION
from aespa_pl.storage.files import read_json, write_json

WORD = 32
"""Bits of the integers that others are packed into."""
GPTQ_BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class FolderFormat(Format):
    """Writes a Hugging Face folder; formats differ in how a matrix is packed, and in config.json."""

    @abstractmethod
    def pack(self, model: QuantizedModel, name: str, matrix: QuantizedWeight) -> dict[str, Tensor]:
        """Return the tensors that stand for a matrix, by their suffix to the name of its layer."""

    @abstractmethod
    def unpack(self, model: QuantizedModel, packed: Mapping[str, Tensor]) -> Tensor:
        """Return the weight that packed tensors stand for, by the format's own library."""

    def quantization(self, model: QuantizedModel) -> dict[str, Any] | None:
        """Return what config.json says of the quantization; None: it stays the original's, byte for byte."""
        return None

    def write(self, model: QuantizedModel, folder: Path, after_block: Callable[[], None]) -> None:
        """Write a file of what lies outside the blocks, and one a block."""
        writer = ModelWriter(folder, model.block_count)
        writer.write_stem({name: model.pretrained.tensor(name) for name in model.pretrained.stem_names()})
        for index in range(model.block_count):
            plain, packed = dict[str, Tensor](), dict[str, Tensor]()
            for name, value in model.block(index).items():
                if isinstance(value, Tensor):
                    plain[name] = value
                    continue
                layer = model.family.places(name)[0][0].removesuffix("weight")
                # other grids than uniform ones are refused, but by hf
                for suffix, tensor in self.pack(model, name, cast(QuantizedWeight, value)).items():
                    if suffix == "weight":
                        plain[name] = tensor
                    else:
                        packed[layer + suffix] = tensor
            writer.write_block(index, model.family.as_stored(plain) | packed)
            after_block()
        # of a multimodal original the run has the files of the text model
        origin, own = model.original if whole_type(model.original) is None else model.pretrained.folder, {}
        if (stated := self.quantization(model)) is not None:
            own = {"config.json": read_json(origin / "config.json") | {"quantization_config": stated}}
        writer.finish(origin, own)
        settings = json.loads(json.dumps(asdict(model.quantization)))  # plain numbers only
        # by this file fit refuses the folder, and test measures it alone
        write_json(folder / DESCRIPTION, {"format": self.name, "quantization": settings})

    def read(self, model: QuantizedModel, folder: Path) -> Iterator[tuple[str, Tensor, int]]:
        """Read the files as a user of the format would."""
        writer = ModelWriter(folder, model.block_count)
        yield from self._read_part(model, writer.stem_file, model.pretrained.stem_names())
        for index in range(model.block_count):
            yield from self._read_part(model, writer.block_file(index), model.pretrained.block_names(index))

    def expected(self, model: QuantizedModel, name: str, value: Tensor) -> Tensor:
        """Return the value itself; of an embedding in a block type what the original's type holds."""
        return value if model.stem_type(name) is None else value.to(model.dtype(name))

    def rounded(self, model: QuantizedModel) -> str | None:
        """Name embedding and head where they are in a block type, whose values are stored as numbers."""
        types = {part: model.stem_type(name) for part, name in model.parts.items()}
        typed = " and ".join(f"{part} ({kind})" for part, kind in types.items() if kind is not None)
        return f"the values of {typed} are stored in the original's type" if typed else None

    def _read_part(
        self, model: QuantizedModel, file: Path, names: Sequence[str]
    ) -> Iterator[tuple[str, Tensor, int]]:
        places: dict[str, list[tuple[str, Part | None]]] = {}
        for name in names:
            place, part = model.family.places(name)[0]
            places.setdefault(place, []).append((name, part))
        packed: dict[str, dict[str, Tensor]] = {}
        for key, tensor in _tensors(file):
            place, suffix = key, "weight"
            if key not in places:
                layer, _, suffix = key.rpartition(".")
                place = f"{layer}.weight"
            for name, part in places.get(place, [(key, None)]):
                value = tensor if part is None else part.of(tensor)
                if name in model.matrices:
                    packed.setdefault(name, {})[suffix] = value
                else:
                    yield name, value, value.nbytes
        for name, tensors in packed.items():
            yield name, self.unpack(model, tensors), sum(tensor.nbytes for tensor in tensors.values())


@dataclass(frozen=True)
class HuggingFace(FolderFormat):
    """Writes dequantized weights, rounded to the types of the original; the size is the original's."""

    name = "hf"
    reader = "safetensors"

    def pack(self, model: QuantizedModel, name: str, matrix: StoredWeight) -> dict[str, Tensor]:
        """Return the weight in the original's type."""
        return {"weight": matrix.weight().to(model.dtype(name))}

    def unpack(self, model: QuantizedModel, packed: Mapping[str, Tensor]) -> Tensor:
        """Return the weight."""
        return packed["weight"]

    def expected(self, model: QuantizedModel, name: str, value: Tensor) -> Tensor:
        """Return the value in the original's type."""
        return value.to(model.dtype(name))


def _in_gguf(model: QuantizedModel) -> bool:
    """Return whether llama.cpp has a model and its tokenizer."""
    return unsupported_part(model.pretrained.config) is None and lacking_tokenizer(model.original) is None


@dataclass(frozen=True)
class PackedFormat(FolderFormat):
    """Packs all integers into one number of bits."""

    container_bits: int | None = None
    """Bits that an integer takes in the file; None: as many as it has."""

    def bits(self, model: QuantizedModel) -> int:
        """Return the bits that an integer takes in the file."""
        return self.container_bits or model.bits

    def obstacles(self, model: QuantizedModel) -> Iterator[tuple[str, str]]:
        """Yield llama.cpp's types, integers of several bits without a container, and too small ones."""
        if model.quantization.format != "uniform":
            why = "its weights are stored as only llama.cpp reads them"
            formats = "gguf, or hf in the original's types" if _in_gguf(model) else "hf"
            yield why, f"Use --format {formats}"
        if self.container_bits is None and len(model.matrix_bits) > 1:
            bits = 4 if model.bits <= 4 else 8
            do = f"Add --container_bits {bits}, in which all integers take {bits} bits"
            other = ", or use --format gguf, which has a type for each matrix" if _in_gguf(model) else ""
            yield "engines expect one number of bits here", f"{do}{other}"
        if model.has_experts:
            yield from self.obstacles_of_experts(model)
        if self.bits(model) < model.bits:
            why = f"integers of {model.bits} bits do not fit {self.container_bits}"
            yield why, "Leave --container_bits out"

    def obstacles_of_experts(self, model: QuantizedModel) -> Iterator[tuple[str, str]]:
        """Yield why engines don't run mixtures of experts in the format."""
        why = "no engine was seen to run a mixture of experts in it"
        joined = joins_experts(model.family, model.matrices)
        yield why, f"Use --format hf{'' if joined else ' or compressed-tensors'}"


@dataclass(frozen=True)
class Gptq(PackedFormat):
    """Packs integers of 2, 3, 4 or 8 bits."""

    name = "gptq"
    reader = "the definition of gptq_v2, bit by bit"

    def obstacles(self, model: QuantizedModel) -> Iterator[tuple[str, str]]:
        """Yield other bits, and sides that do not fill whole words."""
        yield from super().obstacles(model)
        bits = self.bits(model)
        if bits not in GPTQ_BITS:
            yield "it has 2, 3, 4 or 8 bits", "Use --format compressed-tensors, which has 2 to 8"
        blocks = model.names()
        for name in model.unquantized_linears():
            if blocks.get(f"{name}.weight") is not None:
                why = f"{name} keeps its weights, and engines expect all of a block to be packed"
                yield why, "Use --format compressed-tensors"
        for name in model.matrices:
            shape = model.pretrained.tensors[name].shape
            unit = WORD if bits == 3 else WORD // bits
            if any(side % unit for side in shape):
                words = f"{bits}-bit integers fill whole words in multiples of {unit} only"
                yield f"{name} is {list(shape)}, and {words}", "Use --format compressed-tensors"

    def pack(self, model: QuantizedModel, name: str, matrix: QuantizedWeight) -> dict[str, Tensor]:
        """Return ``qweight [d_in * bits / 32, rows]``, ``qzeros [G, rows * bits / 32]`` and others."""
        bits, columns = self.bits(model), matrix.integers.shape[1]
        return {
            "qweight": packed_words(matrix.integers.T, bits),
            "qzeros": packed_words(matrix.zero_point, bits).T.contiguous(),
            "scales": matrix.scale.T.contiguous(),
            "g_idx": torch.arange(columns, dtype=torch.int32) // matrix.group_size,
        }

    def unpack(self, model: QuantizedModel, packed: Mapping[str, Tensor]) -> Tensor:
        """Return the weight; GPTQModel takes 6 GB, so docs/export.md says where it was tried."""
        bits = self.bits(model)
        integers = _unpacked(packed["qweight"], bits)  # [d_in, rows]
        zero_point = _unpacked(packed["qzeros"].T, bits).T  # [G, rows]
        group = packed["g_idx"].long()
        return (packed["scales"][group].float() * (integers - zero_point[group])).T

    def quantization(self, model: QuantizedModel) -> dict[str, Any]:
        """Return the quantization as GPTQModel states it."""
        settings = {
            "quant_method": "gptq",
            "bits": self.bits(model),
            "group_size": model.quantization.group_size or -1,
            "sym": False,
            "desc_act": False,
            "lm_head": False,
            "checkpoint_format": "gptq_v2",
            "pack_dtype": "int32",
        }
        if self.bits(model) == 4 and model.quantization.group_size is None:
            settings["backend"] = "torch"  # its faster CPU kernel has groups of 32 to 256 only
        return settings


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    with opened(path) as file:
        for key in file.keys():  # noqa: SIM118 - no Mapping
            yield key, file.get_tensor(key)


def packed_words(values: Tensor, bits: int) -> Tensor:
    """Return ``[n * bits / 32, m]`` int32 of integers ``[n, m]``: a stream of bits along dim 0."""
    stream = (values[:, None].int() >> torch.arange(bits)[:, None]) & 1  # [n, bits, m]
    digits = stream.flatten(0, 1).unflatten(0, (-1, WORD)).long()  # [words, 32, m]
    words: Tensor = (digits << torch.arange(WORD)[:, None]).sum(1)
    return (words - ((words >> 31) << 32)).to(torch.int32)  # the same bits with a sign


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the integers ``[n, m]`` of a stream of bits ``[n * bits / 32, m]``."""
    stream = (words[:, None] >> torch.arange(WORD)[:, None]) & 1  # [words, 32, m]
    digits = stream.flatten(0, 1).unflatten(0, (-1, bits))  # [n, bits, m]
    integers: Tensor = (digits << torch.arange(bits)[:, None]).sum(1)
    return integers
