"""Hold what an attention layer does with one batch. Notation as in ``family.py``."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
    rotation: tuple[Tensor, Tensor] | None = None
    """``cos, sin``, each ``[L, r]``, of the rotation ``x * cos + rotate_half(x) * sin`` of the first r
    columns of a head; None without RoPE."""
    gate: Tensor | None = None
    """Numbers ``[B, n_h, L, d_h]`` that the attention's output is multiplied by (Qwen3-Next); None: 1."""
    query_factor: Tensor | None = None
    """Numbers ``[L]`` that queries are multiplied by after the rotation (Ministral 3); None: 1."""
    query_inverse_square: Tensor | None = None
    """Numbers ``[B, n_h, L]``: 1 / mean square of each head's query before its norm (Qwen3)."""
    key_inverse_square: Tensor | None = None
    """The same numbers ``[B, n_kv, L]`` of the keys."""

    def probabilities(self, heads: slice = slice(None), rows: slice = slice(None)) -> Tensor:
        """Compute attention probabilities, in float32 at least as the library's fused kernels do.

        Every supported model is causal: columns behind the last row are 0, and are left out. The heads are
        those of the queries, the rows their positions.

        Returns:
            ``[B, heads, rows, end of rows]``: after the softmax, with ALiBi and all masks. Beside sinks they
            add up to less than 1.
        """
        exact = torch.promote_types(self.query.dtype, torch.float32)
        _, n_h, L, _ = self.query.shape
        start, end, _ = rows.indices(L)
        key_heads = torch.arange(n_h, device=self.key.device)[heads] // (n_h // self.key.shape[1])
        Q = self.query[:, heads, start:end].to(exact)  # [B, heads, rows, d_h]
        K = self.key[:, key_heads, :end].to(exact)  # [B, heads, end, d_h]
        scores = (Q * self.scaling) @ K.mT
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.alibi is not None:
            scores += self.alibi[:, heads, :, :end]
        if self.mask is not None:
            scores.masked_fill_(~self.mask[:, :, start:end, :end], -torch.inf)
        else:
            square = scores[..., start:]  # all columns before are in the past of all rows
            later = torch.ones(end - start, end - start, dtype=torch.bool, device=scores.device)
            square.masked_fill_(later.triu_(1), -torch.inf)
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks[heads, None, None].to(exact).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
