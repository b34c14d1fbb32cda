"""Choose one candidate for each matrix, so that the losses' sum is least under a limit of their costs' sum.

This is the multiple-choice knapsack problem, solved exactly by dynamic programming over the costs in whole
steps. One table has the answer for every limit, and a larger limit never has a larger loss.

Source: Dudzinski and Walukiewicz, "Exact methods for the knapsack problem and its generalizations" (1987).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_STEPS = 100_000
"""Steps between the least and the largest sum of costs; finer costs are rounded up to one."""


@dataclass(frozen=True)
class Allocation:
    """Holds the best choice for every limit of the costs."""

    least: int
    most: int
    """Sums of each item's least cost, and of each item's largest."""
    step: int
    """Costs above that are multiples of it."""
    losses: Tensor
    """Least sum of losses ``[steps + 1]`` for a limit of ``least + i * step``, never rising."""
    _taken: Tensor
    """Candidate of each item ``[items, steps + 1]`` where the items up to it are given i steps."""
    _steps: Sequence[Sequence[int]]

    def best(self, limit: int) -> list[int]:
        """Return the candidate of each item; a ValueError says that the limit is below the least costs."""
        if limit < self.least:
            raise ValueError(f"{limit} is below the least cost, {self.least}")
        left = len(self.losses) - 1
        if limit < self.most:  # costs are rounded up to steps, so the largest can need more than fit below
            left = min((limit - self.least) // self.step, left)
        chosen = []
        for taken, steps in zip(reversed(self._taken), reversed(self._steps), strict=True):
            choice = int(taken[left])
            chosen.append(choice)
            left -= steps[choice]
        return chosen[::-1]


def allocate(
    costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], most_steps: int = MOST_STEPS
) -> Allocation:
    """Find the best choice for every limit, given costs and losses of the candidates of each item."""
    above = [[cost - min(of_item) for cost in of_item] for of_item in costs]
    total = sum(map(max, above))
    step = math.gcd(*(cost for of_item in above for cost in of_item)) or 1
    step *= math.ceil(total / (step * most_steps)) or 1
    steps = [[-(-cost // step) for cost in of_item] for of_item in above]
    width = sum(map(max, steps)) + 1
    best = torch.zeros(width, dtype=torch.float64)
    taken = torch.empty(len(costs), width, dtype=torch.uint8)
    for item, (of_item, its_losses) in enumerate(zip(steps, losses, strict=True)):
        options = torch.full((len(of_item), width), torch.inf, dtype=torch.float64)
        for i, (cost, loss) in enumerate(zip(of_item, its_losses, strict=True)):
            options[i, cost:] = best[: width - cost] + loss
        best, taken[item] = options.min(0)
    return Allocation(sum(map(min, costs)), sum(map(max, costs)), step, best, taken, steps)
