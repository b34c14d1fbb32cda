"""Perplexity of a model, a whole block at a time.

Source: the protocol of the paper's Section 4: the text is tokenized once and cut into segments; the
mean negative log likelihood of positions 2 .. L of every segment is exponentiated.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric

from aespa_pl.distributed.processes import ALONE, Ranks
from aespa_pl.errors import UserError
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.storage.batches import Batches

LARGEST_EXPONENT = 700
"""exp() of more than 709 is no double."""

BlockChange = Callable[[nn.Module], None]


@torch.inference_mode()
def perplexity(
    source: StreamedModel,
    texts: Mapping[str, Tensor],
    *,
    batch_size: int,
    change: BlockChange | None = None,
    after_block: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
) -> dict[str, float]:
    """Return the perplexity on each text; every block is read once for all of them.

    Args:
        source: The model.
        texts: Token ids ``[segments, L]`` by name.
        batch_size: Segments that run through a block at once.
        change: Applied to each block before it is used (round-to-nearest, for example).
        after_block: Called after each block, for a progress bar.
        ranks: They divide the segments; all get the perplexities.

    Raises:
        UserError: It is not a finite number.
    """
    texts = {name: ranks.segments(tokens, batch_size) for name, tokens in texts.items()}
    streams = {name: source.embed(tokens, batch_size) for name, tokens in texts.items()}
    for block in source.blocks():
        if change is not None:
            change(block)
        for batches in streams.values():
            source.advance(block, batches)
        after_block()
    with source.stem():
        return {
            name: _head_perplexity(source, batches, texts[name], batch_size)
            for name, batches in streams.items()
        }


def _head_perplexity(
    source: StreamedModel, batches: Batches, tokens: Tensor, batch_size: int
) -> float:
    mean = MeanMetric(nan_strategy="disable").set_dtype(torch.float64).to(source.device)
    for i, ids in zip(range(len(batches)), tokens.split(batch_size), strict=False):
        hidden = batches[i]
        for segment, segment_ids in zip(
            hidden, ids, strict=True
        ):  # logits of one segment at a time
            logits = source.family.head(source.model, segment[None].to(source.device))[0]
            labels = segment_ids.to(source.device)
            mean.update(cross_entropy(logits[:-1].float(), labels[1:], reduction="none"))
    if not len(batches):
        mean.update(torch.zeros(0))  # of nothing: the other processes have the text
    average = float(mean.compute())  # over all processes: the metric adds up its sums
    if not average < LARGEST_EXPONENT:
        advice = "" if source.dtype == torch.float32 else ": try --model.dtype float32"
        raise UserError(
            f"the perplexity of {source.checkpoint.folder} is not a finite number in {source.dtype}"
            f"{advice}"
        )
    return math.exp(average)
