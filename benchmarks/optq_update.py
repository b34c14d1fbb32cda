"""Measure OPTQ's update of the full-precision weights, beside the plain loop over columns.

python benchmarks/optq_update.py --model opt-125m
python benchmarks/optq_update.py --model llama-7b --rows 256        # fewer rows of each matrix

*plain* is the update as its paper has it: the inverse of H and its factor, then column after column, each of
which updates all columns to come. *factor* is what our factor takes alone. Random weights and Hessians
(``shapes.py``). Medians.
"""

from functools import partial

import torch
from jsonargparse import auto_cli
from options import ProjectionOptions, begin, projections
from report import median_of_each
from torch import Tensor

from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.hessian import unit_factor
from aespa_pl.algorithm.optq import update_weights
from aespa_pl.algorithm.quantizer import Grid, GridFormat

KINDS = ("ours", "plain", "factor")


def main(options: ProjectionOptions) -> None:
    """Measure each projection and print a table."""
    columns = ["projection", "shape", "ours, s", "plain, s", "ratio", "factor, s"]
    report = begin(options, columns, benchmark="optq_update")
    for p in projections(options):
        ones = torch.ones_like(p.W[0, 0])
        grid = min_max_grid(p.W, ones, GridFormat(2, symmetric=False, group_size=None))
        seconds = median_of_each(
            [
                partial(update_weights, p.W, p.H, grid),
                partial(plain_update, p.W, p.H, grid),
                partial(factor_each, p.H),
            ],
            options.repeats,
            torch.device(options.device),
        )
        report.row(
            [
                p.name, "{} x {}".format(*p.shape), f"{seconds[0]:.3f}", f"{seconds[1]:.3f}",
                f"{seconds[1] / seconds[0]:.1f}", f"{seconds[2]:.3f}",
            ],
            projection=p.name,
            rows=p.shape[0],
            columns=p.shape[1],
            **dict(zip(KINDS, seconds, strict=True)),
        )  # fmt: skip


def factor_each(H: Tensor) -> None:
    """Factor each Hessian, and nothing else."""
    for single in H:
        unit_factor(single[None])


def plain_update(W: Tensor, H: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return what each weight was before it was rounded, and its integer."""
    visited, integers = torch.empty_like(W), torch.empty_like(W)
    step, zero = grid.step(), grid.zero()
    for h in range(H.shape[0]):
        heads = slice(None) if H.shape[0] == 1 else slice(h, h + 1)
        order = H[h].diagonal().argsort(descending=True)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(H[h][order][:, order]))
        U = torch.linalg.cholesky(inverse, upper=True)
        pending = W[heads][..., order].flatten(0, 1)
        s, z = step[heads][..., order].flatten(0, 1), zero[heads][..., order].flatten(0, 1)
        found = torch.empty_like(pending)
        for j in range(len(order)):
            w = pending[:, j]
            found[:, j] = torch.clamp(torch.round(w / s[:, j]) + z[:, j], 0, grid.largest)
            error = (w - s[:, j] * (found[:, j] - z[:, j])) / U[j, j]
            pending[:, j + 1 :] -= error[:, None] * U[j, j + 1 :]
        visited[heads, :, order] = pending.view_as(W[heads])
        integers[heads, :, order] = found.view_as(W[heads])
    return visited, integers


if __name__ == "__main__":
    main(auto_cli(ProjectionOptions))
