"""Define what every format of a packed model does (refuse, write, read back), and find one by its name."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

from torch import Tensor

from aespa_pl.errors import UserError
from aespa_pl.export.quantized import QuantizedModel

FormatName = Literal["hf", "compressed-tensors", "awq", "gptq", "gguf"]

CLASSES = {
    "hf": "folder:HuggingFace",
    "compressed-tensors": "compressed_tensors:CompressedTensors",
    "awq": "awq:Awq",
    "gptq": "gptq:Gptq",
    "gguf": "gguf:Gguf",
}
"""Module and class by format: the libraries are imported with the format that needs them."""
PACKED = ("compressed-tensors", "awq", "gptq")
"""The formats that may hold an integer in more bits than it has."""
LIBRARIES = {
    "compressed-tensors": "compressed_tensors",
    "awq": "compressed_tensors",  # which unpacks it in the proof
    "gguf": "gguf",
}
"""Library that has to be installed, by format."""


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

    def obstacles(self, model: QuantizedModel) -> Iterator[tuple[str, str]]:
        """Yield why the format can't hold a model exactly, and what to do instead."""
        yield from ()

    def refuse(self, model: QuantizedModel) -> None:
        """Raise UserError where the format can't hold a model exactly; the message says what can."""
        for why, instead in self.obstacles(model):
            raise UserError(
                f"--format {self.name} cannot hold this run exactly ({model.granularity}): {why}. {instead}"
            )

    @abstractmethod
    def write(self, model: QuantizedModel, folder: Path, after_block: Callable[[], None]) -> None:
        """Write the model, one block in memory at a time, every file whole."""

    @abstractmethod
    def read(self, model: QuantizedModel, folder: Path) -> Iterator[ReadTensor]:
        """Yield every tensor of a written folder: what lies outside the blocks, then the blocks."""

    def remark(self, model: QuantizedModel) -> str | None:
        """Return a sentence about a model that takes more bits than the format could give it, or None."""
        return None

    def rounded(self, model: QuantizedModel) -> str | None:
        """Return a sentence about tensors of the run that the file does not hold exactly, or None."""
        return None

    @abstractmethod
    def expected(self, model: QuantizedModel, name: str, value: Tensor) -> Tensor:
        """Return what the file should hold of a tensor; ``value`` is it in float32 or as stored."""


def make_format(
    name: FormatName, container_bits: int | None, embedding: Literal["keep", "q8_0"] | None
) -> Format:
    """Return a format with the user's choices.

    Raises UserError where its library is missing, or a choice is none of this format's.
    """
    library = LIBRARIES.get(name)
    if library is not None and find_spec(library) is None:
        raise UserError(
            f"--format {name} needs the library {library.replace('_', '-')}: pip install 'aespa-pl[export]'"
        )
    if embedding == "q8_0" and name != "gguf":
        raise UserError(f"--embedding {embedding} is of --format gguf only: leave it out")
    if container_bits is not None and name not in PACKED:
        raise UserError(f"--container_bits is of {', '.join(PACKED)} only, not of {name}: leave it out")
    module, _, kind = CLASSES[name].partition(":")
    options: dict[str, object]
    options = {"container_bits": container_bits} if name in PACKED else {}
    if name == "gguf" and embedding is not None:
        options = {"embedding": embedding}
    made: Format = getattr(import_module(f"aespa_pl.export.{module}"), kind)(**options)
    return made
