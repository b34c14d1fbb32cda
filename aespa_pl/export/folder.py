"""Write and read formats that are a Hugging Face folder: safetensors with packed weights, and config.json."""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aespa_pl.algorithm.quantizer import StoredWeight
from aespa_pl.export.format import Format, ReadTensor
from aespa_pl.export.quantized import QuantizedModel
from aespa_pl.models.experts import Part
from aespa_pl.models.headers import opened
from aespa_pl.run.model_writer import ModelWriter
from aespa_pl.run.schema import DESCRIPTION
from aespa_pl.storage.files import write_json

WORD = 32
"""Bits of the integers that others are packed into."""


@dataclass(frozen=True)
class FolderFormat(Format):
    """Writes a Hugging Face folder; formats differ in how a matrix is packed, and in config.json."""

    @abstractmethod
    def pack(self, model: QuantizedModel, name: str, matrix: StoredWeight) -> dict[str, Tensor]:
        """Return the tensors that stand for a matrix, by their suffix to the name of its layer."""

    @abstractmethod
    def unpack(self, model: QuantizedModel, packed: Mapping[str, Tensor]) -> Tensor:
        """Return the weight that packed tensors stand for, by the format's own library."""

    @abstractmethod
    def quantization(self, model: QuantizedModel) -> dict[str, Any]:
        """Return what config.json says of the quantization; nothing: it stays the original's."""

    def write(self, model: QuantizedModel, folder: Path, after_block: Callable[[], None]) -> None:
        """Write a shard for what lies outside the blocks and one a block."""
        writer = ModelWriter(folder, model.block_count)
        writer.write_stem({name: model.pretrained.tensor(name) for name in model.stem_names()})
        for index in range(model.block_count):
            block = model.block(index)
            plain, packed = dict(block.others), dict[str, Tensor]()
            for name, matrix in block.matrices.items():
                layer = model.family.places(name)[0][0].removesuffix("weight")
                for suffix, tensor in self.pack(model, name, matrix).items():
                    if suffix == "weight":
                        plain[name] = tensor
                    else:
                        packed[layer + suffix] = tensor
            writer.write_block(index, model.family.as_stored(plain) | packed)
            after_block()
        config = {"quantization_config": stated} if (stated := self.quantization(model)) else None
        writer.finish(model.original, config)
        settings = json.loads(json.dumps(asdict(model.settings.quantization)))  # plain numbers only
        # by this file fit refuses the folder, and test measures it alone
        write_json(folder / DESCRIPTION, {"format": self.name, "quantization": settings})

    def read(self, model: QuantizedModel, folder: Path) -> Iterator[ReadTensor]:
        """Read the shards as a user of the format would."""
        writer = ModelWriter(folder, model.block_count)
        yield from self._read_part(model, writer.stem_files, model.stem_names())
        for index in range(model.block_count):
            yield from self._read_part(model, writer.block_files(index), model.block_names(index))

    def expected(self, model: QuantizedModel, name: str, value: Tensor) -> Tensor:
        """Return the value itself; of an embedding in a block type what the original's type holds."""
        return value if model.stem_type(name) is None else value.to(model.dtype(name))

    def _read_part(
        self, model: QuantizedModel, files: Sequence[Path], names: Sequence[str]
    ) -> Iterator[ReadTensor]:
        places: dict[str, list[tuple[str, Part | None]]] = {}
        for name in names:
            place, part = model.family.places(name)[0]
            places.setdefault(place, []).append((name, part))
        packed: dict[str, dict[str, Tensor]] = {}
        for key, tensor in _tensors(files):
            place, suffix = key, "weight"
            if key not in places:
                layer, _, suffix = key.rpartition(".")
                place = f"{layer}.weight"
            for name, part in places.get(place, [(key, None)]):
                value = tensor if part is None else part.of(tensor)
                if name in model.matrices:
                    packed.setdefault(name, {})[suffix] = value
                else:
                    yield ReadTensor(name, value, value.nbytes)
        for name, tensors in packed.items():
            size = sum(tensor.nbytes for tensor in tensors.values())
            yield ReadTensor(name, self.unpack(model, tensors), size)


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

    def quantization(self, model: QuantizedModel) -> dict[str, Any]:
        """Return nothing: config.json is the original's, byte for byte."""
        return {}

    def expected(self, model: QuantizedModel, name: str, value: Tensor) -> Tensor:
        """Return the value in the original's type."""
        return value.to(model.dtype(name))


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
        if model.settings.quantization.format != "uniform":
            why = "its weights are stored as only llama.cpp reads them"
            yield why, "Use --format gguf, or hf in the original's types"
        if self.container_bits is None and len(model.matrix_bits) > 1:
            bits = 4 if model.bits <= 4 else 8
            yield (
                "engines expect one number of bits here",
                f"Add --container_bits {bits}, in which all integers take {bits} bits, or use --format gguf, "
                "which has a type for each matrix",
            )
        if model.has_experts:
            yield from self.obstacles_of_experts(model)
        if self.bits(model) < model.bits:
            why = f"integers of {model.bits} bits do not fit {self.container_bits}"
            yield why, "Leave --container_bits out"

    def obstacles_of_experts(self, model: QuantizedModel) -> Iterator[tuple[str, str]]:
        """Yield why engines don't run mixtures of experts in the format."""
        why = "no engine was seen to run a mixture of experts in it"
        yield why, "Use --format hf or compressed-tensors"


def _tensors(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    for path in files:
        with opened(path) as file:
            for key in file.keys():  # noqa: SIM118 - no Mapping
                yield key, file.get_tensor(key)


def packed_words(values: Tensor, bits: int) -> Tensor:
    """Return ``[n * bits / 32, m]`` int32 of integers ``[n, m]``: a stream of bits along dim 0."""
    stream = (values[:, None].int() >> torch.arange(bits)[:, None]) & 1  # [n, bits, m]
    digits = stream.flatten(0, 1).unflatten(0, (-1, WORD)).long()  # [words, 32, m]
    words: Tensor = (digits << torch.arange(WORD)[:, None]).sum(1)
    return (words - ((words >> 31) << 32)).to(torch.int32)  # the same bits with a sign
