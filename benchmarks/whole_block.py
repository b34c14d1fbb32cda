"""Measure steps 2 to 4 of a whole block, by phase, beside plain implementations of the same.

python benchmarks/whole_block.py --model opt-125m --rows 64
python benchmarks/whole_block.py --model llama-7b --rows 64

The projections of ``shapes.py``, each on its own: the grid, searched ``--searches`` times as Z-Fold does
(its zeta, which is cheap beside a search, is left out), OPTQ's update, and ``--iterations`` of the
rounding. *plain* is the plain loop over candidates, over columns, and autograd (*trace* of
``rounding_step.py``). A search, an update and an iteration are measured (medians); the phases are multiples
of them.
"""

from dataclasses import dataclass

import torch
from grid_search import plain_search
from jsonargparse import auto_cli
from options import ProjectionOptions, begin, projections
from optq_update import plain_update
from report import median_of_each
from rounding_step import steps
from shapes import Problem

from aespa_pl.algorithm.adaround import start
from aespa_pl.algorithm.grid import min_max_grid, search_grid
from aespa_pl.algorithm.optq import update_weights
from aespa_pl.algorithm.quantizer import GridFormat

PHASES = ("grid", "OPTQ", "rounding")


@dataclass(frozen=True, kw_only=True)
class BlockOptions(ProjectionOptions):
    """Measure each projection and print the sums of a block."""

    searches: int = 11
    """Number of searches of a grid: 1 without zeta, 11 with ten rounds of Z-Fold."""
    iterations: int = 2000
    """Number of iterations of the rounding."""


def main(options: BlockOptions) -> None:
    """Measure each projection and print the sums of a block."""
    report = begin(
        options, ["phase", "ours, s", "plain, s", "ratio"], benchmark="whole_block", rows=options.rows
    )
    times = torch.tensor([options.searches, 1, options.iterations]).double()[:, None]
    single = [torch.tensor(_measure(p, options.repeats)).double() for p in projections(options)]
    total = times * torch.stack(single).sum(0)  # [phases, ours and plain]
    for phase, (ours, plain) in zip(
        (*PHASES, "block"), [*total.tolist(), total.sum(0).tolist()], strict=True
    ):
        report.row(
            [phase, f"{ours:.2f}", f"{plain:.2f}", f"{plain / ours:.1f}"], phase=phase, ours=ours, plain=plain
        )


def _measure(p: Problem, repeats: int) -> list[list[float]]:
    """Return seconds, ours and plain, of one search, one update and one iteration."""
    zeta, where = torch.ones_like(p.W[0, 0]), p.W.device
    grid = min_max_grid(p.W, zeta, GridFormat(2, symmetric=False, group_size=None))
    ours, trace, _, _ = steps(*start(p.W, p.W, grid), p.H, p.G)
    return [
        median_of_each(
            [
                lambda: search_grid(p.W, p.H, zeta, GridFormat(2, symmetric=False, group_size=None))[0],
                lambda: plain_search(p.W, p.H, zeta, 2),
            ],
            repeats,
            where,
        ),
        median_of_each(
            [lambda: update_weights(p.W, p.H, grid), lambda: plain_update(p.W, p.H, grid)], repeats, where
        ),
        median_of_each([ours, trace], repeats, where),
    ]


if __name__ == "__main__":
    main(auto_cli(BlockOptions))
