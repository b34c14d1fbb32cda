"""Train quantized blocks against the original's, and the quantized model end to end."""

from aespa_pl.tuning.block import (
    BlockReconstruction,
    Reconstruction,
    RunBlock,
    TunableBlock,
    changed_share,
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
from aespa_pl.tuning.recipes import Recipe, recipe
from aespa_pl.tuning.training import LearningRates

__all__ = [
    "BlockReconstruction",
    "FixedIntegers",
    "LearningRates",
    "ModelTuning",
    "QuantizedWeight",
    "Recipe",
    "Reconstruction",
    "RunBlock",
    "SegmentPairs",
    "StraightThrough",
    "TunableBlock",
    "TunableModel",
    "TunedModel",
    "WeightParametrization",
    "changed_share",
    "recipe",
    "reconstruct",
    "tune_model",
]
