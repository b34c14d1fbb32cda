"""Write the format ``awq``: 4-bit integers in the layout of AutoAWQ's ``gemm`` kernels.

Source: AutoAWQ's packing: eight integers of one input channel in an int32, in the order below.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from torch import Tensor

from aespa_pl.algorithm.quantizer import QuantizedWeight, StoredWeight
from aespa_pl.export.compressed_tensors import CompressedTensors, unpacked_by_library
from aespa_pl.export.folder import PackedFormat, packed_words
from aespa_pl.export.quantized import QuantizedModel

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output channel, of each eight, that lies in the nibble; the lowest nibble is the first."""


@dataclass(frozen=True)
class Awq(PackedFormat):
    """Packs integers into 4 bits."""

    name = "awq"
    reader = "compressed-tensors' converter of AutoAWQ"

    def obstacles(self, model: QuantizedModel) -> Iterator[tuple[str, str]]:
        """Yield other bits than 4, and rows that do not fill an int32."""
        if model.bits > BITS:
            yield "it has 4 bits", "Use --format compressed-tensors"
        yield from super().obstacles(model)
        if self.bits(model) != BITS:
            packs = f"which packs {model.bits} bits"
            yield (
                "its integers take 4 bits",
                f"Add --container_bits 4, or use --format compressed-tensors, {packs}",
            )
        for name in model.matrices:
            rows = model.pretrained.tensors[name].shape[0]
            if rows % len(ORDER):
                yield f"{name} has {rows} rows, not a multiple of 8", "Use --format compressed-tensors"

    def pack(self, model: QuantizedModel, name: str, matrix: StoredWeight) -> dict[str, Tensor]:
        """Return ``qweight [d_in, rows / 8]``, ``qzeros [G, rows / 8]`` and ``scales [G, rows]``."""
        matrix = cast(QuantizedWeight, matrix)  # other grids are refused
        order = torch.arange(len(matrix.integers)).unflatten(0, (-1, len(ORDER)))[:, list(ORDER)]
        integers, zero_point = matrix.integers[order.flatten()], matrix.zero_point[order.flatten()]
        return {
            "qweight": packed_words(integers, BITS).T.contiguous(),
            "qzeros": packed_words(zero_point, BITS).T.contiguous(),
            "scales": matrix.scale.T.contiguous(),
        }

    def unpack(self, model: QuantizedModel, packed: Mapping[str, Tensor]) -> Tensor:
        """Return the weight by way of the converter that compressed-tensors has for AutoAWQ."""
        converter = AutoAWQConverter(bits=BITS, group_size=model.group_size or -1)
        layer = {f"layer.{suffix}": tensor for suffix, tensor in packed.items()}
        converted = converter.process(layer)
        tensors = {name.removeprefix("layer."): tensor for name, tensor in converted.items()}
        tensors["weight_scale"] = tensors["weight_scale"].float()
        return unpacked_by_library(tensors, CompressedTensors(BITS).scheme(model))

    def quantization(self, model: QuantizedModel) -> dict[str, Any]:
        """Return the quantization as AutoAWQ states it."""
        return {
            "quant_method": "awq",
            "bits": BITS,
            "group_size": model.group_size or -1,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": model.unquantized_linears(),
        }
