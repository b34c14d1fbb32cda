"""Compare an iteration's element-wise loop on a CPU with the kernels that torch.compile makes of it.

python benchmarks/compiled_step.py --threads 2

*ours* is the loop over chunks that a CPU runs, *compiled* the two kernels of an accelerator, compiled to C++
by torch.compile (a C++ compiler is needed), *product* the matrix product that both have in them. The compiled
kernels don't compute the two losses, as an accelerator doesn't in most iterations. *compiler, s* is the first
call's time, less where its cache (TORCHINDUCTOR_CACHE_DIR) is filled. Random weights; medians.
"""

import inspect
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from jsonargparse import auto_cli
from report import Report, median_of_each

from aespa_pl.algorithm import adaround, soft_kernels
from aespa_pl.algorithm.fusion import compiled
from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.quantizer import GridFormat
from aespa_pl.algorithm.workspace import Workspace

SHAPES = ((128, 512), (576, 576), (1536, 576), (3072, 768))
"""The embedded models' largest matrix, two of SmolLM2-135M and one of OPT-125M."""


KERNELS = ("soft_error", "soft_gradient")


def main(threads: int = 2, *, repeats: int = 30, output: Path | None = None) -> None:
    """Measure each shape and print a table.

    Args:
        threads: Threads of torch.
        repeats: Number of calls that the median is taken of.
        output: JSON lines are appended to this file.
    """
    torch.set_num_threads(threads)
    names = ["ours", "compiled", "product"]
    columns = ["shape", *(f"{name}, ms" for name in names), "compiler, s"]
    report = Report(columns, output, benchmark="compiled_step", threads=threads)
    with ExitStack() as patches:
        for name in KERNELS:
            kernel = compiled(inspect.unwrap(getattr(soft_kernels, name)))
            patches.enter_context(patch.object(adaround, name, kernel))
        for rows, width in SHAPES:
            works, first = _works(rows, width)
            found = median_of_each(works, repeats, torch.device("cpu"))
            cells = [f"{1000 * seconds:.2f}" for seconds in found]
            report.row(
                [f"{rows} x {width}", *cells, f"{first:.1f}"],
                rows=rows,
                columns=width,
                compiler=first,
                **dict(zip(names, found, strict=True)),
            )


def _works(rows: int, width: int) -> tuple[list[Callable[[], object]], float]:
    """Return the works to measure, and the seconds of the first call of the compiled kernels."""
    torch.manual_seed(0)
    W, X = 0.02 * torch.randn(1, rows, width), torch.randn(2 * width, width)
    H, dW = (X.T @ X / len(X))[None], torch.randn_like(W)
    grid = min_max_grid(W, torch.ones(width), GridFormat(2, symmetric=False, group_size=None))
    rounding, B = adaround.start(W, W, grid)
    workspace, plain, fused = Workspace(), torch.empty_like(B), torch.empty_like(B)

    exponent, kernels = torch.tensor(8.0), replace(rounding, gain=None)
    works: list[Callable[[], object]] = [
        lambda: adaround.rounding_loss(
            B, rounding, H, None, weight=1.5, beta=8.0, workspace=workspace, gradient=plain
        ),
        lambda: adaround.write_gradient(
            B, kernels, H, None, exponent, weight=1.5, workspace=workspace, gradient=fused
        ),
        lambda: torch.matmul(dW, H[0]),
    ]
    began = time.perf_counter()
    works[1]()
    first = time.perf_counter() - began
    works[0]()
    torch.testing.assert_close(plain, fused, rtol=0, atol=1e-4)
    return works, first


if __name__ == "__main__":
    auto_cli(main)
