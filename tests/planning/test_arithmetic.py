"""Operations and visits are counted one by one, and rates are measured."""

from dataclasses import replace

import pytest
import torch

from aespa_pl.planning.arithmetic import LEARNED, block_flops, gram_flops, product_rate
from aespa_pl.planning.needs import disk_bytes
from aespa_pl.planning.partition import WHOLE, Partition
from aespa_pl.planning.shape import Setup, Work
from aespa_pl.planning.table import needs_of
from aespa_pl.resolve import resolved
from aespa_pl.settings import (
    DataSettings,
    ObjectiveSettings,
    QuantizationSettings,
    RoundingSettings,
)
from tests.planning.shapes import PAPER, WORK, setup, shape

DATA = DataSettings(hidden_states="memory", memory_gb=1)


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
    expected += LEARNED * s.weights
    assert block_flops(s, WORK, settings)["rounding"] == 7 * expected


def test_passes_over_the_segments_are_counted() -> None:
    s = shape()
    once, twice = (block_flops(s, WORK, PAPER, p) for p in (WHOLE, Partition(heads=1)))
    assert twice["statistics"] - once["statistics"] == once["forward"]
    needs = [disk_bytes(setup(s, WORK, PAPER), 2, p) for p in (WHOLE, Partition(heads=1))]
    assert needs[1] - needs[0] == 4 * s.layout.key_value_heads * s.hidden**2


def test_one_rate_makes_seconds_of_all_phases() -> None:
    s, fast = shape(), resolved(QuantizationSettings(method="aespa-fast"))
    flops = block_flops(s, WORK, fast)
    assert min(flops[phase] for phase in ("forward", "statistics", "grid", "OPTQ", "polish")) > 0
    needs = needs_of(Setup(s, WORK, DATA, fast, torch.device("cpu")), stored_bytes=2, rate=1e6)
    assert needs.seconds == {phase: count / 1e6 for phase, count in flops.items()}
    assert product_rate(torch.device("cpu"), 64, seconds=0.01) > 1e5


def test_devices_divide_rows_and_segments_but_not_the_factors_of_all_rows() -> None:
    s, settings = shape(), replace(PAPER, rounding=RoundingSettings(iterations=7, learn="all"))
    one, two = (block_flops(s, WORK, settings, devices=n) for n in (1, 2))
    assert two["rounding"] == one["rounding"] / 2
    shared = sum(3 * columns**3 for columns in s.inputs.values())
    assert two["OPTQ"] - shared == pytest.approx((one["OPTQ"] - shared) / 2)
    segments = WORK.of_device(2).segments
    assert two["forward"] == pytest.approx(one["forward"] * segments / WORK.segments)
