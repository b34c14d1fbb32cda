"""Define the settings of the training after the steps of the paper."""

from dataclasses import dataclass, field
from typing import Literal

from jsonargparse.typing import OpenUnitInterval, PositiveInt

from aespa_pl.methods import Parametrization, Unit
from aespa_pl.settings.types import FiniteNonNegative, FinitePositive


@dataclass(frozen=True)
class BlockTuningSettings:
    """Training of each block by forward passes: what of it is learned is up to the method."""

    enabled: bool | None = None
    """Train each block on the original block's output, after step 4 and the polish (docs/tuning.md); null:
    as the method does."""
    parametrization: Parametrization | None = None
    """Parameters that are learned. straight-through: integers, scales, norms and biases; annealed: the same,
    with integers that are soft at first and end hard; rounding: whether each weight is rounded up or down
    (BRECQ); clipping: the range of each grid, and a factor of each column (OmniQuant); affine: the same, with
    a matrix for each value head (AffineQuant). null: as the method does."""
    unit: Unit | None = None
    """Modules that are trained together: the block, or one sublayer after the other (attention, then
    feed-forward network; one more stream of hidden states waits in data.hidden_states). null: as the method
    does."""
    epochs: PositiveInt | None = None
    """Visits of all calibration segments, for each unit, except those that are held back or left over from
    whole mini-batches; null: as the method does."""
    batch_size: PositiveInt = 1
    """Segments in a mini-batch; there is one optimizer step for each."""
    integer_rate: FinitePositive | None = None
    """Largest learning rate of the latent values of integers, in distances of two integers, or of the
    rounding variables. null: 0.4 with rounding; 0.005 with straight-through and annealed, less with more than
    2 bits, in models wider than 192, or with block types (docs/tuning.md)."""
    scale_rate: FinitePositive | None = None
    """Largest learning rate of the logarithms of scales, and of the weights of norms, or of the clipping
    strengths. null: 0.003, with block types 0.001; 0.01 with clipping and affine."""
    bias_rate: FinitePositive = 0.0003
    """Largest learning rate of biases."""
    transformation_rate: FinitePositive = 0.005
    """Largest learning rate of the factors of columns, and of the matrices of value heads (OmniQuant)."""
    penalty: FiniteNonNegative = 1.0
    """Weight of the rounding loss, as a mean over the weights; quantization.rounding has its warm-up and
    its exponents (BRECQ; docs/methods.md)."""


@dataclass(frozen=True)
class ModelTuningSettings:
    """Training of the quantized model end to end: integers, scales, norms and biases; not in the paper."""

    enabled: bool | None = None
    """After the last block, train the model on the original's next-token distribution. Where the whole model
    does not fit into the device's memory, blocks are read from disk (docs/memory.md); null: as the method
    does."""
    epochs: PositiveInt = 2
    """Visits of all calibration segments, except those that are held back or left over from whole
    mini-batches."""
    batch_size: PositiveInt = 1
    """Segments in a mini-batch; there is one optimizer step for each."""
    blocks: Literal["auto", "memory", "disk"] = "auto"
    """Place of the blocks. memory: all are on the device, in float32. disk: each is read whenever it runs, so
    that one is in memory at a time; integers that move have files (docs/memory.md). auto: memory
    where that fits, else disk."""
    integer_rate: FiniteNonNegative | None = None
    """Largest learning rate of the latent values of integers, in distances of two integers; null: 0.02 at
    2 bits, 0.015 with block types, and less with more bits, or 0 where too few steps would follow to move an
    integer (docs/tuning.md). 0: the integers stay, which takes about a quarter of the memory."""
    scale_rate: FinitePositive | None = None
    """Largest learning rate of the logarithms of scales, and of the weights of norms; null:
    0.003 at 2 bits, and less with more, in models wider than 192, or with block types (docs/tuning.md)."""
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
        """Tell whether anything is tuned, which takes the original model's stream of hidden states."""
        return bool(self.blocks.enabled or self.model.enabled)

    @property
    def by_sublayer(self) -> bool:
        """Tell whether sublayers are trained, which takes the original's hidden states between them too."""
        return bool(self.blocks.enabled) and self.blocks.unit == "sublayer"
