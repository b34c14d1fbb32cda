"""Define the settings that decide how weights become integers."""

from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveInt

from aespa_pl.methods import Learned, Objective
from aespa_pl.settings.tuning import TuningSettings
from aespa_pl.settings.types import (
    Bits,
    Damping,
    FiniteNonNegative,
    FinitePositive,
    MethodName,
    PenaltyExponent,
    ProjectionBits,
)

KEPT = 16  # bits in ``bits_of`` of a projection that stays as it is


def bits_of_type(name: str) -> int:
    """Return the bits of the integers of a block type, or of most types of a mixture, by its name."""
    return next(int(letter) for letter in name if letter.isdigit())  # Q4_K_M, IQ4_NL


@dataclass(frozen=True)
class GridSettings:
    """Step 2: scale, zero point and column factor of each projection."""

    search: bool | None = None
    """Search the clip of each grid for the least loss; off: from the smallest to the largest weight;
    null: as the method does."""
    zfold: bool | None = None
    """Fit the column factor zeta where it can be folded into the operation before (Z-Fold); null: as the
    method does."""
    awq: bool | None = None
    """Derive zeta from the mean absolute inputs instead, to the power with the least loss (AWQ); null: as
    the method does."""
    max_rounds: PositiveInt = 30
    """Alternations between zeta and the clip search at most (docs/algorithm.md)."""
    exhaustive: bool = False
    """Try all clips of each grid with their exact losses in every round, and alternate as long as the loss
    falls, to compare with others' figures; the search takes 4 times as long or more (docs/methods.md)."""


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
    """The loss that the integers are chosen for."""

    query_key: Objective | None = None
    """attention: Q and K minimize the error of the attention scores (Eq. 21, 22); layer: the error of their
    own outputs; null: as the method does."""
    value: Objective | None = None
    """attention: V minimizes the error of the attention output (Eq. 17), in the grid and the OPTQ update as
    well; layer: the error of its own output; null: as the method does."""
    value_tokens: NonNegativeInt = 32
    """Tokens that V's statistic is summed over, at least, for each of its columns: where a calibration text
    has many more, every second, third ... position counts (docs/performance.md). 0: all, as in the paper."""
    query_key_damping: FiniteNonNegative = 0.1
    """Part of its mean diagonal that is added to the diagonal of G where query_key is attention. Without it
    errors of Q grow where keys are small, and errors of K where queries are small (docs/algorithm.md)."""
    end_loss: bool = False
    """Weigh the errors of all projections' outputs but V's by how the divergence at the end of the model
    depends on them (docs/algorithm.md); for Q and K this takes the place of query_key. It takes longer."""

    @property
    def couples_scores(self) -> bool:
        """Tell whether Q and K have the objective of the attention scores."""
        return self.query_key == "attention" and not self.end_loss


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
    """Keep the better of the learned and the OPTQ rounding in each row (each head for Q and K); off: as
    in the paper; null: as the method does."""


@dataclass(frozen=True)
class PolishSettings:
    """Coordinate descent on the integers after step 4; not in the paper."""

    enabled: bool | None = None
    """Move each integer to its best value with all others fixed, again and again; it never raises the
    objective. off: as in the paper (docs/polish.md); null: as the method does."""
    passes: PositiveInt = 10
    """Visits of all integers at most; a row, or head, ends with a pass that gains less than half a
    percent. With a type of llama.cpp three such descents follow each other."""


@dataclass(frozen=True)
class QuantizationSettings:
    """How the weights become integers."""

    method: MethodName = "aespa-tuned"
    """The method, which decides every setting that is left at null (docs/methods.md). aespa learns the
    rounding of all projections, aespa-hybrid of Q, K and V, aespa-fast of none; aespa-tuned begins as
    aespa-fast and trains blocks and model; the others are those of other papers."""
    format: str = "uniform"
    """Grids of the weights: uniform (bits, group_size and symmetric below), or what llama.cpp stores: a
    mixture (Q2_K, Q4_K_M, IQ4_XS ...), a block type (Q3_K, Q4_0 ...) or auto, the types that target
    chooses. With any of these, bits, group_size and symmetric have no effect."""
    target: float | str | None = None
    """Size that the model may have: of the whole file (3.5 GB, 300 MB), or mean bits of a quantized weight
    (2.75). Types (format auto: the GGUF file has the size) or bits_of (uniform: packed integers) are chosen
    for it, so that the end loss suffers least; those that types and bits_of name stay. null: nothing is
    chosen."""
    types: dict[str, str] = field(default_factory=dict)
    """Block types by name, block and pattern (v_proj: Q4_K, 0.*: Q6_K, embedding: Q6_K). With a format of
    llama.cpp: of any matrix. With uniform: of embedding and head only, which otherwise keep their type."""
    bits: Bits = 2
    """Bits of a weight, 2 to 8."""
    bits_of: dict[str, ProjectionBits] = field(default_factory=dict)
    """Bits of projections that have others than bits: by name (down_proj: 4), by block (0: 4, counted from
    0), by a pattern (1?.*: 3), or by block and name (0.v_proj: 3), which counts first; of the others that fit
    the largest number counts (docs/methods.md). 16: the projection stays as it is. lm_head, which otherwise
    keeps its type, gets the block type of llama.cpp with so many bits."""
    symmetric: bool = False
    """Fix the zero point in the middle of the range."""
    group_size: PositiveInt | None = None
    """Columns that share a scale and a zero point; null: one pair for each output channel. It has to divide
    the columns of every projection; GGUF also wants a multiple of 32."""
    damping: Damping = "auto"
    """Share of the mean diagonal that is added to each Hessian's diagonal (OPTQ), between 0 and 1. auto:
    inputs of the projection / calibration tokens, from 0.01 to 0.3."""
    input_correction: ClosedUnitInterval | None = None
    """Share alpha of the error of earlier blocks, in a projection's input and in the residual stream that
    its output is added to, that the projection makes up for; it takes a second stream of hidden states
    through the original model. 0: none, as in the paper (docs/correction.md); null: as the method does."""
    products: Literal["auto", "float32", "tf32", "bfloat16"] = "auto"
    """Precision of the matrix products of steps 1 and 4 (statistics and learning) and of the tuning's steps;
    matrix units are faster with less. With bfloat16 statistics are in tf32. Sums, grids, OPTQ, polish and the
    losses that decide are float32 (docs/performance.md). auto: tf32 on a CUDA device, float32 on a CPU, which
    has no tf32, but may have units for bfloat16 (AMX). A run that is continued keeps what it was begun with,
    or is refused."""
    grid: GridSettings = field(default_factory=GridSettings)
    """Step 2, the grid."""
    optq: OptqSettings = field(default_factory=OptqSettings)
    """Step 3, the full-precision update."""
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    """The loss that is minimized."""
    rounding: RoundingSettings = field(default_factory=RoundingSettings)
    """Step 4, the rounding."""
    polish: PolishSettings = field(default_factory=PolishSettings)
    """Coordinate descent after step 4 (after step 3 where nothing is learned)."""
    tuning: TuningSettings = field(default_factory=TuningSettings)
    """Training of blocks and of the model after these steps."""

    def __post_init__(self) -> None:
        """Turn numbers of blocks, which YAML reads as numbers, into text."""
        for name in ("types", "bits_of"):
            object.__setattr__(self, name, {str(key): value for key, value in getattr(self, name).items()})

    def bits_for(self, block: int, projection: str) -> int:
        """Return the bits of a projection of a block."""
        kind = self.type_for(block, projection)
        return self._uniform_bits(block, projection) if kind is None else bits_of_type(kind)

    def keeps(self, block: int, projection: str) -> bool:
        """Return whether a projection of a block stays as it is."""
        return self.format == "uniform" and self._uniform_bits(block, projection) == KEPT

    def _uniform_bits(self, block: int, projection: str) -> int:
        """Return the bits of the exact key in ``bits_of``, else the most of keys that fit, else ``bits``."""
        exact = self.bits_of.get(f"{block}.{projection}")
        fitting = (bits for key, bits in self.bits_of.items() if names_projection(key, block, projection))
        return max(fitting, default=self.bits) if exact is None else exact

    def type_for(self, block: int, projection: str) -> str | None:
        """Return the name of the block type of a projection of a block; None where its grid is uniform."""
        if self.format == "uniform":
            return None
        return self.types.get(f"{block}.{projection}", self.format)

    @property
    def precision(self) -> Literal["float32", "tf32", "bfloat16"]:
        """Return ``products`` without auto."""
        if self.products == "auto":
            raise ValueError("these settings are not resolved: see aespa_pl.resolve")
        return self.products

    @property
    def uses_inputs(self) -> bool:
        """Tell whether a block's grids or integers depend on its inputs; of nearest rounding they don't."""
        chosen = self.grid.search or self.optq.enabled or self.learns(attention=True)
        return bool(chosen or self.polish.enabled or self.input_correction or self.tuning.blocks.enabled)

    @property
    def follows_rows(self) -> bool:
        """Tell whether a step follows objectives that couple the rows of a head."""
        follows = self.optq.enabled and (self.optq.rows or self.format != "uniform")
        return bool(follows or self.polish.enabled or self.learns(attention=True))

    @property
    def two_streams(self) -> bool:
        """Tell whether the original model's hidden states are needed beside the quantized model's."""
        return bool(self.input_correction) or self.tuning.enabled

    @property
    def streams(self) -> int:
        """Return how many streams of hidden states wait at once: up to two, and one between the sublayers."""
        return 1 + self.two_streams + self.tuning.by_sublayer

    def with_place(self, blocks: Literal["auto", "memory", "disk"]) -> "QuantizationSettings":
        """Return the settings with another place of the blocks in the end-to-end tuning."""
        model = replace(self.tuning.model, blocks=blocks)
        return replace(self, tuning=replace(self.tuning, model=model))

    def learns(self, *, attention: bool) -> bool:
        """Return whether the rounding of Q, K and V (attention), or of the others, is learned."""
        if self.rounding.learn is None:
            raise ValueError("these settings are not resolved: see aespa_pl.resolve")
        return self.rounding.learn == "all" or (self.rounding.learn == "attention" and attention)


def names_projection(key: str, block: int, projection: str) -> bool:
    """Return whether a key of ``bits_of`` or ``types``, such as ``1?.*``, names a projection of a block."""
    return any(fnmatchcase(name, key) for name in (projection, str(block), f"{block}.{projection}"))
