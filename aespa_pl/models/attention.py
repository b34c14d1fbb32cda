"""See queries, keys and probabilities of an attention module of the library.

The library's fast attention never forms the probabilities. ``aespa_observed`` is registered beside
it under transformers' public interfaces (attention and mask), forms them, and is chosen for the
model only while ``observed`` is open.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

IMPLEMENTATION = "aespa_observed"

AttentionReport = Callable[[Tensor, Tensor, Tensor], None]
"""Takes query ``[B, n_h, L, d_h]``, key ``[B, n_kv, L, d_h]`` and probabilities ``[B, n_h, L, L]``,
the first two as the module hands them to its attention function."""


@contextmanager
def observed(
    model: PreTrainedModel, attention: nn.Module, report: AttentionReport
) -> Iterator[None]:
    """Call ``report`` for each batch that runs through ``attention`` in this context.

    The block's arguments must be made in the context: the mask is the implementation's own.
    """

    def hand_over(
        _module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments, {**keywords, "report": report}

    previous = model.config._attn_implementation  # noqa: SLF001 - there is no public reader
    # The report travels as an argument of the call, so that nothing is shared between models.
    handle = attention.register_forward_pre_hook(hand_over, with_kwargs=True)
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        yield
    finally:
        handle.remove()
        model.set_attn_implementation(previous)


def observed_attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    report: AttentionReport | None = None,
    **_unused: Any,
) -> tuple[Tensor, Tensor]:
    """Return the attention output ``[B, L, n_h, d_h]`` and the probabilities ``[B, n_h, L, L]``.

    Scores and softmax are in float32 at least, as in the library's fused kernels.
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    shared = query.shape[1] // key.shape[1]
    keys = key.repeat_interleave(shared, 1)  # [B, n_h, L, d_h]
    scores = query.to(exact) @ keys.to(exact).transpose(-1, -2) * scaling  # [B, n_h, L, L]
    probabilities = torch.softmax(scores + attention_mask, dim=-1)
    if report is not None:
        report(query, key, probabilities)
    output = probabilities.to(value.dtype) @ value.repeat_interleave(shared, 1)
    return output.transpose(1, 2).contiguous(), probabilities


AttentionInterface.register(IMPLEMENTATION, observed_attention)
AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)
