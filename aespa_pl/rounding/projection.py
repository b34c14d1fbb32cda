"""Hold the rounding variables of one projection, and compute their loss."""

import torch
from torch import Tensor, nn

from aespa_pl.algorithm.adaround import (
    RoundingLoss,
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

    def __init__(
        self,
        weight: Tensor,
        updated: Tensor,
        grid: Grid,
        *,
        penalty: float,
        share: RowShare | None = None,
    ) -> None:
        """Begin between the two integers beside each weight ``[heads, rows, d_in]`` of OPTQ's ``updated``.

        The ``penalty`` is the weight lambda of the rounding loss; ``share`` says which rows of the projection
        these are, None: all of them.
        """
        super().__init__()
        # no buffers: they are where the block was run, on the device, and stay there
        self.fixed, variables = start(weight, updated, grid)
        self.nearest = quantize(weight, grid).to(torch.uint8)
        # memory that lives as long as the variables: new memory each iteration costs a CPU more
        self.gradient = torch.empty_like(variables)
        self.penalty = penalty
        self.share = share or RowShare(weight.shape[0], weight.shape[1], by_heads=True)
        self.variables = nn.Parameter(variables)

    @torch.no_grad()
    def loss(
        self, H: Tensor, G: Tensor | None, beta: float | None, workspace: Workspace
    ) -> RoundingLoss:
        """Return ``rounding_loss`` with the damped H, an ``operand``; its gradient is in ``gradient``."""
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
