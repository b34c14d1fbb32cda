"""Training of quantized blocks against the original's, and of the quantized model end to end."""

from aespa_pl.tuning.block import (
    BlockReconstruction,
    QuantizedBlock,
    Reconstruction,
    reconstruct,
)
from aespa_pl.tuning.data import SegmentPairs
from aespa_pl.tuning.model import ModelTuning, QuantizedModel, TunedModel, tune_model
from aespa_pl.tuning.parametrization import (
    FixedIntegers,
    QuantizedWeight,
    StraightThrough,
    WeightParametrization,
)
from aespa_pl.tuning.training import LearningRates

__all__ = [
    "BlockReconstruction",
    "FixedIntegers",
    "LearningRates",
    "ModelTuning",
    "QuantizedBlock",
    "QuantizedModel",
    "QuantizedWeight",
    "Reconstruction",
    "SegmentPairs",
    "StraightThrough",
    "TunedModel",
    "WeightParametrization",
    "reconstruct",
    "tune_model",
]
