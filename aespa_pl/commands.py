"""What the commands do once their arguments are parsed: ``fit`` quantizes, ``test`` measures."""

import hashlib
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
import transformers
from lightning.pytorch import Trainer
from torch import Tensor, nn

import aespa_pl
from aespa_pl.artifacts import write_json
from aespa_pl.data import calibration_tokens, check_vocabulary, default_cache, evaluation_tokens
from aespa_pl.errors import UserError
from aespa_pl.evaluation import perplexity
from aespa_pl.models import family_of
from aespa_pl.models.checkpoint import Checkpoint
from aespa_pl.models.family import Family
from aespa_pl.models.source import resolve
from aespa_pl.models.weights import set_projection_weight
from aespa_pl.preparation import nearest_weight
from aespa_pl.progress import WalkProgress
from aespa_pl.run import Run, last_run, model_fingerprint
from aespa_pl.settings import DataSettings, ModelSettings, OutputSettings, QuantizationSettings
from aespa_pl.stream import StreamedModel
from aespa_pl.timing import Stopwatch, peak_bytes
from aespa_pl.walk import Walk

PHASES = ("statistics", "grid", "optq", "rounding")
FREE_SPACE_FACTOR = 1.6
"""Disk that a run needs, in sizes of the checkpoint: the model again, one byte a weight beside it."""


@dataclass(frozen=True)
class Job:
    """Everything that a command works on, checked before the work begins."""

    model: ModelSettings
    data: DataSettings
    quantization: QuantizationSettings
    output: OutputSettings
    device: torch.device
    checkpoint: Checkpoint
    family: Family

    @classmethod
    def prepare(
        cls,
        model: ModelSettings,
        data: DataSettings,
        quantization: QuantizationSettings,
        output: OutputSettings,
        device: torch.device,
    ) -> "Job":
        """Open the checkpoint and refuse what cannot work with it.

        Raises:
            UserError: The model can't be found, read or quantized with these settings.
        """
        checkpoint = Checkpoint.open(resolve(model.pretrained, model.revision))
        job = cls(
            model, data, quantization, output, device, checkpoint, family_of(checkpoint.config)
        )
        job._check_lengths()
        job._check_groups()
        return job

    @property
    def segment_length(self) -> int:
        """Tokens in a calibration segment."""
        length = self.data.calibration.segment_length or self.family.positions(
            self.checkpoint.config
        )
        if length is None:
            raise UserError(
                "data.calibration.segment_length must be a number: this model has no limit of positions"
            )
        return length

    @property
    def evaluation_length(self) -> int:
        """Tokens in a segment of held-out text."""
        return self.data.evaluation.segment_length or self.segment_length

    @property
    def dtype(self) -> torch.dtype:
        """Type that blocks run in."""
        if self.model.dtype != "auto":
            chosen: torch.dtype = getattr(torch, self.model.dtype)
            return chosen
        return torch.float32 if self.device.type == "cpu" else self.checkpoint.dtype

    def stream(self, checkpoint: Checkpoint) -> StreamedModel:
        """Return the model, or another checkpoint of its shape, streamed."""
        return StreamedModel.open(checkpoint, self.family, self.device, self.dtype)

    def calibration(self) -> Tensor:
        """Return the calibration segments ``[segments, L]``."""
        tokens = calibration_tokens(
            self.data.calibration, self.checkpoint.tokenizer(), self.segment_length, self._cache
        )
        check_vocabulary(tokens, self.checkpoint.config.vocab_size)
        return tokens

    def evaluation(self) -> dict[str, Tensor]:
        """Return the segments of each held-out text, by its name."""
        settings, tokenizer = self.data.evaluation, self.checkpoint.tokenizer()
        texts = {
            text: evaluation_tokens(
                text, tokenizer, self.evaluation_length, settings.max_segments, self._cache
            )
            for text in settings.texts
        }
        for tokens in texts.values():
            check_vocabulary(tokens, self.checkpoint.config.vocab_size)
        return texts

    def fingerprint(self, tokens: Tensor) -> dict[str, Any]:
        """Return what the result depends on; a resume with anything else is refused."""
        return {
            "model": model_fingerprint(
                {self.checkpoint.folder / "config.json", *self._weight_files}
            ),
            "dtype": str(self.dtype).removeprefix("torch."),
            "calibration": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
            "batch_size": self.data.batch_size,
            "quantization": asdict(self.quantization),
        }

    @property
    def size(self) -> int:
        """Bytes of the checkpoint's weights."""
        return sum(path.stat().st_size for path in self._weight_files)

    @property
    def _weight_files(self) -> set[Path]:
        return {tensor.file for tensor in self.checkpoint.tensors.values()}

    @property
    def _cache(self) -> Path:
        return Path(self.data.cache).expanduser() if self.data.cache else default_cache()

    def _check_lengths(self) -> None:
        limit = self.family.positions(self.checkpoint.config)
        for key, length in (
            ("data.calibration.segment_length", self.segment_length),
            ("data.evaluation.segment_length", self.evaluation_length),
        ):
            if limit is not None and length > limit:
                raise UserError(
                    f"{key} is {length}, but {self.model.pretrained} has {limit} positions: "
                    f"choose {limit} or less"
                )

    def _check_groups(self) -> None:
        size = self.quantization.group_size
        if size is None:
            return
        model = self.checkpoint.skeleton()
        block = model.get_submodule(self.family.blocks_path)[0]
        for projection in self.family.layout(self.checkpoint.config).projections:
            columns = block.get_submodule(projection.module).in_features
            if columns % size:
                raise UserError(
                    f"quantization.group_size is {size}, but {projection.name} has {columns} columns: "
                    "choose a divisor of all, or null"
                )


def fit(
    job: Job,
    make_trainer: Callable[[Run, int], Trainer],
    save_config: Callable[[Path], None],
    progress: WalkProgress,
) -> tuple[Run, dict[str, Any]]:
    """Quantize a model; return the run and its metrics.

    Args:
        job: What to do.
        make_trainer: Makes the Trainer of a block.
        save_config: Writes the configuration to a file.
        progress: Where to show how far it is.

    Raises:
        UserError: See the message; finished blocks stay on disk.
    """
    began = time.perf_counter()
    texts = job.evaluation()  # first: a text that can't be had is noticed before hours of work
    tokens = job.calibration()
    run = Run.create(Path(job.output.folder) / job.output.name, job.fingerprint(tokens))
    _check_space(run.folder, job.size)
    save_config(run.folder / "config.yaml")
    progress.say(f"run folder: {run.folder}")
    stopwatch = Stopwatch()
    source = job.stream(job.checkpoint)
    Walk(
        source,
        run,
        job.quantization,
        job.data.batch_size,
        partial(make_trainer, run),
        progress,
        stopwatch,
    ).quantize(tokens)
    _write_description(job, run)
    quantized = time.perf_counter() - began
    nearest = ("nearest",) if job.data.evaluation.round_to_nearest else ()
    kinds = ("original", *nearest, "quantized")
    results = _compare(job, run.model_folder, texts, kinds, progress) if texts else {}
    seconds = {phase: _total(run, phase) for phase in PHASES}
    metrics = {
        "perplexity": results,
        "seconds": {"quantization": quantized, "total": time.perf_counter() - began, **seconds},
        "peak_bytes": peak_bytes(job.device),
    }
    write_json(run.folder / "metrics.json", metrics)
    return run, metrics


def test(job: Job, run_folder: Path | None, progress: WalkProgress) -> tuple[Path, dict[str, Any]]:
    """Measure the perplexity of the original and of the quantized model; return run and metrics.

    Args:
        job: Which model and texts.
        run_folder: Folder of a finished run; None: the last of ``output.folder/output.name``.
        progress: Where to show how far it is.

    Raises:
        UserError: There is no finished run, or a text can't be had.
    """
    folder = run_folder or last_run(Path(job.output.folder) / job.output.name)
    model = Run.open(folder).model_folder
    if not (model / "model.safetensors.index.json").is_file():
        raise UserError(
            f"the run {folder} is not finished: continue it with aespa-pl fit --ckpt_path {folder}"
        )
    Checkpoint.open(model)  # a damaged file is noticed before the original is measured
    texts = job.evaluation()
    if not texts:
        raise UserError("data.evaluation.texts is empty: name at least one text")
    results = _compare(job, model, texts, ("original", "quantized"), progress)
    metrics = {"perplexity": results}
    write_json(folder / "test.json", metrics)
    return folder, metrics


def _compare(
    job: Job, model: Path, texts: Mapping[str, Tensor], kinds: Sequence[str], progress: WalkProgress
) -> dict[str, dict[str, float]]:
    results = {}
    for kind in kinds:
        progress.begin(f"Perplexity of {kind}, blocks", job.checkpoint.config.num_hidden_layers)
        results[kind] = evaluate(
            job,
            Checkpoint.open(model) if kind == "quantized" else job.checkpoint,
            texts,
            nearest=kind == "nearest",
            after_block=progress.advance,
        )
    return results


def evaluate(
    job: Job,
    checkpoint: Checkpoint,
    texts: Mapping[str, Tensor],
    *,
    nearest: bool = False,
    after_block: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return the perplexity of the job's model, or of another checkpoint of its shape, on each text.

    Args:
        job: Device, types and quantization settings.
        checkpoint: The weights.
        texts: Token ids ``[segments, L]`` by name.
        nearest: Round the weights to the nearest integers of the min-max grid first.
        after_block: Called after each block.
    """
    layout = job.family.layout(job.checkpoint.config)

    def round_to_nearest(block: nn.Module) -> None:
        for projection in layout.projections:
            weight = nearest_weight(block, layout, projection, job.quantization)
            set_projection_weight(block, layout, projection, weight)

    return perplexity(
        job.stream(checkpoint),
        texts,
        batch_size=job.data.batch_size,
        change=round_to_nearest if nearest else None,
        after_block=after_block,
    )


def _write_description(job: Job, run: Run) -> None:
    """Write ``quantization.json`` beside the quantized weights."""
    write_json(
        run.model_folder / "quantization.json",
        {
            "method": "aespa",
            "model": asdict(job.model),
            "calibration": asdict(job.data.calibration),
            "quantization": asdict(job.quantization),
            "versions": {
                "aespa_pl": aespa_pl.__version__,
                "torch": torch.__version__,
                "lightning": lightning.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "losses": {str(i): record["losses"] for i, record in sorted(run.blocks.items())},
        },
    )


def _total(run: Run, phase: str) -> float:
    return sum(float(record["seconds"].get(phase, 0)) for record in run.blocks.values())


def _check_space(folder: Path, checkpoint_bytes: int) -> None:
    free, needed = shutil.disk_usage(folder).free, FREE_SPACE_FACTOR * checkpoint_bytes
    if free < needed:
        raise UserError(
            f"{folder} has {free / 1e9:.1f} GB free, the run needs about {needed / 1e9:.1f} GB: free "
            "space there or choose another folder with --output.folder"
        )
