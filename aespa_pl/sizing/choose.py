"""Choose the candidate of every matrix, so that the predicted end loss is least at a given size."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aespa_pl.algorithm.allocation import Allocation, allocate
from aespa_pl.errors import UserError
from aespa_pl.run.schema import StoredMixture
from aespa_pl.sizing.matrices import SizedMatrix

UNITS = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
SIZE = re.compile(r"(\d+\.?\d*|\.\d+)\s*([KMG]i?B)", re.IGNORECASE)
FOR_GGUF = " (for a GGUF file of a size: --quantization.format auto)"
POINTS = 60
"""Sizes of the curve of size against predicted divergence."""


@dataclass(frozen=True)
class Target:
    """Holds a size, ``quantization.target``: one of both is None."""

    bytes: float | None
    """Bytes of the whole file at most."""
    bits: float | None
    """Mean bits of a weight of the quantized matrices at most."""

    @classmethod
    def of(cls, given: float | str) -> "Target":
        """Read what a user gave. Raises UserError where it is no size."""
        if isinstance(given, str) and (size := SIZE.fullmatch(given.strip())):
            return cls(float(size[1]) * UNITS[size[2].lower()], None)
        try:
            bits = float(given)
        except ValueError:
            bits = math.nan
        if not 0 < bits < math.inf:
            raise UserError(
                f"quantization.target is {given}: expected a size such as 3.5 GB or 300 MB, or bits a "
                "weight such as 2.75"
            )
        return cls(None, bits)


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

    def best(self, limit: float) -> dict[str, str]:
        """Return the candidate of each key for a limit of bytes, which is not below the least."""
        chosen = zip(self.matrices, self.allocation.best(int(limit)), strict=True)
        return {key: list(m.costs)[number] for m, number in chosen for key in m.keys}

    def bytes(self, chosen: Mapping[str, str]) -> int:
        """Return the bytes of the matrices."""
        return bytes_of(self.matrices, chosen)

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


def bytes_of(matrices: Sequence[SizedMatrix], chosen: Mapping[str, str]) -> int:
    """Return the bytes of matrices with a candidate for each key."""
    return sum(m.costs[chosen[m.keys[0]]] for m in matrices)


def limit_of(target: Target, given: object, matrices: Sequence[SizedMatrix], other: int) -> float:
    """Return the bytes that a target, ``given`` by the user, leaves to the matrices of a file.

    ``other`` bytes are no matrices. Raises UserError where the model can't be so small, or needs no choice.
    """
    least, most = (sum(limit(m.costs.values()) for m in matrices) for limit in (min, max))
    if target.bits is not None:
        unit, words, digits, beside = sum(m.weights for m in matrices) / 8, "bits a weight", 2, 0
        limit = target.bits * unit
    else:
        unit, words, digits, beside = 1e6, "MB", 3, other
        if most + other >= 1e9:
            unit, words = 1e9, "GB"
        limit = (target.bytes or 0) - other
    if least <= limit <= most * 1.01:
        return limit
    low = math.ceil((beside + least) / unit * 10**digits) / 10**digits  # this size is possible itself
    packed = target.bytes is not None and all(map(str.isdigit, matrices[0].costs))
    raise UserError(
        f"quantization.target is {given}, and this model can have {low:.{digits}f} to "
        f"{(beside + most) / unit:.{digits}f} {words}: choose a size between them"
        f"{FOR_GGUF if packed else ''}"
    )


class Mixture(StoredMixture):
    """Says in words what was chosen for a target."""

    @property
    def words(self) -> str:
        """Return types, size and prediction in words."""
        size, loss = f"{self.bytes / 1e6:.2f} MB", f"{self.predicted:.3g} nats per token"
        whole = f"a file of {size}"
        if all(chosen.isdigit() for chosen in self.chosen.values()):  # no engine's file has just these
            whole = f"{size} with packed integers{FOR_GGUF}"
        return f"{counted(self.chosen)}: {whole}, predicted KL divergence {loss}"

    def lines(self) -> list[str]:
        """Return the choice in words, a line for each projection: types with their blocks."""
        of_name: dict[str, dict[str, list[str]]] = {}
        for key, chosen in self.chosen.items():
            block, _, name = key.rpartition(".")
            of_name.setdefault(name, {}).setdefault(chosen, []).append(block)
        lines = []
        for name, kinds in of_name.items():
            places = [(_kind(c), ", ".join(blocks)) for c, blocks in sorted(kinds.items())]
            lines.append(f"{name}: " + "; ".join(f"{k} in {where}" if where else k for k, where in places))
        return lines


def counted(chosen: Mapping[str, str]) -> str:
    """Return how many projections have each type, or bits, in words."""
    counts = Counter(chosen.values())
    return ", ".join(f"{count} x {_kind(c)}" for c, count in sorted(counts.items()))


def _kind(chosen: str) -> str:
    return f"{chosen} bits" if chosen.isdigit() else chosen
