"""Hold what was chosen for a size, and say it in words."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Mixture:
    """Holds what was chosen for a target."""

    chosen: Mapping[str, str]
    """Block type, or bits, by ``BLOCK.PROJECTION``, ``embedding`` and ``head``."""
    predicted: float
    """Predicted KL divergence from the original, in nats per token."""
    bytes: int
    """Size of the whole file."""
    curve: list[tuple[int, float]]
    """Sizes of the whole file with the least predicted divergence of each."""
    others: Mapping[str, tuple[int, float]]
    """Size and predicted divergence of llama.cpp's mixtures, by name."""

    @property
    def words(self) -> str:
        """Return types, size and prediction in words."""
        return (
            f"{counted(self.chosen)}: a file of {self.bytes / 1e6:.2f} MB, predicted KL divergence "
            f"{self.predicted:.3g} nats per token"
        )

    def lines(self) -> list[str]:
        """Return the choice in words, a line for each projection: types with their blocks."""
        of_name: dict[str, dict[str, list[str]]] = {}
        for key, chosen in self.chosen.items():
            block, _, name = key.rpartition(".")
            of_name.setdefault(name, {}).setdefault(chosen, []).append(block)
        return [
            f"{name}: "
            + "; ".join(
                f"{_kind(c)} in {', '.join(blocks)}" if blocks[0] else _kind(c)
                for c, blocks in sorted(kinds.items())
            )
            for name, kinds in of_name.items()
        ]


def counted(chosen: Mapping[str, str]) -> str:
    """Return how many projections have each type, or bits, in words."""
    counts = Counter(chosen.values())
    return ", ".join(f"{count} x {_kind(c)}" for c, count in sorted(counts.items()))


def _kind(chosen: str) -> str:
    return f"{chosen} bits" if chosen.isdigit() else chosen
