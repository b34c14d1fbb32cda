"""Compute second moments of queries and keys as they act before RoPE and before a norm on heads."""

import torch
from jaxtyping import Float
from torch import Tensor


def rotate_back(
    G: Float[Tensor, "heads d_head d_head"],
    cos: Float[Tensor, "L d_head"],
    sin: Float[Tensor, "L d_head"],
) -> Float[Tensor, "heads d_head d_head"]:
    """Return ``mean_t R_t^T G R_t``: G as it acts on queries (keys) before the rotation.

    The error of a query is rotated with the query, so ``R_t dq`` meets the rotated keys. R_t is
    ``diag(cos_t) + diag(sin_t) J``, where J x is ``rotate_half(x) = (-x[d_head / 2:], x[:d_head / 2])``.
    """
    # R^T G R has four terms; the mean over t of cos_i cos_j and so on can be taken beforehand.
    cos, sin = cos.to(G), sin.to(G)
    L = cos.shape[0]
    half = G.shape[-1] // 2
    identity = torch.eye(2 * half, dtype=G.dtype, device=G.device)
    J = torch.cat([-identity[half:], identity[:half]])
    cc, cs, ss = cos.T @ cos / L, cos.T @ sin / L, sin.T @ sin / L
    cross = (G * cs) @ J
    return G * cc + cross + cross.transpose(-1, -2) + J.T @ (G * ss) @ J


def through_norm(
    G: Float[Tensor, "heads d_head d_head"],
    weight: Float[Tensor, " d_head"],
    inverse_square: Float[Tensor, " heads"],
) -> Float[Tensor, "heads d_head d_head"]:
    """Return G as it acts on queries (keys) before their norm.

    The paper's families have no such norm. To first order the norm multiplies an error by
    ``weight / rms`` of its token; the part that changes rms itself (one direction of d_head) is left
    out, and ``1 / rms ** 2`` is averaged over the tokens as the Kronecker approximation does for G.
    """
    return inverse_square[:, None, None] * weight[:, None] * G * weight
