"""The best of many grids of a row, with a few of the products that their losses take.

The losses ``e_c H e_c^T`` of a row's candidates c are the diagonal of their Gram matrix
``A = E H E^T``, E being their quantization errors. The product ``e_b H`` of one of them gives its own
loss and, with a dot product for each other candidate, column b of A: a step of the Cholesky
factorization of A with pivot b. What is left of A, ``A - F F^T``, has no negative diagonal, so
``sum_k F_ck^2`` is a lower bound of loss c. The next product is always that of the least bound; the
search ends when no bound is below the least loss found. So the choice is that of computing all losses,
and nothing is assumed about how they depend on the scale.

Of 200 candidates, 6 to 20 are multiplied on statistics of real models, 30 where H is the identity
(docs/performance.md).
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from aespa_pl.algorithm.workspace import chunk_elements

CPU_CHUNK = 2**18
"""Errors at once, for each thread; 2**14 to 2**22 were tried."""
ACCELERATOR_CHUNK = 2**26
"""Errors at once: 256 MB a tensor."""
MARGIN = 1e-4
"""Share of the least loss that a bound must exceed it by. Rounding makes errors of some 1e-6 in a loss,
and up to ten times as much in a bound."""
LEAST_RESIDUAL = 1e-3
"""Share of its loss that what is left of it counts with at least, as a pivot: the difference of two
numbers that are nearly equal may be nothing but their errors. Too much of it makes bounds lower."""


@dataclass(frozen=True)
class Candidates:
    """Grids that each row may choose from."""

    scale: Float[Tensor, "*rows candidates"]
    zero: Float[Tensor, "*rows candidates"]
    levels: int
    """The largest integer."""

    def __getitem__(self, index: Any) -> "Candidates":
        """Return the candidates at an index of ``scale``."""
        return Candidates(self.scale[index], self.zero[index], self.levels)

    def errors(
        self, V: Float[Tensor, "*rows columns"]
    ) -> Float[Tensor, "*rows candidates columns"]:
        """Return the error of nearest rounding with each candidate."""
        V, step, zero = V[..., None, :], self.scale[..., None], self.zero[..., None]
        error = V / step  # all that follows in place: new memory costs more than what it holds
        error.round_()
        # a quarter of the time of clamp with tensors
        torch.maximum(error, -zero, out=error)
        torch.minimum(error, self.levels - zero, out=error)
        return error.mul_(step).sub_(V)


def every_loss(
    V: Float[Tensor, "groups rows columns"],
    H: Float[Tensor, "groups columns columns"],
    candidates: Candidates,
) -> Float[Tensor, "groups rows candidates"]:
    """Return ``dv H dv^T`` of all candidates of all rows."""
    elements = chunk_elements(V, cpu=CPU_CHUNK, accelerator=ACCELERATOR_CHUNK)
    size, losses = max(1, elements // V.numel()), []
    for start in range(0, candidates.scale.shape[-1], size):
        error = candidates[..., start : start + size].errors(V)
        flat = error.flatten(1, 2)  # one product a group
        losses.append((flat * (flat @ H)).sum(-1).view(error.shape[:-1]))
    return torch.cat(losses, -1)


def least_loss(
    V: Float[Tensor, "rows columns"],
    H: Float[Tensor, "columns columns"],
    candidates: Candidates,
) -> Int[Tensor, " rows"]:
    """Return the candidate with the least ``dv H dv^T`` of each row."""
    scale = candidates.scale
    best = torch.zeros(len(V), dtype=torch.long, device=V.device)
    best_loss = torch.full_like(scale[:, 0], torch.inf)
    rows = torch.arange(len(V), device=V.device)  # those with candidates that are not ruled out
    left = torch.arange(scale.shape[1], device=V.device).expand_as(scale)  # these candidates
    counts = [scale.shape[1]] * len(V)  # how many they are
    bound, factor = torch.zeros_like(scale), scale.new_zeros(*scale.shape, 0)
    # The first pivot is no candidate, but the error of rounding all to 0: where the integers don't
    # change with the scale, the error changes by a multiple of that and of itself.
    error, pivot = -V, torch.full_like(rows, -1)
    pivot_bound, pivot_factor = bound[:, 0], factor[:, 0]
    while True:
        product = error @ H
        loss = (error * product).sum(-1)
        better = (loss < best_loss[rows]) & (pivot >= 0)
        best[rows] = torch.where(better, pivot, best[rows])
        best_loss[rows] = torch.where(better, loss, best_loss[rows])

        column = _dots(V[rows], product, candidates[rows[:, None], left], counts)
        column -= (factor @ pivot_factor[..., None])[..., 0]
        residual = torch.maximum(loss - pivot_bound, LEAST_RESIDUAL * loss)
        column /= residual.clamp(min=torch.finfo(V.dtype).tiny).sqrt()[:, None]
        bound, factor = bound + column.square(), torch.cat([factor, column[..., None]], -1)

        count, order = (bound < (1 + MARGIN) * best_loss[rows, None]).sum(1).sort(descending=True)
        counts = [c for c in count.tolist() if c]
        if not counts:
            return best
        kept = order[: len(counts)]
        bound, columns = (x[:, : counts[0]] for x in bound[kept].sort(1))
        rows, left, factor = (
            rows[kept],
            left[kept[:, None], columns],
            factor[kept[:, None], columns],
        )
        pivot, pivot_bound, pivot_factor = left[:, 0], bound[:, 0].clone(), factor[:, 0]
        bound[:, 0] = torch.inf  # its loss is known from now on
        error = candidates[rows[:, None], pivot[:, None]].errors(V[rows])[:, 0]


def _dots(V: Tensor, product: Tensor, candidates: Candidates, counts: list[int]) -> Tensor:
    """Return ``e_c . product`` for the first ``counts`` candidates of each row, most of them first."""
    dots = torch.zeros_like(candidates.scale)
    elements = chunk_elements(V, cpu=CPU_CHUNK, accelerator=ACCELERATOR_CHUNK)
    start = 0
    while start < len(V):
        count = counts[start]
        some = slice(start, start + max(1, elements // (count * V.shape[1])))
        error = candidates[some, :count].errors(V[some])
        dots[some, :count] = error.mul_(product[some, None]).sum(-1)
        start = some.stop
    return dots
