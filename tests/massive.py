"""Direct formulas of docs/algorithm.md for the size that the error of a token is divided by."""

import math

import torch
from torch import Tensor


def power(token: list[float]) -> float:
    return sum(x**2 for x in token) / len(token)


def divisors(target: Tensor, output: Tensor) -> list[float]:
    """Return the divisor of each token of a segment ``[L, d]``."""
    wanted = [power(t) for t in target.double().tolist()]
    made = [power(t) for t in output.double().tolist()]
    median = sorted(wanted)[(len(wanted) - 1) // 2]
    found = []
    for p, q in zip(wanted, made, strict=True):
        found.append(math.sqrt(p * 10 * median) if p > 10 * median else max(p, q))
    counts_as = max(1.0, 0.04 * len(wanted))
    found[0] = min(found[0], max(wanted[0], made[0]) / counts_as)
    return found


def weights(target: Tensor, output: Tensor) -> Tensor:
    """Return the weight ``[L]`` of each token's error where it isn't divided."""
    median = sorted(power(t) for t in target.double().tolist())[(len(target) - 1) // 2]
    shares = [min(1.0, 10 * median / divisor) for divisor in divisors(target, output)]
    return torch.tensor(shares, dtype=torch.float64)
