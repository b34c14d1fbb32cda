"""Write the format ``compressed-tensors``, as vLLM's own quantizers do; transformers reads it as well.

Source: ``pack-quantized`` of the library compressed-tensors: integers minus ``2**(bits - 1)`` as a dense
stream of bits in int32, zero points the same along the rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from aespa_pl.algorithm.quantizer import QuantizedWeight, StoredWeight
from aespa_pl.export.folder import PackedFormat
from aespa_pl.export.quantized import QuantizedModel


@dataclass(frozen=True)
class CompressedTensors(PackedFormat):
    """Packs integers of 2 to 8 bits, in any groups and of any family."""

    name = "compressed-tensors"
    reader = "compressed-tensors"

    def pack(self, model: QuantizedModel, name: str, matrix: StoredWeight) -> dict[str, Tensor]:
        """Return integers, scale, zero point and shape."""
        matrix = cast(QuantizedWeight, matrix)  # other grids are refused
        bits = self.bits(model)
        middle = 2 ** (bits - 1)
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
        if model.has_experts:
            del packed["weight_zero_point"]  # it is 0
        return packed

    def obstacles_of_experts(self, model: QuantizedModel) -> Iterator[tuple[str, str]]:
        """Yield zero points of experts, and experts that transformers keeps in one tensor on disk."""
        if any(part is not None for name in model.matrices for _, part in model.family.places(name)[:1]):
            why = "files of this model have all experts in one tensor, which the format has no name for"
            yield why, "Use --format hf"
        if not model.symmetric:
            why = "transformers and vLLM read no zero points of experts"
            yield why, "Use --format hf, or quantize with quantization.symmetric true"

    def unpack(self, model: QuantizedModel, packed: Mapping[str, Tensor]) -> Tensor:
        """Return the weight that the library makes of the tensors."""
        return unpacked_by_library(dict(packed), self.scheme(model))

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
                "symmetric": model.has_experts,
                "strategy": "group" if model.group_size else "channel",
                "group_size": model.group_size,
                "dynamic": False,
                "actorder": None,
            },
            "input_activations": None,
            "output_activations": None,
        }


def unpacked_by_library(packed: dict[str, Tensor], scheme: dict[str, Any]) -> Tensor:
    """Return the weight that compressed-tensors makes of ``pack-quantized`` tensors."""
    shape = packed["weight_shape"]
    packed["weight_shape"] = torch.Size(shape.tolist())  # type: ignore[assignment]
    weight: Tensor = PackedQuantizationCompressor.decompress(
        packed, QuantizationScheme.model_validate(scheme)
    )["weight"]
    return weight
