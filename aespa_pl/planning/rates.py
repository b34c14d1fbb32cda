"""Measure how fast a device is at what a run spends its time on."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aespa_pl.algorithm.adaround import rounding_loss, start
from aespa_pl.algorithm.candidates import THOROUGH, products_of_a_search
from aespa_pl.algorithm.descent import COUPLED_ROWS, descend
from aespa_pl.algorithm.grid import CLIP_RATIOS, min_max_grid, search_grid
from aespa_pl.algorithm.optq import update_weights
from aespa_pl.algorithm.products import Precision, multiplying_in, operand
from aespa_pl.algorithm.quantizer import GridFormat, quantize
from aespa_pl.algorithm.workspace import Workspace
from aespa_pl.planning.arithmetic import Visits
from aespa_pl.planning.shape import Shape

MEASURED_WEIGHTS = 2**22
"""Number of weights of the matrix that rates are measured on."""
MEASURED_COLUMNS = 1024
"""Largest number of its columns for OPTQ and the descent: their visits hardly depend on it."""
LEAST_SHARE = 0.05
"""Share of a measured time that is left for visits where the products should have taken all of it."""
MOST_CALLS = 1000
MEASUREMENTS = 6
"""Number of measurements that share the time."""
TOKENS = 256
"""Number of tokens that a Hessian is made of: few, because many would take longer than the measurement."""


@dataclass(frozen=True)
class Rates:
    """Says what a device does in a second, in the program's own code."""

    product: float
    """Number of floating-point operations of products."""
    rounding: float
    """Number of floating-point operations of the learning, with all that it does besides."""
    visits: Visits
    """Number of visits of weights, without products."""

    def seconds(self, flops: Mapping[str, float], visits: Visits) -> dict[str, float]:
        """Return the seconds of each phase."""
        found = {
            phase: count / (self.rounding if phase == "rounding" else self.product)
            for phase, count in flops.items()
        }
        rates = self.visits
        found["grid"] += visits.compared / rates.compared
        found["OPTQ"] += visits.updated / rates.updated
        found["polish"] += visits.polished / rates.polished + visits.coupled / rates.coupled
        return found


def measure_rates(
    shape: Shape, device: torch.device, *, seconds: float, precision: Precision = "float32"
) -> Rates:
    """Measure a device on random matrices of a model's width for about ``seconds``.

    Where a whole matrix would take too long it has fewer rows; a rate hardly depends on them.

    Args:
        shape: Sizes of the model.
        device: Device that is measured.
        seconds: Seconds that the whole measurement takes.
        precision: Precision of the learning's products.
    """
    d = shape.hidden
    rows = min(d, max(64, MEASURED_WEIGHTS // d))
    W, X = torch.randn(1, rows, d, device=device), torch.randn(TOKENS, d, device=device)
    # variances as unequal as a model's inputs have
    variances = 1 / torch.arange(1, d + 1, device=device)
    X *= variances.sqrt()
    H = (X.T @ X / (2 * TOKENS) + torch.diag(variances / 2))[None]
    flops = 2.0 * W.numel() * d
    each = seconds / MEASUREMENTS
    product = flops / _median_seconds(lambda: W[0] @ H[0], device, each)
    visits = _measure_visits(shape, W, H, product=product, seconds=each)
    zeta = torch.ones(d, device=device)
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

    return Rates(product, flops / _median_seconds(step, device, each), visits)


def _measure_visits(
    shape: Shape, W: Tensor, H: Tensor, *, product: float, seconds: float
) -> Visits:
    """Return the visits a second of the search, OPTQ and the descent, without their products."""
    device = W.device

    def rate(visits: float, flops: float, work: Callable[[], object]) -> float:
        taken = _median_seconds(work, device, seconds)
        return visits / max(taken - flops / product, LEAST_SHARE * taken)

    form, d = GridFormat(2), W.shape[-1]
    few, ones = W[:, : max(1, W.shape[1] // 8)], torch.ones(d, device=device)
    searched = products_of_a_search(d, 2 * CLIP_RATIOS) * 2 * few.numel() * d
    c = min(d, MEASURED_COLUMNS)
    narrow, h, zeta = W[..., :c].contiguous(), H[:, :c, :c].contiguous(), ones[:c]
    grid, once = min_max_grid(narrow, zeta, form), 2 * narrow.numel() * c
    integers = quantize(narrow, grid)
    heads, rows = shape.layout.heads + shape.layout.key_value_heads, COUPLED_ROWS
    K = torch.randn(heads, 4 * rows, rows, device=device)
    G, Q = K.mT @ K / len(K[0]), torch.randn(heads, rows, c, device=device)
    of_heads = min_max_grid(Q, zeta, form)
    nearest, of_G = quantize(Q, of_heads), 2 * Q.numel() * (c + 2 * rows)
    return Visits(
        compared=rate(
            THOROUGH.compared(2 * CLIP_RATIOS) * few.numel(),
            searched,
            lambda: search_grid(few, H, ones, form),
        ),
        updated=rate(narrow.numel(), once / 2 + 3 * c**3, lambda: update_weights(narrow, h, grid)),
        polished=rate(
            narrow.numel(), 3 * once, lambda: descend(integers, narrow, grid, h, passes=1)
        ),
        coupled=rate(Q.numel(), 3 * of_G, lambda: descend(nearest, Q, of_heads, h, G, passes=1)),
    )


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
