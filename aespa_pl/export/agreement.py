"""Measure how near an engine's next-token distributions are to the run's, and refuse what is too far."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from aespa_pl.errors import UserError
from aespa_pl.export.engines import Engine
from aespa_pl.export.format import Format
from aespa_pl.export.quantized import QuantizedModel
from aespa_pl.models.streamed import StreamedModel

LARGEST_DIVERGENCE = 0.02
"""Largest KL divergence, in nats, that is allowed to engines that round activations, unless their rounding
explains more: it was 0.003 of a good model in llama.cpp, and 1.1 of one with its rows in the wrong order."""
EXPLAINED = 4.0
"""Largest ratio of an engine's divergence to the run's own, when its activations are rounded as the engine
rounds them; llama.cpp had 0.9 to 1.8 (docs/export.md). A bad model answers small changes with large ones."""
PERPLEXITY_SHARE = 0.02
"""Largest relative difference of perplexities."""


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
        return (
            f"{self.version}, KL {self.divergence:.1e}, perplexity {self.perplexity:.2f} "
            f"of {self.reference:.2f}"
        )


def reference_logits(
    model: QuantizedModel,
    chosen: Format,
    tokens: Tensor,
    rounded: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the logits ``[L, V]`` of the weights that a format holds, one block in memory at a time.

    Args:
        model: The run.
        chosen: The format.
        tokens: ``[L]``.
        rounded: Function that rounds, as an engine does, the input of each quantized matrix; None: nothing.
    """
    source = StreamedModel.open(model.pretrained, model.family, torch.device("cpu"), torch.float32)
    with source.stem():
        _hold(source, model, chosen)
        hidden = source.embed_with_stem(tokens[None], 1)
    for index in range(model.block_count):
        matrices = model.block(index).matrices
        prefix = model.family.block_prefix(index)
        with source.block(index) as block, torch.no_grad():
            for name, matrix in matrices.items():
                weight = chosen.expected(model, name, matrix.weight())
                path = name.removeprefix(prefix)
                block.get_parameter(path).copy_(weight)
                if rounded is not None:
                    layer = block.get_submodule(path.removesuffix(".weight"))
                    layer.register_forward_pre_hook(lambda _, given: (rounded(given[0]),))
            source.advance(block, hidden)
    with source.stem(), torch.inference_mode():
        _hold(source, model, chosen)
        return model.family.head(source.model, hidden[0])[0]


@torch.no_grad()
def _hold(source: StreamedModel, model: QuantizedModel, chosen: Format) -> None:
    """Replace embedding and head, which are loaded, by what a format holds of them."""
    for name in model.embeddings.intersection(model.stem_names()):
        value = chosen.expected(model, name, model.pretrained.tensor(name))
        source.model.get_parameter(name).copy_(value)


def compare(
    engine: Engine,
    reference: Tensor,
    found: Tensor,
    tokens: Tensor,
    rounded: Tensor | None = None,
) -> Agreement:
    """Compare distributions.

    Args:
        engine: Engine that the distributions are from.
        reference: The run's logits ``[L, V]``.
        found: The engine's logits or log-probabilities ``[L - first, V]``.
        tokens: ``[L]``.
        rounded: The run's logits ``[L, V]`` with activations rounded as the engine does; None: unknown.

    Raises:
        UserError: They differ by more than the engine's own rounding explains.
    """
    largest = LARGEST_DIVERGENCE
    if rounded is not None:
        explained = _divergences(reference[engine.first :], rounded[engine.first :])
        largest = max(largest, EXPLAINED * float(explained.mean()))
    reference, following = reference[engine.first :], tokens[engine.first + 1 :]
    expected, got = log_softmax(reference.double(), -1), log_softmax(found.double(), -1)
    divergences = _divergences(reference, found)
    divergence = float(divergences.mean())
    losses = [cross_entropy(p[:-1], following, reduction="none") for p in (expected, got)]
    change = losses[1] - losses[0]
    far = _surely_above(divergences, largest) or _surely_above(
        change * change.mean().sign(), math.log1p(PERPLEXITY_SHARE)
    )
    if engine.exact:
        difference = float((reference - found).abs().max())
        wrong = difference > 0
    else:
        difference = float((expected - got).abs().max())
        wrong = not math.isfinite(divergence) or far
    reference_perplexity, perplexity = (math.exp(float(loss.mean())) for loss in losses)
    if wrong:
        raise UserError(
            f"{engine.name} runs the exported model in another way than the run: next-token "
            f"distributions have KL divergence {divergence:.3g} (logits differ by {difference:.3g}, "
            f"perplexity {perplexity:.4g} instead of {reference_perplexity:.4g}); nothing was kept. "
            "Use another --format, or --verify bytes if this engine is not the one you deploy with"
        )
    return Agreement(
        engine.name,
        f"{engine.package} {version(engine.package)}",
        difference,
        divergence,
        perplexity,
        reference_perplexity,
    )


def _divergences(reference: Tensor, found: Tensor) -> Tensor:
    """Return the KL divergence ``[L]`` of each position's distributions."""
    expected, got = log_softmax(reference.double(), -1), log_softmax(found.double(), -1)
    return kl_div(got, expected, reduction="none", log_target=True).sum(-1)


def _surely_above(values: Tensor, bound: float) -> bool:
    """Return whether a mean is above a bound by more than chance: two standard errors.

    The positions are few, and one where the run is nearly undecided can hold most of the divergence.
    """
    return float(values.mean() - 2 * values.std() / math.sqrt(len(values))) > bound
