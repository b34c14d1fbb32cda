"""The choice of candidates is the best that exhaustive search finds, for every limit."""

import itertools
import random

import pytest

from aespa_pl.algorithm.allocation import allocate


def items(seed: int) -> tuple[list[list[int]], list[list[float]]]:
    draw = random.Random(seed)
    sizes = [draw.randint(1, 4) for _ in range(5)]
    costs = [[draw.randint(0, 12) for _ in range(size)] for size in sizes]
    return costs, [[draw.uniform(0, 1) for _ in range(size)] for size in sizes]


@pytest.mark.parametrize("seed", range(5))
def test_every_limit_has_the_least_loss_of_exhaustive_search(seed: int) -> None:
    costs, losses = items(seed)
    found = allocate(costs, losses)
    every = [
        (sum(c[i] for c, i in zip(costs, choice, strict=True)),
         sum(x[i] for x, i in zip(losses, choice, strict=True)))
        for choice in itertools.product(*(range(len(c)) for c in costs))
    ]  # fmt: skip
    for limit in range(sum(map(min, costs)), sum(map(max, costs)) + 3):
        choice = found.best(limit)
        cost = sum(c[i] for c, i in zip(costs, choice, strict=True))
        loss = sum(x[i] for x, i in zip(losses, choice, strict=True))
        assert cost <= limit
        assert loss == pytest.approx(min(x for c, x in every if c <= limit))


def test_coarse_steps_keep_the_limit_and_a_larger_one_never_loses() -> None:
    draw = random.Random(7)
    costs = [sorted(draw.randint(1000, 9000) for _ in range(5)) for _ in range(20)]
    losses = [sorted((draw.uniform(0, 1) for _ in range(5)), reverse=True) for _ in range(20)]
    found = allocate(costs, losses, most_steps=300)
    before = float("inf")
    for limit in range(found.least, 20 * 9000, 997):
        choice = found.best(limit)
        assert sum(c[i] for c, i in zip(costs, choice, strict=True)) <= limit
        loss = sum(x[i] for x, i in zip(losses, choice, strict=True))
        assert loss <= before + 1e-9
        before = loss
    assert found.best(sum(map(max, costs))) == [4] * 20


def test_a_limit_below_the_least_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="below the least cost, 3"):
        allocate([[1, 5], [2]], [[1.0, 0.0], [0.5]]).best(2)
