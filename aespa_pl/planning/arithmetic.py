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
from aespa_pl.planning.shape import Matrix, Shape, Work
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


def learned(matrix: Matrix, settings: QuantizationSettings) -> bool:
    """Return whether the method learns the rounding of a matrix."""
    return settings.learns(attention=matrix.role is not Role.OTHER)


def candidates_of(settings: QuantizationSettings) -> int:
    """Return how many grids a row may choose from."""
    return CLIP_RATIOS if settings.symmetric else 2 * CLIP_RATIOS


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
    work, heads = work.of_device(devices), shape.layout.key_value_heads
    tokens = work.segments * work.length
    attention = 4 * tokens * work.length * shape.layout.heads * shape.layout.head_dim
    forward = float(2 * tokens * shape.weights + attention)
    passes = (2 if settings.two_streams else 1) * len(partition.head_groups(heads))
    product = sum(m.product_flops for m in shape.matrices)
    factors = sum(3 * columns**3 for columns in shape.inputs.values())
    of_values = 3 * heads * shape.hidden**3
    step = sum(_step_flops(m, shape) for m in shape.matrices if learned(m, settings))
    visits = LATER_PASSES * settings.polish.passes
    polish = (2 + visits) * product + visits * VISITED * shape.weights
    optq = (product + of_values + UPDATED * shape.weights) / devices + factors
    return {
        "forward": forward,
        "statistics": passes * forward + gram_flops(shape, work, settings),
        "grid": sum(_search_flops(shape, m, settings) for m in shape.matrices) / devices,
        "OPTQ": optq if settings.optq.enabled else 0.0,
        "rounding": step * settings.rounding.iterations / devices,
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


def input_shifts(shape: Shape) -> int:
    """Return the numbers in the shifts of a block's inputs, and of the outputs that join the residual."""
    outputs = {m.group: shape.hidden for m in shape.matrices if m.adds_to_residual}
    return sum(outputs.get(name, columns) * columns for name, columns in shape.inputs.items())


def attended_shifts(shape: Shape, settings: QuantizationSettings) -> int:
    """Return the numbers in the shifts of the attention's output, which are those of V's weights."""
    layout = shape.layout
    attention = settings.objective.value == "attention"
    return layout.key_value_heads * layout.head_dim * shape.hidden if attention else 0


def gram_flops(shape: Shape, work: Work, settings: QuantizationSettings) -> float:
    """Return the operations of the statistics of a block, without its forward passes."""
    layout, d = shape.layout, shape.hidden
    originals = 1 if settings.input_correction else 0
    products = sum(computed_fraction(c) * c**2 for c in shape.inputs.values())
    products += originals * input_shifts(shape)
    if settings.objective.value == "attention":
        # of the columns of A, those that are not behind a chunk's last row
        columns = min(work.length, (work.length + chunk_rows(work.length)) / 2)
        products += layout.heads * (columns * (layout.head_dim + d) + computed_fraction(d) * d**2)
        products += originals * layout.heads * layout.head_dim * d
    if settings.objective.query_key == "attention":
        products += (layout.heads + layout.key_value_heads) * layout.head_dim**2
    return 2.0 * work.segments * work.length * products


def _step_flops(matrix: Matrix, shape: Shape) -> float:
    """Return the operations of an iteration of a matrix's rounding: dW H, and for query and key G dW."""
    coupled = matrix.role in (Role.QUERY, Role.KEY)
    of_G = 2 * shape.layout.head_dim if coupled else 0
    return float(matrix.product_flops + matrix.size * (of_G + LEARNED))


def _search_flops(shape: Shape, matrix: Matrix, settings: QuantizationSettings) -> float:
    """Return the operations of all searches of a matrix's grids."""
    if not settings.grid.search:
        return 0.0
    columns = min(matrix.columns, settings.group_size or matrix.columns)
    exhaustive = settings.grid.exhaustive
    rank = columns if exhaustive else leading_rank(columns)
    exact = 0 if exhaustive else EXACT * 2 * columns
    search = candidates_of(settings) * (2 * rank + COMPARED) + exact
    rounds = 0
    if settings.grid.zfold and any(
        g.name == matrix.group and g.fold is not None for g in shape.layout.groups
    ):
        typical = ZFOLD_ROUNDS if settings.bits == 2 else ZFOLD_ROUNDS_OF_MORE_BITS
        rounds = 1 + min(typical, settings.grid.max_rounds)  # one without zeta
    return matrix.size * search * (1 + rounds * (1 if exhaustive else QUICK_SEARCH))
