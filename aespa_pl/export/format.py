"""Define what every format of a packed model does (refuse, write, read back), and prove what was written."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

from torch import Tensor

from aespa_pl.errors import UserError
from aespa_pl.export.quantized import QuantizedModel, StoredTensor, value_of
from aespa_pl.extras import install_command
from aespa_pl.models.family import BlockLayout, Family

FormatName = Literal["hf", "compressed-tensors", "awq", "gptq", "gguf"]

CLASSES = {
    "hf": "folder:HuggingFace",
    "compressed-tensors": "compressed_tensors:CompressedTensors",
    "awq": "compressed_tensors:Awq",
    "gptq": "folder:Gptq",
    "gguf": "gguf:Gguf",
}
"""Module and class by format; each module but ``folder`` has the name of the library that it needs."""
PACKED = ("compressed-tensors", "awq", "gptq")
"""The formats that may hold an integer in more bits than it has."""
QUANTIZED, EMBEDDINGS, OTHERS = "quantized matrices", "embedding and head", "norms, biases, others"


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
    def read(self, model: QuantizedModel, folder: Path) -> Iterator[tuple[str, Tensor, int]]:
        """Yield every tensor of a written folder as a reader of it gets it: first those outside the blocks.

        Each comes with its name in the model's ``state_dict``, dequantized (in float32 or in the type of the
        file), and with its bytes in the file, scales and zero points included.
        """

    def remark(self, model: QuantizedModel) -> str | None:
        """Return a sentence about a model that takes more bits than the format could give it, or None."""
        return None

    def rounded(self, model: QuantizedModel) -> str | None:
        """Return a sentence about tensors of the run that the file does not hold exactly, or None."""
        return None

    @abstractmethod
    def expected(self, model: QuantizedModel, name: str, value: Tensor) -> Tensor:
        """Return what the file should hold of a tensor; ``value`` is it in float32 or as stored."""


def kept_in_part(layouts: Sequence[BlockLayout]) -> str | None:
    """Return which projections vLLM has in one matrix, where some keep their weights and others don't."""
    for group in (group for layout in layouts for group in layout.groups):
        names = [p.name for p in group.projections if p.expert is None]
        kept = [p.name for p in group.projections if p.expert is None and p.kept]
        if kept and kept != names:
            return f"it has {', '.join(names)} in one matrix, of which {', '.join(kept)} are no integers"
    return None


def joins_experts(family: Family, names: Iterable[str]) -> bool:
    """Return whether files have some of these tensors of a model as parts of larger ones."""
    return any(part is not None for name in names for _, part in family.places(name)[:1])


def make_format(
    name: FormatName, container_bits: int | None, embedding: Literal["keep", "q8_0"] | None
) -> Format:
    """Return a format. Raises UserError where its library is missing, or a choice is another format's."""
    # the command line's parser refuses other values, and Python's callers have none
    known = {"format": (*CLASSES,), "container_bits": (None, 4, 8), "embedding": (None, "keep", "q8_0")}
    for option, value in {"format": name, "container_bits": container_bits, "embedding": embedding}.items():
        if value not in known[option]:
            raise UserError(f"--{option} is {value!r}: expected one of {known[option]}")
    module, _, kind = CLASSES[name].partition(":")
    if module != "folder" and find_spec(module) is None:
        raise UserError(
            f"--format {name} needs the library {module.replace('_', '-')}: {install_command('export')}"
        )
    if embedding == "q8_0" and name != "gguf":
        raise UserError(f"--embedding {embedding} is of --format gguf only: leave it out")
    if container_bits is not None and name not in PACKED:
        raise UserError(f"--container_bits is of {', '.join(PACKED)} only, not of {name}: leave it out")
    options: dict[str, object] = {"container_bits": container_bits} if name in PACKED else {}
    if name == "gguf":
        options = {"embedding": embedding}
    made: Format = getattr(import_module(f"aespa_pl.export.{module}"), kind)(**options)
    return made


@dataclass
class ClassSize:
    """Counts the tensors of one kind."""

    weights: int = 0
    size: int = 0
    """Number of bytes in the file, with scales and zero points."""
    original: int = 0
    """Number of bytes in the original."""


def prove(
    model: QuantizedModel, chosen: Format, folder: Path, after_block: Callable[[], None] = lambda: None
) -> Mapping[str, ClassSize]:
    """Compare every tensor of a written folder with the run; return the sizes by kind of tensor.

    Raises UserError where a tensor is missing or differs in one bit; the message names the first.
    """
    sizes = {kind: ClassSize() for kind in (QUANTIZED, EMBEDDINGS, OTHERS)}
    where = model.names()
    missing, at, block = set(where), None, dict[str, StoredTensor]()
    for name, read, size in chosen.read(model, folder):
        index = where.get(name)
        if index not in (None, at):
            at, block = index, model.block(index)
            after_block()
        value = value_of(block[name] if name in block else model.stem(name))
        if difference := _difference(read, chosen.expected(model, name, value)):
            raise _fault(f"{name} {difference}", chosen)
        missing.discard(name)
        kind = EMBEDDINGS if name in model.parts.values() else OTHERS
        counted = sizes[QUANTIZED if name in model.matrices else kind]
        counted.weights += value.numel()
        counted.size += size
        counted.original += value.numel() * model.dtype(name).itemsize
    if missing:
        raise _fault(f"{min(missing)} is missing", chosen)
    return sizes


def _difference(read: Tensor, expected: Tensor) -> str:
    if read.shape != expected.shape:
        return f"is {list(read.shape)}, not {list(expected.shape)}"
    different = int((read.double() != expected.double()).sum())
    return f"differs in {different} of {expected.numel()} values" if different else ""


def _fault(what: str, chosen: Format) -> UserError:
    return UserError(
        f"the exported model, read back by {chosen.reader}, is not the run's: {what}; nothing was kept. "
        "Export again; if it stays so, this is a fault of aespa-pl: please report it"
    )
