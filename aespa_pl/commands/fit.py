"""Run ``aespa-pl fit``: quantize a model, or continue a run."""

import json
import platform
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
import transformers
from torch import Tensor

import aespa_pl
from aespa_pl.commands.arguments import CONFIGURATION, Arguments
from aespa_pl.commands.block_types import types_in_words
from aespa_pl.commands.evaluate import compare_perplexities, measure_divergence, model_sizes
from aespa_pl.commands.job import Job
from aespa_pl.commands.limits import check_evaluation, check_space, tuning_shortages
from aespa_pl.commands.trainers import BlockTrainers
from aespa_pl.data.texts import seen_texts
from aespa_pl.data.tokens import few_tokens
from aespa_pl.errors import UserError
from aespa_pl.evaluation.perplexity import tokens_of
from aespa_pl.evaluation.table import known
from aespa_pl.export.forecast import forecast
from aespa_pl.measure import Stopwatch, peak_bytes
from aespa_pl.models.llama_cpp_tokenizer import lacking_tokenizer
from aespa_pl.planning.budget import choose_partition, portions_in_words, room
from aespa_pl.planning.needs import disk_bytes
from aespa_pl.planning.shape import Devices, Setup
from aespa_pl.planning.tuning import recomputes
from aespa_pl.progress import WalkProgress
from aespa_pl.run.context import Context
from aespa_pl.run.find import LAST
from aespa_pl.run.journal import Run
from aespa_pl.run.model_writer import companions
from aespa_pl.run.schema import PHASES, Measured
from aespa_pl.run.stored_settings import can_read_settings
from aespa_pl.storage.files import write_json
from aespa_pl.walk.record import method_in_words
from aespa_pl.walk.walk import Walk


def fit(
    job: Job, resume: str | None, trainers: BlockTrainers, *, one_block: bool
) -> tuple[Run, dict[str, Any]]:
    """Quantize a model; return the run and its metrics. ``one_block`` ends after one, without a model."""
    began, progress, world = time.perf_counter(), trainers.progress, trainers.world
    setup = job.setup(Devices(trainers.first.world_size, trainers.first.num_nodes))
    with ExitStack() as locks:
        begin = partial(_start, job, resume, locks, progress, setup)
        run, tokens, texts, finished = world.from_first(begin)
        run = replace(run, writes=world.is_first)
        if finished is not None:
            _say_finished(run, texts, finished, trainers)
            return run, finished
        for words in _plans(job, run):
            progress.say(words)
        words = few_tokens(len(tokens), job.segment_length, job.shape.widest_input) or ""
        if words and job.quantization.uses_inputs and not one_block:
            progress.warn(words)
        before = sum(phase_seconds(run).values())
        # only now: a later cell of aespa-pl compare finds the tokens of the first one in the cache
        began_to_quantize, began_to_work = time.perf_counter(), time.process_time()
        context = _context(job, run, trainers, setup)
        Walk(replace(context, one_block=one_block)).quantize(tokens)
        for logger in context.loggers:
            logger.finalize("success")
        if one_block:
            took = {"quantization": time.perf_counter() - began_to_quantize}
            progress.say(f"{took['quantization']:.0f} s for the quantization")
            return run, {"perplexity": {}, "seconds": took, "peak_bytes": peak_bytes(job.device)}
        if world.is_first:
            _write_description(job, run)
            run.finish_model()
        world.wait_for_all()  # for the files of the first
        quantized = before + time.perf_counter() - began_to_quantize
        worked = time.process_time() - began_to_work
        progress.say(f"{quantized:.0f} s for the quantization")
        nearest = ["nearest"] if job.data.evaluation.round_to_nearest else []
        kinds, model = ["original", *nearest, "quantized"], run.model_folder
        metrics = {
            "perplexity": compare_perplexities(job, model, texts, kinds, progress=progress, world=world),
            "seconds": {
                "total": before + time.perf_counter() - began,
                "quantization": quantized,
                # earlier processes of a continued run took theirs with them
                **({"processor": worked} if resume in (None, LAST) else {}),
                **phase_seconds(run),
            },
            "peak_bytes": peak_bytes(job.device),
            "size": model_sizes(job, ["original", "quantized"]),
            "tokens": tokens_of(texts),
        }
        if texts and job.quantization.target is not None:  # beside what was predicted
            measured = measure_divergence(job, model, texts, progress=progress, world=world)
            metrics["divergence"] = measured
        if world.is_first:
            write_json(run.metrics_file, metrics)
    return run, metrics


def _plans(job: Job, run: Run) -> Iterator[str]:
    """Yield what a run will do, and what the user should know before it does."""
    yield method_in_words(job.quantization, job.shape.layout)
    yield f"run folder: {run.folder}"
    lacking = lacking_tokenizer(job.pretrained.folder)
    if job.quantization.format == "uniform":
        yield forecast(job.quantization, job.shape, job.config, lacking)
    elif lacking:
        yield f"this run can be exported as hf, but not as gguf: {lacking}"
    if job.quantization.types:
        yield types_in_words(job.quantization)


def _start(
    job: Job, resume: str | None, locks: ExitStack, progress: WalkProgress, setup: Setup
) -> tuple[Run, Tensor, dict[str, Tensor], dict[str, Any] | None]:
    """Return the run, new or to be continued, locked; calibration segments ``[segments, L]``; held-out ones.

    Last come the metrics of a run that is finished and whole; None: there is work to do.
    """
    progress.phase("reading the model and the texts")
    if resume == LAST:
        progress.say(f"no run in {job.runs_folder} yet: this is the first")
    earlier = None if resume in (None, LAST) else Run.open(Path(resume))
    unfinished = earlier is None or not earlier.metrics_file.is_file()
    if unfinished:
        refuse_without_room(job, setup, earlier)
    texts = job.evaluation()  # first: a text that can't be had is noticed before hours of work
    if unfinished:
        compares = job.quantization.target is not None
        check_evaluation(texts, setup, job.runs_folder, compares=compares)
    tokens = job.calibration()
    fingerprint = job.fingerprint(tokens)
    if earlier is None:
        if words := job.pretrained.unused():
            progress.warn(words)
        progress.begin("Checking weights, tensors", len(job.pretrained.tensors))
        for name in job.pretrained.tensors:  # all: a NaN in the last block is noticed before hours of work
            job.pretrained.tensor(name, job.dtype)
            progress.advance()
        for file in companions(job.pretrained.folder):  # and one that can't be read when it is copied
            file.read_bytes()
        run = Run.create(job.runs_folder, fingerprint)
        locks.enter_context(run.locked())
        for warning in _seen(job):
            progress.warn(warning)
    else:
        locks.enter_context(earlier.locked())
        run = Run.open(earlier.folder)  # again: until now another process may have worked on it
        if run.tuned is None:
            run.move_blocks(job.quantization.tuning.model.blocks)
        run.refuse_changes(fingerprint)
    return run, tokens, texts, _finished(run, progress)


def refuse_without_room(job: Job, setup: Setup, earlier: Run | None = None) -> None:
    """Raise UserError where the disk, or the device for a tuning, has too little room for a run."""
    alone, tuned = job.setup(), None
    needed = disk_bytes(alone, job.pretrained.dtype.itemsize, choose_partition(alone))
    if earlier is None:
        check_space(job.runs_folder, needed, "choose another folder with --output.folder")
    else:
        needed -= sum(path.stat().st_size for path in earlier.folder.rglob("*") if path.is_file())
        check_space(earlier.folder, needed, "move the run's folder")
        complete = len(earlier.blocks) == len(job.shape.of_blocks)
        tuned = ["blocks"] * complete + ["model"] * (earlier.tuned is not None)
    if words := tuning_shortages(setup, tuned):
        raise UserError(words[0])


def _seen(job: Job) -> Iterator[str]:
    """Yield a warning for each text whose perplexity says little, because it is calibrated on."""
    if job.quantization.uses_inputs:
        texts = dict.fromkeys(job.data.evaluation.names)
        for text in seen_texts(job.data.calibration.source, [*texts]):
            yield (
                f"{text} is a calibration text as well: perplexity of it is that of text the quantization "
                "has seen"
            )


def _finished(run: Run, progress: WalkProgress) -> dict[str, Any] | None:
    """Return metrics as :func:`_start`; damage is said and mended."""
    if not run.metrics_file.is_file():
        return None
    if damage := run.damage():
        progress.warn(f"{run.folder}: {damage}: what was lost is made again")
        run.metrics_file.unlink()  # a process that is killed meanwhile leaves a run that is not finished
        return None
    metrics = run.metrics()
    if metrics is None:
        progress.warn(f"{run.metrics_file} is damaged: the perplexities are measured again")
    return metrics


def _say_finished(
    run: Run, texts: Mapping[str, Tensor], metrics: Mapping[str, Any], trainers: BlockTrainers
) -> None:
    """Say that a run is finished, and which texts it lacks; a lost configuration is made again."""
    progress = trainers.progress
    progress.say(f"{run.folder} is finished already: nothing to do")
    if run.writes and not can_read_settings(run):
        trainers.store_configuration(run)
        progress.warn(f"{run.folder / CONFIGURATION} was missing or damaged: it is made again")
    tested = known(Measured, run.folder / "test.json", [], "")
    later = _not_measured(texts, tested.model_dump() if tested else {"perplexity": {}})
    if new := [text for text in _not_measured(texts, metrics) if text in later]:
        also = _how_to_measure(run, trainers.parsed.arguments)
        progress.say(f"not measured on these tokens: {', '.join(new)} ({also})")


def _not_measured(texts: Mapping[str, Tensor], metrics: Mapping[str, Any]) -> list[str]:
    """Return the texts without a perplexity, and those that have other tokens than when it was measured."""
    measured, tokens = metrics["perplexity"].get("quantized", {}), metrics.get("tokens", {})
    return [t for t, now in tokens_of(texts).items() if t not in measured or tokens.get(t, now) != now]


def _how_to_measure(run: Run, given: Arguments) -> str:
    """Return the command that measures a run on the held-out texts that options ask for."""
    named = [o for o in given.options if o.key == "config" and o.value != str(run.folder / "config.yaml")]
    named += [o for o in given.given() if o.key.startswith("data.evaluation.") and not o.file]
    words = [f"--{key} {shlex.quote(v if isinstance(v, str) else json.dumps(v))}" for key, v, _ in named]
    return " ".join([f"aespa-pl test --ckpt_path {shlex.quote(str(run.folder))}", *words])


def _context(job: Job, run: Run, trainers: BlockTrainers, setup: Setup) -> Context:
    progress, world = trainers.progress, trainers.world
    loggers = trainers.begin(run) if world.is_first else []
    partition = choose_partition(setup, world)
    for words in portions_in_words(partition, job.shape):
        progress.say(words)
    return Context(
        source=job.stream(job.pretrained),
        run=run,
        settings=job.quantization,
        trainers=trainers,
        batch_size=job.data.batch,
        progress=progress,
        stopwatch=Stopwatch(progress.phase),
        partition=partition,
        recompute=recomputes(job.shape, job.work, job.quantization, world.smallest(room(setup).free)),
        loggers=loggers,
        world=world,
    )


def _write_description(job: Job, run: Run) -> None:
    """Write ``quantization.json`` beside the quantized weights."""
    modules = (aespa_pl, torch, lightning, transformers)
    versions = {module.__name__: module.__version__ for module in modules}
    description = {
        "method": job.quantization.method,
        "model": asdict(job.model),
        "calibration": asdict(job.data.calibration),
        "quantization": asdict(job.quantization),
        "versions": {**versions, "python": platform.python_version()},
        "losses": {str(i): record.losses for i, record in sorted(run.blocks.items())},
    }
    write_json(run.description_file, description)


def phase_seconds(run: Run) -> dict[str, float]:
    """Return the seconds of each phase, of all complete blocks and of the end-to-end tuning."""
    stored = [record.seconds for record in run.blocks.values()]
    if run.tuned is not None:
        stored.append(run.tuned.seconds)
    return {phase: sum(float(seconds.get(phase, 0)) for seconds in stored) for phase in PHASES}
