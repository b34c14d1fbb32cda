"""Operations and visits are counted one by one, and rates are measured."""

from dataclasses import replace

import pytest
import torch

from aespa_pl.algorithm.products import Precision
from aespa_pl.planning.arithmetic import Visits, block_flops, block_visits, gram_flops
from aespa_pl.planning.disk import disk_bytes
from aespa_pl.planning.partition import WHOLE, Partition
from aespa_pl.planning.rates import measure_rates
from aespa_pl.planning.shape import Work
from aespa_pl.resolve import resolved
from aespa_pl.settings import (
    ObjectiveSettings,
    QuantizationSettings,
    RoundingSettings,
)
from tests.planning.shapes import PAPER, WORK, shape


def test_arithmetic_of_the_statistics_is_that_of_the_products() -> None:
    """Multiplications counted one by one, on a shape that is too narrow for blocks."""
    s, work = shape("llama"), Work(segments=3, length=1024, batch_size=1, dtype_bytes=4)
    heads, d_h, d = s.layout.heads, s.layout.head_dim, s.hidden
    inputs = sum(c**2 for c in s.inputs.values())
    A = sum(row_end for row_end in (128 * (i // 128 + 1) for i in range(1024)))  # of one head
    count = 3 * (1024 * inputs + heads * (A * (d_h + d) + 1024 * d**2) + 1024 * 2 * heads * d_h**2)
    assert gram_flops(s, work, PAPER) == 2 * count
    residual = d * sum(m.columns for m in s.matrices if m.adds_to_residual)
    count += 3 * 1024 * (2 * d**2 + residual + heads * d_h * d)
    assert gram_flops(s, work, resolved(QuantizationSettings(method="aespa"))) == 2 * count
    layer = replace(PAPER, objective=ObjectiveSettings("layer", "layer"))
    assert gram_flops(s, work, layer) == 2 * 3 * 1024 * inputs


def test_arithmetic_of_an_iteration_is_that_of_the_products() -> None:
    s = shape()
    settings = replace(PAPER, rounding=RoundingSettings(iterations=7, learn="all"))
    expected = sum(2 * m.rows * m.columns**2 for m in s.matrices)
    d_h = s.layout.head_dim
    expected += sum(2 * m.rows * m.columns * d_h for m in s.matrices[:2])
    assert block_flops(s, WORK, settings)["rounding"] == 7 * expected


def test_passes_over_the_segments_are_counted() -> None:
    s = shape()
    once, twice = (block_flops(s, WORK, PAPER, p) for p in (WHOLE, Partition(heads=1)))
    assert twice["statistics"] - once["statistics"] == once["forward"]
    needs = [
        disk_bytes(s, WORK, PAPER, stored_bytes=2, on_disk=False, partition=p)
        for p in (WHOLE, Partition(heads=1))
    ]
    assert needs[1] - needs[0] == 4 * s.layout.key_value_heads * s.hidden**2


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_rates_are_measured(precision: Precision) -> None:
    rates = measure_rates(shape(), torch.device("cpu"), seconds=0.3, precision=precision)
    visits = rates.visits
    assert min(rates.product, rates.rounding) > 1e4
    assert min(vars(visits).values()) > 100  # a machine with other work as well
    flops = dict.fromkeys(("grid", "OPTQ", "polish", "other"), rates.product)
    flops["rounding"] = 2 * rates.rounding
    more = Visits(visits.compared, 2 * visits.updated, 3 * visits.polished, 4 * visits.coupled)
    found = rates.seconds(flops, more)
    assert found == pytest.approx({"grid": 2, "OPTQ": 3, "polish": 8, "other": 1, "rounding": 2})


def test_visits_are_counted_one_by_one() -> None:
    """A search compares 200 grids; a quick one (without zeta, and 4 rounds) 40, then 4 beside the best 4.

    The last leaves out what a quick one has compared.
    """
    s = shape()
    settings = resolved(QuantizationSettings(method="aespa-fast"))
    q, k, v, o, *others = (m.size for m in s.matrices)
    folded = q + k + v + sum(others)  # the output projection's input has no norm before it
    assert block_visits(s, settings) == Visits(
        compared=200 * o + (200 + 4 * (40 + 16)) * folded,
        updated=s.weights,
        polished=0.4 * 10 * (s.weights - q - k),
        coupled=0.4 * 10 * (q + k),
    )
    plain = replace(
        settings,
        symmetric=True,
        grid=replace(settings.grid, zfold=False),
        optq=replace(settings.optq, enabled=False),
        polish=replace(settings.polish, enabled=False),
    )
    assert block_visits(s, plain) == Visits(100 * s.weights, 0, 0, 0)


def test_products_of_the_search_are_counted_one_by_one() -> None:
    """Exact losses of 8 candidates and 2 for the parabola; A has 16 columns, or as many as the weights."""
    s, fast = shape(), resolved(QuantizationSettings(method="aespa-fast"))
    settings = replace(fast, grid=replace(fast.grid, zfold=False))
    expected = sum(2 * m.size * (10 * m.columns + 200 * min(16, m.columns)) for m in s.matrices)
    assert block_flops(s, WORK, settings)["grid"] == pytest.approx(expected)
    grouped = replace(settings, group_size=4)
    expected = sum(2 * m.size * (10 * 4 + 200 * 4) for m in s.matrices)
    assert block_flops(s, WORK, grouped)["grid"] == pytest.approx(expected)
    folded = [
        m for m in s.matrices if m.group != s.matrices[3].group
    ]  # that of the output projection
    expected = sum(2 * m.size * (10 * m.columns + 200 * min(16, m.columns)) for m in s.matrices)
    expected += sum(2 * m.size * (5 * 3 * m.columns + 4 * 56 * min(16, m.columns)) for m in folded)
    assert block_flops(s, WORK, fast)["grid"] == pytest.approx(expected)


def test_an_exhaustive_search_multiplies_all_candidates_with_the_hessian() -> None:
    s, fast = shape("llama"), resolved(QuantizationSettings(method="aespa-fast"))
    settings = replace(fast, grid=replace(fast.grid, zfold=False, exhaustive=True))
    expected = sum(200 * 2 * m.size * m.columns for m in s.matrices)
    assert block_flops(s, WORK, settings)["grid"] == pytest.approx(expected)
