"""A small projection on a device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.quantizer import Grid, GridFormat


@dataclass(frozen=True)
class Problem:
    """A projection on the device."""

    W: Tensor
    H: Tensor
    G: Tensor
    grid: Grid


def problem(
    device: torch.device, heads: int = 1, rows: int = 48, columns: int = 160, group_size: int | None = None
) -> Problem:
    W, X = torch.randn(heads, rows, columns), torch.randn(columns, 400)
    K = torch.randn(heads, 90, rows)
    grid = min_max_grid(W, torch.rand(columns) + 0.5, GridFormat(2, group_size=group_size))
    on_device = Grid(grid.scale.to(device), grid.zero_point.to(device), grid.zeta.to(device), grid.bits)
    H, G = (X @ X.T)[None] / 200, K.mT @ K
    return Problem(W.to(device), H.to(device), G.to(device), on_device)
