"""Hold the rounding variables of one projection, and compute their loss."""

import torch
from torch import Tensor, nn

from aespa_pl.algorithm.adaround import (
    RoundingLoss,
    SoftRounding,
    decide,
    rounding_loss,
    start,
    undecided,
)
from aespa_pl.algorithm.quantizer import Grid, quantize
from aespa_pl.algorithm.workspace import Workspace
from aespa_pl.curve_names import NOT_NEAREST, UNDECIDED
from aespa_pl.distributed.rows import RowShare


class ProjectionRounding(nn.Module):
    """Rounds a projection softly, or the rows of it that this process learns.

    Only the variables are stored in checkpoints; the fixed tensors follow from weights and grid.
    """

    lower: Tensor
    base: Tensor
    gain: Tensor | None
    scale: Tensor
    zeta: Tensor
    nearest: Tensor
    gradient: Tensor

    def __init__(
        self,
        weight: Tensor,
        updated: Tensor,
        grid: Grid,
        *,
        penalty: float,
        share: RowShare | None = None,
    ) -> None:
        """Begin with a hard choice between the two integers beside each updated weight.

        Args:
            weight: Weight that is aimed at, ``[heads, rows, d_in]``.
            updated: OPTQ's W', which decides the two integers, in the same shape.
            grid: Grid of these rows.
            penalty: Weight lambda of the rounding loss.
            share: Which rows of the projection these are; None: all of them.
        """
        super().__init__()
        fixed, variables = start(weight, updated, grid)
        self.largest = fixed.largest
        self.penalty = penalty
        self.share = share or RowShare(weight.shape[0], weight.shape[1], by_heads=True)
        self.variables = nn.Parameter(variables)
        nearest = quantize(weight, grid).to(torch.uint8)
        for name, tensor in (
            ("lower", fixed.lower), ("base", fixed.base), ("gain", fixed.gain), ("scale", fixed.scale),
            ("zeta", fixed.zeta), ("nearest", nearest),
        ):  # fmt: skip
            self.register_buffer(name, tensor, persistent=False)
        # memory that lives as long as the variables: new memory each iteration costs a CPU more
        self.register_buffer("gradient", torch.empty_like(variables), persistent=False)

    @property
    def fixed(self) -> SoftRounding:
        """Return everything that stays fixed while the variables are learned."""
        return SoftRounding(self.lower, self.base, self.gain, self.scale, self.zeta, self.largest)

    @torch.no_grad()
    def loss(
        self, H: Tensor, G: Tensor | None, beta: float | None, workspace: Workspace
    ) -> RoundingLoss:
        """Return the loss; its gradient is in ``gradient``.

        Args:
            H: Damped Hessian, an operand of the context's precision, ``[heads or 1, d_in, d_in]``.
            G: Second moment of the other side ``[heads, rows, rows]``, or None.
            beta: Exponent of the rounding loss; None: there is none yet.
            workspace: Memory for intermediate results.
        """
        return rounding_loss(
            self.variables,
            self.fixed,
            H,
            G,
            weight=self.penalty,
            beta=beta,
            workspace=workspace,
            gradient=self.gradient,
        )

    @torch.no_grad()
    def integers(self) -> Tensor:
        """Return the integers that the variables stand for, uint8, ``[heads, rows, d_in]``."""
        return decide(self.variables, self.fixed)

    @torch.no_grad()
    def decisions(self) -> dict[str, Tensor]:
        """Return the share of variables still undecided, and of integers that are not the nearest."""
        differs = (self.integers() != self.nearest).count_nonzero() / self.variables.numel()
        return {UNDECIDED: undecided(self.variables), NOT_NEAREST: differs}
