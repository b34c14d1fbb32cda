"""Write ``compressed-tensors``, as vLLM's own quantizers do, and ``awq``, which its library reads as well.

Source: ``pack-quantized`` of the library compressed-tensors, which transformers reads too: integers minus
``2**(bits - 1)`` as a dense stream of bits in int32, zero points the same along the rows; and AutoAWQ's
packing for its ``gemm`` kernels: eight integers of one input channel in an int32, in the order below.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from aespa_pl.algorithm.quantizer import QuantizedWeight
from aespa_pl.export.folder import PackedFormat, packed_words
from aespa_pl.export.format import joins_experts, kept_in_part
from aespa_pl.export.quantized import QuantizedModel

AWQ_BITS = 4
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output channel, of each eight, that lies in the nibble; the lowest nibble is the first."""


@dataclass(frozen=True)
class CompressedTensors(PackedFormat):
    """Packs integers of 2 to 8 bits, in any groups.

    It takes any family, but mixtures of experts only where the run is symmetric and quantizes all experts,
    and no gpt-oss, Granite or Gemma 4, whose files have all experts of a block in one tensor.
    """

    name = "compressed-tensors"
    reader = "compressed-tensors"

    def pack(self, model: QuantizedModel, name: str, matrix: QuantizedWeight) -> dict[str, Tensor]:
        """Return integers, scale, shape, and zero point; a symmetric grid has none in any container."""
        bits, symmetric = self.bits(model), model.quantization.symmetric
        middle = 2 ** ((matrix.bits if symmetric else bits) - 1)
        integers = (matrix.integers.short() - middle).to(torch.int8)
        zero_point = (matrix.zero_point.short() - middle).to(torch.int8)
        packed = {
            "weight_packed": pack_to_int32(integers, bits),
            # float32: transformers computes scale * (q - z) in the type of the scale, and in float16
            # the product would be rounded
            "weight_scale": matrix.scale.float(),
            "weight_zero_point": pack_to_int32(zero_point, bits, packed_dim=0),
            "weight_shape": torch.tensor(matrix.integers.shape),
        }
        if symmetric:
            del packed["weight_zero_point"]  # it is 0
        return packed

    def obstacles_of_experts(self, model: QuantizedModel) -> Iterator[tuple[str, str]]:
        """Yield zero points, experts in 16 bits, and experts that transformers keeps in one tensor."""
        if joins_experts(model.family, model.matrices):
            why = "files of this model have all experts in one tensor, which the format has no name for"
            yield why, "Use --format hf"
        if model.keeps_experts:
            why = "transformers reads either all experts as integers or none"
            yield why, "Use --format hf, or quantize all of them"
        if not model.quantization.symmetric:
            why = "transformers and vLLM read no zero points of experts"
            yield why, "Use --format hf, or quantize with quantization.symmetric true"

    def remark(self, model: QuantizedModel) -> str | None:
        """Say where vLLM does not load a model that transformers loads."""
        words = kept_in_part(model.layouts)
        return f"transformers loads it, but vLLM does not, because {words}" if words else None

    def unpack(self, model: QuantizedModel, packed: Mapping[str, Tensor]) -> Tensor:
        """Return the weight that the library makes of the tensors."""
        return _unpacked(dict(packed), self.scheme(model))

    def quantization(self, model: QuantizedModel) -> dict[str, Any]:
        """Return the quantization that transformers and vLLM read."""
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            # transformers' layers for packed weights refuse packed zero points; vLLM ignores this
            "dequantize": True,
            "ignore": model.unquantized_linears(),
            "config_groups": {"group_0": self.scheme(model)},
        }

    def scheme(self, model: QuantizedModel) -> dict[str, Any]:
        """Return how the library describes the integers."""
        return {
            "targets": ["Linear"],
            "weights": {
                "num_bits": self.bits(model),
                "type": "int",
                "symmetric": model.quantization.symmetric,
                "strategy": "group" if model.quantization.group_size else "channel",
                "group_size": model.quantization.group_size,
                "dynamic": False,
                "actorder": None,
            },
            "input_activations": None,
            "output_activations": None,
        }


@dataclass(frozen=True)
class Awq(PackedFormat):
    """Packs integers into 4 bits."""

    name = "awq"
    reader = "compressed-tensors' converter of AutoAWQ"

    def obstacles(self, model: QuantizedModel) -> Iterator[tuple[str, str]]:
        """Yield other bits than 4, and rows that do not fill an int32."""
        if model.bits > AWQ_BITS and model.quantization.format == "uniform":
            several = " --container_bits 8" if len(model.matrix_bits) > 1 else ""
            yield "it has 4 bits", f"Use --format compressed-tensors{several}"
        yield from super().obstacles(model)
        if self.bits(model) != AWQ_BITS:
            other = f"use --format compressed-tensors, which packs {model.bits} bits"
            yield "its integers take 4 bits", f"Add --container_bits 4, or {other}"
        if words := kept_in_part(model.layouts):
            yield words, "Use --format compressed-tensors, for transformers"
        for name in model.matrices:
            rows = model.pretrained.tensors[name].shape[0]
            if rows % len(AWQ_ORDER):
                yield f"{name} has {rows} rows, not a multiple of 8", "Use --format compressed-tensors"

    def pack(self, model: QuantizedModel, name: str, matrix: QuantizedWeight) -> dict[str, Tensor]:
        """Return ``qweight [d_in, rows / 8]``, ``qzeros [G, rows / 8]`` and ``scales [G, rows]``."""
        order = torch.arange(len(matrix.integers)).unflatten(0, (-1, len(AWQ_ORDER)))[:, list(AWQ_ORDER)]
        integers, zero_point = matrix.integers[order.flatten()], matrix.zero_point[order.flatten()]
        return {
            "qweight": packed_words(integers, AWQ_BITS).T.contiguous(),
            "qzeros": packed_words(zero_point, AWQ_BITS).T.contiguous(),
            "scales": matrix.scale.T.contiguous(),
        }

    def unpack(self, model: QuantizedModel, packed: Mapping[str, Tensor]) -> Tensor:
        """Return the weight by way of the converter that compressed-tensors has for AutoAWQ."""
        converter = AutoAWQConverter(bits=AWQ_BITS, group_size=model.quantization.group_size or -1)
        layer = {f"layer.{suffix}": tensor for suffix, tensor in packed.items()}
        converted = converter.process(layer)
        tensors = {name.removeprefix("layer."): tensor for name, tensor in converted.items()}
        tensors["weight_scale"] = tensors["weight_scale"].float()
        return _unpacked(tensors, CompressedTensors(AWQ_BITS).scheme(model))

    def quantization(self, model: QuantizedModel) -> dict[str, Any]:
        """Return the quantization as AutoAWQ states it."""
        return {
            "quant_method": "awq",
            "bits": AWQ_BITS,
            "group_size": model.quantization.group_size or -1,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": model.unquantized_linears(),
        }


def _unpacked(packed: dict[str, Tensor], scheme: dict[str, Any]) -> Tensor:
    """Return the weight that compressed-tensors makes of ``pack-quantized`` tensors."""
    shape = packed["weight_shape"]
    packed["weight_shape"] = torch.Size(shape.tolist())  # type: ignore[assignment]
    weight: Tensor = PackedQuantizationCompressor.decompress(
        packed, QuantizationScheme.model_validate(scheme)
    )["weight"]
    return weight
