"""A file is no larger than its target, whatever it says of its own making."""

from itertools import count

import pytest
import torch

from aespa_pl.commands import target
from aespa_pl.commands.job import Job
from aespa_pl.progress import PlainConsole, WalkProgress
from aespa_pl.settings import (
    CalibrationSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    OutputSettings,
    QuantizationSettings,
    Settings,
)


def test_a_file_whose_metadata_grow_with_each_choice_stays_below_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grown = count()
    monkeypatch.setattr(target, "_other_bytes", lambda *_: 20_000 + 500 * min(next(grown), 6))
    calibration = CalibrationSettings("embedded", segments=2, segment_length=16)
    settings = Settings(
        ModelSettings("embedded:llama"),
        DataSettings(calibration, EvaluationSettings([], segment_length=16)),
        QuantizationSettings(method="rtn", format="auto", target="400 kB"),
        OutputSettings(),
    )
    with WalkProgress(PlainConsole()) as progress:
        job = Job.prepare(settings, torch.device("cpu"))
        _, mixture = target.for_target(job, settings, None, progress)
    assert mixture is not None
    assert 390_000 < mixture.bytes <= 400_000
