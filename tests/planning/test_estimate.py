"""The time of each phase follows from its settings, and from a rate that is measured."""

import math
from dataclasses import replace

import pytest
import torch

from aespa_pl.planning.estimate import (
    LEARNED,
    OF_COLUMN,
    OF_HEAD,
    block_flops,
    needs_of,
    product_rate,
    rows_of,
)
from aespa_pl.planning.needs import disk_bytes
from aespa_pl.planning.partition import WHOLE, Partition
from aespa_pl.planning.shape import Setup
from aespa_pl.resolve import resolved
from aespa_pl.settings import DataSettings, ObjectiveSettings, QuantizationSettings, RoundingSettings
from tests.planning.shapes import PAPER, WORK, setup, shape

DATA = DataSettings(hidden_states="memory", memory_gb=1)


def test_each_phase_counts_its_own_setting() -> None:
    """Settings that a phase does not know leave it alone, and those that it knows change it."""
    s, base = shape("llama"), resolved(QuantizationSettings(method="aespa-fast"))
    before = block_flops(s, WORK, base)
    longer = block_flops(s, replace(WORK, segments=2 * WORK.segments), base)
    for phase in ("forward", "statistics"):
        assert longer[phase] == pytest.approx(2 * before[phase])
    for changes, phase in (
        ({"objective": ObjectiveSettings("layer", "layer")}, "statistics"),
        ({"symmetric": True}, "grid"),
        ({"grid": replace(base.grid, zfold=False)}, "grid"),
        ({"optq": replace(base.optq, enabled=False)}, "OPTQ"),
        ({"polish": replace(base.polish, passes=1)}, "polish"),
    ):
        after = block_flops(s, WORK, replace(base, **changes))
        assert after[phase] < before[phase]
        assert {**after, phase: 0} == {**before, phase: 0}


def test_arithmetic_of_an_iteration_is_that_of_the_products() -> None:
    s = shape()
    settings = replace(PAPER, rounding=RoundingSettings(iterations=7, learn="all"))
    expected = sum(2 * m.rows * m.columns**2 for m in s.matrices)
    assert block_flops(s, WORK, settings)["rounding"] == 7 * (expected + LEARNED * s.weights)


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
    assert needs.seconds == pytest.approx({phase: s.blocks * count / 1e6 for phase, count in flops.items()})
    assert product_rate(torch.device("cpu"), 64, seconds=0.01) > 1e5


def test_devices_divide_rows_and_segments_but_not_the_factors_of_all_rows() -> None:
    s, settings = shape(), replace(PAPER, rounding=RoundingSettings(iterations=7, learn="all"))
    one, two = (block_flops(s, WORK, settings, devices=n) for n in (1, 2))
    assert two["rounding"] == one["rounding"] / 2
    shared = sum(3 * columns**3 for columns in s.inputs.values())
    assert two["OPTQ"] - shared == pytest.approx((one["OPTQ"] - shared) / 2)
    segments = WORK.of_device(2).segments
    assert two["forward"] == pytest.approx(one["forward"] * segments / WORK.segments)


def test_an_accelerator_waits_for_columns_and_heads_however_fast_it_is() -> None:
    s, settings = shape(), replace(PAPER, polish=replace(PAPER.polish, enabled=False))
    cpu, gpu = (
        needs_of(Setup(s, WORK, DATA, settings, torch.device(name)), stored_bytes=2, rate=1e30).seconds
        for name in ("cpu", "cuda")
    )
    assert max(cpu.values()) < 1e-9
    columns = sum(matrix.columns for matrix in s.matrices)
    assert gpu["OPTQ"] == pytest.approx(OF_COLUMN["OPTQ"] * columns * s.blocks)
    batches = math.ceil(WORK.segments / WORK.batch_size)
    heads = s.layout.key_value_heads
    assert gpu["statistics"] == pytest.approx(OF_HEAD * heads * batches * s.blocks)
    assert gpu["polish"] == 0


def test_the_table_names_the_cpu_and_the_rounding_only_where_it_is_learned() -> None:
    for method, learned in (("aespa-fast", False), ("aespa", True)):
        settings = resolved(QuantizationSettings(method=method))
        needs = needs_of(Setup(shape(), WORK, DATA, settings, torch.device("cpu")), stored_bytes=2, rate=1e9)
        rows = rows_of(needs)
        assert any(words.startswith("rounding") for _, _, words in rows) is learned
        (most,) = [size for what, size, _ in rows if what == "device memory"]
        assert [size for what, size, _ in rows].count(most) >= 2  # the phase that needs most is among them
        assert "estimate, without evaluation, at 1.0 GFLOP/s of this CPU" in [words for _, _, words in rows]
