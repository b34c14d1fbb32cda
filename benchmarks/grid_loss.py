"""Compare the loss of a run's grids with that of trying all candidates, on the run's weights and Hessians.

python benchmarks/grid_loss.py '[0, 6, 12]' 'fit --config CONFIG.yaml'

The command is one of ``aespa-pl``, whose run goes on up to the last of the blocks. A row has
the projections with one input: processor seconds of our search, and of the exhaustive one, which
computes the exact losses of all candidates in each round of Z-Fold; and ``tr(dW H dW^T)`` under nearest
rounding, ours over the other.
"""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from jsonargparse import auto_cli
from report import Report
from torch import Tensor

from aespa_pl import cli
from aespa_pl.algorithm.objectives import reconstruction_loss
from aespa_pl.algorithm.quantizer import Grid, dequantize, quantize
from aespa_pl.algorithm.zeta import fit_grids as fit_grids_of_group
from aespa_pl.block.grids import fit_grids
from aespa_pl.block.quantized import QuantizedBlock, QuantizedProjection
from aespa_pl.distributed.processes import World
from aespa_pl.settings import QuantizationSettings

COLUMNS = ["block", "projections", "ours, s", "all candidates, s", "loss"]


def main(blocks: list[int], command: str, *, output: Path | None = None) -> None:
    """Run a command with a search that measures itself in some blocks.

    Args:
        blocks: Numbers of the blocks, from 0.
        command: Command of aespa-pl, with its options.
        output: JSON lines are appended to this file.
    """
    torch.set_num_threads(1)
    report, index = Report(COLUMNS, output, benchmark="grid_loss"), 0

    def search_block(block: QuantizedBlock, settings: QuantizationSettings, world: World) -> None:
        nonlocal index
        index = block.index
        fit_grids(block, settings, world)
        if index >= max(blocks):
            raise KeyboardInterrupt

    def search_group(
        weights: Sequence[Tensor], projections: Sequence[QuantizedProjection], *rest: Any, **named: Any
    ) -> list[Grid]:
        def searched(*, exhaustive: bool) -> tuple[list[Grid], float]:
            began = time.process_time()
            options = named | {"exhaustive": exhaustive}
            found = fit_grids_of_group(weights, projections, *rest, **options)
            return found, time.process_time() - began

        ours, seconds = searched(exhaustive=False)
        if index in blocks:
            best, longer = searched(exhaustive=True)
            names = " ".join(p.projection.name for p in projections)
            ratio = loss(projections, ours) / loss(projections, best)
            report.row(
                [index, names, f"{seconds:.2f}", f"{longer:.2f}", f"{ratio:.4f}"],
                block=index,
                projections=names,
                ours=seconds,
                all=longer,
                loss=ratio,
            )
        return ours

    with (
        patch("aespa_pl.block.quantize.fit_grids", search_block),
        patch("aespa_pl.block.grids.fit_grids_of_group", search_group),
    ):
        cli.main(shlex.split(command))


def loss(projections: Sequence[QuantizedProjection], found: Sequence[Grid]) -> float:
    """Return ``tr(dW H dW^T)`` of nearest rounding, the sum over projections, in float64."""
    return sum(
        float(
            reconstruction_loss(
                (dequantize(quantize(p.weight, g), g) - p.weight).double(), p.hessian[:].double()
            ).sum()
        )
        for p, g in zip(projections, found, strict=True)
    )


if __name__ == "__main__":
    auto_cli(main)
