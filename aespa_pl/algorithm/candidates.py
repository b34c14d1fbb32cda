"""Find the best of many grids of a row: compare all on an approximation of H, and the best few on H.

The loss ``e H e^T`` of a candidate with the error e takes a product with H, and a row has 200 candidates.
``A A^T + diag(D)`` with a narrow A stands for H where they are compared: A holds the directions in which
the inputs vary most, D what they leave of the diagonal. That takes a small part of the product. A few
candidates with the least approximate losses get their exact ones.

Last, the scale leaves the candidates. With the integers Q of the best candidate fixed, the loss
``(s Q - v) H (s Q - v)^T`` is a parabola of the scale s; its lowest point is tried, with the integers that
are nearest there.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from aespa_pl.algorithm.candidate_losses import (
    Candidates,
    approximate_losses,
    exact_losses,
    leading_part,
    lowest_point,
)


@dataclass(frozen=True)
class Effort:
    """Says how many candidates of a row a search looks at; what was tried stands in docs/performance.md."""

    stride: int = 1
    """Distance of the candidates that are compared first."""
    basins: int = 0
    """Number of the best of these whose neighbours are compared as well."""
    shortlist: int | None = None
    """Number of the best of all these that get their exact losses; None: all candidates get exact losses
    and nothing else."""

    @property
    def reach(self) -> int:
        """Return the distance of the farthest neighbours on either side; all between were not compared."""
        return self.stride // 2


THOROUGH = Effort(shortlist=8)
"""Compares all candidates, because the loss may be rough in the scale."""
QUICK = Effort(stride=5, basins=4, shortlist=1)
"""Takes a third of the time, within Z-Fold's alternation."""
EXHAUSTIVE = Effort()
"""Gives every candidate its exact loss, to compare with figures of others; takes far longer than QUICK."""


def best_grids(
    V: Float[Tensor, "groups rows columns"],
    H: Float[Tensor, "groups columns columns"],
    candidates: Candidates,
    *,
    effort: Effort = THOROUGH,
) -> tuple[Float[Tensor, "groups rows"], Float[Tensor, "groups rows"], Float[Tensor, "groups rows"]]:
    """Return a scale and a zero point with nearly the least ``dv H dv^T`` for each row, and its loss.

    V is the weights over zeta. Neighbouring candidates differ little. The scale leaves the candidates unless
    the effort is EXHAUSTIVE.
    """
    if effort.shortlist is None:
        loss, best = exact_losses(V, H, candidates).min(-1, keepdim=True)
        chosen = candidates.take(best)
        return chosen.scale[..., 0], chosen.zero[..., 0], loss[..., 0]
    index, losses = _compare(V, H, candidates, effort)
    few = losses.topk(min(effort.shortlist, losses.shape[-1]), largest=False).indices
    shortlist = candidates.take(index.gather(-1, few))
    loss, best = exact_losses(V, H, shortlist).min(-1, keepdim=True)
    chosen = shortlist.take(best)
    moved = lowest_point(V, H, chosen)
    moved_loss = exact_losses(V, H, moved)
    better = moved_loss < loss
    scale, loss = (torch.where(better, *pair) for pair in ((moved.scale, chosen.scale), (moved_loss, loss)))
    return scale[..., 0], chosen.zero[..., 0], loss[..., 0]


def _compare(V: Tensor, H: Tensor, candidates: Candidates, effort: Effort) -> tuple[Tensor, Tensor]:
    """Return place and approximate loss of candidates, among them the best of those that are compared."""
    A, D = leading_part(H)
    count = candidates.scale.shape[-1]
    index = torch.arange(min(effort.reach, count - 1), count, effort.stride, device=V.device)
    index = index.expand(*candidates.scale.shape[:2], -1)  # [groups, rows, compared]
    if not effort.reach:
        return index, approximate_losses(V, A, D, candidates)
    losses = approximate_losses(V, A, D, candidates.take(index))
    least, best = losses.topk(min(effort.basins, losses.shape[-1]), largest=False)
    index = index.gather(-1, best)
    distances = torch.arange(1, effort.reach + 1, device=V.device)
    near = torch.cat([index[..., None] - distances, index[..., None] + distances], -1)
    near = near.flatten(-2).clamp(0, count - 1)
    of_near = approximate_losses(V, A, D, candidates.take(near))
    return torch.cat([index, near], -1), torch.cat([least, of_near], -1)
