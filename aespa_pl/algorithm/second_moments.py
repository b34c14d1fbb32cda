"""Sum up ``X^T X``, which is symmetric: only the part on and above the diagonal is computed."""

from itertools import pairwise

from jaxtyping import Float
from torch import Tensor

STRIPES = 4
"""Stripes of columns: 10 of 16 products are left, and took 0.63 to 0.81 of the time on one thread of a CPU
for 256 to 4096 columns; with 8 stripes it was 0.60 to 0.86."""
NARROW = 256
"""Columns below which the products are too small: with 64 columns stripes take longer than all at once."""


def add_gram(total: Float[Tensor, "d d"], X: Float[Tensor, "N d"], *, factor: float = 1.0) -> None:
    """Add ``factor X^T X`` to a sum in place, above the diagonal alone; ``mirror`` makes it whole."""
    for start, stop in _stripes(X.shape[1]):
        total[start:stop, start:].addmm_(X[:, start:stop].T, X[:, start:], alpha=factor)


def mirror(total: Float[Tensor, "d d"]) -> None:
    """Copy the elements above the diagonal below it, in place: the sum is exactly symmetric then.

    It is so within the squares on the diagonal too, whose products need not be symmetric to the last bit.
    """
    for start, stop in _stripes(total.shape[0]):
        total[stop:, start:stop] = total[start:stop, stop:].T
        diagonal = total[start:stop, start:stop]
        diagonal.copy_(diagonal.triu() + diagonal.triu(1).T)


def computed_fraction(d: int) -> float:
    """Return the fraction of the ``d^2`` sums that ``add_gram`` computes."""
    return sum((stop - start) * (d - start) for start, stop in _stripes(d)) / d**2


def _stripes(d: int) -> list[tuple[int, int]]:
    count = 1 if d < NARROW else STRIPES
    return list(pairwise(d * i // count for i in range(count + 1)))
