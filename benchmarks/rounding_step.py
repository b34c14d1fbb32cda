"""Measure one iteration of the rounding, for the projections of known models, beside plain autograd.

python benchmarks/rounding_step.py --model opt-125m --threads 2
python benchmarks/rounding_step.py --model llama-7b --rows 256        # fewer rows of each matrix

Random weights and statistics: no model is needed. In the same run are measured the matrix product alone,
and two plain forms of the same mathematics with autograd and ``torch.optim.Adam``, one projection after the
other: *trace* computes ``tr(G dW H dW^T)`` as it is written, *sum* as ``sum(dW * (G dW H))``. Medians;
--output appends JSON lines.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jsonargparse import auto_cli
from options import ProjectionOptions, begin, projections
from report import median_of_each
from torch import Tensor

from aespa_pl.algorithm.adaround import SoftRounding, rounding_loss, start
from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.objectives import error_product
from aespa_pl.algorithm.quantizer import GridFormat
from aespa_pl.algorithm.workspace import Workspace

BETA, WEIGHT = 8.0, 1.5
COLUMNS = [
    "projection", "shape", "ours, ms", "trace, ms", "ratio", "sum, ms", "ratio", "product, ms",
    "its share",
]  # fmt: skip
KINDS = ("ours", "trace", "sum", "product")


@dataclass(frozen=True, kw_only=True)
class RoundingOptions(ProjectionOptions):
    """Measure each projection and print a table."""

    repeats: int = 7
    """Number of calls that the median is taken of, after one that warms up."""


def main(options: RoundingOptions) -> None:
    """Measure each projection and print a table."""
    report = begin(options, COLUMNS, benchmark="rounding_step")
    total = [0.0] * 4
    for p in projections(options):
        ones = torch.ones_like(p.W[0, 0])
        grid = min_max_grid(p.W, ones, GridFormat(2, symmetric=False, group_size=None))
        works = list(steps(*start(p.W, p.W, grid), p.H, p.G))
        seconds = median_of_each(works, options.repeats, torch.device(options.device))
        total = [a + b for a, b in zip(total, seconds, strict=True)]
        report.row(
            [p.name, "{} x {}".format(*p.shape), *_cells(seconds)],
            projection=p.name,
            rows=p.shape[0],
            columns=p.shape[1],
            **dict(zip(KINDS, seconds, strict=True)),
        )
    report.row(["block", "", *_cells(total)], projection="block", **dict(zip(KINDS, total, strict=True)))


def _cells(seconds: list[float]) -> list[str]:
    ours, trace, plain, product = seconds
    return [
        f"{1e3 * ours:.2f}", f"{1e3 * trace:.2f}", f"{trace / ours:.2f}", f"{1e3 * plain:.2f}",
        f"{plain / ours:.2f}", f"{1e3 * product:.2f}", f"{product / ours:.0%}",
    ]  # fmt: skip


def steps(rounding: SoftRounding, B: Tensor, H: Tensor, G: Tensor | None) -> Iterator[Callable[[], object]]:
    """Yield the works to measure, one after the other."""
    yield _ours(rounding, B.clone(), H, G)
    yield _autograd(rounding, B.clone(), H, G, trace=True)
    yield _autograd(rounding, B.clone(), H, G, trace=False)
    dW = torch.randn_like(B)
    yield lambda: error_product(dW, H, G)


def _ours(rounding: SoftRounding, B: Tensor, H: Tensor, G: Tensor | None) -> Callable[[], None]:
    parameter, workspace = torch.nn.Parameter(B), Workspace()
    adam = torch.optim.Adam([parameter], lr=0.015, fused=True)

    def step() -> None:
        b = parameter.detach()
        gradient = workspace.like("gradient", b)
        rounding_loss(b, rounding, H, G, weight=WEIGHT, beta=BETA, workspace=workspace, gradient=gradient)
        parameter.grad = gradient
        adam.step()

    return step


def _autograd(
    rounding: SoftRounding, B: Tensor, H: Tensor, G: Tensor | None, *, trace: bool
) -> Callable[[], None]:
    parameter, gain = torch.nn.Parameter(B), rounding.gain
    assert gain is not None  # it is made on a CPU
    adam = torch.optim.Adam([parameter], lr=0.015)

    def step() -> None:
        h = torch.clamp(1.2 * torch.sigmoid(parameter) - 0.1, 0, 1)
        dW = rounding.base + gain * h
        if trace:
            inner = dW @ H @ dW.mT  # [heads, rows, rows]
            inner = inner if G is None else G @ inner
            loss = inner.diagonal(dim1=-2, dim2=-1).sum()
        else:
            loss = (dW * error_product(dW, H, G)).sum()
        loss = loss + WEIGHT * (1 - (2 * h - 1).abs().pow(BETA)).sum()
        adam.zero_grad()
        loss.backward()
        adam.step()

    return step


if __name__ == "__main__":
    main(auto_cli(RoundingOptions))
