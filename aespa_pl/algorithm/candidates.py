"""Find the best of many grids of a row: compare all on an approximation of H, and the best few on H.

The loss ``e H e^T`` of a candidate with the error e takes a product with H, and a row has 200 candidates.
``A A^T + diag(D)`` with a narrow A stands for H where they are compared: A holds the directions in which
the inputs vary most, D what they leave of the diagonal. A few candidates with the least approximate losses
get their exact ones. A few rows with a few candidates are rounded at once, in memory that stays in the cache.

Last, the scale leaves the candidates. With the integers Q of the best candidate fixed, the loss
``(s Q - v) H (s Q - v)^T`` is a parabola of the scale s; its lowest point is tried, rounded anew.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from aespa_pl.algorithm.workspace import chunk_elements

CPU_CHUNK = 2**18
"""Numbers of errors that a thread holds at once, if rows are not wide; 2**13 takes up to seven times as
long."""
LEAST_ERRORS = 400
"""Vectors of errors that a CPU's thread multiplies at least, although wide ones then leave the cache."""
ACCELERATOR_CHUNK = 2**26
"""Number of errors that an accelerator holds at once, in tensors of 256 MB."""
LEAST_RANK = 16
"""Smallest number of columns of A; 8 to 64 were tried."""
COLUMNS_PER_RANK = 24
"""Columns of H for each column of A in wide matrices."""
NARROW_RANK = 128
"""Up to so many columns, A has one for each 12 of H; some projections need them."""
ITERATIONS = 2
"""Products with H that turn the columns of A into its leading directions."""


@dataclass(frozen=True)
class Effort:
    """Says how many candidates of a row a search looks at; what was tried stands in docs/performance.md."""

    stride: int = 1
    """Distance of the candidates that are compared first."""
    basins: int = 0
    """Number of the best of these whose neighbours are compared as well."""
    shortlist: int | None = None
    """Number of the best of all these that get their exact losses; None: all get them, and nothing else."""


THOROUGH = Effort(shortlist=8)
"""Compares all candidates, because the loss may be rough in the scale."""
QUICK = Effort(stride=5, basins=4, shortlist=1)
"""Takes a third of the time, within Z-Fold's alternation."""
EXHAUSTIVE = Effort()
"""Gives every candidate its exact loss, to compare with figures of others; takes far longer than QUICK."""


@dataclass(frozen=True)
class Candidates:
    """Holds the grids that each row may choose from, with integers up to ``largest``."""

    scale: Float[Tensor, "groups rows candidates"]
    zero: Float[Tensor, "groups rows candidates"]
    largest: int

    def take(self, index: Tensor) -> "Candidates":
        """Return the candidates at ``[groups, rows, some]``."""
        return Candidates(self.scale.gather(-1, index), self.zero.gather(-1, index), self.largest)


def best_grids(
    V: Float[Tensor, "groups rows columns"],
    H: Float[Tensor, "groups columns columns"],
    candidates: Candidates,
    *,
    effort: Effort = THOROUGH,
) -> tuple[Float[Tensor, "groups rows"], Float[Tensor, "groups rows"], Float[Tensor, "groups rows"]]:
    """Return a scale and a zero point with nearly the least ``dv H dv^T`` for each row, and its loss.

    V is the weights over zeta. The scale leaves the candidates, whose neighbours differ little, unless
    EXHAUSTIVE.
    """
    if effort.shortlist is not None:
        candidates = _shortlist(V, H, candidates, effort, effort.shortlist)
    loss, best = exact_losses(V, H, candidates).min(-1, keepdim=True)
    chosen = candidates.take(best)
    scale = chosen.scale
    if effort.shortlist is not None:
        moved = lowest_point(V, H, chosen)
        moved_loss = exact_losses(V, H, moved)
        better = moved_loss < loss
        scale, loss = torch.where(better, moved.scale, scale), torch.where(better, moved_loss, loss)
    return scale[..., 0], chosen.zero[..., 0], loss[..., 0]


def best_weighted(
    V: Float[Tensor, "groups rows columns"], D: Float[Tensor, "groups columns"], candidates: Candidates
) -> tuple[Float[Tensor, "groups rows"], Float[Tensor, "groups rows"]]:
    """Return the scale and the zero point with the least ``dv diag(D) dv^T`` for each row."""
    nothing = torch.zeros_like(D)[..., None]
    best = candidates.take(approximate_losses(V, nothing, D, candidates).argmin(-1, keepdim=True))
    return best.scale[..., 0], best.zero[..., 0]


def _shortlist(V: Tensor, H: Tensor, candidates: Candidates, effort: Effort, length: int) -> Candidates:
    """Return the candidates with the least approximate losses of those that are compared."""
    A, D = leading_part(H)
    count, reach = candidates.scale.shape[-1], effort.stride // 2  # what lies between was not compared
    index = torch.arange(min(reach, count - 1), count, effort.stride, device=V.device)
    index = index.expand(*candidates.scale.shape[:2], -1)  # [groups, rows, compared]
    losses = approximate_losses(V, A, D, candidates.take(index) if reach else candidates)
    if reach:
        least, best = losses.topk(min(effort.basins, losses.shape[-1]), largest=False)
        index = index.gather(-1, best)
        distances = torch.arange(1, reach + 1, device=V.device)
        near = torch.cat([index[..., None] - distances, index[..., None] + distances], -1)
        near = near.flatten(-2).clamp(0, count - 1)
        losses = torch.cat([least, approximate_losses(V, A, D, candidates.take(near))], -1)
        index = torch.cat([index, near], -1)
    few = losses.topk(min(length, losses.shape[-1]), largest=False).indices
    return candidates.take(index.gather(-1, few))


def cpu_chunk(columns: int) -> int:
    """Return how many numbers of errors of so many columns a CPU's thread holds at once."""
    return max(CPU_CHUNK, LEAST_ERRORS * columns)


def leading_rank(columns: int) -> int:
    """Return the columns of A for a Hessian of so many columns."""
    narrow = min(NARROW_RANK, 2 * columns // COLUMNS_PER_RANK)
    return min(columns, max(LEAST_RANK, narrow, columns // COLUMNS_PER_RANK))


def leading_part(
    H: Float[Tensor, "groups columns columns"],
) -> tuple[Float[Tensor, "groups columns rank"], Float[Tensor, "groups columns"]]:
    """Return A and D, so that ``A A^T + diag(D)`` is near H and has its diagonal.

    A is Nystroem's approximation on a few directions, which begin with the columns of the largest
    variances; nothing is random, because each process must find the same.
    """
    diagonal, columns = H.diagonal(dim1=1, dim2=2), H.shape[-1]
    leading = diagonal.topk(leading_rank(columns)).indices
    Y = H.gather(2, leading[:, None].expand(-1, columns, -1))  # [groups, columns, rank]
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(Y).Q
        Y = H @ basis
    triangle = torch.linalg.cholesky_ex(basis.mT @ Y, upper=True).L
    A = torch.linalg.solve_triangular(triangle, Y, upper=True, left=False)
    return A, (diagonal - A.square().sum(-1)).clamp(min=0)


def approximate_losses(
    V: Float[Tensor, "groups rows columns"],
    A: Float[Tensor, "groups columns rank"],
    D: Float[Tensor, "groups columns"],
    candidates: Candidates,
) -> Float[Tensor, "groups rows candidates"]:
    """Return ``dv (A A^T + diag(D)) dv^T`` of all candidates of all rows."""
    # a product with D, which has one column, takes a CPU longer than that with A
    return _of_each(
        V, A, candidates, lambda e, product: product.square_().sum(-1) + e.square_().mul_(D[:, None]).sum(-1)
    )


def exact_losses(
    V: Float[Tensor, "groups rows columns"],
    H: Float[Tensor, "groups columns columns"],
    candidates: Candidates,
) -> Float[Tensor, "groups rows candidates"]:
    """Return ``dv H dv^T`` of all candidates of all rows."""
    return _of_each(V, H, candidates, lambda errors, product: product.mul_(errors).sum(-1))


def lowest_point(V: Tensor, H: Tensor, chosen: Candidates) -> Candidates:
    """Return the scale with the least loss for the integers of each row's only candidate."""
    moved = torch.empty_like(chosen.scale)
    for V_rows, scale, Q, QH, place in _chunks(V, chosen, H.shape[-1], moved):
        torch.bmm(Q[:, :, 0], H, out=QH)
        slope = (scale[:, :, 0] * Q[:, :, 0]).sub_(V_rows[:, :, 0]).mul_(QH)
        curvature = QH.mul_(Q[:, :, 0])
        step = slope.sum(-1, keepdim=True) / curvature.sum(-1, keepdim=True)
        torch.sub(scale[:, :, 0], step, out=place)
    usable = (moved > 0) & moved.isfinite()  # not where all integers stand for 0
    return Candidates(torch.where(usable, moved, chosen.scale), chosen.zero, chosen.largest)


def _of_each(
    V: Tensor, matrix: Tensor, candidates: Candidates, losses: Callable[[Tensor, Tensor], Tensor]
) -> Float[Tensor, "groups rows candidates"]:
    """Return what ``losses`` makes of errors ``V - s Q`` of nearest rounding, a few at a time.

    It is called with errors ``[groups, n, columns]`` and their product with ``matrix``; it may change both.
    """
    results = torch.empty_like(candidates.scale)
    for V_rows, scale, Q, product, place in _chunks(V, candidates, matrix.shape[-1], results):
        torch.addcmul(V_rows, Q, scale, value=-1, out=Q)
        errors = Q.view(len(V), -1, V.shape[-1])  # one product a group
        place.copy_(losses(errors, torch.bmm(errors, matrix, out=product)).view(place.shape))
    return results


def _chunks(
    V: Tensor, candidates: Candidates, outputs: int, results: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Yield rows, scales and integers of some candidates of some rows, memory for a product, and a place.

    Rows are ``[groups, rows, 1, columns]``, scales ``[groups, rows, candidates, 1]``, and the integers, less
    the zero point, ``[groups, rows, candidates, columns]``. The product is ``[groups, n, outputs]``; the
    place is in ``results``. All chunks have the same memory: new memory takes longer than the work in it.
    """
    groups, row_count, columns = V.shape
    chunk = chunk_elements(V, cpu=cpu_chunk(columns), accelerator=ACCELERATOR_CHUNK)
    elements, count = chunk // (groups * columns), candidates.scale.shape[-1]
    width = min(count, max(1, elements))
    height = min(row_count, max(1, elements // width))
    integers = V.new_empty(groups * height * width * columns)
    products = V.new_empty(groups * height * width * outputs)
    zero = candidates.zero[..., None]
    # half the time of a division; the inverse of a scale below 1e-38 is infinite, and 0 times that NaN
    inverse = candidates.scale.reciprocal().clamp(max=torch.finfo(V.dtype).max)[..., None]
    of_candidates = inverse, -zero, candidates.largest - zero, candidates.scale[..., None], results
    for first in range(0, count, width):
        some = (x[:, :, first : first + width].split(height, 1) for x in of_candidates)
        # split at once: a chunk's own slices would take a tenth of its time
        for rows, inverses, lowest, highest, scale, place in zip(
            V[:, :, None].split(height, 1), *some, strict=True
        ):
            shape = place.shape
            Q = integers[: shape.numel() * columns].view(*shape, columns)
            torch.mul(rows, inverses, out=Q)
            Q.round_()
            # a quarter of the time of clamp with tensors
            torch.maximum(Q, lowest, out=Q)
            torch.minimum(Q, highest, out=Q)
            product = products[: shape.numel() * outputs].view(groups, -1, outputs)
            yield rows, scale, Q, product, place
