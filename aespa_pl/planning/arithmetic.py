"""Estimate the seconds of a block: its operations, by the rate that products of matrices have on a device.

Products of matrices count as their operations. Work on single weights counts as the operations of a product
that takes as long: the constants below are from one thread of a CPU, and an accelerator's are others.
"""

import time

import torch

from aespa_pl.algorithm.candidates import leading_rank
from aespa_pl.algorithm.grid import CLIP_RATIOS
from aespa_pl.algorithm.second_moments import computed_fraction
from aespa_pl.planning import tuning
from aespa_pl.planning.partition import WHOLE, Partition
from aespa_pl.planning.shape import Shape, Work
from aespa_pl.settings import QuantizationSettings

COMPARED, UPDATED, VISITED, LEARNED = 250, 20_000, 5_000, 1_500
"""Operations for each weight: rounded to a candidate grid, rounded by OPTQ, visited by a pass of the descent,
and learned in an iteration; 1 to 1.5 times as many were measured at widths 576 and 2,048."""
SEARCHES = 4
"""Searches without zeta that those of Z-Fold take as long as; 2 to 7 were seen."""
LATER_PASSES = 0.4
"""Mean time of a pass of the descent beside that of the first: less and less moves."""
MEASURED_WEIGHTS = 2**22
"""Weights of the largest matrix that the rate is measured on."""


def candidates_of(settings: QuantizationSettings) -> int:
    """Return how many grids a row may choose from."""
    return CLIP_RATIOS if settings.symmetric else 2 * CLIP_RATIOS


def block_flops(
    shape: Shape, work: Work, settings: QuantizationSettings, partition: Partition = WHOLE, devices: int = 1
) -> dict[str, float]:
    """Return the floating-point operations of one block on each device, by phase; two for a multiply-add.

    Several devices divide the segments in whole batches, and the rows evenly; each factors the Hessians that
    all rows have in common.
    """
    work, layout, shares = work.of_device(devices), shape.layout, shape.shares
    tokens, d, heads = work.segments * work.length, shape.hidden, layout.key_value_heads
    attention = 4 * tokens * work.length * layout.heads * layout.head_dim
    forward = float(2 * tokens * sum(m.share * m.size for m in shape.matrices) + attention)
    passes = (2 if settings.two_streams else 1) * len(partition.passes(heads, shape.experts))
    moments = sum(shares[name] * computed_fraction(c) * c**2 for name, c in shape.inputs.items())
    moments *= 2 if settings.input_correction else 1  # as many for the shifts
    if settings.objective.value == "attention":  # A X of each head, with half of A, and its moments
        moments += layout.heads * d * (work.length / 2 + computed_fraction(d) * d)
    product = sum(2 * m.size * m.columns for m in shape.matrices)  # dW H of all projections
    factors = sum(3 * columns**3 for columns in shape.inputs.values())
    widths = [(m.size, min(m.columns, settings.group_size or m.columns)) for m in shape.matrices]
    search = sum(size * (2 * leading_rank(columns) + COMPARED) for size, columns in widths)
    searches = candidates_of(settings) * (SEARCHES if settings.grid.zfold else 1)
    optq = (product + 3 * heads * d**3 + UPDATED * shape.weights) / devices + factors
    learned = sum(m.size * (2 * m.columns + LEARNED) for m in shape.learned(settings))
    visits = LATER_PASSES * settings.polish.passes
    polish = (2 + visits) * product + visits * VISITED * shape.weights
    return {
        "forward": forward,
        "statistics": passes * forward + 2 * tokens * moments,
        "grid": float(searches * search / devices) if settings.grid.search else 0.0,
        "OPTQ": optq if settings.optq.enabled else 0.0,
        "rounding": float(learned * settings.rounding.iterations / devices),
        "polish": polish / devices if settings.polish.enabled else 0.0,
        **tuning.tuning_flops(shape, work, settings, forward),
    }


def product_rate(device: torch.device, columns: int, seconds: float = 1.0) -> float:
    """Return the operations a second that products of matrices with so many columns reach on a device."""
    rows = min(columns, max(64, MEASURED_WEIGHTS // columns))
    W, H = (torch.randn(n, columns, device=device) for n in (rows, columns))
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < 2 or time.perf_counter() < end:
        began = time.perf_counter()
        float((W @ H)[0, 0])  # waits for the device
        taken.append(time.perf_counter() - began)
    # the first call prepares the library
    return 2.0 * rows * columns**2 / sorted(taken[1:])[(len(taken) - 1) // 2]
