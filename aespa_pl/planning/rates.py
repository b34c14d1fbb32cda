"""How fast a device is at what a run spends its time on."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from aespa_pl.algorithm.adaround import rounding_loss, start
from aespa_pl.algorithm.candidates import products_of_a_search
from aespa_pl.algorithm.grid import CLIP_RATIOS, min_max_grid, search_grid
from aespa_pl.algorithm.products import Precision, multiplying_in, operand
from aespa_pl.algorithm.quantizer import GridFormat
from aespa_pl.algorithm.workspace import Workspace
from aespa_pl.planning.shape import Shape

MEASURED_WEIGHTS = 2**22
"""Weights of the matrix that rates are measured on."""
MOST_CALLS = 1000
TOKENS = 256
"""That a Hessian is made of: few, for on a CPU a wide model's would take longer than what is measured."""


@dataclass(frozen=True)
class Rates:
    """Floating-point operations a second of a device, in the program's own code."""

    product: float
    grid: float
    rounding: float

    def seconds(self, flops: dict[str, float]) -> dict[str, float]:
        """Return the seconds of each phase."""
        rate = {"grid": self.grid, "rounding": self.rounding}
        return {phase: count / rate.get(phase, self.product) for phase, count in flops.items()}


def measure_rates(
    shape: Shape, device: torch.device, *, seconds: float, precision: Precision = "float32"
) -> Rates:
    """Measure a device on random matrices of a model's width for about ``seconds``.

    Where a whole matrix would take too long it has fewer rows; a rate hardly depends on them.

    Args:
        shape: Of the model.
        device: To measure.
        seconds: To take.
        precision: Of the learning's products.
    """
    d = shape.hidden
    rows = min(d, max(64, MEASURED_WEIGHTS // d))
    W, X = torch.randn(1, rows, d, device=device), torch.randn(TOKENS, d, device=device)
    # variances as unequal as those of a model's inputs
    variances = 1 / torch.arange(1, d + 1, device=device)
    X *= variances.sqrt()
    H = (X.T @ X / (2 * TOKENS) + torch.diag(variances / 2))[None]
    flops = 2.0 * W.numel() * d
    product = flops / _median_seconds(lambda: W[0] @ H[0], device, seconds / 3)
    few, zeta = W[:, : max(1, rows // 8)], torch.ones(d, device=device)

    def search() -> object:
        return search_grid(few, H, zeta, GridFormat(2))

    searched = products_of_a_search(d, 2 * CLIP_RATIOS) * 2.0 * few.numel() * d
    grid = searched / _median_seconds(search, device, seconds / 3)
    fixed, B = start(W, W, min_max_grid(W, zeta, GridFormat(2)))
    B = torch.nn.Parameter(B)
    adam, workspace = torch.optim.Adam([B], fused=True), Workspace()
    with multiplying_in(precision):
        Hessian = operand(H)

    def step() -> None:
        b = B.detach()
        gradient = workspace.like("gradient", b)
        B.grad = gradient
        with multiplying_in(precision):
            rounding_loss(
                b, fixed, Hessian, None, weight=1.0, beta=8.0, workspace=workspace, gradient=gradient
            )  # fmt: skip
        adam.step()

    return Rates(product, grid, flops / _median_seconds(step, device, seconds / 3))


def _median_seconds(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the median of the calls made in ``seconds``, after one that warms up."""
    work()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while not taken or (time.perf_counter() < end and len(taken) < MOST_CALLS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return sorted(taken)[len(taken) // 2]
