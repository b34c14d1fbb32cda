"""Divide a block whose statistics or whose learning do not fit into memory as a whole."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest


@dataclass(frozen=True)
class Partition:
    """Says how much of a block is in memory at once at most; the results do not depend on it."""

    heads: int | None = None
    """Number of key/value heads whose H_V is in memory: with fewer than all, the statistics take several
    passes over the segments, and the matrices wait on disk; later so many are learned at once, and all other
    steps have those of one. None: all."""
    weights: int | None = None
    """Number of weights that are learned at once, each portion with a Trainer of its own. None: all."""
    experts: int | None = None
    """Number of experts whose statistics are in memory, as of ``heads``; if not all, later those of one."""

    def passes(self, heads: int, experts: int) -> list[tuple[range, range]]:
        """Return heads and experts of each pass over the segments, as evenly as can be."""
        groups = _evenly(heads, self.heads), _evenly(experts, self.experts)
        return list(zip_longest(*groups, fillvalue=range(0)))


def _evenly(count: int, most: int | None) -> list[range]:
    groups = math.ceil(count / (most or count)) if count else 1
    ends = [round(count * i / groups) for i in range(groups + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


WHOLE = Partition()
"""Partition with all of a block at once."""


@dataclass(frozen=True)
class HeadRange:
    """Names some heads of a projection."""

    name: str
    first: int
    end: int
    heads: int
    """Number of heads of the whole projection."""

    @property
    def key(self) -> str:
        """Return a name that tells these heads from others of their projection."""
        whole = self.end - self.first == self.heads
        return self.name if whole else f"{self.name}_heads_{self.first}_to_{self.end - 1}"


Portion = Sequence[HeadRange]
"""Parts of a block that are learned together."""


@dataclass(frozen=True)
class Divisible:
    """Describes a projection as far as its division goes."""

    name: str
    heads: int
    """Number of groups of rows that do not depend on each other; 1: the projection stays whole."""
    weights: int
    on_disk: bool
    """Whether it has a Hessian for each head, and they are on disk."""


def learning_portions(projections: Sequence[Divisible], partition: Partition) -> list[Portion]:
    """Return what of a block is learned together, portion after portion.

    A portion has at most ``partition.weights`` weights, but at least one head, or a projection without heads;
    of one whose Hessians are on disk it has at most ``partition.heads`` heads.
    """
    portions: list[list[HeadRange]] = [[]]
    free = limit = partition.weights or sum(p.weights for p in projections)
    for p in projections:
        each = p.weights // p.heads
        most = partition.heads if p.on_disk and partition.heads else p.heads
        first = 0
        while first < p.heads:
            if portions[-1] and (free < each or portions[-1][-1].name == p.name):
                portions.append([])
                free = limit
            count = min(p.heads - first, most, max(1, free // each))
            portions[-1].append(HeadRange(p.name, first, first + count, p.heads))
            first += count
            free -= count * each
    return [portion for portion in portions if portion]
