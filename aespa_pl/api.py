"""Quantize from Python: ``aespa_pl.quantize`` and ``aespa_pl.resume`` do what ``aespa-pl fit`` does."""

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from aespa_pl.commands import application
from aespa_pl.commands.arguments import FREE, Arguments, Option, leaves
from aespa_pl.commands.export import export
from aespa_pl.commands.inputs import FOLDER, is_texts, keep_model, keep_text, token_ids
from aespa_pl.commands.mistakes import nearest, refuse_mistakes, refuse_other_methods
from aespa_pl.commands.output import quiet
from aespa_pl.commands.resuming import TRUST, with_run
from aespa_pl.commands.sections import AespaCLI
from aespa_pl.errors import UserError
from aespa_pl.processors import threads
from aespa_pl.progress import PlainConsole
from aespa_pl.run.interruption import Interruption, RunInterrupted
from aespa_pl.settings import (
    SECTIONS,
    CalibrationSettings,
    EvaluationSettings,
    OutputSettings,
    QuantizationSettings,
)

OF_QUANTIZATION = tuple(each.name for each in fields(QuantizationSettings))
OF_MODEL = ("revision", "dtype")
KEYWORDS = (*OF_QUANTIZATION, *OF_MODEL, "data", "output", FREE, "seed_everything")
"""Keywords of :func:`quantize` beside those in its signature."""


@dataclass(frozen=True)
class QuantizedRun:
    """A finished run: its folder has the quantized model and all that was measured."""

    folder: Path
    metrics: Mapping[str, Any] = field(repr=False)
    """Measurements, as in ``metrics.json``."""

    @property
    def perplexity(self) -> Mapping[str, Mapping[str, float]]:
        """Return perplexities by model (original, nearest, quantized) and by text."""
        by_model: Mapping[str, Mapping[str, float]] = self.metrics["perplexity"]
        return by_model

    def model(self, **options: Any) -> PreTrainedModel:
        """Return the quantized model, its weights in floating point; options are ``from_pretrained``'s."""
        return AutoModelForCausalLM.from_pretrained(self.folder / "model", **options)

    def tokenizer(self) -> Any:
        """Return the tokenizer of the model."""
        return AutoTokenizer.from_pretrained(self.folder / "model")

    def export(self, format: str, output: str | Path | None = None, **options: Any) -> Path:  # noqa: A002
        """Pack the integers for an engine, prove the files, and return their folder.

        Args:
            format: hf, compressed-tensors, awq, gptq or gguf.
            output: Folder to write; None: ``export/FORMAT`` in the run's folder.
            options: Options of ``aespa-pl export``: verify, container_bits, embedding ...
        """
        target = Path(output or self.folder / "export" / format)
        export(str(self.folder), format=format, output=str(target), **options)  # type: ignore[arg-type]
        return target


def quantize(
    model: str | Path | PreTrainedModel,
    *,
    tokenizer: Any = None,
    calibration: Any = None,
    evaluation: Any = None,
    config: str | Path | Sequence[str | Path] = (),
    progress: bool = True,
    **settings: Any,
) -> QuantizedRun:
    """Quantize a model, as ``aespa-pl fit`` does, and return the finished run.

    Ctrl-C, or interrupting the cell of a notebook, leaves a run that :func:`resume` continues.

    Args:
        model: Name on the Hugging Face hub, folder, or a model that is in memory.
        tokenizer: Tokenizer of a model that is in memory.
        calibration: Text: the name of one (c4, wikitext2, ptb), a file, a list of texts, or token ids
            ``[segments, L]``; a mapping from names to proportions; or one with keys of ``data.calibration``,
            such as source and segments.
        evaluation: Text to measure the perplexity on, in one of these forms, or a list of names and files;
            [] measures nothing. Or a mapping with keys of ``data.evaluation``, such as texts.
        config: YAML files of settings, over which the keywords count.
        progress: Show bars, in a terminal and in a notebook, and lines, on stderr.
        settings: Settings by name: those of ``quantization`` (method, bits, group_size, symmetric ...),
            revision and dtype of the model, and ``data``, ``output`` and ``trainer`` as mappings.

    Raises:
        UserError: Something that was given can't work; the message says what to do.
        KeyboardInterrupt: The run was interrupted; the message says how to continue it.
    """
    files = [config] if isinstance(config, str | Path) else config
    options = [Option("config", str(file)) for file in files]
    options += [option for key, value in settings.items() for option in _options(key, value)]
    given = Arguments(tuple(options)).with_configurations()
    inputs = _runs_folder(given) / FOLDER
    if isinstance(model, PreTrainedModel):
        with quiet():
            model = keep_model(inputs, model, tokenizer)
    elif tokenizer is not None:
        raise UserError("tokenizer is given, but the model's folder has one: leave it out")
    given = given.then(
        Option("model.pretrained", str(model)),
        *_texts(inputs, "calibration", "source", CalibrationSettings, calibration),
        *_texts(inputs, "evaluation", "texts", EvaluationSettings, evaluation),
    )
    return _fit(given, progress=progress)


def resume(folder: str | Path, *, trust: bool = False, progress: bool = True) -> QuantizedRun:
    """Continue a run, or return a finished one.

    Args:
        folder: Folder of the run (NAME/version_N).
        trust: Let the configuration of a run from somebody else name callbacks, loggers and ``data.cache``.
        progress: As for :func:`quantize`.

    Raises:
        UserError: There is no such run, or what it was made from has changed.
        KeyboardInterrupt: It was interrupted again.
    """
    options = [Option("ckpt_path", str(folder)), *([Option(TRUST, "true")] if trust else [])]
    return _fit(Arguments(tuple(options)), progress=progress)


def _options(key: str, value: Any) -> list[Option]:
    """Return a setting as options of the command line. Raises UserError where there is none of this name."""
    section = key.split(".", maxsplit=1)[0]
    if key in OF_QUANTIZATION:
        key = f"quantization.{key}"
    elif key in OF_MODEL:
        key = f"model.{key}"
    elif section not in (*SECTIONS, FREE, "seed_everything"):
        hint = nearest(key, KEYWORDS) or f": expected one of {', '.join(KEYWORDS)}"
        raise UserError(f"{key} is unknown{hint}")
    if section == FREE and isinstance(value, Mapping):  # a logger is a mapping, too
        return [_option(f"{key}.{name}", inner) for name, inner in value.items()]
    return [_option(name, inner) for name, inner in leaves({key: value})]


def _option(key: str, value: Any) -> Option:
    return Option(key, value if isinstance(value, str) else json.dumps(value, default=str))


def _runs_folder(given: Arguments) -> Path:
    """Return the folder of the runs of this name, which inputs lie beside."""
    default = OutputSettings()
    folder, name = (given.setting(f"output.{key}", getattr(default, key)) for key in ("folder", "name"))
    return Path(folder).expanduser() / name


def _texts(inputs: Path, name: str, key: str, kind: type, given: Any) -> list[Option]:
    """Return what was given for a section of texts as options; texts in memory are kept in a file.

    ``name`` is the section's, ``kind`` its dataclass, and ``key`` the field that takes the texts.
    """
    if given is None:
        return []
    names = {each.name for each in fields(kind)}
    known = dict(given) if isinstance(given, Mapping) and given.keys() <= names else {key: given}
    texts = known.get(key, "")
    if not _are_names(texts):
        if not is_texts(texts):
            sizes = zip(("segments", "segment_length"), token_ids(texts, name).shape, strict=True)
            known = {size: number for size, number in sizes if size in names} | known
        known[key] = keep_text(inputs, texts, name)
    return [_option(f"data.{name}.{field}", value) for field, value in known.items()]


def _are_names(given: Any) -> bool:
    """Tell whether texts are given by their names or files: one, a list of them, or proportions."""
    if isinstance(given, list | tuple):
        return all(isinstance(item, Path) or _is_name(item) for item in given)
    return isinstance(given, str | Path | Mapping)


def _is_name(item: Any) -> bool:
    """Tell whether an item of a list is the name of a text or of a file, not a text itself."""
    return isinstance(item, str) and (not any(c.isspace() for c in item) or os.path.isfile(item))  # noqa: PTH113  (a text may be too long for a Path)


def _fit(given: Arguments, *, progress: bool) -> QuantizedRun:
    """Run ``fit`` with options, under this process's own settings."""
    given = with_run(given, "fit")
    refuse_mistakes(given, "fit")
    refuse_other_methods(given)
    interruption = Interruption()
    try:
        with _own_process(), quiet(), interruption.watching():
            console = PlainConsole(stderr=True, quiet=not progress)
            parsed = AespaCLI(given, "fit")
            run, metrics = application.quantize(parsed, interruption, console)
    except UserError as error:
        raise UserError(f"{error}{_then(interruption)}") from error
    except RunInterrupted as stop:  # it ends as a process ends that does not watch signals
        if stop.number != signal.SIGINT:
            signal.raise_signal(stop.number)
        raise KeyboardInterrupt(f"stopped{_then(interruption) or ': nothing was begun'}") from None
    return QuantizedRun(run.folder.absolute(), metrics)


def _then(interruption: Interruption) -> str:
    folder = interruption.run_folder
    return f"; continue with aespa_pl.resume({str(folder)!r})" if folder else ""


@contextmanager
def _own_process() -> Iterator[None]:
    """Set threads and precision in this context as the command line does for its process."""
    count, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    quota = threads()
    if quota is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(count, quota))
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_num_threads(count)
        torch.set_float32_matmul_precision(precision)
