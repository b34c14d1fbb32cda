"""Read back what was written, compare it with the run bit for bit, and count its sizes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
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
    model: QuantizedModel,
    chosen: Format,
    folder: Path,
    after_block: Callable[[], None] = lambda: None,
) -> Mapping[str, ClassSize]:
    """Compare every tensor of a written folder with the run; return the sizes by kind of tensor.

    Raises UserError where a tensor is missing or differs in one bit; the message names the first.
    """
    sizes = {kind: ClassSize() for kind in (QUANTIZED, EMBEDDINGS, OTHERS)}
    seen: set[str] = set()
    block: tuple[int | None, StoredBlock | None] = (None, None)
    for found in chosen.read(model, folder):
        index = _block_index(model, found.name)
        if index is not None and index != block[0]:
            block = (index, model.block(index))
            after_block()
        quantized = block[1] is not None and found.name in block[1].matrices
        value = _value(model, found.name, block[1] if index is not None else None)
        _refuse_difference(
            found.name, found.value, chosen.expected(model, found.name, value), chosen
        )
        seen.add(found.name)
        kind = QUANTIZED if quantized else EMBEDDINGS if found.name in model.embeddings else OTHERS
        original = value.numel() * model.dtype(found.name).itemsize
        sizes[kind].weights += value.numel()
        sizes[kind].size += found.size
        sizes[kind].original += original
    wanted = {*model.stem_names()}.union(*map(model.block_names, range(model.block_count)))
    if missing := sorted(wanted - seen):
        raise _fault(f"{missing[0]} is missing", chosen)
    return sizes


def _block_index(model: QuantizedModel, name: str) -> int | None:
    path = f"{model.family.blocks_path}."
    return int(name.removeprefix(path).split(".")[0]) if name.startswith(path) else None


def _value(model: QuantizedModel, name: str, block: StoredBlock | None) -> Tensor:
    if block is None:
        return model.stem_value(name)
    return block.matrices[name].weight() if name in block.matrices else block.others[name]


def _refuse_difference(name: str, found: Tensor, expected: Tensor, chosen: Format) -> None:
    if found.shape != expected.shape:
        raise _fault(f"{name} is {list(found.shape)}, not {list(expected.shape)}", chosen)
    if not torch.equal(found.double(), expected.double()):
        different = int((found.double() != expected.double()).sum())
        raise _fault(f"{name} differs in {different} of {math.prod(found.shape)} values", chosen)


def _fault(what: str, chosen: Format) -> UserError:
    return UserError(
        f"the exported model, read back by {chosen.reader}, is not the run's: {what}; nothing was kept. "
        "Export again; if it stays so, this is a fault of aespa-pl: please report it"
    )
