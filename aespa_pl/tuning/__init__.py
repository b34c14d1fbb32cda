"""Training of quantized blocks against the original's, and of the quantized model end to end."""

from aespa_pl.tuning.block import (
    BlockReconstruction,
    Reconstruction,
    TunableBlock,
    reconstruct,
)
from aespa_pl.tuning.data import SegmentPairs
from aespa_pl.tuning.model import ModelTuning, TunableModel, TunedModel, tune_model
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
    "QuantizedWeight",
    "Reconstruction",
    "SegmentPairs",
    "StraightThrough",
    "TunableBlock",
    "TunableModel",
    "TunedModel",
    "WeightParametrization",
    "reconstruct",
    "tune_model",
]
