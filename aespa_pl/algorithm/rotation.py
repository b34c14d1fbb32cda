"""Compute second moments of queries and keys as they act before RoPE and before a norm on heads."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad


def rotate_back(
    G: Float[Tensor, "heads d_head d_head"],
    cos: Float[Tensor, "L rotated"],
    sin: Float[Tensor, "L rotated"],
    factor: Float[Tensor, " L"] | None = None,
) -> Float[Tensor, "heads d_head d_head"]:
    """Return ``mean_t f_t^2 R_t^T G R_t``: G as it acts on queries (keys) before rotation and factor f.

    The error of a query is rotated with the query, so ``R_t dq`` meets the rotated keys. R_t is
    ``diag(cos_t) + diag(sin_t) J``, where J x is ``rotate_half(x) = (-x[half:], x[:half])`` of the first
    ``rotated = 2 half`` columns of a head; the others stay, so there cos is 1 and sin is 0.
    """
    # R^T G R has four terms; the mean over t of cos_i cos_j and so on can be taken beforehand.
    L, rotated = cos.shape
    half, others = rotated // 2, G.shape[-1] - rotated
    cos, sin = pad(cos.to(G), (0, others), value=1.0), pad(sin.to(G), (0, others))
    if factor is not None:
        cos, sin = cos * factor.to(G)[:, None], sin * factor.to(G)[:, None]
    identity = torch.eye(rotated, dtype=G.dtype, device=G.device)
    J = pad(torch.cat([-identity[half:], identity[:half]]), (0, others, 0, others))
    cc, cs, ss = cos.T @ cos / L, cos.T @ sin / L, sin.T @ sin / L
    cross = (G * cs) @ J
    return G * cc + cross + cross.transpose(-1, -2) + J.T @ (G * ss) @ J


def through_norm(
    G: Float[Tensor, "heads d_head d_head"],
    weight: Float[Tensor, "#heads d_head"],
    inverse_square: Float[Tensor, " heads"],
) -> Float[Tensor, "heads d_head d_head"]:
    """Return G as it acts on queries (keys) before their norm.

    The paper's families have no such norm. To first order the norm multiplies an error by
    ``weight / rms`` of its token; the part that changes rms itself (one direction of d_head) is left
    out, and ``1 / rms ** 2`` is averaged over the tokens as the Kronecker approximation does for G.
    """
    return inverse_square[:, None, None] * weight[..., None] * G * weight[:, None]
