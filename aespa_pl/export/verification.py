"""Choose the engines that are asked about an exported folder, and compare their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from aespa_pl.data import evaluation_tokens
from aespa_pl.errors import UserError
from aespa_pl.export.agreement import Agreement, compare, reference_logits
from aespa_pl.export.engines import ENGINES, Engine
from aespa_pl.export.format import Format
from aespa_pl.export.formats import FormatName
from aespa_pl.export.quantized import QuantizedModel
from aespa_pl.measure import free_bytes, human

Verify = Literal["auto", "bytes", "transformers", "llama.cpp", "vllm", "gptqmodel"]
SEGMENT = 64
"""Number of tokens that engines are asked about."""
TEXT = "embedded"
"""Text that engines are asked about; it comes with the package."""


@dataclass(frozen=True)
class Questions:
    """Lists the engines that an export asks."""

    engines: Sequence[Engine]
    unchecked: Mapping[str, str] = field(default_factory=dict)
    """Reason why an engine that reads the format is not asked, by its name."""
    insist: bool = False
    """Whether an engine that fails ends the export; else it is one more that was not checked."""


@dataclass(frozen=True)
class Answers:
    """Holds the answers of the engines."""

    agreements: Sequence[Agreement] = ()
    unchecked: Mapping[str, str] = field(default_factory=dict)
    """Reason why an engine that reads the format did not answer, by its name."""


def choose_engines(name: FormatName, verify: Verify) -> Questions:
    """Return the engines to ask.

    Raises:
        UserError: The engine that is asked for does not read the format, or is not installed.
    """
    readers = [engine for engine in ENGINES if name in engine.formats]
    if verify == "bytes":
        return Questions([], {engine.name: "not asked for" for engine in readers})
    if verify == "auto":
        installed = [engine for engine in readers if engine.installed]
        others = [engine for engine in readers if not engine.installed]
        return Questions(installed, {engine.name: "not installed" for engine in others})
    for engine in readers:
        if engine.name == verify:
            if not engine.installed:
                raise UserError(
                    f"--verify {verify}: {engine.package} is not installed: pip install "
                    f"{engine.package}, or choose --verify auto"
                )
            return Questions([engine], insist=True)
    names = ", ".join(engine.name for engine in readers)
    raise UserError(f"--verify {verify}: it does not read --format {name}: choose {names} or bytes")


def that_fit(model: QuantizedModel, questions: Questions) -> Questions:
    """Leave out all engines where the whole model in float32 does not fit half of the free memory."""
    tensors = set(model.pretrained.tensors.values())
    needed = sum(torch.Size(tensor.shape).numel() * 4 for tensor in tensors)
    if questions.insist or needed < free_bytes(torch.device("cpu")) / 2:
        return questions
    reason = f"the whole model takes {human(needed, 'B')} of memory: --verify ENGINE asks it anyway"
    left_out = {engine.name: reason for engine in questions.engines}
    return Questions([], {**questions.unchecked, **left_out})


def ask(model: QuantizedModel, chosen: Format, folder: Path, questions: Questions) -> Answers:
    """Compare next-token distributions of engines with the run's.

    Raises:
        UserError: They differ by more than the engine's own rounding explains, or an engine that was
            insisted on can't run the folder.
    """
    if not questions.engines:
        return Answers(unchecked=questions.unchecked)
    tokens = _tokens(model)
    reference = reference_logits(model, chosen, tokens)
    agreements, unchecked = [], dict(questions.unchecked)
    for engine in questions.engines:
        try:
            found = engine.logits(folder, tokens, int(model.pretrained.config.vocab_size))
        except (
            Exception
        ) as error:  # the engine's own, of any class: no kernel for this processor ...
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            if questions.insist:
                raise UserError(
                    f"--verify {engine.name}: it cannot run the exported model here ({reason}); nothing "
                    "was kept. Use --verify bytes, and try the engine where it will run"
                ) from error
            unchecked[engine.name] = f"it failed ({reason})"
        else:
            rounded = (
                None if engine.exact else reference_logits(model, chosen, tokens, engine.rounded)
            )
            agreements.append(compare(engine, reference, found, tokens, rounded))
    return Answers(agreements, unchecked)


def _tokens(model: QuantizedModel) -> Tensor:
    """Return one segment ``[L]`` of held-out text."""
    limit = model.family.positions(model.pretrained.config) or SEGMENT
    tokenizer = model.pretrained.tokenizer()
    segments = evaluation_tokens(TEXT, tokenizer, min(SEGMENT, limit), 1, model.cache)
    return segments[0]
