"""Write the format ``hf``: a Hugging Face folder in the original's own types, which everything reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aespa_pl.algorithm.quantizer import StoredWeight
from aespa_pl.export.folder import FolderFormat
from aespa_pl.export.quantized import QuantizedModel


@dataclass(frozen=True)
class HuggingFace(FolderFormat):
    """Writes dequantized weights, rounded to the types of the original; the size is the original's."""

    name = "hf"
    reader = "safetensors"

    def refuse(self, model: QuantizedModel) -> None:
        """Refuse nothing."""

    def pack(self, model: QuantizedModel, name: str, matrix: StoredWeight) -> dict[str, Tensor]:
        """Return the weight in the original's type."""
        return {"weight": matrix.weight().to(model.dtype(name))}

    def unpack(self, model: QuantizedModel, packed: Mapping[str, Tensor]) -> Tensor:
        """Return the weight."""
        return packed["weight"]

    def config(self, model: QuantizedModel) -> dict[str, Any]:
        """Return nothing: config.json is the original's, byte for byte."""
        return {}

    def expected(self, model: QuantizedModel, name: str, value: Tensor) -> Tensor:
        """Return the value in the original's type."""
        return value.to(model.dtype(name))
