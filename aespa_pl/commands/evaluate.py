"""Run ``aespa-pl test``: measure a run beside its original, or a quantized model alone."""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import aespa_pl
from aespa_pl.commands.job import Job, block_dtype, held_out_texts
from aespa_pl.commands.limits import check_evaluation, check_length, evaluation_length
from aespa_pl.commands.output import store
from aespa_pl.distributed.processes import World
from aespa_pl.errors import UserError
from aespa_pl.evaluation.perplexity import (
    divergence,
    perplexity,
    refuse_diverged,
    tokens_of,
    whole_perplexity,
)
from aespa_pl.evaluation.table import rules_of
from aespa_pl.evaluation.tasks import (
    Tasks,
    find_tasks,
    load_tokenizer,
    load_whole,
    measure_tasks,
    refuse_too_large,
    unpacked_config,
)
from aespa_pl.models import family_of
from aespa_pl.models.headers import shards
from aespa_pl.models.multimodal import MULTIMODAL
from aespa_pl.models.pretrained import PretrainedFolder
from aespa_pl.paths import expanded
from aespa_pl.planning.shape import Devices
from aespa_pl.progress import WalkProgress
from aespa_pl.run.find import refuse_smoke_test
from aespa_pl.run.folder import how_to_continue
from aespa_pl.run.journal import Run
from aespa_pl.run.schema import DESCRIPTION
from aespa_pl.run.stored_settings import stored_quantization
from aespa_pl.settings import DataSettings, ModelSettings, TaskSettings
from aespa_pl.sizing.matrices import packed_bits
from aespa_pl.storage.cache import keep, recalled
from aespa_pl.storage.files import checksum_of

PERPLEXITIES = "perplexities"  # kind of what is kept in the cache
MENDED_BY = {"original": "check model.pretrained", "quantized": "quantize with another method or more bits"}


def test(
    job: Job, folder: Path, tasks: TaskSettings, progress: WalkProgress, world: World
) -> tuple[Run, dict[str, Any]]:
    """Measure original and quantized model; return run and metrics, which its test.json has as well."""
    refuse_smoke_test(folder)
    run = Run.open(folder)
    model = run.model_folder
    if not run.is_of(job.pretrained.files):
        raise UserError(
            f"the run {folder} was made from another model than {job.model.pretrained}: give its "
            "model.pretrained, or another run with --ckpt_path"
        )
    if not run.metrics_file.is_file():
        raise UserError(f"the run {folder} is not finished: continue it with {how_to_continue(folder)}")
    world.from_first(run.refuse_damaged)
    PretrainedFolder.open(model)  # early: an index may name other files
    job = replace(job, quantization=stored_quantization(run))  # whatever the settings of this command are
    texts = world.from_first(job.evaluation)
    if not texts and not tasks.tasks:
        raise UserError("data.evaluation.texts is empty: name at least one text, or tasks with --tasks")
    if tasks.kld and not texts:
        raise UserError("--kld: data.evaluation.texts is empty: name at least one text to compare on")
    check_evaluation(texts, job.setup(Devices(world.size)), job.runs_folder, compares=tasks.kld)
    chosen = None
    if tasks.tasks and world.is_first:  # before the perplexities, which may take hours
        refuse_too_large(job.pretrained.folder, job.device, job.dtype)
        chosen = find_tasks(tasks)
    nearest = ["nearest"] if tasks.tasks and job.data.evaluation.round_to_nearest else []
    kinds = ["original", *nearest, "quantized"]
    metrics: dict[str, Any] = {"size": model_sizes(job, kinds), "tokens": tokens_of(texts)}
    if texts:
        metrics["perplexity"] = compare_perplexities(job, model, texts, kinds, progress=progress, world=world)
    if tasks.kld:
        metrics["divergence"] = measure_divergence(job, model, texts, progress=progress, world=world)
    world.wait_for_all()  # the first process alone measures tasks, which may take longer than others wait
    if chosen is not None:
        progress.phase("tasks")
        measured = _compare_tasks(job, model, chosen, tasks, kinds)
        metrics |= measured
        metrics["tokens"] |= rules_of(measured["tasks"]["quantized"], tasks)
    if world.is_first:
        store(folder, metrics, job.quantization.method)
    return run, metrics


def measure_divergence(
    job: Job, model: Path, texts: dict[str, Tensor], *, progress: WalkProgress, world: World
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the quantized model's KL divergence on each text ``[segments, L]``, by its kind and text."""
    blocks = job.pretrained.config.num_hidden_layers * len(texts)
    progress.begin("KL divergence, blocks of both models", 2 * blocks)
    original, quantized = map(job.stream, (job.pretrained, PretrainedFolder.open(model)))
    divergences = divergence(
        original, quantized, texts, batch_size=job.data.batch, after_block=progress.advance, world=world
    )
    return {"quantized": {name: asdict(each) for name, each in divergences.items()}}


def model_sizes(job: Job, kinds: list[str]) -> dict[str, dict[str, float]]:
    """Return ``bits_per_weight`` (of quantized projections) and ``bytes`` of each kind of model, packed."""
    tensors, settings = job.pretrained.tensors, job.quantization
    stored = {tensor.file: tensor.file.stat().st_size for tensor in tensors.values()}
    weights, total = 0, 0.0
    for index, block in enumerate(job.shape.of_blocks):
        for name, matrix in block.items():
            kind = settings.type_for(index, name) or str(settings.bits_for(index, name))
            weights += matrix.size
            total += packed_bits(matrix.size, matrix.columns, kind, settings)
    packed = total / weights
    ends = job.pretrained.embeddings().items()
    names = {name: settings.types[part] for part, name in ends if part in settings.types}
    for name, kind in names.items():
        rows, columns = tensors[name].shape
        total += packed_bits(rows * columns, columns, kind, settings)
    small = job.pretrained.bytes_beside(weights, names) + round(total / 8)
    bits = 8.0 * job.pretrained.dtype.itemsize
    whole = job.pretrained.whole is not None  # whose files have other parts as well
    size = job.pretrained.bytes_beside(0) if whole else sum(stored.values())
    own = {"bits_per_weight": bits, "bytes": size}
    others = {"bits_per_weight": packed, "bytes": small}
    return {kind: own if kind == "original" else others for kind in kinds}


def _compare_tasks(
    job: Job, model: Path, tasks: Tasks, settings: TaskSettings, kinds: list[str]
) -> dict[str, Any]:
    """Return ``tasks`` (scores by kind and task) and ``test_seconds`` by kind, for ``test.json``."""
    scores, seconds = {}, {}
    for kind in kinds:
        start, folder = time.perf_counter(), model if kind == "quantized" else job.pretrained.folder
        changes = job.rounded_to_nearest if kind == "nearest" else {}
        scores[kind] = measure_tasks(folder, tasks, settings, device=job.device, dtype=job.dtype, **changes)
        seconds[kind] = time.perf_counter() - start
    return {"tasks": scores, "test_seconds": seconds}


def compare_perplexities(
    job: Job, model: Path, texts: dict[str, Tensor], kinds: list[str], *, progress: WalkProgress, world: World
) -> dict[str, dict[str, float]]:
    """Return the perplexity of each kind of model on each text ``[segments, L]``, by kind and text.

    Raises UserError where one isn't finite; round-to-nearest, only a comparison, is left out then.
    """
    results = {}
    layers = job.pretrained.config.num_hidden_layers
    for kind in kinds:
        # of the quantized model nothing is remembered, because it is new
        keys = {} if kind == "quantized" else {n: measured_on(job, kind, t) for n, t in texts.items()}
        known = world.from_first(partial(_remembered, job.cache, keys))
        unknown = {name: tokens for name, tokens in texts.items() if name not in known}
        measured = {}
        if unknown:
            progress.begin(f"Perplexity of {kind}, blocks", layers * len(unknown))
            chosen = PretrainedFolder.open(model) if kind == "quantized" else job.pretrained
            measured = evaluate(
                job, chosen, unknown, nearest=kind == "nearest", after_block=progress.advance, world=world
            )
        values = {name: {**known, **measured}[name] for name in texts}
        if kind == "nearest":
            if diverged := [name for name, value in values.items() if not math.isfinite(value)]:
                progress.warn(f"round-to-nearest has no finite perplexity on {', '.join(diverged)}")
            values = {name: value for name, value in values.items() if name not in diverged}
        else:
            refuse_diverged(values, f"the {kind} model", job.dtype, MENDED_BY[kind])
        if world.is_first:
            for name in keys.keys() & measured.keys() & values.keys():
                value = torch.tensor([measured[name]], dtype=torch.float64)
                keep(job.cache, PERPLEXITIES, keys[name], value)
        if values:
            results[kind] = values
    return results


def measured_on(job: Job, kind: str, tokens: Tensor) -> dict[str, object]:
    """Return, as JSON, all that the perplexity of the original or of round-to-nearest depends on."""
    grids = ("bits", "symmetric", "group_size", "bits_of", "format", "types")
    rounding = {name: getattr(job.quantization, name) for name in grids}
    versions = {module.__name__: module.__version__ for module in (aespa_pl, torch, transformers)}
    return {
        "model": job.model_fingerprint,
        "rounded": rounding if kind == "nearest" else None,
        "dtype": str(job.dtype).removeprefix("torch."),
        "device": job.device.type,
        "tokens": checksum_of([tokens]),
        "segments": list(tokens.shape),
        "versions": versions,
    }


def _remembered(cache: Path, keys: Mapping[str, dict[str, object]]) -> dict[str, float]:
    values = {name: recalled(cache, PERPLEXITIES, key) for name, key in keys.items()}
    return {name: float(value) for name, value in values.items() if value is not None}


def evaluate(
    job: Job, model: PretrainedFolder, texts: Mapping[str, Tensor], *, nearest: bool = False, **options: Any
) -> dict[str, float]:
    """Return the perplexity of the job's model, or of another one of its shape, on each text.

    ``nearest`` rounds the weights first; ``options`` are after_block and world of :func:`perplexity`.
    """
    options |= job.rounded_to_nearest if nearest else {}
    return perplexity(job.stream(model), texts, batch_size=job.data.batch, **options)


def quantized_folder(model: ModelSettings) -> Path | None:
    """Return the folder of a model that is quantized already, for transformers; None for any other."""
    folder = expanded(model.pretrained)
    if (folder / "model.gguf").is_file():
        raise UserError(
            f"model.pretrained: {folder} holds a model for llama.cpp, but test runs in transformers: test "
            "the run that it was exported from, or its export as compressed-tensors"
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # whoever opens it as a model says what is wrong
    packed = config.get("quantization_config") if isinstance(config, dict) else None
    if packed is None:
        return folder if (folder / DESCRIPTION).is_file() else None
    if config.get("model_type") in MULTIMODAL:
        raise UserError(
            f"model.pretrained: {folder} has a multimodal model that is quantized already, and test measures "
            "text models: give a run, or an export of one"
        )
    method = packed.get("quant_method") if isinstance(packed, dict) else None
    if str(method) not in {*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"}:
        raise UserError(
            f"model.pretrained: quantization_config in {folder / 'config.json'} has no quant_method that "
            f"transformers knows (it has {method}): copy config.json from the model's origin, or export the "
            "run again"
        )
    return folder


def measure_exported(
    folder: Path, model: ModelSettings, data: DataSettings, tasks: TaskSettings, device: torch.device
) -> dict[str, Any]:
    """Return metrics as in ``test.json``, and write them into the folder.

    Blocks of a packed model can't be streamed: transformers loads it whole, as an application would.
    """
    if not tasks.tasks and not data.evaluation.names:
        raise UserError("data.evaluation.texts is empty: name at least one text, or tasks with --tasks")
    if tasks.kld:
        raise UserError(
            f"--kld: {folder} has no original to compare with: test the run that it was exported from"
        )
    chosen = find_tasks(tasks) if tasks.tasks else None
    config = unpacked_config(folder)
    positions = family_of(config).positions(config)
    length = evaluation_length(data, positions)
    check_length("evaluation", length, positions, str(folder))
    tokenizer = load_tokenizer(folder)
    texts = held_out_texts(data, tokenizer, length, config)
    dtype = block_dtype(model, device, getattr(config, "dtype", None) or torch.float16)
    size = sum(path.stat().st_size for path in shards(folder))
    metrics: dict[str, Any] = {"size": {"quantized": {"bytes": size}}, "tokens": tokens_of(texts)}
    if texts:
        whole = load_whole(folder, device, dtype)
        measured = {name: whole_perplexity(whole, tokens) for name, tokens in texts.items()}
        refuse_diverged(measured, str(folder), dtype, "export a run with more bits")
        metrics["perplexity"] = {"quantized": measured}
        del whole  # the harness loads its own
    if chosen is not None:
        start = time.perf_counter()
        scores = measure_tasks(folder, chosen, tasks, device=device, dtype=dtype)
        metrics["tasks"] = {"quantized": scores}
        metrics["tokens"] |= rules_of(scores, tasks)
        metrics["test_seconds"] = {"quantized": time.perf_counter() - start}
    store(folder, metrics, folder.name)
    return metrics
