"""Describe mixtures of experts, and find the matrices of one expert in tensors of all."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

NAME = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


@dataclass(frozen=True)
class ExpertMixture:
    """Describes the mixture of experts of a block."""

    module: str
    """Path of the module whose input all tokens are, and whose output is added to the residual stream."""
    router: str
    """Path of the module that returns logits, weights ``[N, k]`` and experts ``[N, k]`` of each token."""
    experts: str
    """Path of the list of experts."""
    count: int
    """Number of experts."""
    chosen: int
    """Number k of experts that a token is routed to."""
    residual: str
    """Path of the module whose input the output is added to."""
    shared_gate: str | None = None
    """Path of the linear layer whose output, behind a sigmoid, is the weight of the shared expert. All tokens
    are routed to this expert, whose number comes after those of the others; None: there is none."""

    @property
    def total(self) -> int:
        """Return the number of experts, with the shared one."""
        return self.count + (self.shared_gate is not None)

    def share(self, expert: int) -> float:
        """Return the share of the tokens that an expert gets, on average."""
        return self.chosen / self.count if expert < self.count else 1.0


@dataclass(frozen=True)
class Part:
    """Says which part of a tensor of all experts, ``[experts, ...]``, is a tensor of one."""

    expert: int
    number: int
    """Number of the matrix among those whose rows are side by side."""
    count: int
    interleaved: bool
    """Whether the rows of the matrices alternate; otherwise one matrix follows the other."""
    transposed: bool
    """Whether the tensor has columns before rows."""

    def of(self, tensor: Any) -> Tensor:
        """Return the part, a view; a file's slice will do for the tensor."""
        one: Tensor = tensor[self.expert]
        if self.transposed and one.dim() == 2:
            one = one.mT
        if self.count == 1:
            return one
        return one[self.number :: self.count] if self.interleaved else one.chunk(2)[self.number]

    def shape_of_all(self, one: Tensor, experts: int) -> tuple[int, ...]:
        """Return the shape of the tensor of all experts, given the part that belongs to one."""
        rows, *columns = one.shape
        shape = (self.count * rows, *columns)
        return (experts, *(reversed(shape) if self.transposed else shape))


@dataclass(frozen=True)
class Fused:
    """Says how the library stores gate, up and down of all experts in one or two tensors."""

    interleaved: bool = False
    transposed: bool = False

    def place_of(self, name: str) -> tuple[str, Part]:
        """Return the tensor of all experts that a tensor of one lies in, and the part of it.

        Raises:
            ValueError: The tensor is none of an expert.
        """
        match = NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name} is no tensor of an expert")
        path, expert, kind, parameter = match.groups()
        fused = "down_proj" if kind == "down" else "gate_up_proj"
        ending = "" if parameter == "weight" else "_bias"
        number, count = (0, 1) if kind == "down" else (("gate", "up").index(kind), 2)
        part = Part(int(expert), number, count, self.interleaved, self.transposed)
        return f"{path}.{fused}{ending}", part


def joined(parts: Iterable[tuple[Part, Tensor]]) -> Tensor:
    """Return the tensor of all experts from the parts of each."""
    parts = list(parts)
    first, one = parts[0]
    experts = 1 + max(part.expert for part, _ in parts)
    whole = one.new_empty(first.shape_of_all(one, experts))
    for part, tensor in parts:
        part.of(whole).copy_(tensor)
    return whole


def as_stored(
    tensors: Mapping[str, Tensor], place_of: Callable[[str], tuple[str, Part | None]]
) -> dict[str, Tensor]:
    """Return the tensors of a model as its files have them.

    Args:
        tensors: Tensors by their names in the model; of experts, all of a tensor's.
        place_of: Returns the name in the files, and the part that a tensor is of it.
    """
    stored: dict[str, Tensor] = {}
    parts: dict[str, list[tuple[Part, Tensor]]] = {}
    for name, tensor in tensors.items():
        place, part = place_of(name)
        if part is None:
            stored[place] = tensor
        else:
            parts.setdefault(place, []).append((part, tensor))
    return stored | {name: joined(pieces) for name, pieces in parts.items()}
