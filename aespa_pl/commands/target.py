"""Choose block types or bits for ``quantization.target``, before a run begins."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import aespa_pl
from aespa_pl.commands.block_types import UNIFORM, block_types, is_named
from aespa_pl.commands.job import Job
from aespa_pl.distributed.processes import ALONE, World
from aespa_pl.errors import UserError
from aespa_pl.evaluation.size import packed_bytes
from aespa_pl.export.gguf import file_bytes
from aespa_pl.export.gguf_bytes import BLOCK_TYPES
from aespa_pl.export.quantized import QuantizedModel
from aespa_pl.models.llama_cpp_types import MIXTURES
from aespa_pl.progress import WalkProgress
from aespa_pl.run.find import LAST, find_run, last_run
from aespa_pl.run.journal import Run
from aespa_pl.run.stored_settings import stored_quantization
from aespa_pl.settings import Settings
from aespa_pl.settings.quantization import names_projection
from aespa_pl.sizing.choose import Choices, limit_of
from aespa_pl.sizing.matrices import SizedMatrix, typed_matrices, uniform_matrices
from aespa_pl.sizing.mixture import Mixture
from aespa_pl.sizing.predict import of_matrices, predicted_losses
from aespa_pl.sizing.target import Target

ATTEMPTS = 3
"""Choices at most: what a file says of its own making is a little longer or shorter with each."""


def for_target(
    job: Job, given: Settings, resume: str | None, progress: WalkProgress, world: World = ALONE
) -> tuple[Job, Mixture | None]:
    """Return the job with what is chosen for its target, and the choice where it is made now.

    A job without a target, or with one that something was chosen for before, has its types or bits already;
    a run that is continued keeps its own. Raises UserError where the model can't have this size.

    Args:
        job: The job before the choice.
        given: Settings of the user, from which those of the job follow.
        resume: As ``--ckpt_path``.
        progress: Shows how far it is.
        world: Processes of the run, for which the first one chooses.
    """
    quantization = given.quantization
    named = quantization.types.keys() | quantization.bits_of.keys()
    if quantization.target is None or _keys(job) <= named:
        return job, None
    runs, name = Path(job.output.folder).expanduser(), job.output.name
    if resume is not None and (resume != LAST or last_run(runs, name) is not None):
        stored = stored_quantization(Run.open(find_run(resume, runs, name)))
        uniform = stored.format == UNIFORM
        return with_choice(job, given, stored.bits_of if uniform else stored.types), None
    mixture = world.from_first(lambda: choose(job, given, progress))
    progress.say(mixture.words)
    return with_choice(job, given, mixture.chosen), mixture


def settings_for_target(given: Settings, device: torch.device, console: Console) -> Settings:
    """Return settings with what is chosen for their target, and print it; as they are without one."""
    if given.quantization.target is None:
        return given
    with WalkProgress(console) as progress:
        job, mixture = for_target(Job.prepare(given, device), given, None, progress)
    for line in () if mixture is None else mixture.lines():
        console.print(line, soft_wrap=True)
    return replace(given, quantization=job.quantization)


def choose(job: Job, given: Settings, progress: WalkProgress) -> Mixture:
    """Return the types or bits of least predicted loss for a target; arguments as above.

    Raises UserError where the model can't have this size.
    """
    target = Target.of(given.quantization.target or "")
    choices, candidate = _choices(job, given, progress), job
    for _ in range(ATTEMPTS):
        other = _other_bytes(candidate, choices)
        chosen = choices.best(limit_of(target, given.quantization.target, choices, other))
        candidate = with_choice(job, given, chosen)
        if _other_bytes(candidate, choices) <= other:
            break
    other = _other_bytes(candidate, choices)
    return Mixture(
        chosen,
        choices.loss(chosen),
        other + choices.bytes(chosen),
        choices.curve(other),
        _llama_cpp(job, given, choices, other),
    )


def with_choice(job: Job, given: Settings, chosen: Mapping[str, Any]) -> Job:
    """Return the job of the same settings with a choice, on which learning rates depend."""
    if given.quantization.format == UNIFORM:
        bits = {key: int(value) for key, value in chosen.items()}
        changed = replace(given.quantization, bits_of=bits)
    else:
        changed = replace(given.quantization, types=dict(chosen))
    return Job.prepare(replace(given, quantization=changed), job.device)


def _choices(job: Job, given: Settings, progress: WalkProgress) -> Choices:
    matrices = _matrices(job, given)
    layouts = job.layouts
    progress.begin("Choosing for the target, matrices", 2 + sum(len(x.projections) for x in layouts))
    losses = predicted_losses(
        job.stream(job.pretrained), job.calibration(), matrices, job.quantization, progress.advance
    )
    return Choices.of(matrices, of_matrices(matrices, losses))


def _matrices(job: Job, given: Settings) -> list[SizedMatrix]:
    layouts, settings = job.layouts, job.quantization
    if settings.format == UNIFORM:
        fixed = {
            key: str(settings.bits_for(int(block), name))
            for key in _keys(job)
            for block, _, name in [key.partition(".")]
            if any(names_projection(str(named), int(block), name) for named in given.quantization.bits_of)
        }
        return uniform_matrices(layouts, job.shape, settings, fixed)
    fixed = {
        key: kind
        for key, kind in settings.types.items()
        if any(is_named(named, key) for named in given.quantization.types)
    }
    tied = bool(job.config.tie_word_embeddings)
    return typed_matrices(layouts, job.shape, fixed, tied=tied)


def _keys(job: Job) -> set[str]:
    """Return the keys of all that is chosen."""
    if job.quantization.format != UNIFORM:
        return set(job.quantization.types)
    layouts = job.layouts
    return {f"{i}.{p.name}" for i, layout in enumerate(layouts) for p in layout.projections}


def _other_bytes(job: Job, choices: Choices) -> int:
    """Return the bytes of the file that belong to none of the matrices."""
    settings = job.quantization
    if settings.format == UNIFORM:
        files = {tensor.file for tensor in job.pretrained.tensors.values()}
        original = sum(file.stat().st_size for file in files)
        weights, size = job.shape.vocabulary * job.shape.hidden, 0.0
        for kind in settings.types.values():  # of embedding and head
            size += weights * BLOCK_TYPES[kind].bits
        weights = choices.weights + weights * len(settings.types)
        return packed_bytes(original, weights, 8 * job.pretrained.dtype.itemsize, size)
    run = Run(Path(), {"version of aespa-pl": aespa_pl.__version__})
    model = QuantizedModel(
        run, job, job.pretrained.folder, job.cache, job.pretrained, job.pretrained.embeddings()
    )
    return file_bytes(model) - choices.bytes(settings.types)


def _llama_cpp(job: Job, given: Settings, choices: Choices, other: int) -> dict[str, tuple[int, float]]:
    """Return size and predicted divergence of the mixtures that consist of candidates."""
    found: dict[str, tuple[int, float]] = {}
    settings = given.quantization
    for name in MIXTURES if settings.format != UNIFORM else ():
        try:
            types = block_types(replace(settings, format=name, target=None, types={}), job.config)
        except UserError:  # a type that doesn't hold a row
            continue
        if choices.has(types):
            found[name] = (other + choices.bytes(types), choices.loss(types))
    return found
