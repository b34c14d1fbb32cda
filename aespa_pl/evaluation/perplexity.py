"""Measure the perplexity of a model and its divergence from the original, one text and one block at a time.

Host memory holds the hidden states of one text, for the divergence twice. In exchange every block is read,
and changed, once for each text: reading a block costs far less than running a text's segments through it.
The stem is loaded once and stays on the device.

Source of the perplexity: the protocol of the paper's Section 4: the text is tokenized once and cut into
segments; the mean negative log likelihood of positions 2 .. L of every segment is exponentiated.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torchmetrics import MeanMetric
from transformers import PreTrainedModel

from aespa_pl.distributed.processes import ALONE, World
from aespa_pl.errors import UserError
from aespa_pl.models import streamed
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.storage.batches import Batches
from aespa_pl.storage.files import checksum_of

RARE = 0.999
"""The quantile of the positions' divergences that is reported beside their mean."""
LARGEST_EXPONENT = 700
"""exp() of more than 709 is no double."""

BlockChange = Callable[[int, nn.Module], None]
"""Changes a block, whose number counts from 0."""
StemChange = Callable[[PreTrainedModel], None]
"""Changes embedding and head of a model."""


@torch.inference_mode()
def perplexity(
    source: StreamedModel,
    texts: Mapping[str, Tensor],
    *,
    batch_size: int,
    change: BlockChange | None = None,
    change_stem: StemChange | None = None,
    after_block: Callable[[], None] = lambda: None,
    world: World = ALONE,
) -> dict[str, float]:
    """Return the perplexity on each text; infinity where it is not a finite number.

    ``texts`` has token ids ``[segments, L]`` by name. ``change`` changes each block before it is used
    (round-to-nearest, for example), ``change_stem`` embedding and head; ``after_block`` is called after each
    block of each text. The processes of ``world`` divide the segments, and all get the perplexities.
    """
    perplexities = {}
    with source.stem():
        if change_stem is not None:
            change_stem(source.model)
        for name, all_tokens in texts.items():
            tokens = world.segments(all_tokens, batch_size)
            batches = last_hidden(source, tokens, batch_size, change=change, after_block=after_block)
            hidden = (segment for i in range(len(batches)) for segment in batches[i])
            losses = (
                cross_entropy(logits, following, reduction="none")
                for x, ids in zip(hidden, tokens, strict=True)
                for logits, following in zip(
                    source.logits(x[:-1]), ids[1:].to(source.device).split(streamed.POSITIONS), strict=True
                )
            )
            perplexities[name] = _perplexity(losses, source.device)
            del batches, hidden, losses  # the next text's hidden states need the memory
    return perplexities


def last_hidden(
    source: StreamedModel,
    tokens: Tensor,
    batch_size: int,
    *,
    change: BlockChange | None = None,
    after_block: Callable[[], None] = lambda: None,
) -> Batches:
    """Return the hidden states after the last block, in a ``stem`` context (arguments of perplexity)."""
    batches = source.embed_with_stem(tokens, batch_size)
    for index, block in enumerate(source.blocks()):
        if change is not None:
            change(index, block)
        source.advance(block, batches)
        after_block()
    return batches


@torch.inference_mode()
def whole_perplexity(model: PreTrainedModel, tokens: Tensor) -> float:
    """Return the perplexity, or infinity, of a model that is in memory, on token ids ``[segments, L]``."""
    segments = tokens.to(model.device)
    logits = ((model(ids[None], use_cache=False).logits[0, :-1].float(), ids[1:]) for ids in segments)
    return _perplexity((cross_entropy(*each, reduction="none") for each in logits), model.device)


def refuse_diverged(values: Mapping[str, float], model: str, dtype: torch.dtype, advice: str) -> None:
    """Raise UserError if a perplexity is not finite: the model is broken, or its type too narrow.

    ``model`` is the model in words, ``advice`` what the user can do where the type is wide enough.
    """
    for text, value in values.items():
        if not math.isfinite(value):
            do = advice if dtype == torch.float32 else "try --model.dtype float32"
            raise UserError(f"the perplexity of {model} on {text} is not a finite number in {dtype}: {do}")


def _perplexity(losses: Iterable[Tensor], device: torch.device) -> float:
    """Return the perplexity of positions, from the negative log likelihoods of some at a time."""
    mean = MeanMetric(nan_strategy="disable").set_dtype(torch.float64).to(device)
    mean.update(torch.zeros(0))  # other processes may have all segments of the text
    for some in losses:
        mean.update(some)
    average = float(mean.compute())  # over all processes: the metric adds up its sums
    return math.exp(average) if average < LARGEST_EXPONENT else math.inf  # NaN is not less either


def tokens_of(texts: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what tells the segments ``[segments, L]`` of each text from others."""
    return {name: f"{tuple(tokens.shape)} {checksum_of([tokens])}" for name, tokens in texts.items()}


@dataclass(frozen=True)
class Divergence:
    """Says how far a model's distributions are from the original's, over all positions of a text."""

    mean: float
    """Mean KL divergence of the model from the original, nats."""
    rare: float
    """Quantile 99.9 % of the divergences, nats."""
    same_top: float
    """Part of the positions where both find the same token most likely."""


@torch.inference_mode()
def divergence(
    original: StreamedModel,
    quantized: StreamedModel,
    texts: Mapping[str, Tensor],
    *,
    batch_size: int,
    after_block: Callable[[], None] = lambda: None,
    world: World = ALONE,
) -> dict[str, Divergence]:
    """Return the divergence on each text, at the positions whose next token is in the segment.

    ``texts`` has token ids ``[segments, L]`` by name; ``after_block`` is called after each block of each
    model and text. The processes of ``world`` divide the segments, and all get the result.
    """
    divergences = {}
    with original.stem(), quantized.stem():
        for name, tokens in texts.items():
            mine = world.segments(tokens, batch_size)
            reference, hidden = (
                last_hidden(source, mine, batch_size, after_block=after_block)
                for source in (original, quantized)
            )
            # all processes write the rows of their segments into one table of zeros, and it is summed up
            table = torch.zeros(len(tokens), 2, tokens.shape[1] - 1, device=original.device)
            row = world.indices(math.ceil(len(tokens) / batch_size)).start * batch_size
            for i in range(len(reference)):
                for expected, got in zip(reference[i], hidden[i], strict=True):  # segments [L, d]
                    both = zip(original.logits(expected[:-1]), quantized.logits(got[:-1]), strict=True)
                    table[row] = torch.cat([torch.stack(compared(*logits)) for logits in both], 1)
                    row += 1
            del reference, hidden  # the next text's hidden states need the memory
            world.sum_(table)
            divergences[name] = summary(table[:, 0], table[:, 1])
    return divergences


def compared(reference: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the KL divergence of each position, and whether the likeliest token is the same (1 or 0).

    Logits ``[L, V]`` are the original's and the other model's; the result has their type.
    """
    expected, got = log_softmax(reference, -1), log_softmax(other, -1)
    values = kl_div(got, expected, reduction="none", log_target=True).sum(-1)
    return values, (expected.argmax(-1) == got.argmax(-1)).to(values.dtype)


def summary(divergences: Tensor, same: Tensor) -> Divergence:
    """Return mean, quantile and agreement of the positions of a text."""
    values = divergences.double().flatten()
    # kthvalue, because torch.quantile has a limit of 16 million values
    rare = values.kthvalue(max(1, round(RARE * len(values)))).values
    mean = values.mean().clamp(min=0)  # of nearly equal models float32 may leave less; NaN stays
    return Divergence(float(mean), float(rare), float(same.double().mean()))
