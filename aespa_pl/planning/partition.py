"""What is worked on at once, where a block's H_V or its learning do not fit into memory as a whole."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Partition:
    """Most of a block that is in memory at once; the results do not depend on it."""

    heads: int | None = None
    """Key/value heads whose H_V is in memory: with fewer than all, the statistics take several passes over
    the segments, and what is done already waits on disk. None: all."""
    weights: int | None = None
    """Weights that are learned at once, each part with a Trainer of its own. None: all."""

    def head_groups(self, heads: int) -> list[range]:
        """Return the heads of each pass over the segments, as evenly as can be."""
        count = math.ceil(heads / (self.heads or heads))
        ends = [round(heads * i / count) for i in range(count + 1)]
        return [range(first, end) for first, end in pairwise(ends)]


WHOLE = Partition()
"""All of a block at once."""


@dataclass(frozen=True)
class Piece:
    """Some heads of a projection."""

    name: str
    first: int
    end: int
    heads: int
    """Of the whole projection."""

    @property
    def key(self) -> str:
        """What tells the piece from others of its projection."""
        if self.end - self.first == self.heads:
            return self.name
        return f"{self.name}_heads_{self.first}_to_{self.end - 1}"


@dataclass(frozen=True)
class Divisible:
    """A projection, as far as its division goes."""

    name: str
    heads: int
    """Parts of its rows that do not depend on each other; 1: it stays whole."""
    weights: int
    on_disk: bool
    """It has a Hessian a head, and they are on disk."""


def learning_parts(
    projections: Sequence[Divisible], partition: Partition
) -> list[tuple[Piece, ...]]:
    """Return what is learned together, part after part.

    A part has at most ``partition.weights`` weights, but always something: a projection whose rows do
    not fall apart into heads is never divided. Of one whose Hessians are on disk it has at most
    ``partition.heads`` heads.
    """
    parts: list[list[Piece]] = [[]]
    free = limit = partition.weights or sum(p.weights for p in projections)
    for p in projections:
        each = p.weights // p.heads
        most = partition.heads if p.on_disk and partition.heads else p.heads
        first = 0
        while first < p.heads:
            if parts[-1] and (free < each or parts[-1][-1].name == p.name):
                parts.append([])
                free = limit
            count = min(p.heads - first, most, max(1, free // each))
            parts[-1].append(Piece(p.name, first, first + count, p.heads))
            first += count
            free -= count * each
    return [tuple(part) for part in parts if part]
