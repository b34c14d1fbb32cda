"""Watch queries and keys of an attention module of the library.

``aespa_observed`` is registered under transformers' public interfaces (attention and mask): it is the
library's fused attention, with the same output bit for bit, and reports the arguments of each call. It
is chosen for the model only while ``observed`` is open.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as attention_with_sinks

from aespa_pl.models.observed import Attention

IMPLEMENTATION = "aespa_observed"

AttentionReport = Callable[[Attention], None]
"""A function that is called with the queries, keys, scaling and mask of each batch."""


@contextmanager
def observed(model: PreTrainedModel, attention: nn.Module, report: AttentionReport) -> Iterator[None]:
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
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    report: AttentionReport | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention output ``[B, L, n_h, d_h]``, and no probabilities."""
    if report is not None:
        report(Attention(query, key, scaling, attention_mask, softcap=softcap, sinks=s_aux))
    function: Any = sdpa_attention_forward
    if softcap is not None:  # no fused kernel has it, so the library runs such a model without them
        function, others = eager_attention_forward, others | {"softcap": softcap}
        attention_mask = _added(attention_mask, query)
    if s_aux is not None:  # nor sinks, which the module has
        function, attention_mask = attention_with_sinks, _added(attention_mask, query)
    output, _ = function(module, query, key, value, attention_mask, scaling=scaling, **others)
    return output, None


def _added(mask: Tensor | None, query: Tensor) -> Tensor:
    """Return a mask, true where a query may look, as the numbers that the library adds to scores."""
    if mask is None:
        L = query.shape[2]
        mask = torch.ones(L, L, dtype=torch.bool, device=query.device).tril()
    least = torch.finfo(query.dtype).min
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, least)


AttentionInterface.register(IMPLEMENTATION, observed_attention)
# None where causality is all, which the fused kernels do without a mask; else boolean.
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
