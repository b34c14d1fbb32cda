"""Sums of X^T X by blocks are those of the whole product."""

import pytest
import torch

from aespa_pl.algorithm.second_moments import (
    HALVED,
    HALVINGS,
    STRIPED,
    STRIPES,
    add_gram,
    computed_fraction,
    mirror,
)
from tests import reference

NARROW = STRIPED
WIDTHS = [1, 5, NARROW - 1, NARROW, NARROW + 3, HALVED + 5]


@pytest.mark.parametrize("width", WIDTHS)
def test_sum_of_grams_is_the_product_and_symmetric_to_the_last_bit(width: int) -> None:
    total = torch.zeros(width, width)
    parts = [torch.randn(rows, width) for rows in (7, 1)]
    for X in parts:
        add_gram(total, X, factor=0.5)
    mirror(total)
    whole = torch.cat(parts).double()
    torch.testing.assert_close(total.double(), 0.5 * whole.T @ whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(total, total.T)


def test_entries_are_sums_over_tokens() -> None:
    X = torch.randn(4, NARROW + 1, dtype=torch.float64)
    total = torch.zeros(NARROW + 1, NARROW + 1, dtype=torch.float64)
    add_gram(total, X)
    mirror(total)
    dW = torch.randn(2, NARROW + 1, dtype=torch.float64)
    error = reference.output_error(dW, X.T)
    assert float(torch.trace(dW @ total @ dW.T)) == pytest.approx(error)


def test_a_sum_within_a_larger_tensor_is_added_to_in_place() -> None:
    sums = torch.zeros(3, NARROW, NARROW)
    X = torch.randn(5, NARROW)
    add_gram(sums[1], X)
    mirror(sums[1])
    torch.testing.assert_close(sums[1], X.T @ X)
    assert not sums[::2].any()


@pytest.mark.parametrize("width", WIDTHS)
def test_share_is_that_of_what_is_not_zero(width: int) -> None:
    total = torch.zeros(width, width)
    add_gram(total, torch.ones(1, width))
    assert computed_fraction(width) == pytest.approx(float(total.mean()))


def test_wide_products_leave_out_what_is_below_the_blocks() -> None:
    assert computed_fraction(NARROW - 1) == 1
    assert computed_fraction(NARROW) == (STRIPES + 1) / (2 * STRIPES)
    assert computed_fraction(HALVED) == (1 + 1 / 2**HALVINGS) / 2
