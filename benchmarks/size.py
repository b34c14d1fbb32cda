"""Measure what quantization.target gains: the table of ``docs/toys.md``.

python benchmarks/size.py MODEL EVAL CALIBRATION --method aespa-fast

EVAL and CALIBRATION are as in ``accuracy.py``. Every row may have an incomplete last block, so that small
models have the types of large ones. It prints the predicted and the measured KL divergence (nats per token)
of llama.cpp's mixtures, of the best choice at the same bytes, and of ten random mixtures with their rank
correlation.
"""

import random
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from accuracy import SilentTrainers, calibration_ids, evaluation_ids
from jsonargparse import auto_cli
from rich.console import Console
from torch import Tensor

from aespa_pl.commands.block_types import block_types
from aespa_pl.commands.job import Job
from aespa_pl.commands.output import quiet
from aespa_pl.evaluation.perplexity import divergence
from aespa_pl.measure import Stopwatch
from aespa_pl.models.pretrained import PretrainedFolder
from aespa_pl.progress import WalkProgress
from aespa_pl.run.context import Context
from aespa_pl.run.journal import Run
from aespa_pl.settings import (
    CalibrationSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    OutputSettings,
    QuantizationSettings,
    Settings,
)
from aespa_pl.sizing.choose import Choices
from aespa_pl.sizing.matrices import WIDE, predicted_losses, typed_matrices
from aespa_pl.walk.walk import Walk

MIXTURES = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S")
RANDOM = 10
LENGTH = 256


def main(
    model: str,
    evaluation: str,
    calibration: str,
    *,
    method: str = "aespa-fast",
    segments: int = 32,
    held_out: int = 48,
) -> None:
    """Print one line for each mixture, and the rank correlation of random ones.

    Args:
        model: As model.pretrained.
        evaluation: File with the token ids of the held-out text.
        calibration: File with the token ids of the calibration segments.
        method: As quantization.method.
        segments: Calibration segments that the method sees.
        held_out: Segments of the held-out text that are measured.
    """
    torch.set_num_threads(1)
    job = _job(model, method)
    tokens, ids = calibration_ids(job, calibration), evaluation_ids(job, evaluation)[:held_out]
    layouts, tied = job.family.layouts(job.config), bool(job.config.tie_word_embeddings)
    matrices = typed_matrices(layouts, job.shape, {}, tied=tied, candidates=lambda _: WIDE)
    losses = predicted_losses(job.stream(job.pretrained), tokens, matrices, job.quantization)
    choices = Choices.of(matrices, losses)

    def line(name: str, types: Mapping[str, str]) -> float:
        measured = _measured(job, types, tokens[:segments], ids)
        size, predicted = choices.bytes(types), choices.loss(types)
        print(f"{name:16} {size:10} bytes, predicted {predicted:.5f}, measured {measured:.5f}")
        return measured

    for name in MIXTURES:
        types = _mixture(job, name)
        theirs = line(name, types)
        ours = line("  best choice", choices.best(choices.bytes(types)))
        print(f"  {100 * (ours / theirs - 1):+.0f} %", flush=True)
    draw, pairs = random.Random(0), []
    for number in range(RANDOM):
        weights = [draw.gammavariate(0.7, 1) for _ in WIDE[:-1]]
        types = {key: draw.choices(WIDE[:-1], weights)[0] for m in matrices for key in m.keys}
        pairs.append((choices.loss(types), line(f"random {number}", types)))
    ranks = np.argsort(np.argsort(np.array(pairs), axis=0), axis=0)
    correlation = np.corrcoef(ranks[:, 0], ranks[:, 1])[0, 1]
    print(f"rank correlation {correlation:.3f}")


def _job(model: str, method: str) -> Job:
    data = DataSettings(
        CalibrationSettings(segment_length=LENGTH), EvaluationSettings(segment_length=LENGTH), batch_size=8
    )
    quantization = QuantizationSettings(method=method, format="Q8_0")
    settings = Settings(ModelSettings(model), data, quantization, OutputSettings())
    return Job.prepare(settings, torch.device("cpu"))


def _mixture(job: Job, name: str) -> dict[str, str]:
    """Return llama.cpp's types as if all rows were whole blocks."""
    settings = replace(job.quantization, format=name, types={})
    with patch("aespa_pl.algorithm.grid_types.GridType.fits", lambda *_: True):
        return block_types(settings, job.config)


def _measured(job: Job, types: Mapping[str, str], tokens: Tensor, ids: Tensor) -> float:
    """Quantize, and return the KL divergence from the original, in nats per token."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(Path(folder), {})
        Walk(
            Context(
                source=job.stream(job.pretrained),
                run=run,
                settings=replace(job.quantization, format="Q4_K", types=dict(types)),
                trainers=SilentTrainers(job.quantization.rounding.iterations),
                batch_size=job.data.batch,
                progress=WalkProgress(Console(quiet=True)),
                stopwatch=Stopwatch(),
            )
        ).quantize(tokens)
        original, quantized = (
            job.stream(folder) for folder in (job.pretrained, PretrainedFolder.open(run.model_folder))
        )
        return divergence(original, quantized, {"": ids}, batch_size=8)[""].mean


if __name__ == "__main__":
    with quiet():
        auto_cli(main)
