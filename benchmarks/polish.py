"""Measure the cost of the coordinate descent beside the learned rounding, on random weights and statistics.

python benchmarks/polish.py

A row for each projection of a block of OPT-125M: seconds of the processor for 2,000 iterations of
AdaRound, extrapolated from a few, and for the descent from OPTQ's integers, which is longer than one
from learned integers. The last row adds them up.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jsonargparse import auto_cli
from torch import Tensor

from aespa_pl.algorithm.adaround import rounding_loss, start
from aespa_pl.algorithm.descent import Descent, descend
from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.hessian import damp
from aespa_pl.algorithm.objectives import reconstruction_loss
from aespa_pl.algorithm.optq import update_weights
from aespa_pl.algorithm.quantizer import GridFormat, dequantize

ITERATIONS = 2000
HEAD_SIZE = 64


@dataclass(frozen=True)
class Shape:
    """Describes a projection."""

    heads: int
    rows: int
    columns: int
    attention: str = ""
    """Objective: ``G`` as of the query; ``H`` with one H a head, as of the value; empty: neither."""


def main(*, hidden: int = 768, passes: int = 10, bits: int = 2, measured: int = 20) -> None:
    """Print the table.

    Args:
        hidden: Hidden size of the block; a multiple of 64.
        passes: As quantization.polish.passes.
        bits: Bits of a weight.
        measured: Iterations of AdaRound that are measured, after 3 that are not.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    heads = hidden // HEAD_SIZE
    shapes = {
        "q_proj": Shape(heads, HEAD_SIZE, hidden, "G"),
        "k_proj": Shape(heads, HEAD_SIZE, hidden, "G"),
        "v_proj": Shape(heads, HEAD_SIZE, hidden, "H"),
        "out_proj": Shape(1, hidden, hidden),
        "fc1": Shape(1, 4 * hidden, hidden),
        "fc2": Shape(1, hidden, 4 * hidden),
    }
    print("| projection | shape | rounding, s | polish, s | share | passes | changed | objective |")
    print("|---|---|---|---|---|---|---|---|")
    totals = [0.0, 0.0]
    for name, shape in shapes.items():
        rounding, polish, found, changed, ratio = _measure(shape, bits, passes, measured)
        totals = [totals[0] + rounding, totals[1] + polish]
        size = shape.heads * shape.rows
        print(
            f"| {name} | {size} x {shape.columns} | {rounding:.1f} | {polish:.2f} | "
            f"{polish / rounding:.1%} | {int(found.passes.max())} | {changed:.1%} | {ratio:.3f} |",
            flush=True,
        )
    print(f"| block | | {totals[0]:.1f} | {totals[1]:.2f} | {totals[1] / totals[0]:.1%} | | | |")


def _measure(
    shape: Shape, bits: int, passes: int, measured: int
) -> tuple[float, float, Descent, float, float]:
    """Return seconds of rounding and descent, what it found, shares of integers changed and of the loss."""
    W = torch.randn(shape.heads, shape.rows, shape.columns)
    H, G = _statistics(shape)
    grid = min_max_grid(W, torch.ones(shape.columns), GridFormat(bits, symmetric=False, group_size=None))
    updated, integers, _ = update_weights(W, H, grid)
    rounding, B = start(W, updated, grid)
    B.requires_grad_()
    adam = torch.optim.Adam([B], lr=0.015, fused=True)

    def iterate(times: int) -> None:
        for _ in range(times):
            B.grad = rounding_loss(B.detach(), rounding, H, G, weight=1.5, beta=8.0).gradient
            adam.step()

    iterate(3)
    learning = _seconds(lambda: iterate(measured)) / measured * ITERATIONS
    found: list[Descent] = []
    polish = _seconds(lambda: found.append(descend(integers, W, grid, H, G, passes=passes)))
    after = float(reconstruction_loss(dequantize(found[0].integers, grid) - W, H, G).sum())
    changed = float((found[0].integers != integers).float().mean())
    return learning, polish, found[0], changed, after / float(found[0].loss_before.sum())


def _statistics(shape: Shape) -> tuple[Tensor, Tensor | None]:
    """Return correlated inputs' H, with eigenvalues over several orders of magnitude, and G."""
    problems = shape.heads if shape.attention == "H" else 1
    d, samples = shape.columns, 2 * shape.columns
    spectrum = torch.logspace(0, -1.5, d)[:, None] * torch.randn(d, d) / d**0.5
    X = torch.randn(problems, samples, d) @ spectrum
    H = X.transpose(1, 2) @ X / samples
    diagonal = H.diagonal(dim1=-2, dim2=-1)
    diagonal.copy_(damp(diagonal, 0.01))
    if shape.attention != "G":
        return H, None
    K = torch.randn(shape.heads, 4 * shape.rows, shape.rows) @ torch.randn(shape.rows, shape.rows)
    return H, K.transpose(1, 2) @ K / K.shape[1]


def _seconds(work: Callable[[], None]) -> float:
    """Return the processor's seconds: other programs on the machine do not count."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


if __name__ == "__main__":
    auto_cli(main)
