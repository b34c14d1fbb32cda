"""Count the arithmetic of a block from shapes, and its visits of weights outside of products.

Most phases are products, and take as long as their operations. The search of the grids, OPTQ and the descent
touch each weight many times besides: these visits are counted too, and ``rates.py`` measures how many of
them a device makes in a second.
"""

from dataclasses import dataclass

from aespa_pl.algorithm.candidate_losses import leading_rank
from aespa_pl.algorithm.candidates import (
    EXHAUSTIVE,
    QUICK,
    THOROUGH,
    Effort,
    products_of_a_search,
)
from aespa_pl.algorithm.grid import CLIP_RATIOS
from aespa_pl.algorithm.second_moments import computed_share
from aespa_pl.calibration.attention_weighted import chunk_rows
from aespa_pl.models.family import Role
from aespa_pl.planning import tuning
from aespa_pl.planning.partition import WHOLE, Partition
from aespa_pl.planning.shape import Matrix, Shape, Work
from aespa_pl.settings import QuantizationSettings

TYPICAL_ZFOLD_ROUNDS, TYPICAL_ROUNDS_OF_MORE_BITS = 4, 9
"""Number of Z-Fold's rounds in the estimate of the time, at 2 bits and at more; 3 to 20 and 4 to 16 were
seen, the settings allow up to 30."""
LATER_PASSES = 0.4
"""Mean time of a pass of the descent as a share of the first pass: less and less moves."""


@dataclass(frozen=True)
class Visits:
    """Counts visits of weights by phase; as rates, visits a second."""

    compared: float
    """Number of weights times the candidate grids that a search compares them on."""
    updated: float
    """Number of weights that OPTQ rounds."""
    polished: float
    """Number of weights that the passes of the descent visit, in rows that stand alone."""
    coupled: float
    """The same number of query and key, where G couples the rows of a head."""


def learned(matrix: Matrix, settings: QuantizationSettings) -> bool:
    """Return whether the method learns the rounding of a matrix."""
    return settings.learns(attention=matrix.role is not Role.OTHER)


def candidates_of(settings: QuantizationSettings) -> int:
    """Return how many grids a row may choose from."""
    return CLIP_RATIOS if settings.symmetric else 2 * CLIP_RATIOS


def searches(shape: Shape, matrix: Matrix, settings: QuantizationSettings) -> dict[Effort, int]:
    """Return how many searches of each effort the grid of a matrix takes."""
    if not settings.grid.search:
        return {}
    last = EXHAUSTIVE if settings.grid.exhaustive else THOROUGH
    folds = any(g.name == matrix.group and g.fold is not None for g in shape.layout.groups)
    if not (settings.grid.zfold and folds):
        return {last: 1}
    typical = TYPICAL_ZFOLD_ROUNDS if settings.bits == 2 else TYPICAL_ROUNDS_OF_MORE_BITS
    # the one without zeta, one a round, and the last
    rounds = 1 + min(typical, settings.grid.max_rounds)
    return {EXHAUSTIVE: rounds + 1} if settings.grid.exhaustive else {QUICK: rounds, THOROUGH: 1}


def comparisons(shape: Shape, matrix: Matrix, settings: QuantizationSettings) -> int:
    """Return how many candidates of a row of a matrix all searches compare together."""
    candidates = candidates_of(settings)
    found = searches(shape, matrix, settings).items()
    compared = sum(count * effort.compared(candidates) for effort, count in found)
    return compared - left_out(shape, matrix, settings)


def left_out(shape: Shape, matrix: Matrix, settings: QuantizationSettings) -> int:
    """Return how many candidates the last search leaves out: those that a quick one has compared."""
    quick = QUICK in searches(shape, matrix, settings) and not settings.group_size
    return QUICK.compared(candidates_of(settings)) if quick else 0


def block_visits(shape: Shape, settings: QuantizationSettings) -> Visits:
    """Return the visits of a block's weights."""
    passes = LATER_PASSES * settings.polish.passes if settings.polish.enabled else 0
    with_G = settings.objective.query_key == "attention"
    coupled = sum(m.size for m in shape.matrices if with_G and m.role in (Role.QUERY, Role.KEY))
    return Visits(
        compared=sum(m.size * comparisons(shape, m, settings) for m in shape.matrices),
        updated=shape.weights if settings.optq.enabled else 0,
        polished=passes * (shape.weights - coupled),
        coupled=passes * coupled,
    )


def block_flops(
    shape: Shape, work: Work, settings: QuantizationSettings, partition: Partition = WHOLE
) -> dict[str, float]:
    """Return the floating-point operations of one block, by phase; two for a multiply-add."""
    streams = 2 if settings.two_streams else 1
    tokens = work.segments * work.length
    kv = shape.layout.key_value_heads
    attention = 4 * tokens * work.length * shape.layout.heads * shape.layout.head_dim
    forward = 2 * tokens * shape.weights + attention
    statistics = streams * len(partition.head_groups(kv)) * forward + gram_flops(
        shape, work, settings
    )
    product = sum(m.product_flops for m in shape.matrices)
    grid = sum(
        2 * m.size * _searched_columns(m, settings) * _products_of_searches(shape, m, settings)
        for m in shape.matrices
    )
    factors = shared_factor_flops(shape) + value_factor_flops(shape)
    step = sum(learning_flops(m, shape) for m in shape.matrices if learned(m, settings))
    # a product of all rows before and after, and in each pass one of the rows that move
    polish = (2 + LATER_PASSES * settings.polish.passes) * product if settings.polish.enabled else 0
    return {
        "forward": forward,
        "statistics": statistics,
        "grid": float(grid),
        "OPTQ": float(product + factors) if settings.optq.enabled else 0.0,
        "rounding": float(step * settings.rounding.iterations),
        "polish": float(polish),
        **tuning.tuning_flops(shape, work, settings, forward),
    }


def shared_factor_flops(shape: Shape) -> float:
    """Return the operations of OPTQ's factors of the Hessians that all rows of a projection share."""
    return float(sum(3 * columns**3 for columns in shape.inputs.values()))


def value_factor_flops(shape: Shape) -> float:
    """Return the operations of OPTQ's factors of H_V, one for each key/value head."""
    return float(3 * shape.layout.key_value_heads * shape.hidden**3)


def learning_flops(matrix: Matrix, shape: Shape) -> float:
    """Return the operations of an iteration of a matrix's rounding: dW H, and for query and key G dW."""
    coupled = matrix.role in (Role.QUERY, Role.KEY)
    return float(matrix.product_flops + (2 * matrix.size * shape.layout.head_dim if coupled else 0))


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
    products = sum(computed_share(c) * c**2 for c in shape.inputs.values())
    products += originals * input_shifts(shape)
    if settings.objective.value == "attention":
        # of the columns of A, those that are not behind a chunk's last row
        columns = min(work.length, (work.length + chunk_rows(work.length)) / 2)
        products += layout.heads * (columns * (layout.head_dim + d) + computed_share(d) * d**2)
        products += originals * layout.heads * layout.head_dim * d
    if settings.objective.query_key == "attention":
        products += (layout.heads + layout.key_value_heads) * layout.head_dim**2
    return 2.0 * work.segments * work.length * products


def _products_of_searches(shape: Shape, matrix: Matrix, settings: QuantizationSettings) -> float:
    """Return how many products of a row with H all searches make, or what takes as much arithmetic."""
    columns, candidates = _searched_columns(matrix, settings), candidates_of(settings)
    found = searches(shape, matrix, settings).items()
    products = sum(n * products_of_a_search(columns, candidates, effort) for effort, n in found)
    return products - left_out(shape, matrix, settings) * leading_rank(columns) / columns


def _searched_columns(matrix: Matrix, settings: QuantizationSettings) -> int:
    return min(matrix.columns, settings.group_size or matrix.columns)
