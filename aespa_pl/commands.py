"""What the commands do once their arguments are parsed: ``fit`` quantizes, ``test`` measures."""

import hashlib
import math
import platform
import shutil
import tempfile
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
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

import aespa_pl
from aespa_pl.artifacts import disk_errors, read_json, write_json
from aespa_pl.data import calibration_tokens, check_vocabulary, default_cache, evaluation_tokens
from aespa_pl.errors import UserError
from aespa_pl.evaluation import perplexity
from aespa_pl.models import family_of
from aespa_pl.models.checkpoint import Checkpoint
from aespa_pl.models.family import Family
from aespa_pl.models.source import resolve
from aespa_pl.models.weights import set_projection_weight
from aespa_pl.planning.budget import described, divide
from aespa_pl.planning.shape import Shape, Work
from aespa_pl.preparation import nearest_weight
from aespa_pl.progress import WalkProgress
from aespa_pl.run import Run, last_run, model_fingerprint
from aespa_pl.settings import DataSettings, ModelSettings, OutputSettings, QuantizationSettings
from aespa_pl.stream import StreamedModel
from aespa_pl.timing import Stopwatch, peak_bytes
from aespa_pl.walk import Walk

CHECKPOINT_BYTES = 24
"""Of a checkpoint for each weight of a block: rounding variable and two moments of Adam in float32, and
the same again while a new checkpoint replaces the old one."""
EVALUATION_LENGTH = 2048
"""Tokens in a segment of held-out text at most, unless the user asks for more (Section 4.1)."""
LAST = "last"
"""``--ckpt_path last``: the newest run."""
PHASES = ("statistics", "correction", "grid", "optq", "rounding", "polish")
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
        positions = self.family.positions(self.checkpoint.config) or EVALUATION_LENGTH
        return self.data.evaluation.segment_length or min(positions, EVALUATION_LENGTH)

    @property
    def dtype(self) -> torch.dtype:
        """Type that blocks run in."""
        if self.model.dtype != "auto":
            chosen: torch.dtype = getattr(torch, self.model.dtype)
            return chosen
        return torch.float32 if self.device.type == "cpu" else self.checkpoint.dtype

    def stream(self, checkpoint: Checkpoint) -> StreamedModel:
        """Return the model, or another checkpoint of its shape, streamed."""
        on_disk = self.data.hidden_states == "disk"
        return StreamedModel.open(
            checkpoint,
            self.family,
            self.device,
            self.dtype,
            hidden_folder=self.runs_folder if on_disk else None,
        )

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
        """Return what the result depends on; a resume with anything else is refused.

        The number of iterations may change (it then holds for the block under way and those to come),
        and so may the batch size (sums are then rounded in another order).
        """
        quantization = asdict(self.quantization)
        del quantization["rounding"]["iterations"]
        return {
            "model": self.model_fingerprint,
            "dtype": str(self.dtype).removeprefix("torch."),
            "calibration": {
                "tokens": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
                "segments": self.data.calibration.segments,
                "segment_length": self.segment_length,
                "seed": self.data.calibration.seed,
            },
            "quantization": quantization,
        }

    @property
    def model_fingerprint(self) -> str:
        """What tells one checkpoint from another."""
        return model_fingerprint({self.checkpoint.folder / "config.json", *self._weight_files})

    @property
    def largest_block(self) -> int:
        """Weights of the largest block."""
        tensors = self.checkpoint.tensors
        blocks = range(self.checkpoint.config.num_hidden_layers)
        return max(
            sum(math.prod(tensors[name].shape) for name in names)
            for names in (self.checkpoint.block_names(self.family, index) for index in blocks)
        )

    @property
    def runs_folder(self) -> Path:
        """Folder of the runs of this name."""
        return Path(self.output.folder).expanduser() / self.output.name

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
            if length < 2:
                raise UserError(f"{key} is {length}: at least 2 tokens, one predicts the next")
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
    resume: str | None,
    *,
    make_trainer: Callable[[Run, int], Trainer],
    make_loggers: Callable[[Run], Sequence[Logger]],
    save_config: Callable[[Path], None],
    progress: WalkProgress,
) -> tuple[Run, dict[str, Any]]:
    """Quantize a model; return the run and its metrics.

    Args:
        job: What to do.
        resume: ``last`` or the folder of a run to continue; None: a new run.
        make_trainer: Makes the Trainer of a block.
        make_loggers: Makes what takes the curves over the blocks.
        save_config: Writes the configuration into the folder of the run.
        progress: Where to show how far it is.

    Raises:
        UserError: See the message; finished blocks stay on disk.
    """
    began = time.perf_counter()
    _check_output(job)
    earlier = _run_to_continue(job, resume, progress)
    texts = job.evaluation()  # first: a text that can't be had is noticed before hours of work
    tokens = job.calibration()
    fingerprint = job.fingerprint(tokens)
    if earlier is None:
        _check_weights(job, progress)
        run = Run.create(job.runs_folder, fingerprint)
    else:
        run = earlier
    with run.locked():
        if earlier is not None:
            run = Run.open(run.folder)  # again: until now another process may have worked on it
            run.refuse_changes(fingerprint)
            if run.metrics_file.is_file():
                progress.say(f"{run.folder} is finished already: nothing to do")
                return run, read_json(run.metrics_file)
        save_config(run.folder)
        progress.say(f"run folder: {run.folder}")
        before = sum(sum(record["seconds"].values()) for record in run.blocks.values())
        _quantize(
            job,
            run,
            tokens,
            make_trainer=make_trainer,
            loggers=make_loggers(run),
            progress=progress,
        )
        quantized = before + time.perf_counter() - began
        nearest = ("nearest",) if job.data.evaluation.round_to_nearest else ()
        kinds = ("original", *nearest, "quantized")
        results = _compare(job, run.model_folder, texts, kinds, progress) if texts else {}
        seconds = {phase: _total(run, phase) for phase in PHASES}
        metrics = {
            "perplexity": results,
            "seconds": {
                "total": before + time.perf_counter() - began,
                "quantization": quantized,
                **seconds,
            },
            "peak_bytes": peak_bytes(job.device),
        }
        write_json(run.metrics_file, metrics)
    return run, metrics


def _run_to_continue(job: Job, resume: str | None, progress: WalkProgress) -> Run | None:
    """Return the run that ``--ckpt_path`` names; ``last`` before the first run means a new one."""
    if resume is None:
        return None
    if resume != LAST:
        return Run.open(Path(resume).expanduser())
    folder = last_run(job.runs_folder)
    if folder is None:
        progress.say(f"no run in {job.runs_folder} yet: this is the first")
        return None
    return Run.open(folder)


def _check_weights(job: Job, progress: WalkProgress) -> None:
    """Read all weights once: a NaN in the last block is noticed before hours of work."""
    names = list(job.checkpoint.tensors)
    progress.begin("Checking weights, tensors", len(names))
    for name in names:
        job.checkpoint.tensor(name)
        progress.advance()


def _quantize(
    job: Job,
    run: Run,
    tokens: Tensor,
    *,
    make_trainer: Callable[[Run, int], Trainer],
    loggers: Sequence[Logger],
    progress: WalkProgress,
) -> None:
    source = job.stream(job.checkpoint)
    trainer = partial(make_trainer, run)
    shape = Shape.of(job.checkpoint.config, job.family)
    segments, length = tokens.shape
    work = Work(segments, length, job.data.batch_size, job.dtype.itemsize)
    partition = divide(shape, work, job.data, job.quantization, job.device)
    for words in described(partition, shape):
        progress.say(words)
    walk = Walk(
        source=source,
        run=run,
        settings=job.quantization,
        batch_size=job.data.batch_size,
        make_trainer=trainer,
        progress=progress,
        stopwatch=Stopwatch(),
        partition=partition,
        loggers=loggers,
    )
    walk.quantize(tokens)
    for logger in loggers:
        logger.finalize("success")
    _write_description(job, run)


def test(job: Job, which: str, progress: WalkProgress) -> tuple[Path, dict[str, Any]]:
    """Measure the perplexity of the original and of the quantized model; return run and metrics.

    Args:
        job: Which model and texts.
        which: Folder of a finished run; ``last``: the newest of ``output.folder/output.name``.
        progress: Where to show how far it is.

    Raises:
        UserError: There is no finished run, or a text can't be had.
    """
    folder = last_run(job.runs_folder) if which == LAST else Path(which).expanduser()
    if folder is None:
        raise UserError(
            f"no run in {job.runs_folder}: check output.folder and output.name, or start with "
            "aespa-pl fit"
        )
    run = Run.open(folder)
    model = run.model_folder
    if run.fingerprint["model"] != job.model_fingerprint:
        raise UserError(
            f"the run {folder} was made from another model than {job.model.pretrained}: give its "
            "model.pretrained, or another run with --ckpt_path"
        )
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
            "method": job.quantization.method,
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


def _check_output(job: Job) -> None:
    """Refuse a folder that cannot be written to or is too small, before anything is computed."""
    folder = job.runs_folder
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    needed = FREE_SPACE_FACTOR * job.size
    if job.quantization.method != "aespa-fast":
        needed += CHECKPOINT_BYTES * job.largest_block
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder} has {free / 1e9:.1f} GB free, the run needs about {needed / 1e9:.1f} GB: free "
            "space there or choose another folder with --output.folder"
        )
