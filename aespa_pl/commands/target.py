"""Choose block types or bits for ``quantization.target``, before a run begins."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aespa_pl
from aespa_pl.commands.block_types import UNIFORM, block_types, is_named
from aespa_pl.commands.job import Job
from aespa_pl.distributed.processes import ALONE, World
from aespa_pl.errors import UserError
from aespa_pl.export.gguf_bytes import BLOCK_TYPES
from aespa_pl.export.quantized import QuantizedModel
from aespa_pl.extras import install_command
from aespa_pl.models.llama_cpp_types import MIXTURES
from aespa_pl.progress import WalkProgress
from aespa_pl.run.find import LAST
from aespa_pl.run.journal import Run
from aespa_pl.run.stored_settings import stored_quantization
from aespa_pl.settings import Settings
from aespa_pl.sizing.choose import Choices, Mixture, Target, bytes_of, limit_of
from aespa_pl.sizing.matrices import SizedMatrix, predicted_losses, typed_matrices, uniform_matrices


def for_target(
    job: Job, given: Settings, resume: str | None, progress: WalkProgress, world: World = ALONE
) -> tuple[Job, Mixture | None]:
    """Return the job with what is chosen for its target, and the choice where it is made now.

    A job without a target, or whose settings name all types or bits, has them already; a run that is
    continued (``resume`` as ``--ckpt_path``) keeps its own. Those of the job follow from the user's settings,
    ``given``. Raises UserError where the model can't have this size, or what is named is larger.
    """
    if given.quantization.target is None:
        return job, None
    fixed = _fixed(job, given)
    if resume not in (None, LAST):  # of a name without a run, last begins one
        stored = stored_quantization(Run.open(Path(resume)))
        of_run = stored.bits_of if stored.format == UNIFORM else stored.types
        # what the user names anew is a change, which the run refuses
        return _with_choice(job, given, {**of_run, **fixed}), None
    if fixed.keys() == _keys(job):
        progress.say(_size_in_words(job, given))
        return job, None
    mixture = world.from_first(lambda: _choose(job, given, progress))
    progress.say(mixture.words)
    return _with_choice(job, given, mixture.chosen), mixture


def _size_in_words(job: Job, given: Settings) -> str:
    """Say the size of a job whose types or bits are all named. Raises UserError where the target is less."""
    matrices, target = _matrices(job, given), Target.of(str(given.quantization.target))
    in_matrices = sum(min(m.costs.values()) for m in matrices)  # each has one candidate
    size = in_matrices + _other_bytes(job, matrices)
    bits = 8 * in_matrices / sum(m.weights for m in matrices)
    key, whole = "types", f"a file of {size / 1e6:.2f} MB"
    if job.quantization.format == UNIFORM:
        key, whole = "bits_of", f"{size / 1e6:.2f} MB with packed integers"
    words = f"quantization.{key} names all matrices: {whole}, {bits:.3f} bits a weight"
    if size > (target.bytes or math.inf) or bits > (target.bits or math.inf):
        raise UserError(
            f"quantization.target is {given.quantization.target}, but {words}; remove {key} from the "
            "configuration, and it is chosen for this size"
        )
    return f"{words}; nothing is chosen"


def _choose(job: Job, given: Settings, progress: WalkProgress) -> Mixture:
    """Return the types or bits of least predicted loss."""
    matrices, target = _matrices(job, given), Target.of(str(given.quantization.target))

    def limit(other: int) -> float:
        return limit_of(target, given.quantization.target, matrices, other)

    reserved = _other_bytes(job, matrices)
    limit(reserved)  # a size that can't be is refused before the work
    total = 2 + sum(len(layout.projections) for layout in job.layouts)
    progress.begin("Choosing for the target, matrices", total)
    losses = predicted_losses(
        job.stream(job.pretrained), job.calibration(), matrices, job.quantization, progress.advance
    )
    choices = Choices.of(matrices, losses)
    while True:  # what a file says of its own making is a little longer or shorter with each choice
        chosen = choices.best(limit(reserved))
        other = _other_bytes(_with_choice(job, given, chosen), matrices)
        if other <= reserved:
            break
        reserved = other
    size, others = other + choices.bytes(chosen), _llama_cpp(job, given, choices, other)
    return Mixture(
        chosen=chosen, predicted=choices.loss(chosen), bytes=size, curve=choices.curve(other), others=others
    )


def _with_choice(job: Job, given: Settings, chosen: Mapping[str, Any]) -> Job:
    """Return the job of the same settings with a choice, on which learning rates depend."""
    changes: dict[str, Any] = {"types": dict(chosen)}
    if given.quantization.format == UNIFORM:
        # what the user keeps, and the head, is nothing to choose for
        changes = {"bits_of": given.quantization.bits_of | {key: int(bits) for key, bits in chosen.items()}}
    quantization = replace(given.quantization, **changes)
    if quantization.tuning.model.blocks == "auto":  # it was found with the memory that all processes share
        quantization = quantization.with_place(job.quantization.tuning.model.blocks)
    return Job.prepare(replace(given, quantization=quantization), job.device)


def _matrices(job: Job, given: Settings) -> list[SizedMatrix]:
    """Return what there is to choose for; what the user names has one candidate."""
    settings, fixed = job.quantization, _fixed(job, given)
    if settings.format == UNIFORM:
        return uniform_matrices(job.layouts, job.shape, settings, fixed)
    return typed_matrices(job.layouts, job.shape, fixed, tied=bool(job.config.tie_word_embeddings))


def _fixed(job: Job, given: Settings) -> dict[str, str]:
    """Return the types or bits of the matrices that the user names, by their keys."""
    settings, uniform = job.quantization, job.quantization.format == UNIFORM
    named = [*(given.quantization.bits_of if uniform else given.quantization.types)]
    fixed = sorted(key for key in _keys(job) if any(is_named(name, key) for name in named))
    if not uniform:
        return {key: settings.types[key] for key in fixed}
    parts = {key: key.partition(".") for key in fixed}
    return {key: str(settings.bits_for(int(block), name)) for key, (block, _, name) in parts.items()}


def _keys(job: Job) -> set[str]:
    """Return the keys of all that is chosen."""
    if job.quantization.format != UNIFORM:
        return set(job.quantization.types)
    return {f"{i}.{p.name}" for i, layout in enumerate(job.layouts) for p in layout.projections}


def _other_bytes(job: Job, matrices: Sequence[SizedMatrix]) -> int:
    """Return the bytes of the file that belong to none of the matrices."""
    settings = job.quantization
    if settings.format == UNIFORM:
        pretrained, names = job.pretrained, job.pretrained.embeddings()
        of_types = {names[part]: BLOCK_TYPES[kind].bits for part, kind in settings.types.items()}
        packed = sum(math.prod(pretrained.tensors[n].shape) * bits / 8 for n, bits in of_types.items())
        return pretrained.bytes_beside(sum(m.weights for m in matrices), of_types) + round(packed)
    try:
        from aespa_pl.export.gguf import file_bytes  # noqa: PLC0415 - its library is of an extra
    except ModuleNotFoundError as error:
        raise UserError(
            f"quantization.target with block types needs the library {error.name}: "
            f"{install_command('export')}"
        ) from error
    run = Run(Path(), {"version of aespa-pl": aespa_pl.__version__})
    model = QuantizedModel(
        run, job, job.pretrained.folder, job.cache, job.pretrained, job.pretrained.embeddings()
    )
    return file_bytes(model) - bytes_of(matrices, settings.types)


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
