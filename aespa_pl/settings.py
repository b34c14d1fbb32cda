"""Every knob of ``aespa-pl``: its meaning, unit, range, default and the default's source.

The docstring under a field is its ``--help`` text. Ranges are types, so that a bad value is refused
while the command line is parsed. What is done with a value is decided elsewhere; what null means in a
setting of the method is filled in by :func:`aespa_pl.resolve.resolved`.
"""

import math
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from jsonargparse import set_parsing_settings
from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeInt,
    OpenUnitInterval,
    PositiveInt,
    restricted_number_type,
)

from aespa_pl.methods import METHODS
from aespa_pl.methods.method import Learned, Objective

set_parsing_settings(docstring_parse_attribute_docstrings=True)

if TYPE_CHECKING:
    Bits = int
    Seed = int
    FinitePositive = float
    FiniteNonNegative = float
    PenaltyExponent = float
    MethodName = str
else:
    MethodName = Literal[tuple(METHODS)]
    Bits = restricted_number_type("Bits", int, [(">=", 2), ("<=", 8)])
    Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])
    # jsonargparse's PositiveFloat and NonNegativeFloat allow infinity
    FinitePositive = restricted_number_type("FinitePositive", float, [(">", 0), ("<", math.inf)])
    FiniteNonNegative = restricted_number_type(
        "FiniteNonNegative", float, [(">=", 0), ("<", math.inf)]
    )
    PenaltyExponent = restricted_number_type("PenaltyExponent", float, [(">=", 2), ("<", math.inf)])

EXPECTED: dict[Any, str] = {
    Bits: "2 to 8",
    Seed: "0 to 4294967295",
    PositiveInt: "a whole number, 1 or more",
    NonNegativeInt: "a whole number, 0 or more",
    FinitePositive: "a finite number above 0",
    FiniteNonNegative: "a finite number, 0 or more",
    PenaltyExponent: "a finite number, 2 or more",
    OpenUnitInterval: "a number between 0 and 1, without either",
    ClosedUnitInterval: "a number from 0 to 1",
    bool: "true or false",
    str: "a text",
    type(None): "null",
}
"""What a value of each type has to be, in the words of an error message."""


@dataclass(frozen=True)
class ModelSettings:
    """The model that is quantized."""

    pretrained: str
    """Folder of a Hugging Face checkpoint, a name on the hub, or embedded:opt, embedded:bloom,
    embedded:llama for the small models that come with the package."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Floating-point type that blocks run in. auto: float32 on the CPU, the checkpoint's own type on
    an accelerator. Statistics and rounding are float32 in any case."""


@dataclass(frozen=True)
class CalibrationSettings:
    """The text that the statistics are taken from."""

    source: str = "c4"
    """c4, wikitext2 or ptb (from the hub), embedded (comes with the package), or a local file: .json or
    .jsonl, of which each row is a document, or any other text, which is one document; also with .gz."""
    segments: PositiveInt = 128
    """Number of calibration segments (Section 4.1)."""
    segment_length: PositiveInt | None = 2048
    """Tokens in a segment (Section 4.1); null: as many as the model has positions."""
    pack: bool = False
    """Join documents that are shorter than a segment, in random order, until they are longer than one; off:
    leave them out, as in the paper (OPTQ)."""
    seed: NonNegativeInt = 0
    """Seed of the random choice of segments."""


@dataclass(frozen=True)
class EvaluationSettings:
    """The texts that the perplexity is measured on."""

    texts: list[str] | str = field(default_factory=lambda: ["wikitext2", "ptb", "c4"])
    """Any of wikitext2, ptb, c4 (from the hub), embedded, or local files, as a list; one may stand alone.
    An empty list: no evaluation."""
    segment_length: PositiveInt | None = None
    """Tokens in a segment; null: as many as the model has positions, 2048 at most (Section 4.1)."""
    max_segments: PositiveInt | None = None
    """Evaluate only the first so many segments of each text; null: all of them (c4: 256)."""
    round_to_nearest: bool = True
    """fit: measure round-to-nearest as well, for comparison; it costs one more pass."""

    @property
    def names(self) -> list[str]:
        """Return the texts as a list."""
        return [self.texts] if isinstance(self.texts, str) else self.texts


@dataclass(frozen=True)
class TaskSettings:
    """Zero-shot tasks, by the rules of lm-evaluation-harness (pip install 'aespa-pl[eval]')."""

    tasks: list[str] = field(default_factory=list)
    """Names of the harness (arc_easy, hellaswag, mmlu ...), whose data come from the hub, or local task
    files: path/to/task.yaml. The whole model must fit into the device's memory."""
    task_limit: PositiveInt | None = None
    """Items of each task at most, its first ones; null: all of them."""
    task_batch_size: PositiveInt = 8
    """Items that run through the model at once."""
    task_examples: NonNegativeInt = 0
    """Solved examples before each item (few-shot); 0: zero-shot, as in the paper."""
    task_seed: NonNegativeInt = 0
    """Seed of the choice of solved examples and of all that a task draws at random."""


@dataclass(frozen=True)
class DataSettings:
    """Texts, and how they reach the model."""

    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    """Calibration text."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    """Held-out text."""
    batch_size: PositiveInt = 4
    """Segments that run through a block at once; changes memory and speed, and the order of sums."""
    hidden_states: Literal["memory", "disk"] = "memory"
    """Where the hidden states of all segments wait for the next block: in host memory, or in a file in
    output.folder that is gone with the process. One stream takes segments * segment_length * hidden
    size numbers of model.dtype."""
    memory_gb: FinitePositive | None = None
    """Memory of the device, in units of 10^9 bytes, that a block may take; null: what is free at the start.
    Where the statistics need more, H_V is collected for some heads at a time, with one more pass over the
    segments for each group; where the learning needs more, it is done in parts. The result is the same."""
    cache: str | None = None
    """Folder for what later runs need again: tokenized texts, weights read out of pickles, perplexities
    of the original model; null: aespa_pl under $XDG_CACHE_HOME or ~/.cache."""


@dataclass(frozen=True)
class GridSettings:
    """Step 2: scale, zero point and column factor of each projection."""

    search: bool | None = None
    """Search the clip of each grid for the least loss; off: from the smallest to the largest weight;
    null: as the method does."""
    zfold: bool | None = None
    """Fit the column factor zeta where it can be folded into the operation before (Z-Fold); null: as the
    method does."""
    max_rounds: PositiveInt = 30
    """Alternations between zeta and the clip search at most (docs/algorithm.md)."""


@dataclass(frozen=True)
class OptqSettings:
    """Step 3: the update of the full-precision weights before rounding."""

    enabled: bool | None = None
    """Compensate each column's rounding error in the columns not yet visited; off: rounding starts
    from the original weights; null: as the method does."""
    rows: bool | None = None
    """Compensate in the later rows of the same head as well, for Q and K with the attention objective
    (BoA); one row after the other, so it takes longer. null: as the method does."""


@dataclass(frozen=True)
class ObjectiveSettings:
    """What the integers are chosen for."""

    query_key: Objective | None = None
    """attention: the error of the attention scores (Eq. 21, 22); layer: of the projection's output; null:
    as the method does."""
    value: Objective | None = None
    """attention: the error of the attention output (Eq. 17), for the grid and the OPTQ update as
    well; layer: of the projection's output; null: as the method does."""


@dataclass(frozen=True)
class RoundingSettings:
    """Step 4: AdaRound, for the projections that the method learns."""

    learn: Learned | None = None
    """Projections that learn their rounding: all, attention (Q, K and V) or none; the others keep the
    integers of the OPTQ update (of nearest rounding, with OPTQ off). null: as the method does."""
    iterations: PositiveInt = 2000
    """Optimizer steps of each block (Section 4.1)."""
    learning_rate: FinitePositive = 0.015
    """Learning rate of Adam (Section 4.1)."""
    penalty_attention: FiniteNonNegative = 1.5
    """Weight lambda of the rounding loss for Q, K and V (Section 4.1)."""
    penalty_other: FiniteNonNegative = 1.0
    """Weight lambda of the rounding loss for the other projections (docs/algorithm.md)."""
    warmup: ClosedUnitInterval = 0.2
    """Share of the iterations, at the start, without rounding loss (AdaRound)."""
    beta_start: PenaltyExponent = 20.0
    """Exponent of the rounding loss after the warm-up (AdaRound)."""
    beta_end: PenaltyExponent = 2.0
    """Exponent of the rounding loss at the last iteration (AdaRound)."""
    keep_best: bool | None = None
    """For each row (each head for Q and K) keep the better of the learned and the OPTQ rounding; off:
    as in the paper; null: as the method does."""


@dataclass(frozen=True)
class PolishSettings:
    """Coordinate descent on the integers after step 4; not in the paper."""

    enabled: bool | None = None
    """Move each integer to its best value with all others fixed, again and again; it never raises the
    objective. off: as in the paper (docs/polish.md); null: as the method does."""
    passes: PositiveInt = 10
    """Visits of all integers at most; a pass that changes nothing is the last."""


@dataclass(frozen=True)
class BlockTuningSettings:
    """Training of each block as a whole: integers, scales, norms and biases together; not in the paper."""

    enabled: bool | None = None
    """Train each block on the original block's output, after step 4 and the polish (docs/tuning.md); null:
    as the method does."""
    epochs: PositiveInt = 2
    """Visits of all calibration segments."""
    batch_size: PositiveInt = 1
    """Segments in a mini-batch; there is one optimizer step for each."""
    integer_rate: FinitePositive = 0.01
    """Largest learning rate of the latent values of integers, in distances of two integers."""
    scale_rate: FinitePositive = 0.003
    """Largest learning rate of the logarithms of scales, and of the weights of norms."""
    bias_rate: FinitePositive = 0.0003
    """Largest learning rate of biases."""


@dataclass(frozen=True)
class ModelTuningSettings:
    """Training of the quantized model end to end: scales, norms and biases; not in the paper."""

    enabled: bool | None = None
    """After the last block, train the model on the original's next-token distribution, with all integers
    fixed. The whole model must fit into the device's memory (docs/tuning.md); null: as the method does."""
    epochs: PositiveInt = 1
    """Visits of all calibration segments."""
    batch_size: PositiveInt = 2
    """Segments in a mini-batch; there is one optimizer step for each."""
    scale_rate: FinitePositive = 0.003
    """Largest learning rate of the logarithms of scales, and of the weights of norms."""
    bias_rate: FinitePositive = 0.0003
    """Largest learning rate of biases."""


@dataclass(frozen=True)
class TuningSettings:
    """Training on calibration text after the steps of the paper."""

    blocks: BlockTuningSettings = field(default_factory=BlockTuningSettings)
    """Blocks as a whole."""
    model: ModelTuningSettings = field(default_factory=ModelTuningSettings)
    """The model end to end."""
    held_back: OpenUnitInterval = 0.0625
    """Share of the calibration segments, the last ones, that nothing is trained on: the epoch that is best
    on them is kept, and the start where none is better."""

    @property
    def enabled(self) -> bool:
        """Whether anything is tuned, which takes the original model's stream of hidden states."""
        return bool(self.blocks.enabled or self.model.enabled)


@dataclass(frozen=True)
class QuantizationSettings:
    """How the weights become integers."""

    method: MethodName = "aespa-tuned"
    """What is done: it decides every setting that is left at null (docs/methods.md). aespa learns the
    rounding of all projections, aespa-hybrid of Q, K and V, aespa-fast of none; aespa-tuned begins as
    aespa-fast and trains blocks and model; the others are what the paper compares with."""
    bits: Bits = 2
    """Bits of a weight, 2 to 8."""
    symmetric: bool = False
    """Fix the zero point in the middle of the range."""
    group_size: PositiveInt | None = None
    """Columns that share a scale and a zero point; null: one pair for each output channel."""
    damping: OpenUnitInterval = 0.01
    """Share of the mean diagonal that is added to each Hessian's diagonal (OPTQ)."""
    input_correction: ClosedUnitInterval | None = None
    """Share alpha of the error of earlier blocks, in a projection's input and in the residual stream that
    its output is added to, that the projection makes up for; it takes a second stream of hidden states
    through the original model. 0: none, as in the paper (docs/correction.md); null: as the method does."""
    products: Literal["float32", "tf32", "bfloat16"] = "float32"
    """Precision of the matrix products of steps 1 and 4, statistics (bfloat16: in tf32) and learning, where
    the matrix units of an accelerator are faster for less; sums, grids, OPTQ, polish and the losses that
    decide, on these statistics, are float32 (docs/performance.md)."""
    grid: GridSettings = field(default_factory=GridSettings)
    """Step 2, the grid."""
    optq: OptqSettings = field(default_factory=OptqSettings)
    """Step 3, the full-precision update."""
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    """What is minimized."""
    rounding: RoundingSettings = field(default_factory=RoundingSettings)
    """Step 4, the rounding."""
    polish: PolishSettings = field(default_factory=PolishSettings)
    """Coordinate descent after step 4 (after step 3 where nothing is learned)."""
    tuning: TuningSettings = field(default_factory=TuningSettings)
    """Training of blocks and of the model after these steps."""

    @property
    def two_streams(self) -> bool:
        """Whether the original model's hidden states are needed beside the quantized model's."""
        return bool(self.input_correction) or self.tuning.enabled

    def learns(self, *, attention: bool) -> bool:
        """Return whether the rounding of Q, K and V (attention), or of the others, is learned."""
        if self.rounding.learn is None:
            raise ValueError("these settings are not resolved: see aespa_pl.resolve")
        return self.rounding.learn == "all" or (self.rounding.learn == "attention" and attention)


@dataclass(frozen=True)
class OutputSettings:
    """Where the results go."""

    folder: str = "lightning_logs"
    """Folder of all runs; the one to give to tensorboard --logdir."""
    name: str = "aespa"
    """Name of the run. Every run gets a folder NAME/version_N of its own."""
    checkpoint_seconds: FinitePositive | None = 60.0
    """Seconds between two checkpoints of the block under way; null: none by time. One takes 12 bytes
    for each weight of the block, and the time to write them."""
    checkpoint_iterations: PositiveInt | None = None
    """Iterations between two checkpoints of the block under way; null: none by iterations."""
    histograms: list[str] = field(default_factory=list)
    """Projections, such as [q_proj], whose h(B) TensorBoard and the report show over the iterations; one
    histogram takes milliseconds to a second, so name few. The result is the same."""


SECTIONS: dict[str, type] = {
    "model": ModelSettings,
    "data": DataSettings,
    "quantization": QuantizationSettings,
    "output": OutputSettings,
}
"""The sections of a configuration that are ours; ``trainer`` is Lightning's."""


def keys_of(section: Any, prefix: str) -> dict[str, Any]:
    """Return the type of each key of a section, by its whole name: ``quantization.grid.zfold``."""
    found: dict[str, Any] = {}
    types = get_type_hints(section)
    for each in fields(section):
        key, kind = f"{prefix}.{each.name}", types[each.name]
        found |= keys_of(kind, key) if is_dataclass(kind) else {key: kind}
    return found
