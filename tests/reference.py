"""Write the mathematics once more as loops in float64: slow, plain, and sharing no code with ours."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def output_error(dW: Tensor, X: Tensor) -> float:
    """Return the sum over samples of ``||dW x||^2``; dW ``[rows, d]``, X ``[d, N]``."""
    total = 0.0
    for n in range(X.shape[1]):
        for i in range(dW.shape[0]):
            y = sum(float(dW[i, j]) * float(X[j, n]) for j in range(dW.shape[1]))
            total += y * y
    return total


def attention_output_error(dW: Tensor, X: Tensor, A: Tensor) -> float:
    """Return the sum over the positions of ``||sum_l A[t, l] dW x_l||^2``, the exact error that V causes."""
    total = 0.0
    for t in range(A.shape[0]):
        mixed = sum(float(A[t, n]) * X[:, n] for n in range(A.shape[1]))
        total += float((dW @ mixed).square().sum())
    return total


def score_error(dW: Tensor, X: Tensor, others: Tensor) -> float:
    """Return the sum over all pairs of ``(others_m . dW x_n)^2``: every query's error meets every key."""
    total = 0.0
    for n in range(X.shape[1]):
        error = dW @ X[:, n]
        for m in range(others.shape[0]):
            total += float(others[m] @ error) ** 2
    return total


def rotation_matrix(position: int, head_size: int, base: float, *, neighbours: bool = False) -> Tensor:
    """Return RoPE's matrix of one position; the pair i turns by ``position * f_i``.

    Pairs are ``(i, i + head_size / 2)``, or ``neighbours``, ``(2 i, 2 i + 1)``.
    """
    R = torch.zeros(head_size, head_size, dtype=torch.float64)
    for i in range(head_size // 2):
        first, second = (2 * i, 2 * i + 1) if neighbours else (i, i + head_size // 2)
        angle = position * base ** (-2 * i / head_size)
        R[first, first] = R[second, second] = math.cos(angle)
        R[first, second], R[second, first] = -math.sin(angle), math.sin(angle)
    return R


def nearest(W: Tensor, scale: float, zero: float, largest: int) -> Tensor:
    """Round one row to the nearest."""
    return torch.tensor(
        [min(max(round(float(w) / scale) + zero, 0), largest) for w in W], dtype=torch.float64
    )


def best_rounding(low: Tensor, step: Tensor, zero: Tensor, W: Tensor, H: Tensor, largest: int) -> float:
    """Return the least ``dw H dw^T`` over all ``2 ** d`` choices between ``low`` and ``low + 1``."""
    best = math.inf
    for ups in itertools.product((0, 1), repeat=W.numel()):
        q = (low + torch.tensor(ups, dtype=W.dtype)).clamp(0, largest)
        error = step * (q - zero) - W
        best = min(best, float(error @ H @ error))
    return best


def optq_row(w: Tensor, H: Tensor, step: Tensor, zero: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return OPTQ of one row by its definition: the optimal update of all columns left after each rounding.

    Minimizes the quadratic form over the columns not yet rounded, by solving the linear system of
    the columns left, instead of going through a Cholesky factor.
    """
    order = sorted(range(w.numel()), key=lambda j: -float(H[j, j]))
    current, integers = w.clone(), torch.zeros_like(w)
    left = list(order)
    for j in order:
        left.remove(j)
        q = min(max(round(float(current[j] / step[j])) + float(zero[j]), 0), largest)
        integers[j] = q
        error = current[j] - step[j] * (q - zero[j])
        if left:
            # d/d delta of (error at j, delta on the columns left) H (...)^T is 0
            delta = torch.linalg.solve(H[left][:, left], H[left, j] * error)
            current[left] += delta
    return current, integers


def best_integers(step: Tensor, zero: Tensor, W: Tensor, H: Tensor, largest: int) -> float:
    """Return the least ``dw H dw^T`` of one row over all ``(largest + 1) ** d`` integers."""
    candidates = torch.tensor(list(itertools.product(range(largest + 1), repeat=W.numel())), dtype=W.dtype)
    error = step * (candidates - zero) - W
    return float(((error @ H) * error).sum(1).min())


def coordinate_descent(
    integers: Tensor,
    step: Tensor,
    zero: Tensor,
    W: Tensor,
    H: Tensor,
    G: Tensor,
    largest: int,
    passes: int,
    order: Sequence[tuple[int, int]],
) -> tuple[Tensor, int]:
    """Try every value of every integer of one head, in an order of rows and columns.

    Returns:
        The integers ``[rows, d]``, and how many passes it took; the last of them moved nothing, or
        it was the limit.
    """

    def objective(q: Tensor) -> float:
        error = step * (q - zero) - W
        return float(torch.trace(G @ error @ H @ error.T))

    current, least, done = integers.clone(), objective(integers), 0
    before = None
    while done < passes and (before is None or not torch.equal(current, before)):
        before, done = current.clone(), done + 1
        for i, j in order:
            for value in range(largest + 1):
                other = current.clone()
                other[i, j] = value
                if objective(other) < least * (1 - 1e-12):
                    current, least = other, objective(other)
    return current, done
