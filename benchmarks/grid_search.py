"""Measure one search of scale and zero point, beside the plain loop over all candidates.

python benchmarks/grid_search.py --model opt-125m
python benchmarks/grid_search.py --model llama-7b --rows 128        # fewer rows of each matrix

Z-Fold makes up to 31 such searches. *plain* is a loop over the 100 ratios and 2 zero points, each with
its product ``dw H``; *product* one such product, so that ``ours / product`` says what a search costs.
Random weights; the Hessians have a spectrum as steep as models' have, on which the nearness of our
choice depends (``shapes.py``). Medians; *loss* is the loss of all rows, in float64, over the loss of the
plain loop's choice.
"""

from dataclasses import dataclass
from functools import partial

import torch
from jsonargparse import auto_cli
from options import ProjectionOptions, begin, projections
from report import median_of_each
from shapes import Problem
from torch import Tensor

from aespa_pl.algorithm.grid import search_grid
from aespa_pl.algorithm.objectives import error_product
from aespa_pl.algorithm.quantizer import Grid, GridFormat, dequantize, quantize

COLUMNS = ["projection", "shape", "ours, s", "plain, s", "ratio", "product, s", "ours / product", "loss"]


@dataclass(frozen=True, kw_only=True)
class SearchOptions(ProjectionOptions):
    """Measure each projection and print a table."""

    bits: int = 2
    """Bits of a weight."""


def main(options: SearchOptions) -> None:
    """Measure each projection and print a table."""
    bits, where = options.bits, torch.device(options.device)
    report = begin(options, COLUMNS, benchmark="grid_search", bits=bits)
    for p in projections(options):
        zeta = torch.ones(p.W.shape[-1], device=where)
        found: dict[str, Grid] = {}

        def ours(p: Problem = p, zeta: Tensor = zeta, found: dict[str, Grid] = found) -> None:
            found["ours"] = search_grid(p.W, p.H, zeta, GridFormat(bits, symmetric=False, group_size=None))[0]

        def plain(p: Problem = p, zeta: Tensor = zeta, found: dict[str, Grid] = found) -> None:
            found["plain"] = plain_search(p.W, p.H, zeta, bits)

        seconds = median_of_each([ours, plain, partial(error_product, p.W, p.H)], options.repeats, where)
        losses = {name: _loss(p, grid) for name, grid in found.items()}
        loss = float(losses["ours"].sum() / losses["plain"].sum())
        report.row(
            [
                p.name, "{} x {}".format(*p.shape), f"{seconds[0]:.3f}", f"{seconds[1]:.3f}",
                f"{seconds[1] / seconds[0]:.1f}", f"{seconds[2]:.4f}",
                f"{seconds[0] / seconds[2]:.0f}", f"{loss:.4f}",
            ],
            projection=p.name,
            rows=p.shape[0],
            columns=p.shape[1],
            loss=loss,
            **dict(zip(("ours", "plain", "product"), seconds, strict=True)),
        )  # fmt: skip


def plain_search(W: Tensor, H: Tensor, zeta: Tensor, bits: int) -> Grid:
    """Return the best grid of each row, computing the loss of every candidate."""
    V, H, largest = W / zeta, zeta[:, None] * H * zeta, 2**bits - 1
    low, high = V.amin(-1, keepdim=True).clamp(max=0), V.amax(-1, keepdim=True).clamp(min=0)
    full = (high - low) / largest
    least = torch.full_like(full, torch.inf)
    scale, zero = full.clone(), torch.zeros_like(full)
    for z in ((-low / full).floor(), (-low / full).clamp(max=largest).ceil()):
        for percent in range(100, 0, -1):
            s = full * (percent / 100)
            error = s * (torch.clamp(torch.round(V / s) + z, 0, largest) - z) - V
            loss = ((error @ H) * error).sum(-1, keepdim=True)
            better = loss < least
            least = torch.where(better, loss, least)
            scale, zero = torch.where(better, s, scale), torch.where(better, z, zero)
    return Grid(scale, zero, zeta, bits)


def _loss(p: Problem, grid: Grid) -> Tensor:
    error = (dequantize(quantize(p.W, grid), grid) - p.W).double()
    return torch.cat(
        [((e @ p.H[h if len(p.H) > 1 else 0].double()) * e).sum(-1) for h, e in enumerate(error)]
    )


if __name__ == "__main__":
    main(auto_cli(SearchOptions))
