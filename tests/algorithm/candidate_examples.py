"""The tests of candidates share problems with 200 grids a row, and an oracle in float64."""

import torch
from torch import Tensor

from aespa_pl.algorithm.candidates import Candidates
from tests import reference

SPECTRA = {"identity": 0.0, "mild": 0.5, "typical": 1.0, "steep": 2.0, "nearly singular": 6.0}
"""Exponents of the eigenvalues' power law."""


def problem(
    spectrum: str, bits: int, rows: int = 6, columns: int = 40, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Candidates]:
    """Return weights, a damped Hessian and the 200 candidates of each row, all with one group."""
    eigenvalues = torch.arange(1, columns + 1, dtype=torch.float64) ** -SPECTRA[spectrum]
    Q = torch.linalg.qr(torch.randn(columns, columns, dtype=torch.float64))[0]
    H = (Q * (eigenvalues + 1e-2 * eigenvalues.mean())) @ Q.T
    V = torch.randn(rows, columns, dtype=torch.float64)
    full = (V.amax(1) - V.amin(1)) / (2**bits - 1)
    ratios = torch.arange(100, 0, -1, dtype=torch.float64) / 100
    zero = -V.amin(1) / full
    zeros = torch.stack([zero.floor(), zero.ceil()], 1).repeat_interleave(100, 1)
    scales = (full[:, None] * ratios).repeat(1, 2)
    candidates = Candidates(scales[None].to(dtype), zeros[None].to(dtype), 2**bits - 1)
    return V[None].to(dtype), H[None].to(dtype), candidates


def loss_of(V: Tensor, H: Tensor, scale: float, zero: float, largest: int) -> float:
    """Return the loss of one row on one grid, in float64."""
    q = reference.nearest(V, scale, zero, largest)
    error = scale * (q - zero) - V.double()
    return float(error @ H.double() @ error)


def every_loss(V: Tensor, H: Tensor, candidates: Candidates, row: int) -> Tensor:
    """Return the loss of each candidate of a row, in float64."""
    scale, zero = (x[0, row].double()[:, None] for x in (candidates.scale, candidates.zero))
    weights = V[0, row].double()
    error = scale * ((weights / scale).round() + zero).clamp(0, candidates.largest)
    error -= scale * zero + weights
    return ((error @ H[0].double()) * error).sum(1)


def strong_directions(columns: int) -> Tensor:
    """Return a damped Hessian of inputs with 24 strong directions and variances that fall as 1 / j."""
    variances = 1 / torch.arange(1, columns + 1, dtype=torch.float64)[torch.randperm(columns)]
    strong = torch.randn(columns, 24, dtype=torch.float64) * variances[:, None].sqrt()
    strong *= 4 / torch.arange(1, 25, dtype=torch.float64).sqrt()
    weak = torch.randn(columns, 4 * columns, dtype=torch.float64) * variances[:, None].sqrt()
    H = strong @ strong.T + weak @ weak.T / (4 * columns)
    return (H + 0.01 * H.diagonal().mean() * torch.eye(columns, dtype=torch.float64))[None]
