"""Read back what was written, compare it with the run bit for bit, and count its sizes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from aespa_pl.errors import UserError
from aespa_pl.export.format import Format
from aespa_pl.export.quantized import QuantizedModel, StoredBlock

QUANTIZED, EMBEDDINGS, OTHERS = "quantized matrices", "embedding and head", "norms, biases, others"


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
    where = {name: i for i in range(model.block_count) for name in model.block_names(i)}
    missing, at, block = {*model.stem_names(), *where}, -1, StoredBlock({}, {})
    for tensor in chosen.read(model, folder):
        name, index = tensor.name, where.get(tensor.name, at)
        if index != at:
            at, block = index, model.block(index)
            after_block()
        value = _value(model, name, block)
        if difference := _difference(tensor.value, chosen.expected(model, name, value)):
            raise _fault(f"{name} {difference}", chosen)
        missing.discard(name)
        kind = EMBEDDINGS if name in model.embeddings else OTHERS
        size = sizes[QUANTIZED if name in model.matrices else kind]
        size.weights += value.numel()
        size.size += tensor.size
        size.original += value.numel() * model.dtype(name).itemsize
    if missing:
        raise _fault(f"{min(missing)} is missing", chosen)
    return sizes


def _value(model: QuantizedModel, name: str, block: StoredBlock) -> Tensor:
    if name in block.matrices:
        return block.matrices[name].weight()
    return block.others[name] if name in block.others else model.stem_value(name)


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
