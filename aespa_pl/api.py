"""Quantize from Python: ``aespa_pl.quantize`` and ``aespa_pl.resume`` do what ``aespa-pl fit`` does."""

import json
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field, fields
from io import StringIO
from pathlib import Path
from typing import Any, get_type_hints

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from aespa_pl.commands import application
from aespa_pl.commands.arguments import FREE, TRUST, Arguments, Option, leaves, with_run
from aespa_pl.commands.export import export
from aespa_pl.commands.keys import nearest, refuse_mistakes, refuse_other_methods
from aespa_pl.commands.output import quiet
from aespa_pl.commands.sections import AespaCLI
from aespa_pl.data.texts import are_names
from aespa_pl.data.tokens import TENSOR
from aespa_pl.distributed.launch import end_with_launcher
from aespa_pl.distributed.processes import PeerLostError
from aespa_pl.errors import UserError, one_line, system_words
from aespa_pl.in_memory import keep_model, kept, token_ids
from aespa_pl.paths import expanded
from aespa_pl.processors import threads
from aespa_pl.progress import PlainConsole
from aespa_pl.run.find import refuse_smoke_test
from aespa_pl.run.interruption import Interruption, RunInterrupted
from aespa_pl.settings import SECTIONS, DataSettings, OutputSettings, QuantizationSettings
from aespa_pl.storage.files import write_tensors, write_text

OF_QUANTIZATION = tuple(each.name for each in fields(QuantizationSettings))
OF_MODEL = ("revision", "dtype")
OF_CALL = ("tokenizer", "calibration", "evaluation", "config", "progress")  # as in the signature
EXPORT = ("verify", "container_bits", "embedding", "original", "push_to_hub")
OF_COMMAND = re.compile(
    rf"--(?=(?:{'|'.join((*SECTIONS, FREE))})\.|(?:{'|'.join(('format', 'output', *EXPORT))})\b)"
)
"""Matches the dashes before a key or an option of an export in messages of the command line."""
IN_PYTHON = {
    rf"--{TRUST} true": "trust=True",
    r", or give (your own|the run's configuration) with --config": "",
    r"without --ckpt_path": "with aespa_pl.quantize",
    r"aespa-pl fit --ckpt_path (?:'([^']*)'|([^\s']+))": r"aespa_pl.resume('\1\2')",  # quoted for a shell
}
"""Patterns of the command line's advice, with what is written here."""
KEYWORDS = (*OF_QUANTIZATION, *OF_MODEL, *OF_CALL, "data", "output", FREE, "seed_everything")


@dataclass(frozen=True)
class QuantizedRun:
    """A finished run: its folder has the quantized model and all that was measured."""

    folder: Path
    metrics: Mapping[str, Any] = field(repr=False)
    """Measurements, as in ``metrics.json``."""
    progress: bool = field(default=True, repr=False)
    """Whether loading the model shows a bar."""

    @property
    def perplexity(self) -> Mapping[str, Mapping[str, float]]:
        """Return perplexities by model (original, nearest, quantized) and by text."""
        return dict(self.metrics["perplexity"])

    def model(self, **options: Any) -> PreTrainedModel:
        """Return the quantized model, its weights in floating point; options are ``from_pretrained``'s."""
        with nullcontext() if self.progress else quiet():
            return AutoModelForCausalLM.from_pretrained(self._model_folder(), **options)

    def tokenizer(self) -> Any:
        """Return the tokenizer of the model."""
        return AutoTokenizer.from_pretrained(self._model_folder())

    def _model_folder(self) -> Path:
        refuse_smoke_test(self.folder)
        if not (folder := self.folder / "model").is_dir():
            raise UserError(
                f"{folder} is gone: aespa_pl.resume({str(self.folder)!r}) makes a lost model again"
            )
        return folder

    def export(self, format: str, output: str | Path | None = None, **options: Any) -> Path:  # noqa: A002
        """Pack the integers for an engine, prove the files, and return their folder.

        ``format`` (hf, compressed-tensors, awq, gptq, gguf) and ``options`` (verify, container_bits ...) are
        those of ``aespa-pl export``; ``output`` is the folder to write, by default its own.
        """
        if other := next((key for key in options if key not in EXPORT), None):
            raise UserError(f"{other} is unknown{nearest(other, EXPORT)}")
        target = expanded(output or self.folder / "export" / format).absolute()
        try:
            with nullcontext() if self.progress else redirect_stdout(StringIO()):
                export(str(self.folder), format=format, output=str(target), **options)  # type: ignore[arg-type]
        except UserError as error:
            raise UserError(_in_python(str(error))) from error
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

    Raises UserError where something can't work, and KeyboardInterrupt where the run was interrupted; the
    message says what to do.
    """
    files = [config] if isinstance(config, str | Path) else config
    options = [Option("config", str(file)) for file in files]
    options += [option for key, value in settings.items() for option in _options(key, value)]
    given = Arguments(tuple(options)).with_configurations()
    default = OutputSettings()
    folder, name = (given.setting(f"output.{key}", getattr(default, key)) for key in ("folder", "name"))
    inputs = expanded(Path(folder, name, "inputs"))  # what runs of this name have in common is here once
    if isinstance(model, PreTrainedModel):
        with quiet():
            model = keep_model(inputs, model, tokenizer)
    elif not isinstance(model, str | Path):
        what = type(model).__name__
        raise UserError(f"model is a {what}: expected a name, a folder, or a transformers model in memory")
    elif tokenizer is not None:
        raise UserError("tokenizer is given, but the model's folder has one: leave it out")
    texts = _texts(inputs, "calibration", "source", calibration)
    texts += _texts(inputs, "evaluation", "texts", evaluation)
    sections = {option.key: option.value for option in options}  # what data= says of them
    for key, value, _ in texts:
        if (other := sections.get(key, value)) != value:
            name = key.split(".")[1]
            raise UserError(f"{key} is {other}, but the keyword {name} gives {value}: leave one of them out")
    return _fit(given.then(Option("model.pretrained", str(model)), *texts), progress=progress)


def resume(
    folder: str | Path, *, trust: bool = False, progress: bool = True, **settings: Any
) -> QuantizedRun:
    """Continue the run of a folder (NAME/version_N), or return a finished one.

    ``trust`` lets the configuration of a run from somebody else name callbacks, loggers and ``data.cache``;
    ``progress`` and ``settings`` that a run may change (``data={"hidden_states": "disk"}``) are as for
    :func:`quantize`. Raises UserError where there is no such run or what it was made from has changed, and
    KeyboardInterrupt where it was interrupted again.
    """
    if of_quantize := next((key for key in settings if key in OF_CALL), None):
        raise UserError(
            f"{of_quantize} is a keyword of aespa_pl.quantize alone: a run keeps its model and calibration; "
            "other texts to measure are data={'evaluation': {'texts': [...]}}"
        )
    options = [Option("ckpt_path", str(folder)), *([Option(TRUST, "true")] if trust else [])]
    options += [option for key, value in settings.items() for option in _options(key, value)]
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
    if isinstance(value, str | os.PathLike):
        return Option(key, os.fspath(value))
    if isinstance(value, torch.dtype):
        return Option(key, str(value).removeprefix("torch."))
    try:  # numbers of NumPy and torch become Python's
        return Option(key, json.dumps(value, default=lambda v: v.item() if hasattr(v, "item") else str(v)))
    except (TypeError, ValueError, RuntimeError) as error:  # the last: a tensor of several numbers
        raise UserError(f"{key} is {value}: {error}") from error


def _texts(inputs: Path, name: str, key: str, given: Any) -> list[Option]:
    """Return what was given for a section of texts as options; texts in memory (of ``key``) become a file."""
    if given is None:
        return []
    names = get_type_hints(get_type_hints(DataSettings)[name]).keys()
    known = {key: given}
    if isinstance(given, Mapping):
        other = next((k for k in given if k not in names), None)
        if other is not None and not all(isinstance(v, int | float) for v in given.values()):  # proportions
            raise UserError(f"{name}.{other} is unknown{nearest(str(other), sorted(names))}")
        known = dict(given) if other is None else known
    texts = known.get(key, "")
    if name == "calibration" and isinstance(texts, list | tuple) and not texts:
        raise UserError("calibration is an empty list: give texts, token ids, or the name of a text")
    if isinstance(texts, str) and "\n" in texts:
        raise UserError(f"{name} is a text with several lines: give texts in memory as a list of them")
    if not are_names(texts):
        if isinstance(texts, Sequence) and texts and all(isinstance(text, str) for text in texts):
            file = f"{name}.jsonl"
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            folder = kept(inputs, name, lambda made: write_text(made / file, lines))
        else:
            file, tokens = f"{name}.safetensors", token_ids(texts, name)
            folder = kept(inputs, name, lambda made: write_tensors(made / file, {TENSOR: tokens}, {}))
            sizes = zip(("segments", "segment_length"), tokens.shape, strict=True)
            known = {size: number for size, number in sizes if size in names} | known
        known[key] = str(folder / file)
    return [_option(f"data.{name}.{field}", value) for field, value in known.items()]


def _fit(given: Arguments, *, progress: bool) -> QuantizedRun:
    """Run ``fit`` with options, under this process's own settings."""
    interruption = Interruption()
    end_with_launcher()
    try:
        given = with_run(given, "fit")
        refuse_mistakes(given, "fit")
        refuse_other_methods(given)
        with _own_process(), quiet(), interruption.watching():
            console = PlainConsole(stderr=True, quiet=not progress)
            parsed = AespaCLI(given, "fit")
            run, metrics = application.quantize(parsed, interruption, console)
    except (UserError, PeerLostError, OSError) as error:
        words = _in_python(system_words(error) if isinstance(error, OSError) else str(error))
        raise UserError(one_line(f"{words}{_then(interruption)}")) from error
    except RunInterrupted as stop:  # it ends as a process ends that does not watch signals
        if stop.number != signal.SIGINT:
            signal.raise_signal(stop.number)
        raise KeyboardInterrupt(f"stopped{_then(interruption) or ': nothing was begun'}") from None
    return QuantizedRun(run.folder.absolute(), metrics, progress)


def _in_python(message: str) -> str:
    """Return a message of the command line as one of this module."""
    for command, python in IN_PYTHON.items():
        message = re.sub(command, python, message)
    return OF_COMMAND.sub("", message)


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
