"""Compare the next-token distributions of a quantized model with the original's, as llama.cpp users do.

Both models run block by block, so that host memory holds the hidden states of one text twice, and logits of
one segment at a time.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from aespa_pl.distributed.processes import ALONE, World
from aespa_pl.evaluation.perplexity import last_hidden
from aespa_pl.models.streamed import StreamedModel

RARE = 0.999
"""The quantile of the positions' divergences that is reported beside their mean."""


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
                for pair in zip(reference[i], hidden[i], strict=True):  # segments [L, d]
                    logits = (
                        source.family.head(source.model, segment[None].to(source.device))[0, :-1].float()
                        for source, segment in zip((original, quantized), pair, strict=True)
                    )
                    table[row] = torch.stack(compared(*logits))
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
    return Divergence(float(values.mean()), float(rare), float(same.double().mean()))
