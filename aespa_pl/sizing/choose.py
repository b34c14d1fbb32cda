"""Choose the candidate of every matrix, so that the predicted end loss is least at a given size."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aespa_pl.algorithm.allocation import Allocation, allocate
from aespa_pl.errors import UserError
from aespa_pl.sizing.matrices import SizedMatrix
from aespa_pl.sizing.target import Target

POINTS = 60
"""Sizes of the curve of size against predicted divergence."""


@dataclass(frozen=True)
class Choices:
    """Holds matrices, the predicted losses of their candidates, and the best choice for every size."""

    matrices: Sequence[SizedMatrix]
    losses: Sequence[Mapping[str, float]]
    """Predicted rise of the end loss by candidate, of each matrix, in nats per token."""
    allocation: Allocation

    @classmethod
    def of(cls, matrices: Sequence[SizedMatrix], losses: Sequence[Mapping[str, float]]) -> "Choices":
        """Find the best choice for every size."""
        costs = [list(m.costs.values()) for m in matrices]
        values = [[of[c] for c in m.costs] for m, of in zip(matrices, losses, strict=True)]
        return cls(matrices, losses, allocate(costs, values))

    @property
    def weights(self) -> int:
        """Return the number of weights."""
        return sum(m.weights for m in self.matrices)

    @property
    def limits(self) -> tuple[int, int]:
        """Return the least and the largest bytes of all matrices together."""
        least = sum(min(m.costs.values()) for m in self.matrices)
        return least, sum(max(m.costs.values()) for m in self.matrices)

    def best(self, limit: float) -> dict[str, str]:
        """Return the candidate of each key for a limit of bytes, which is not below the least."""
        chosen = self.allocation.best(int(limit))
        return {
            key: list(m.costs)[number]
            for m, number in zip(self.matrices, chosen, strict=True)
            for key in m.keys
        }

    def bytes(self, chosen: Mapping[str, str]) -> int:
        """Return the bytes of the matrices."""
        return sum(m.costs[chosen[m.keys[0]]] for m in self.matrices)

    def loss(self, chosen: Mapping[str, str]) -> float:
        """Return the predicted rise of the end loss, in nats per token."""
        return sum(of[chosen[m.keys[0]]] for m, of in zip(self.matrices, self.losses, strict=True))

    def has(self, chosen: Mapping[str, str]) -> bool:
        """Return whether a mixture consists of candidates."""
        return all(chosen.get(m.keys[0]) in m.costs for m in self.matrices)

    def curve(self, other: int) -> list[tuple[int, float]]:
        """Return sizes of the file with the least predicted loss of each; ``other`` bytes are no matrices."""
        a, last = self.allocation, len(self.allocation.losses) - 1
        places = sorted({round(i * last / POINTS) for i in range(POINTS + 1)})
        return [(other + a.least + p * a.step, float(a.losses[p])) for p in places]


def limit_of(target: Target, given: object, choices: Choices, other: int) -> float:
    """Return the bytes that a target leaves to the matrices.

    Args:
        target: The target.
        given: What the user wrote.
        choices: Matrices and candidates.
        other: Bytes of the file that belong to none of the matrices.

    Raises:
        UserError: The model can't be so small, or needs no choice to be so large.
    """
    least, most = choices.limits
    if target.bits is not None:
        limit = target.bits * choices.weights / 8
        low, high, digits, words = (
            least * 8 / choices.weights,
            most * 8 / choices.weights,
            2,
            "bits a weight",
        )
    else:
        limit = (target.bytes or 0) - other
        unit, words = (1e9, "GB") if most + other >= 1e9 else (1e6, "MB")
        low, high, digits = (other + least) / unit, (other + most) / unit, 3
    if least <= limit <= most * 1.01:
        return limit
    low = math.ceil(low * 10**digits) / 10**digits  # this size is possible itself
    raise UserError(
        f"quantization.target is {given}, and this model can have {low:.{digits}f} to {high:.{digits}f} "
        f"{words}: choose a size between them"
    )
