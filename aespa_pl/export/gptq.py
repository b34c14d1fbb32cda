"""Write the format ``gptq``: GPTQModel's checkpoint format ``gptq_v2``, without reordered columns.

Source: GPTQModel's TorchLinear: integers as a dense stream of bits in int32 along the input channels,
zero points the same along the output channels.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from aespa_pl.algorithm.quantizer import QuantizedWeight, StoredWeight
from aespa_pl.export.folder import WORD, PackedFormat, packed_words
from aespa_pl.export.quantized import QuantizedModel

BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class Gptq(PackedFormat):
    """Packs integers of 2, 3, 4 or 8 bits."""

    name = "gptq"
    reader = "the definition of gptq_v2, bit by bit"

    def obstacles(self, model: QuantizedModel) -> Iterator[tuple[str, str]]:
        """Yield other bits, and sides that do not fill whole words."""
        yield from super().obstacles(model)
        bits = self.bits(model)
        if bits not in BITS:
            yield "it has 2, 3, 4 or 8 bits", "Use --format compressed-tensors, which has 2 to 8"
        for name in model.matrices:
            shape = model.pretrained.tensors[name].shape
            unit = WORD if bits == 3 else WORD // bits
            if any(side % unit for side in shape):
                words = f"{bits}-bit integers fill whole words in multiples of {unit} only"
                yield f"{name} is {list(shape)}, and {words}", "Use --format compressed-tensors"

    def pack(self, model: QuantizedModel, name: str, matrix: StoredWeight) -> dict[str, Tensor]:
        """Return ``qweight [d_in * bits / 32, rows]``, ``qzeros [G, rows * bits / 32]`` and others."""
        matrix = cast(QuantizedWeight, matrix)  # other grids are refused
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
            "group_size": model.group_size or -1,
            "sym": False,
            "desc_act": False,
            "lm_head": False,
            "checkpoint_format": "gptq_v2",
            "pack_dtype": "int32",
        }
        if self.bits(model) == 4 and model.group_size is None:
            settings["backend"] = "torch"  # its faster CPU kernel has groups of 32 to 256 only
        return settings


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the integers ``[n, m]`` of a stream of bits ``[n * bits / 32, m]``."""
    stream = (words[:, None] >> torch.arange(WORD)[:, None]) & 1  # [words, 32, m]
    digits = stream.flatten(0, 1).unflatten(0, (-1, bits))  # [n, bits, m]
    integers: Tensor = (digits << torch.arange(bits)[:, None]).sum(1)
    return integers
