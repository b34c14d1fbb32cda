"""Define what every format of a packed model does: refuse, write, and read back."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from aespa_pl.errors import UserError
from aespa_pl.export.quantized import QuantizedModel

CONTAINER_BITS = (4, 8)
"""Bits that integers of fewer bits may take in a file."""


@dataclass(frozen=True)
class ReadTensor:
    """Holds one tensor of the model, as a reader of the exported folder gets it."""

    name: str
    """Its name in the model's ``state_dict``."""
    value: Tensor
    """Dequantized values, in float32 or in the type that the file has."""
    size: int
    """Number of bytes in the file, with scales and zero points."""


@dataclass(frozen=True)
class Format(ABC):
    """Stands for a format; its only state is what the user chose."""

    name: ClassVar[str]
    reader: ClassVar[str]
    """Name of the library or the definition that unpacks the file in the proof, for messages."""

    @abstractmethod
    def refuse(self, model: QuantizedModel) -> None:
        """Raise UserError where the format can't hold a model exactly; the message says what can."""

    @abstractmethod
    def write(self, model: QuantizedModel, folder: Path, after_block: Callable[[], None]) -> None:
        """Write the model, one block in memory at a time, every file whole."""

    @abstractmethod
    def read(self, model: QuantizedModel, folder: Path) -> Iterator[ReadTensor]:
        """Yield every tensor of a written folder: what lies outside the blocks, then the blocks."""

    def remark(self, model: QuantizedModel) -> str | None:
        """Return a sentence about a model that takes more bits than the format could give it, or None."""
        del model
        return None

    def rounded(self, model: QuantizedModel) -> str | None:
        """Return a sentence about tensors of the run that the file does not hold exactly, or None."""
        del model
        return None

    @abstractmethod
    def expected(self, model: QuantizedModel, name: str, value: Tensor) -> Tensor:
        """Return what the file should hold of a tensor; ``value`` is it in float32 or as stored."""


def refuse_several_bits(
    model: QuantizedModel, format_name: str, container_bits: int | None
) -> None:
    """Refuse a model whose matrices have different bits, unless all of them take the container's.

    Raises:
        UserError: The bits differ, and there is no container.
    """
    if container_bits is None and len(model.matrix_bits) > 1:
        container = next(
            (bits for bits in CONTAINER_BITS if bits >= model.bits), max(CONTAINER_BITS)
        )
        raise impossible(
            model,
            format_name,
            "engines expect one number of bits here",
            f"Add --container_bits {container}, in which all integers take {container} bits, or use "
            "--format gguf, which has a type for each matrix",
        )


def impossible(model: QuantizedModel, format_name: str, why: str, instead: str) -> UserError:
    """Return the error for a model that a format can't hold."""
    return UserError(
        f"--format {format_name} cannot hold this run exactly ({model.granularity}): {why}. {instead}"
    )
