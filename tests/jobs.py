"""Settings of a command on a small model that comes with the package, for tests of one of its steps."""

from pathlib import Path

import torch

from aespa_pl.commands.job import Job
from aespa_pl.settings import (
    CalibrationSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    OutputSettings,
    QuantizationSettings,
    Settings,
)

PLAIN = QuantizationSettings()


def embedded(
    name: str,
    quantization: QuantizationSettings = PLAIN,
    *,
    length: int = 16,
    max_segments: int | None = None,
    cache: Path | None = None,
) -> Settings:
    """Return settings for embedded texts in segments of ``length`` tokens."""
    calibration = CalibrationSettings("embedded", segments=2, segment_length=length)
    evaluation = EvaluationSettings(["embedded"], length, max_segments)
    data = DataSettings(calibration, evaluation, cache=None if cache is None else str(cache))
    return Settings(ModelSettings(f"embedded:{name}"), data, quantization, OutputSettings())


def prepared(settings: Settings) -> Job:
    """Return the job of these settings on the CPU."""
    return Job.prepare(settings, torch.device("cpu"))
