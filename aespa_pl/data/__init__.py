"""Turn texts into token ids: calibration segments and evaluation texts."""

from aespa_pl.data.tokens import (
    calibration_tokens,
    check_vocabulary,
    evaluation_tokens,
    few_tokens,
)

__all__ = ["calibration_tokens", "check_vocabulary", "evaluation_tokens", "few_tokens"]
