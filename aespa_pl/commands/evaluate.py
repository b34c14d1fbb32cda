"""Run ``aespa-pl test``: measure the perplexity of the original and of the quantized model."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from aespa_pl.commands.job import Job
from aespa_pl.commands.output import store
from aespa_pl.distributed.processes import ALONE, World
from aespa_pl.errors import UserError
from aespa_pl.evaluation.perplexity import (
    divergence,
    measured_on,
    perplexity,
    recall,
    refuse_diverged,
    remember,
)
from aespa_pl.evaluation.size import bits_per_weight, packed_bits, packed_bytes, projection_weights
from aespa_pl.evaluation.tasks import Tasks, find_tasks, measure_tasks, refuse_too_large
from aespa_pl.models.headers import read_header
from aespa_pl.models.pretrained import PretrainedFolder
from aespa_pl.progress import WalkProgress
from aespa_pl.run.folder import how_to_continue
from aespa_pl.run.journal import Run
from aespa_pl.run.stored_settings import stored_quantization
from aespa_pl.settings import TaskSettings

MENDED_BY = {"original": "check model.pretrained", "quantized": "quantize with another method or more bits"}
"""Advice where a model of a kind has a perplexity that is not finite."""


def test(
    job: Job, folder: Path, tasks: TaskSettings, progress: WalkProgress, world: World
) -> tuple[Run, dict[str, Any]]:
    """Measure perplexities and accuracies of original and quantized model; return run and metrics.

    They are written to the folder of the run as ``test.json`` and ``test.md``.
    """
    run = Run.open(folder)
    model = run.model_folder
    if run.fingerprint["model"] != job.model_fingerprint:
        raise UserError(
            f"the run {folder} was made from another model than {job.model.pretrained}: give its "
            "model.pretrained, or another run with --ckpt_path"
        )
    if not run.metrics_file.is_file():
        raise UserError(f"the run {folder} is not finished: continue it with {how_to_continue(folder)}")
    world.from_first(run.refuse_damaged)
    PretrainedFolder.open(model)  # such as an index that names other files
    job = replace(job, quantization=stored_quantization(run))  # whatever the settings of this command are
    texts = world.from_first(job.evaluation)
    if not texts and not tasks.tasks:
        raise UserError("data.evaluation.texts is empty: name at least one text, or tasks with --tasks")
    chosen = None
    if tasks.tasks and world.is_first:  # before the perplexities, which may take hours
        refuse_too_large(job.pretrained.folder, job.device, job.dtype)
        chosen = find_tasks(tasks)
    kinds = ("original", "nearest", "quantized") if tasks.tasks else ("original", "quantized")
    metrics: dict[str, Any] = {"size": model_sizes(job, run, kinds)}
    if texts:
        metrics["perplexity"] = compare_perplexities(job, model, texts, kinds, progress=progress, world=world)
    if tasks.kld and texts:
        metrics["divergence"] = {"quantized": _divergences(job, model, texts, progress=progress, world=world)}
    if chosen is not None:
        progress.phase("tasks")
        metrics |= _compare_tasks(job, model, chosen, tasks, kinds)
    world.wait_for_all()
    if world.is_first:
        store(folder, metrics, method_of(run))
    return run, metrics


def method_of(run: Run) -> str:
    """Return the name of the run's method."""
    return stored_quantization(run).method


def model_sizes(job: Job, run: Run, kinds: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return ``bits_per_weight`` of the blocks and ``bytes`` of each kind of model, with integers packed."""
    shapes = {
        f"{index}.{name}": tensor.shape
        for index in run.blocks
        for name, tensor in read_header(run.block_file(index)).items()
    }
    stored = {tensor.file: tensor.file.stat().st_size for tensor in job.pretrained.tensors.values()}
    original, bits = sum(stored.values()), 8.0 * job.pretrained.dtype.itemsize
    settings = job.quantization
    packed = bits_per_weight(shapes, settings.bits_for)
    weights, total = projection_weights(shapes), packed * projection_weights(shapes)
    if run.stem_file.is_file():
        names = {name: part for part, name in job.pretrained.embeddings().items()}
        stem = {name: tensor.shape for name, tensor in read_header(run.stem_file).items()}
        weights += projection_weights(stem)
        total += packed_bits(stem, lambda name: int(settings.types[names[name]][1]))
    small = packed_bytes(original, weights, int(bits), total)
    own = {"bits_per_weight": bits, "bytes": original}
    return {
        kind: own if kind == "original" else {"bits_per_weight": packed, "bytes": small} for kind in kinds
    }


def _divergences(
    job: Job, model: Path, texts: Mapping[str, Tensor], *, progress: WalkProgress, world: World
) -> dict[str, dict[str, float]]:
    """Return how far the quantized model is from the original on each text."""
    blocks = job.pretrained.config.num_hidden_layers * len(texts)
    progress.begin("KL divergence, blocks of both models", 2 * blocks)
    divergences = divergence(
        job.stream(job.pretrained),
        job.stream(PretrainedFolder.open(model)),
        texts,
        batch_size=job.data.batch,
        after_block=progress.advance,
        world=world,
    )
    return {name: asdict(value) for name, value in divergences.items()}


def _compare_tasks(
    job: Job, model: Path, tasks: Tasks, settings: TaskSettings, kinds: Sequence[str]
) -> dict[str, Any]:
    """Return ``tasks`` (scores by kind and task) and ``test_seconds`` by kind, for ``test.json``."""
    scores, seconds = {}, {}
    for kind in kinds:
        start = time.perf_counter()
        scores[kind] = measure_tasks(
            model if kind == "quantized" else job.pretrained.folder,
            tasks,
            settings,
            device=job.device,
            dtype=job.dtype,
            change=job.round_to_nearest if kind == "nearest" else None,
            change_stem=job.round_stem_to_nearest if kind == "nearest" else None,
        )
        seconds[kind] = time.perf_counter() - start
    return {"tasks": scores, "test_seconds": seconds}


def compare_perplexities(
    job: Job,
    model: Path,
    texts: Mapping[str, Tensor],
    kinds: Sequence[str],
    *,
    progress: WalkProgress,
    world: World,
) -> dict[str, dict[str, float]]:
    """Return the perplexity of each kind of model on each text ``[segments, L]``, by kind and text.

    Raises UserError where one isn't finite; round-to-nearest, only a comparison, is left out then.
    """
    results = {}
    for kind in kinds:
        # of the quantized model nothing is remembered, because it is new
        keys = {} if kind == "quantized" else {n: _made_from(job, kind, t) for n, t in texts.items()}
        known = world.from_first(partial(_remembered, job.cache, keys))
        unknown = {name: tokens for name, tokens in texts.items() if name not in known}
        measured = {}
        if unknown:
            blocks = job.pretrained.config.num_hidden_layers * len(unknown)
            progress.begin(f"Perplexity of {kind}, blocks", blocks)
            measured = evaluate(
                job,
                PretrainedFolder.open(model) if kind == "quantized" else job.pretrained,
                unknown,
                nearest=kind == "nearest",
                after_block=progress.advance,
                world=world,
            )
        values = {name: {**known, **measured}[name] for name in texts}
        if kind == "nearest":
            diverged = [name for name, value in values.items() if not math.isfinite(value)]
            values = {name: value for name, value in values.items() if name not in diverged}
            if diverged:
                progress.say(f"round-to-nearest has no finite perplexity on {', '.join(diverged)}")
        else:
            refuse_diverged(values, f"the {kind} model", job.dtype, MENDED_BY[kind])
        if world.is_first:
            for name in keys.keys() & measured.keys() & values.keys():
                remember(job.cache, keys[name], measured[name])
        if values:
            results[kind] = values
    return results


def _made_from(job: Job, kind: str, tokens: Tensor) -> dict[str, object]:
    """Return what the perplexity of the original or of round-to-nearest depends on."""
    q = job.quantization
    grids = ("bits", "symmetric", "group_size", "bits_of", "format", "types")
    rounding = {name: getattr(q, name) for name in grids}
    model = {
        "model": job.model_fingerprint,
        "rounded": rounding if kind == "nearest" else None,
        "dtype": str(job.dtype).removeprefix("torch."),
        "device": job.device.type,
    }
    return measured_on(model, tokens)


def _remembered(cache: Path, keys: Mapping[str, dict[str, object]]) -> dict[str, float]:
    """Return the perplexities that an earlier run measured, by text."""
    values = {name: recall(cache, key) for name, key in keys.items()}
    return {name: value for name, value in values.items() if value is not None}


def evaluate(
    job: Job,
    pretrained: PretrainedFolder,
    texts: Mapping[str, Tensor],
    *,
    nearest: bool = False,
    after_block: Callable[[], None] = lambda: None,
    world: World = ALONE,
) -> dict[str, float]:
    """Return the perplexity of the job's model, or of another one of its shape, on each text.

    It is infinity where it is not a finite number. ``nearest`` rounds the weights first.
    """
    return perplexity(
        job.stream(pretrained),
        texts,
        batch_size=job.data.batch,
        change=job.round_to_nearest if nearest else None,
        change_stem=job.round_stem_to_nearest if nearest else None,
        after_block=after_block,
        world=world,
    )
