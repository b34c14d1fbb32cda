"""Predict the seconds that a run takes on an H100: nothing is measured, and no GPU is needed.

Operations, bytes and kernels follow from the shapes of a model (``aespa_pl/planning``) and from what the
simulated device counts (``tests/device/test_block.py``). They become seconds by a few rates, which are
options. A phase takes the longest of its arithmetic, its bytes and its launches: they overlap.

    python benchmarks/predict_gpu.py
"""

from dataclasses import dataclass, replace
from pathlib import Path

from jsonargparse import auto_cli
from report import Report
from shapes import config

from aespa_pl.algorithm.descent import COLUMNS, COUPLED_COLUMNS, COUPLED_ROWS
from aespa_pl.algorithm.optq import LAZY_COLUMNS
from aespa_pl.algorithm.tile import COUPLED_ROUNDS, ROUNDS
from aespa_pl.models import family_of
from aespa_pl.models.family import Role
from aespa_pl.planning.arithmetic import block_flops, block_visits, gram_flops, learned
from aespa_pl.planning.shape import Matrix, Shape, Work
from aespa_pl.resolve import resolved
from aespa_pl.settings import QuantizationSettings

ITERATION_BYTES = 56
"""Bytes for each weight that is learned: 14 before the product, 14 after it, 28 of Adam."""
ITERATION_KERNELS = 4
"""Launches for each projection: beta, its way into the graph, the graph, and a part of Adam."""
COLUMN_KERNELS = 16
"""Kernels for each column of OPTQ's update; graphs repeat them, but for the first columns of a projection."""
TILE_LAUNCHES = 12
"""Launches for each tile of weights in the descent: a graph for its rounds, and what its moves change."""
ROUND_KERNELS, COUPLED_ROUND_KERNELS, OTHER_KERNELS = 4, 6, 9
"""Kernels that it repeats for each round but the first, without G and with it, and besides. A product that
is added to something is counted as one kernel, though a device may copy the summand first."""
CANDIDATE_BYTES = 52
"""Bytes for each weight of each candidate: the errors take five kernels, their losses three."""
PROBABILITY_BYTES = 32
"""Bytes for each attention probability of A X: scores, mask, softmax, and the product."""
MODELS = {"llama-7b": 32, "llama-30b": 60}
"""Blocks of each; of SHAPES."""
COUPLED = (Role.QUERY, Role.KEY)
METHODS = ("aespa-fast", "aespa", "aespa-tuned")


@dataclass(frozen=True)
class Assumed:
    """Holds rates that are reached, below the peaks that the maker states."""

    half: float = 600.0
    """TFLOP/s of products in half precision (989 stated)."""
    tf32: float = 300.0
    """TFLOP/s of products in TF32 (495 stated)."""
    float32: float = 50.0
    """TFLOP/s of products in float32 (67 stated)."""
    bandwidth: float = 2.7
    """TB/s of the memory (3.35 stated)."""
    launch: float = 6.0
    """Microseconds of a kernel that does next to nothing, launched from Python."""
    repeated: float = 2.0
    """Microseconds of such a kernel in a graph."""
    read: float = 2.0
    """GB/s at which weights come from disk."""
    passes: int = 10
    """Passes of the descent: the most that are allowed, which SmolLM2-135M's larger matrices take."""


@dataclass(frozen=True)
class Costs:
    """Says what a phase of a block asks of the device."""

    seconds_of_products: float
    bytes: float = 0.0
    kernels: float = 0.0
    repeated: float = 0.0
    """Kernels that graphs repeat."""

    def seconds(self, assumed: Assumed) -> float:
        """Return the longest of the three times."""
        moving = self.bytes / (1e12 * assumed.bandwidth)
        launching = 1e-6 * (assumed.launch * self.kernels + assumed.repeated * self.repeated)
        return max(self.seconds_of_products, moving, launching)


def main(
    *,
    segments: int = 128,
    length: int = 2048,
    assumed: Assumed | None = None,
    output: Path | None = None,
) -> None:
    """Print the prediction by model, method and phase.

    Args:
        segments: Calibration segments.
        length: Tokens in a segment.
        assumed: Rates.
        output: JSON lines are appended to this file.
    """
    assumed = assumed or Assumed()
    report = Report(("model", "method", "phase", "minutes"), output, device="H100 (predicted)")
    for model in MODELS:
        shape = _shape(model, length)
        for method in METHODS:
            settings = resolved(QuantizationSettings(method=method), "cuda")
            if model == "llama-30b":  # the whole model would have to be in memory
                tuning = settings.tuning
                model_too = replace(tuning.model, enabled=False)
                settings = replace(settings, tuning=replace(tuning, model=model_too))
            work = Work(segments, length, batch_size=max(1, 8192 // length), dtype_bytes=2)
            found = predicted(shape, work, settings, assumed)
            for phase, seconds in (found | {"all": sum(found.values())}).items():
                if seconds:
                    minutes = shape.blocks * seconds / 60
                    row = {"model": model, "method": method, "phase": phase, "minutes": minutes}
                    report.row([model, method, phase, f"{minutes:.1f}"], **row)


def predicted(
    shape: Shape, work: Work, settings: QuantizationSettings, assumed: Assumed
) -> dict[str, float]:
    """Return the seconds of one block by phase."""
    costs = {
        "statistics": _statistics(shape, work, settings, assumed),
        "grid": _grid(shape, work, settings, assumed),
        "OPTQ": _optq(shape, work, settings, assumed),
        "learning": _learning(shape, work, settings, assumed),
        "polish": _polish(shape, settings, assumed),
    }
    flops = block_flops(shape, work, settings)
    seconds = {phase: cost.seconds(assumed) for phase, cost in costs.items()}
    for phase in ("tuning of blocks", "tuning of the model"):  # in float32, whatever products is
        seconds[phase] = flops[phase] / (1e12 * assumed.float32)
    seconds["reading"] = 2 * shape.block_weights / (1e9 * assumed.read)
    return seconds


def _statistics(
    shape: Shape, work: Work, settings: QuantizationSettings, assumed: Assumed
) -> Costs:
    flops, streams = block_flops(shape, work, settings), 2 if settings.two_streams else 1
    products = (streams + 1) * flops["forward"] / (1e12 * assumed.half)  # one to the next block
    products += gram_flops(shape, work, settings) / (1e12 * assumed.tf32)
    # of the correction: each Hessian's factor, and two products and two solves with it for each row
    layout, d = shape.layout, shape.hidden
    factors = sum(m.columns**3 / 3 for m in shape.matrices) + layout.key_value_heads * d**3 / 3
    solved = 4 * sum(m.product_flops for m in shape.matrices)
    products += (factors + solved) / (1e12 * assumed.float32)
    probabilities = work.segments * layout.heads * work.length**2 * 9 / 16
    return Costs(products, streams * PROBABILITY_BYTES * probabilities)


def _grid(shape: Shape, work: Work, settings: QuantizationSettings, assumed: Assumed) -> Costs:
    products = block_flops(shape, work, settings)["grid"] / (1e12 * assumed.float32)
    return Costs(products, CANDIDATE_BYTES * block_visits(shape, settings).compared)


def _optq(shape: Shape, work: Work, settings: QuantizationSettings, assumed: Assumed) -> Costs:
    products = block_flops(shape, work, settings)["OPTQ"] / (1e12 * assumed.float32)
    # the first columns twice by single kernels, and captured once
    launched = sum(min(3 * LAZY_COLUMNS, m.columns) for m in shape.matrices)
    repeated = sum(max(0, m.columns - LAZY_COLUMNS) for m in shape.matrices)
    return Costs(products, kernels=COLUMN_KERNELS * launched, repeated=COLUMN_KERNELS * repeated)


def _learning(shape: Shape, work: Work, settings: QuantizationSettings, assumed: Assumed) -> Costs:
    chosen = [m for m in shape.matrices if learned(m, settings)]
    iterations = int(settings.rounding.iterations)
    products = block_flops(shape, work, settings)["rounding"] / (1e12 * assumed.tf32)
    moving = ITERATION_BYTES * sum(m.size for m in chosen) / (1e12 * assumed.bandwidth)
    # products and element-wise kernels take turns
    return Costs(products + iterations * moving, 0.0, iterations * ITERATION_KERNELS * len(chosen))


def _polish(shape: Shape, settings: QuantizationSettings, assumed: Assumed) -> Costs:
    if not settings.polish.enabled:
        return Costs(0.0)
    products = 2 * sum(m.product_flops for m in shape.matrices) / (1e12 * assumed.float32)
    launched = repeated = 0
    for matrix in shape.matrices:
        tiles = assumed.passes * _tiles(matrix, shape)
        launched += TILE_LAUNCHES * tiles
        rounds, each = ROUNDS, ROUND_KERNELS
        if matrix.role in COUPLED:
            rounds, each = COUPLED_ROUNDS, COUPLED_ROUND_KERNELS
        repeated += (each * (rounds - 1) + OTHER_KERNELS) * tiles
    return Costs(assumed.passes * products, 0.0, launched, repeated)


def _tiles(matrix: Matrix, shape: Shape) -> int:
    """Return the tiles of a pass that wait for each other; other rows and heads run beside them."""
    if matrix.role in COUPLED:
        return -(-shape.layout.head_dim // COUPLED_ROWS) * -(-matrix.columns // COUPLED_COLUMNS)
    return -(-matrix.columns // COLUMNS)


def _shape(model: str, length: int) -> Shape:
    blocks = MODELS[model]
    found = config(model, length)
    return replace(Shape.of(found, family_of(found)), blocks=blocks)


if __name__ == "__main__":
    auto_cli(main)
