"""Turn texts into token ids: calibration segments and evaluation texts."""
