"""Ask engines about an exported folder, and refuse next-token distributions that are far from the run's."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

from aespa_pl.data.tokens import evaluation_tokens
from aespa_pl.errors import UserError
from aespa_pl.evaluation.perplexity import compared, last_hidden, summary
from aespa_pl.export.engines import ENGINES, Engine
from aespa_pl.export.format import Format, FormatName
from aespa_pl.export.quantized import QuantizedModel, value_of
from aespa_pl.measure import free_bytes, human
from aespa_pl.models.pretrained import PretrainedFolder
from aespa_pl.models.streamed import StreamedModel

LARGEST_DIVERGENCE = 0.02
"""Largest KL divergence, in nats, that is allowed to engines that round activations, unless their rounding
explains more: it was 0.003 of a good model in llama.cpp, and 1.1 of one with its rows in the wrong order."""
EXPLAINED = 4.0
"""Largest ratio of an engine's divergence to the run's own, when its activations are rounded as the engine
rounds them; llama.cpp had 0.9 to 1.8 (docs/export.md). A bad model answers small changes with large ones."""
REORDERED = 1e-6
"""Largest KL divergence that sums in another order may make in float32; 1e-13 was seen."""
PERPLEXITY_CHANGE = 0.02
"""Largest relative difference of perplexities."""
Verify = Literal["auto", "bytes", "transformers", "llama.cpp", "vllm", "gptqmodel"]
SEGMENT = 64
"""Number of tokens that engines are asked about."""
BESIDE = 512
"""Number of tokens at which the run is compared with the original."""
TEXT = "embedded"
"""Text that engines are asked about; it comes with the package."""


@dataclass(frozen=True)
class Agreement:
    """Says how near an engine's distributions are to the run's."""

    engine: str
    version: str
    difference: float
    """Largest difference of the logits; of an engine that is not exact, of the log-probabilities."""
    divergence: float
    """Mean KL divergence, nats."""
    perplexity: float
    reference: float
    """The run's perplexity at the same positions."""

    @property
    def text(self) -> str:
        """Return what a person wants to know."""
        if self.difference == 0:
            return f"{self.version}, logits equal"
        perplexities = f"perplexity {self.perplexity:.2f} of {self.reference:.2f}"
        return f"{self.version}, KL {self.divergence:.1e}, {perplexities}"


@dataclass(frozen=True)
class Asked:
    """Lists the engines that an export asks, and their answers once they are there."""

    engines: Sequence[Engine]
    unchecked: Mapping[str, str] = field(default_factory=dict)
    """Reason why an engine that reads the format does not answer, by its name."""
    insist: bool = False
    """Whether an engine that fails ends the export; else it is one more that was not checked."""
    agreements: Sequence[Agreement] = ()
    bytes_only: bool = False
    """Whether no model is run."""
    beside: str | None = None
    """How far the file's distributions are from the original's."""


def choose_engines(name: FormatName, verify: Verify) -> Asked:
    """Return the engines to ask. Raises UserError where the one asked for can't be, or reads no such file."""
    readers = {engine.name: engine for engine in ENGINES if name in engine.formats}
    if verify in ("bytes", "auto"):
        asked = [engine for engine in readers.values() if verify == "auto" and engine.installed]
        reason = "not installed" if verify == "auto" else "not asked for"
        unchecked = {name: reason for name, engine in readers.items() if engine not in asked}
        return Asked(asked, unchecked, bytes_only=verify == "bytes")
    engine = readers.get(verify)
    if engine is None:
        raise UserError(
            f"--verify {verify}: it does not read --format {name}: choose {', '.join(readers)} or bytes"
        )
    if not engine.installed:
        raise UserError(
            f"--verify {verify}: {engine.package} is not installed: pip install {engine.package}, or choose "
            "--verify auto"
        )
    return Asked([engine], insist=True)


def that_fit(model: QuantizedModel, questions: Asked) -> Asked:
    """Leave out all engines where the whole model in float32 does not fit half of the free memory."""
    needed = sum(4 * math.prod(tensor.shape) for tensor in set(model.pretrained.tensors.values()))
    if questions.insist or needed < free_bytes(torch.device("cpu")) / 2:
        return questions
    reason = f"the whole model takes {human(needed, 'B')} of memory: --verify ENGINE asks it anyway"
    left_out = dict.fromkeys((engine.name for engine in questions.engines), reason)
    return replace(questions, engines=[], unchecked={**questions.unchecked, **left_out})


def ask(model: QuantizedModel, chosen: Format, folder: Path, questions: Asked) -> Asked:
    """Compare next-token distributions of engines with the run's, and the run's with the original's.

    Raises UserError where they differ by more than the engine's own rounding explains, or an engine that was
    insisted on can't run the folder.
    """
    if questions.bytes_only:
        return questions
    config = model.pretrained.config
    length = min(BESIDE, model.family.positions(config) or BESIDE)
    (text,) = evaluation_tokens(TEXT, model.pretrained.tokenizer(), length, 1, model.cache)
    reference = reference_logits(model, chosen, text)
    questions = replace(questions, beside=beside_original(model, reference, text))
    tokens = text[:SEGMENT]
    # again: last bits of a product differ with its length
    reference = reference_logits(model, chosen, tokens) if questions.engines else reference[:SEGMENT]
    agreements, unchecked = list[Agreement](), dict(questions.unchecked)
    for engine in questions.engines:
        if len(tokens) <= engine.first + 1:
            unchecked[engine.name] = f"the model has {len(tokens)} positions only"
            continue
        try:
            logits = engine.logits(folder, tokens, int(config.vocab_size))
        except UserError:
            raise
        except Exception as error:  # of any class: no kernel for this processor ...
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            if questions.insist:
                raise UserError(
                    f"--verify {engine.name}: it cannot run the exported model here ({reason}); nothing "
                    "was kept. Use --verify bytes, and try the engine where it will run"
                ) from error
            unchecked[engine.name] = f"it failed ({reason})"
        else:
            rounded = None if engine.exact else reference_logits(model, chosen, tokens, engine.rounded)
            other = model.has_experts  # whose outputs the library adds up in an order of its own
            agreements.append(compare(engine, reference, logits, tokens, rounded, other_order=other))
    return replace(questions, unchecked=unchecked, agreements=agreements)


@torch.inference_mode()
def beside_original(model: QuantizedModel, logits: Tensor, tokens: Tensor) -> str:
    """Say how far logits ``[L, V]`` of tokens ``[L]`` are from the original model's, as llama.cpp does."""
    pretrained = PretrainedFolder.open(model.original, model.cache)
    source = StreamedModel.open(pretrained, torch.device("cpu"), torch.float32)
    with source.stem():
        hidden = last_hidden(source, tokens[None], 1)
        original = model.family.head(source.model, hidden[0])[0]
    found = summary(*compared(original[:-1], logits[:-1]))
    losses = (cross_entropy(x[:-1].float(), tokens[1:]) for x in (logits, original))
    perplexity, before = (math.exp(float(loss)) for loss in losses)
    return (
        f"KL {found.mean:.4f} nats, {found.rare:.3f} at the 99.9 % quantile, the same top token "
        f"at {100 * found.same_top:.1f} % of {len(tokens) - 1} positions, perplexity {perplexity:.2f} of "
        f"{before:.2f}"
    )


@torch.inference_mode()
def reference_logits(
    model: QuantizedModel, chosen: Format, tokens: Tensor, rounded: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return the logits ``[L, V]`` of the weights that a format holds after tokens ``[L]``, block by block.

    ``rounded`` rounds, as an engine does, the input of each quantized matrix.
    """

    def change(index: int, block: nn.Module) -> None:
        stored = model.block(index)
        for name in stored.keys() & model.matrices.keys():
            layer = name.removeprefix(model.family.block_prefix(index)).removesuffix(".weight")
            module = block.get_submodule(layer)
            module.get_parameter("weight").copy_(chosen.expected(model, name, value_of(stored[name])))
            if rounded is not None:
                module.register_forward_pre_hook(lambda _, given: (rounded(given[0]),))

    source = StreamedModel.open(model.pretrained, torch.device("cpu"), torch.float32)
    with source.stem():
        for name in {*model.parts.values()}.intersection(model.pretrained.stem_names()):
            value = chosen.expected(model, name, value_of(model.stem(name)))
            source.model.get_parameter(name).copy_(value)
        hidden = last_hidden(source, tokens[None], 1, change=change)
        return model.family.head(source.model, hidden[0])[0]


def compare(
    engine: Engine,
    reference: Tensor,
    logits: Tensor,
    tokens: Tensor,
    rounded: Tensor | None = None,
    *,
    other_order: bool = False,
) -> Agreement:
    """Compare the run's logits ``[L, V]`` of tokens ``[L]`` with an engine's ``[L - first, V]``.

    ``rounded`` are the run's with the engine's rounding of activations; None: unknown. By ``other_order`` an
    exact engine adds up in another order. Raises UserError where they differ by more than rounding explains.
    """
    largest, following = LARGEST_DIVERGENCE, tokens[engine.first + 1 :]
    logits, reference = logits.double(), reference[engine.first :].double()
    if rounded is not None:
        explained, _ = compared(reference, rounded[engine.first :].double())
        largest = max(largest, EXPLAINED * float(explained.mean()))
    divergences, _ = compared(reference, logits)
    divergence = float(divergences.mean())
    expected, losses = (cross_entropy(x[:-1], following, reduction="none") for x in (reference, logits))
    change = losses - expected
    if engine.exact:
        difference = float((reference - logits).abs().max())
        wrong = divergence > REORDERED if other_order else difference > 0
    else:
        difference = float((log_softmax(reference, -1) - log_softmax(logits, -1)).abs().max())
        wrong = (
            not math.isfinite(divergence)
            or _surely_above(divergences, largest)
            or _surely_above(change * change.mean().sign(), math.log1p(PERPLEXITY_CHANGE))
        )
    perplexities = [math.exp(float(x.mean())) for x in (losses, expected)]
    if wrong:
        raise UserError(
            f"{engine.name} runs the exported model in another way than the run: next-token "
            f"distributions have KL divergence {divergence:.3g} (logits differ by {difference:.3g}, "
            f"perplexity {perplexities[0]:.4g} instead of {perplexities[1]:.4g}); nothing was kept. "
            "Use another --format, or --verify bytes if this engine is not the one you deploy with"
        )
    name = f"{engine.package} {version(engine.package)}"
    return Agreement(engine.name, name, difference, divergence, *perplexities)


def _surely_above(values: Tensor, bound: float) -> bool:
    """Return whether a mean is above a bound by more than chance: two standard errors."""
    # the positions are few, and one where the run is nearly undecided can hold most of the divergence
    return float(values.mean() - 2 * values.std() / math.sqrt(len(values))) > bound
