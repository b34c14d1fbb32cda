"""Train quantized blocks against the original's, and the quantized model end to end."""

from aespa_pl.tuning.data import SegmentPairs
from aespa_pl.tuning.losses import RunBlock, divergence, output_error
from aespa_pl.tuning.training import LearningRates
from aespa_pl.tuning.tune import Tuned, changed_fraction, tune, tune_streamed
from aespa_pl.tuning.weights import EVERYTHING, SCALES, TunableBlock, recipe

__all__ = [
    "EVERYTHING",
    "SCALES",
    "LearningRates",
    "RunBlock",
    "SegmentPairs",
    "TunableBlock",
    "Tuned",
    "changed_fraction",
    "divergence",
    "output_error",
    "recipe",
    "tune",
    "tune_streamed",
]
