"""Measure a model's perplexity and KL divergence after quantization, on stored token ids (``docs/toys.md``).

python benchmarks/accuracy.py MODEL EVAL.safetensors '[CALIB_0.safetensors, CALIB_1.safetensors]'

Each safetensors file holds ``ids``, ``[segments, 256]`` for calibration and ``[1, tokens]`` for
evaluation; instead, ``SOURCE@SEED`` samples 128 segments of a text, and EVAL may be a text as well
(``embedded`` and ``embedded@0`` for the models that come with the package). It takes the keys
of the ``quantization`` section, for example ``--quantization.bits 3 --quantization.polish.enabled false``.
"""

import gc
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from aespa_pl.commands.evaluate import evaluate
from aespa_pl.commands.job import Job
from aespa_pl.commands.output import quiet
from aespa_pl.evaluation.perplexity import divergence
from aespa_pl.measure import Stopwatch
from aespa_pl.models.pretrained import PretrainedFolder
from aespa_pl.progress import WalkProgress
from aespa_pl.resolve import resolved
from aespa_pl.run.context import Context
from aespa_pl.run.folder import Training
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
from aespa_pl.walk.walk import Walk

DEFAULTS = QuantizationSettings()


@dataclass(frozen=True)
class Measured:
    """Holds what was measured with one calibration set."""

    perplexity: float
    divergence: float
    """Mean KL divergence from the original."""
    seconds: dict[str, float]
    losses: dict[str, Any]


@dataclass(frozen=True)
class SilentTrainers:
    """Makes Trainers without loggers, checkpoints and bars."""

    iterations: int

    def begin(self, _: Run) -> list[Logger]:
        """Return no loggers."""
        return []

    def loggers(self, _run: Run, _curves: str) -> list[Logger]:
        """Return no loggers."""
        return []

    def free(self) -> None:
        """Free what refers to each other."""
        gc.collect()

    def of_rounding(self, _run: Run, _training: Training) -> Trainer:
        """Return the Trainer of a portion of a block."""
        return self._silent(max_steps=self.iterations, max_epochs=-1)

    def of_tuning(self, _run: Run, _training: Training, epochs: int) -> Trainer:
        """Return the Trainer of a tuning."""
        return self._silent(max_epochs=epochs, num_sanity_val_steps=-1)

    def _silent(self, **more: Any) -> Trainer:
        return Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1000,
            **more,
        )


def main(
    model: str,
    evaluation: str,
    calibration: list[str],
    *,
    quantization: QuantizationSettings = DEFAULTS,
    label: str = "",
    threads: int = 1,
    segments: int | None = None,
    batch: int = 8,
    nearest: bool = False,
    partial: bool = False,
    says: bool = False,
    output: str | None = None,
) -> None:
    """Quantize with each calibration set and print the perplexities.

    Args:
        model: As model.pretrained.
        evaluation: File with the token ids of the held-out text.
        calibration: Files with the token ids of the calibration segments.
        quantization: What to do.
        label: Name of the row.
        threads: Threads of torch.
        segments: Use only the first so many calibration segments.
        batch: Segments that go through a block at once; it changes last bits.
        nearest: Measure the original and round-to-nearest as well.
        partial: Give all projections the block type of the format, and let a row's last block be incomplete.
        says: Print what the walk tells of each block.
        output: JSON lines are appended to this file.
    """
    torch.set_num_threads(threads)
    length = 256
    data = DataSettings(
        CalibrationSettings(segment_length=length),
        EvaluationSettings(segment_length=length),
        batch_size=batch,
    )
    settings = Settings(ModelSettings(model), data, quantization, OutputSettings())
    job = Job.prepare(settings, torch.device("cpu"))
    if partial:
        job = replace(job, quantization=_of_one_type(job, quantization))
    sets = [calibration_ids(job, name)[:segments] for name in calibration]
    ids = evaluation_ids(job, evaluation)
    bars = {}
    if nearest:
        bars["original"] = evaluate(job, job.pretrained, {"": ids})[""]
        bars["nearest"] = evaluate(job, job.pretrained, {"": ids}, nearest=True)[""]
        print(label, bars)
    results = [_measure(job, tokens, ids, says=says) for tokens in sets]
    values = [result.perplexity for result in results]
    spread = f" +- {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    phases = {k: round(v, 1) for k, v in results[0].seconds.items()}
    divergences = [result.divergence for result in results]
    print(f"{label} {[round(v, 3) for v in values]} mean {statistics.mean(values):.3f}{spread} {phases}")
    print(f"divergence {[round(v, 5) for v in divergences]}")
    if output:
        with Path(output).open("a", encoding="utf-8") as file:
            row = {"label": label, "command": sys.argv[1:], "perplexity": values, **bars}
            row["divergence"] = divergences
            row |= {"seconds": phases, "losses": results[0].losses}
            file.write(json.dumps(row) + "\n")


def _of_one_type(job: Job, given: QuantizationSettings) -> QuantizationSettings:
    """Return a job's settings with the format's own type everywhere, and its learning rates."""
    width, segments = job.config.get_text_config().hidden_size, job.data.calibration.segments
    wanted = resolved(given, job.device.type, width, segments)
    of_model = replace(wanted.tuning.model, blocks=job.quantization.tuning.model.blocks)
    tuning = replace(wanted.tuning, model=of_model)
    return replace(job.quantization, types={}, bits=wanted.bits, tuning=tuning)


def calibration_ids(job: Job, name: str) -> Tensor:
    """Return the calibration segments of a file, or of ``SOURCE@SEED``."""
    if name.endswith(".safetensors"):
        return load_file(name)["ids"].long()
    source, _, seed = name.partition("@")
    settings = replace(job.data.calibration, source=source, seed=int(seed or 0))
    return replace(job, data=replace(job.data, calibration=settings)).calibration()


def evaluation_ids(job: Job, name: str) -> Tensor:
    """Return the segments of a file, or of a text, that is measured on."""
    if name.endswith(".safetensors"):
        return load_file(name)["ids"].long().view(-1, job.segment_length)
    settings = replace(job.data.evaluation, texts=[name])
    (ids,) = replace(job, data=replace(job.data, evaluation=settings)).evaluation().values()
    return ids


def _measure(job: Job, tokens: Tensor, ids: Tensor, *, says: bool) -> Measured:
    stopwatch = Stopwatch()
    start, processor = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(Path(folder), {})

        Walk(
            Context(
                source=job.stream(job.pretrained),
                run=run,
                settings=job.quantization,
                trainers=SilentTrainers(job.quantization.rounding.iterations),
                batch_size=job.data.batch,
                progress=WalkProgress(Console(quiet=not says)),
                stopwatch=stopwatch,
            )
        ).quantize(tokens)
        spent = {"total": time.perf_counter() - start, "processor": time.process_time() - processor}
        seconds = spent | stopwatch.seconds
        quantized = PretrainedFolder.open(run.model_folder)
        value = evaluate(job, quantized, {"": ids})[""]
        original, found = map(job.stream, (job.pretrained, quantized))
        distance = divergence(original, found, {"": ids}, batch_size=job.data.batch)[""].mean
        losses = {str(i): record.losses for i, record in run.blocks.items()}
    return Measured(value, distance, seconds, losses)


if __name__ == "__main__":
    with quiet():
        auto_cli(main)
