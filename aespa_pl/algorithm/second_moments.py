"""Sum up ``X^T X``, and compute the second moments G as they act before RoPE and before a norm on heads.

``X^T X`` is symmetric: only the part on and above the diagonal is computed.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

LARGEST = 5.0
"""Largest factor of a norm behind an output, beside the median of the segment: BOS of Gemma 3 270M has up
to 77, and damping, a share of H's mean diagonal, would be of BOS alone."""
STRIPED, STRIPES = 256, 4
"""Columns from which on the sum is computed in so many stripes, which leaves 10 of 16 products. With 64
columns stripes take longer than all at once."""
HALVED, HALVINGS = 2048, 4
"""Columns from which on the sum is halved so many times, which leaves 17 of 32 products. On two threads of a
CPU that takes 0.93 to 0.95 of the time of 8 stripes (3,072 to 11,008 columns): most products are large."""


def bounded(inverse: Tensor, dim: int) -> Tensor:
    """Return factors ``1 / rms`` of the tokens along a dimension, none larger than ``LARGEST`` medians."""
    return inverse.minimum(LARGEST * inverse.median(dim, keepdim=True).values)


def add_gram(total: Float[Tensor, "d d"], X: Float[Tensor, "N d"], *, factor: float = 1.0) -> None:
    """Add ``factor X^T X`` to a sum in place, above the diagonal alone; ``mirror`` makes it whole."""
    add_symmetric(total, X, X, factor=factor)


def add_symmetric(
    total: Float[Tensor, "d d"], X: Float[Tensor, "N d"], Y: Float[Tensor, "N d"], *, factor: float
) -> None:
    """Add ``factor X^T Y``, which must be symmetric, to a sum in place, above the diagonal alone."""
    for rows, columns in _pieces(X.shape[1]):
        total[rows, columns].addmm_(X[:, rows].T, Y[:, columns], alpha=factor)


def mirror(total: Float[Tensor, "d d"]) -> None:
    """Copy the elements above the diagonal below it, in place: the sum is symmetric to the last bit then."""
    for rows, columns in _pieces(total.shape[0]):
        beyond = slice(max(rows.stop, columns.start), columns.stop)
        total[beyond, rows] = total[rows, beyond].T
        if rows.start == columns.start:
            diagonal = total[rows, rows]
            diagonal.copy_(diagonal.triu() + diagonal.triu(1).T)


def computed_fraction(d: int) -> float:
    """Return the fraction of the ``d^2`` sums that ``add_gram`` computes."""
    return sum(len(range(d)[r]) * len(range(d)[c]) for r, c in _pieces(d)) / d**2


def _pieces(d: int) -> list[tuple[slice, slice]]:
    """Return rows and columns of the pieces that cover what is on and above the diagonal, each once."""
    if d >= HALVED:
        return list(_halves(0, d, HALVINGS))
    stripes = STRIPES if d >= STRIPED else 1
    return [
        (slice(*rows), slice(rows[0], d)) for rows in pairwise(d * i // stripes for i in range(stripes + 1))
    ]


def _halves(start: int, stop: int, halvings: int) -> Iterator[tuple[slice, slice]]:
    if not halvings:
        yield slice(start, stop), slice(start, stop)
        return
    middle = (start + stop) // 2
    yield slice(start, middle), slice(middle, stop)
    yield from _halves(start, middle, halvings - 1)
    yield from _halves(middle, stop, halvings - 1)


def rotate_back(
    G: Float[Tensor, "heads d_head d_head"],
    cos: Float[Tensor, "L rotated"],
    sin: Float[Tensor, "L rotated"],
    factor: Float[Tensor, " L"] | None = None,
    *,
    neighbours: bool = False,
) -> Float[Tensor, "heads d_head d_head"]:
    """Return ``mean_t f_t^2 R_t^T G R_t``: G as it acts on queries (keys) before rotation and factor f.

    The error of a query is rotated with the query, so ``R_t dq`` meets the rotated keys. R_t is
    ``diag(cos_t) + diag(sin_t) J``, where J x is ``rotate_half(x) = (-x[half:], x[:half])`` of the first
    ``rotated = 2 half`` columns of a head; where ``neighbours`` are turned it is ``(-x[1], x[0], -x[3],
    ...)``. The others stay, so there cos is 1 and sin is 0.
    """
    # R^T G R has four terms; the mean over t of cos_i cos_j and so on can be taken beforehand.
    L, rotated = cos.shape
    half, others = rotated // 2, G.shape[-1] - rotated
    cos, sin = pad(cos.to(G), (0, others), value=1.0), pad(sin.to(G), (0, others))
    if factor is not None:
        cos, sin = cos * factor.to(G)[:, None], sin * factor.to(G)[:, None]
    identity = torch.eye(rotated, dtype=G.dtype, device=G.device)
    if neighbours:
        turned = torch.stack([-identity[1::2], identity[::2]], 1).flatten(0, 1)
    else:
        turned = torch.cat([-identity[half:], identity[:half]])
    J = pad(turned, (0, others, 0, others))
    cc, cs, ss = cos.T @ cos / L, cos.T @ sin / L, sin.T @ sin / L
    cross = (G * cs) @ J
    return G * cc + cross + cross.transpose(-1, -2) + J.T @ (G * ss) @ J


def through_norm(
    G: Float[Tensor, "heads d_head d_head"],
    weight: Float[Tensor, "#heads d_head"],
    inverse_square: Float[Tensor, " heads"],
) -> Float[Tensor, "heads d_head d_head"]:
    """Return G as it acts on queries (keys) before their norm.

    The paper's families have no such norm. To first order the norm multiplies an error by
    ``weight / rms`` of its token; the part that changes rms itself (one direction of d_head) is left
    out, and ``1 / rms ** 2`` is averaged over the tokens as the Kronecker approximation does for G.
    """
    return inverse_square[:, None, None] * weight[..., None] * G * weight[:, None]
