"""Count the arithmetic of a block from shapes; the rate of a device's products makes seconds of it.

Products of matrices count as their operations. Work on single weights counts as the operations of a product
that takes as long: the constants below are from one thread of a CPU, and an accelerator's are others.
"""

import time

import torch

from aespa_pl.algorithm.candidate_losses import leading_rank
from aespa_pl.algorithm.grid import CLIP_RATIOS
from aespa_pl.algorithm.second_moments import computed_fraction
from aespa_pl.calibration.attention_weighted import chunk_rows
from aespa_pl.models.family import Role
from aespa_pl.planning import tuning
from aespa_pl.planning.partition import WHOLE, Partition
from aespa_pl.planning.shape import Shape, Work
from aespa_pl.settings import QuantizationSettings

COMPARED, UPDATED, VISITED, LEARNED = 250, 20_000, 5_000, 1_500
"""Operations for each weight: rounded to a candidate grid, rounded by OPTQ, visited by a pass of the descent,
and learned in an iteration; 1 to 1.5 times as many were measured at widths 576 and 2,048."""
ZFOLD_ROUNDS, ZFOLD_ROUNDS_OF_MORE_BITS = 4, 9
"""Rounds of Z-Fold at 2 bits and at more; 3 to 20 and 4 to 16 were seen."""
EXACT, QUICK_SEARCH = 10, 1 / 3
"""Candidates of a row with exact losses in a thorough search, and the time of a quick search beside it."""
LATER_PASSES = 0.4
"""Mean time of a pass of the descent beside that of the first: less and less moves."""
MEASURED_WEIGHTS = 2**22
"""Weights of the largest matrix that the rate is measured on."""


def candidates_of(settings: QuantizationSettings) -> int:
    """Return how many grids a row may choose from."""
    return CLIP_RATIOS if settings.symmetric else 2 * CLIP_RATIOS


def shifts(shape: Shape, settings: QuantizationSettings, *, routed: bool = False) -> int:
    """Return the numbers in what only the correction of earlier errors needs; 0 without it.

    It is the shifts of the inputs, of the outputs that join the residual, and of V's weights. With
    ``routed``, an expert's counts by the share of the tokens that it sees.
    """
    if not settings.input_correction:
        return 0
    layout = shape.layout
    outputs = {m.input: shape.hidden for m in shape.matrices if m.adds_to_residual}
    shares = shape.shares
    numbers = sum(
        round(outputs.get(name, columns) * columns * (shares[name] if routed else 1))
        for name, columns in shape.inputs.items()
    )
    if settings.objective.value == "attention":
        numbers += layout.key_value_heads * layout.head_dim * shape.hidden
    return numbers


def block_flops(
    shape: Shape,
    work: Work,
    settings: QuantizationSettings,
    partition: Partition = WHOLE,
    devices: int = 1,
) -> dict[str, float]:
    """Return the floating-point operations of one block on each device, by phase; two for a multiply-add.

    Several devices divide the segments in whole batches, and the rows evenly; each factors the Hessians that
    all rows have in common.
    """
    work, layout = work.of_device(devices), shape.layout
    tokens = work.segments * work.length
    attention = 4 * tokens * work.length * layout.heads * layout.head_dim
    forward = float(2 * tokens * sum(m.share * m.size for m in shape.matrices) + attention)
    heads = layout.key_value_heads
    passes = (2 if settings.two_streams else 1) * len(partition.head_groups(heads))
    product = sum(2 * m.size * m.columns for m in shape.matrices)
    factors = sum(3 * columns**3 for columns in shape.inputs.values())
    # an iteration of the rounding computes dW H, and of query and key also G dW
    step = sum(
        2 * m.size * (m.columns + layout.head_dim * (m.role in (Role.QUERY, Role.KEY))) + LEARNED * m.size
        for m in shape.learned(settings)
    )
    visits = LATER_PASSES * settings.polish.passes
    polish = (2 + visits) * product + visits * VISITED * shape.weights
    optq = (product + 3 * heads * shape.hidden**3 + UPDATED * shape.weights) / devices + factors
    return {
        "forward": forward,
        "statistics": passes * forward + gram_flops(shape, work, settings),
        "grid": _search_flops(shape, settings) / devices,
        "OPTQ": optq if settings.optq.enabled else 0.0,
        "rounding": float(step) * settings.rounding.iterations / devices,
        "polish": polish / devices if settings.polish.enabled else 0.0,
        **tuning.tuning_flops(shape, work, settings, forward),
    }


def gram_flops(shape: Shape, work: Work, settings: QuantizationSettings) -> float:
    """Return the operations of the statistics of a block, without its forward passes."""
    layout, d = shape.layout, shape.hidden
    shares = shape.shares
    products = sum(shares[n] * computed_fraction(c) * c**2 for n, c in shape.inputs.items())
    products += shifts(shape, settings, routed=True)
    if settings.objective.value == "attention":
        # of the columns of A, those that are not behind a chunk's last row
        columns = min(work.length, (work.length + chunk_rows(work.length)) / 2)
        products += layout.heads * (columns * (layout.head_dim + d) + computed_fraction(d) * d**2)
    if settings.objective.query_key == "attention":
        products += (layout.heads + layout.key_value_heads) * layout.head_dim**2
    return 2.0 * work.segments * work.length * products


def _search_flops(shape: Shape, settings: QuantizationSettings) -> float:
    """Return the operations of all searches of grids."""
    if not settings.grid.search:
        return 0.0
    exhaustive, total = settings.grid.exhaustive, 0.0
    typical = ZFOLD_ROUNDS if settings.bits == 2 else ZFOLD_ROUNDS_OF_MORE_BITS
    # one without zeta, and the rounds with it, which are quick searches
    rounds = (1 + min(typical, settings.grid.max_rounds)) * (1 if exhaustive else QUICK_SEARCH)
    folded = {group.name for group in shape.layout.groups if group.fold is not None}
    for m in shape.matrices:
        columns = min(m.columns, settings.group_size or m.columns)
        rank = columns if exhaustive else leading_rank(columns)
        exact = 0 if exhaustive else EXACT * 2 * columns
        search = candidates_of(settings) * (2 * rank + COMPARED) + exact
        total += m.size * search * (1 + rounds * (settings.grid.zfold and m.group in folded))
    return total


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
