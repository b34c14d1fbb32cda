"""Watch what an attention layer does with each batch. Notation as in ``family.py``.

``aespa_observed`` is registered under transformers' public interfaces (attention and mask): it is the
library's fused attention, with the same output bit for bit, and reports the arguments of each call. It
is chosen for the model only while ``observed`` is open.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as attention_with_sinks

IMPLEMENTATION = "aespa_observed"


@dataclass(frozen=True)
class Rotation:
    """Holds RoPE of an attention: ``x * cos + rotate_half(x) * sin`` of the first r columns of a head."""

    cos: Tensor
    """Cosines ``[L, r]``."""
    sin: Tensor
    """Sines ``[L, r]``."""
    neighbours: bool = False
    """Whether columns 2i and 2i + 1 are turned, not i and i + r / 2 (GLM-4, ERNIE 4.5)."""
    before_norm: bool = False
    """Whether norms on query and key heads come after it (Hunyuan); else before it."""
    query_factor: Tensor | None = None
    """Numbers ``[L]`` that queries are multiplied by after the rotation (Ministral 3); None: 1."""


@dataclass(frozen=True)
class Attention:
    """Holds queries, keys and masks of one attention layer for one batch."""

    query: Tensor
    """Queries ``[B, n_h, L, d_h]``, after RoPE where there is one, without the factor ``1 / sqrt(d_h)``."""
    key: Tensor
    """Keys ``[B, n_kv, L, d_h]``, after RoPE."""
    scaling: float
    """Factor ``1 / sqrt(d_h)`` of the scores, or the one that the model has in its place."""
    mask: Tensor | None = None
    """Mask ``[B, 1, L, L]``, true where a query may look (sliding windows); None: wherever causality
    allows."""
    alibi: Tensor | None = None
    """Values ``[B, n_h, 1, L]`` that ALiBi adds to the scores; None without ALiBi."""
    softcap: float | None = None
    """The c of a score s that becomes ``c tanh(s / c)`` before masks and softmax; None: it stays."""
    sinks: Tensor | None = None
    """Scores ``[n_h]`` that each row has beside those of its keys (gpt-oss); None: it has no others."""
    rotation: Rotation | None = None
    """RoPE of queries and keys; None without."""
    gate: Tensor | None = None
    """Numbers ``[B, n_h, L, d_h]`` that the attention's output is multiplied by (Qwen3-Next); None: 1."""
    query_inverse_square: Tensor | None = None
    """Numbers ``[B, n_h, L]``: 1 / mean square of each head's query before its norm (Qwen3)."""
    key_inverse_square: Tensor | None = None
    """The same numbers ``[B, n_kv, L]`` of the keys."""
    value_inverse: Tensor | None = None
    """Numbers ``[B, n_kv, L]``: 1 / rms of each head's value before its norm (Gemma 4); None: no norm."""

    def probabilities(self, heads: slice = slice(None), rows: slice = slice(None)) -> Tensor:
        """Compute attention probabilities, in float32 at least as the library's fused kernels do.

        They are ``[B, heads, rows, end of rows]``: after the softmax, with ALiBi and all masks. Beside sinks
        they add up to less than 1. Every supported model is causal: columns behind the last row are 0, and
        are left out. The heads are those of the queries, the rows their positions.
        """
        exact = torch.promote_types(self.query.dtype, torch.float32)
        _, n_h, L, _ = self.query.shape
        start, end, step = rows.indices(L)
        key_heads = torch.arange(n_h, device=self.key.device)[heads] // (n_h // self.key.shape[1])
        Q = self.query[:, heads, rows].to(exact)  # [B, heads, rows, d_h]
        K = self.key[:, key_heads, :end].to(exact)  # [B, heads, end, d_h]
        scores = (Q * self.scaling) @ K.mT
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.alibi is not None:
            scores += self.alibi[:, heads, :, :end]
        if self.mask is not None:
            scores.masked_fill_(~self.mask[:, :, rows, :end], -torch.inf)
        else:
            square = scores[..., start:]  # all columns before are in the past of all rows
            later = torch.ones(end - start, end - start, dtype=torch.bool, device=scores.device).triu_(1)
            square.masked_fill_(later[::step], -torch.inf)
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks[heads, None, None].to(exact).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]


Observer = Callable[[Attention], None]
"""A function that is called with the queries, keys, scaling and mask of each batch."""


@contextmanager
def observed(model: PreTrainedModel, attention: nn.Module, report: Observer) -> Iterator[None]:
    """Call ``report`` for each batch that runs through ``attention`` in this context.

    The block's arguments must be made in the context: the mask is the implementation's own.
    """

    def hand_over(_module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> Any:
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
    report: Observer | None = None,
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
