"""What a plan says follows from the shape of a model, and is said without its weights."""

from dataclasses import replace

import pytest
import torch

from aespa_pl.algorithm.products import Precision
from aespa_pl.models import family_of
from aespa_pl.models.family import Role
from aespa_pl.planning.arithmetic import Visits, block_flops, block_visits, gram_flops
from aespa_pl.planning.budget import described, divide
from aespa_pl.planning.needs import (
    batch_bytes,
    device_bytes,
    disk_bytes,
    hessian_bytes,
    host_bytes,
    partition_for,
    shift_bytes,
)
from aespa_pl.planning.partition import WHOLE, Partition
from aespa_pl.planning.rates import measure_rates
from aespa_pl.planning.shape import Shape, Work
from aespa_pl.planning.table import duration, human
from aespa_pl.resolve import resolved
from aespa_pl.settings import (
    DataSettings,
    ObjectiveSettings,
    QuantizationSettings,
    RoundingSettings,
)
from tests.models.examples import EXAMPLES, make_model

PAPER = replace(resolved(QuantizationSettings(method="aespa")), input_correction=0.0)
WORK = Work(segments=10, length=32, batch_size=2, dtype_bytes=2)


def shape(name: str = "llama-grouped") -> Shape:
    config = EXAMPLES[name]()
    return Shape.of(config, family_of(config))


@pytest.mark.parametrize("name", EXAMPLES)
def test_shape_is_that_of_a_real_model(name: str) -> None:
    model, found = make_model(name), shape(name)
    family = family_of(model.config)
    blocks = model.get_submodule(family.blocks_path)
    assert found.blocks == len(blocks)
    assert found.block_weights == sum(p.numel() for p in blocks[0].parameters())
    everything = sum(p.numel() for p in model.parameters())
    assert found.stem_weights + found.blocks * found.block_weights == everything
    modules = {p.module for p in family.layout(model.config).projections}
    weights = sum(blocks[0].get_submodule(path).weight.numel() for path in modules)
    assert found.weights == weights
    roles = [matrix.role for matrix in found.matrices]
    assert roles[:3] == [Role.QUERY, Role.KEY, Role.VALUE]
    assert sum(matrix.adds_to_residual for matrix in found.matrices) == 2


def test_statistics_are_counted_one_by_one() -> None:
    s = shape()  # 24 wide, 4 query and 2 key heads of 6, feed-forward of 20 or 32
    d, wide = s.hidden, s.inputs["mlp_hidden"]
    layout = s.layout
    plain = sum(c**2 for c in (d, layout.heads * layout.head_dim, d, wide))
    G = (layout.heads + layout.key_value_heads) * layout.head_dim**2
    H_V = layout.key_value_heads * d**2
    assert hessian_bytes(s, PAPER) == 4 * (plain + G + H_V)
    layer = replace(PAPER, objective=ObjectiveSettings("layer", "layer"))
    assert hessian_bytes(s, layer) == 4 * plain
    assert shift_bytes(s, PAPER) == 0
    inputs, outputs = 2 * d**2, d * (layout.heads * layout.head_dim + wide)
    values = layout.key_value_heads * layout.head_dim * d
    assert shift_bytes(s, resolved(QuantizationSettings(method="aespa"))) == 4 * (
        inputs + outputs + values
    )


def test_memory_of_a_batch_is_that_of_one_heads_chunk() -> None:
    """Not of the probabilities of all heads, but where the model forms them itself."""
    s, layout = shape("llama"), shape("llama").layout
    long = Work(segments=1, length=1 << 15, batch_size=1, dtype_bytes=2)
    all_heads = 4 * layout.heads * long.length**2
    assert batch_bytes(s, long, PAPER) < 0.5 * all_heads
    assert batch_bytes(shape("bloom"), long, PAPER) > 3 * all_heads
    # an eighth of the rows of one head, scores and probabilities, and all else grows with L
    twice = replace(long, length=2 * long.length)
    square = batch_bytes(s, twice, PAPER) - 2 * batch_bytes(s, long, PAPER)
    assert square == 4 * 2 * (twice.length**2 // 8 - 2 * (long.length**2 // 8))
    d = s.hidden
    # shifts of the attention's output, the original's inputs and residual streams, what is added to both
    both = batch_bytes(s, long, resolved(QuantizationSettings(method="aespa"))) - batch_bytes(
        s, long, PAPER
    )
    inputs = sum(s.inputs.values()) + 7 * d
    assert both == 4 * long.length * 3 * d + 2 * long.length * inputs


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


def test_less_is_learned_with_a_faster_method() -> None:
    s, found = shape(), {}
    for method in ("aespa", "aespa-hybrid", "aespa-fast"):
        settings = resolved(QuantizationSettings(method=method, input_correction=0))
        found[method] = (
            device_bytes(s, WORK, settings)["rounding"],
            block_flops(s, WORK, settings)["rounding"],
            disk_bytes(s, WORK, settings, stored_bytes=2, on_disk=False),
        )
    for one, two in (("aespa", "aespa-hybrid"), ("aespa-hybrid", "aespa-fast")):
        assert all(a > b for a, b in zip(found[one], found[two], strict=True))
    assert found["aespa-fast"][1] == 0


def test_arithmetic_of_an_iteration_is_that_of_the_products() -> None:
    s = shape()
    settings = replace(PAPER, rounding=RoundingSettings(iterations=7, learn="all"))
    expected = sum(2 * m.rows * m.columns**2 for m in s.matrices)
    d_h = s.layout.head_dim
    expected += sum(2 * m.rows * m.columns * d_h for m in s.matrices[:2])
    assert block_flops(s, WORK, settings)["rounding"] == 7 * expected


def test_products_in_bfloat16_need_the_statistics_in_it() -> None:
    exact = device_bytes(shape(), WORK, PAPER)
    lower = device_bytes(shape(), WORK, replace(PAPER, products="bfloat16"))
    assert lower["rounding"] - exact["rounding"] == hessian_bytes(shape(), PAPER) // 2
    assert {**lower, "rounding": 0} == {**exact, "rounding": 0}


def test_hidden_states_are_in_memory_or_on_disk() -> None:
    s, settings = shape(), resolved(QuantizationSettings(method="aespa"))
    stream = 10 * 32 * s.hidden * 2
    host = [host_bytes(s, WORK, settings, on_cpu=False, on_disk=d) for d in (False, True)]
    assert host[0] - host[1] == 2 * stream  # the original's and the quantized model's
    disk = [disk_bytes(s, WORK, settings, stored_bytes=2, on_disk=d) for d in (False, True)]
    assert disk[1] - disk[0] == 2 * stream
    largest = max(device_bytes(s, WORK, settings).values())
    assert host_bytes(s, WORK, settings, on_cpu=True, on_disk=True) == host[1] + largest


def test_memory_does_not_grow_with_the_number_of_blocks() -> None:
    few = shape()
    many = replace(few, blocks=10 * few.blocks)
    settings = resolved(QuantizationSettings(method="aespa"))
    assert device_bytes(few, WORK, settings) == device_bytes(many, WORK, settings)


def test_parts_need_no_more_than_there_is() -> None:
    s, settings = shape(), resolved(QuantizationSettings(method="aespa"))
    needs = device_bytes(s, WORK, settings)
    assert partition_for(s, WORK, settings, max(needs.values())) == WHOLE
    one = device_bytes(s, WORK, settings, Partition(heads=1))
    collecting = max(one[phase] for phase in ("statistics", "correction", "OPTQ"))
    assert collecting < max(needs[phase] for phase in ("statistics", "correction", "OPTQ"))
    assert partition_for(s, WORK, settings, collecting).heads == 1
    in_parts = partition_for(s, WORK, settings, 0.7 * needs["rounding"])
    assert in_parts.weights is not None
    assert device_bytes(s, WORK, settings, in_parts)["rounding"] <= 0.7 * needs["rounding"]
    larger = replace(in_parts, weights=2 * in_parts.weights)
    assert device_bytes(s, WORK, settings, larger)["rounding"] > 0.7 * needs["rounding"]


def test_smallest_parts_are_planned_where_nothing_fits() -> None:
    s, settings = shape(), resolved(QuantizationSettings(method="aespa"))
    partition = partition_for(s, WORK, settings, 0)
    assert partition.heads == 1
    learning = sum(m.size for m in s.matrices)
    assert partition.weights is not None
    assert partition.weights <= learning / 10
    layer = replace(
        settings,
        objective=ObjectiveSettings("layer", "layer"),
        rounding=RoundingSettings(learn="none"),
    )
    assert partition_for(s, WORK, layer, 0) == WHOLE


def test_memory_that_is_free_decides_unless_a_limit_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    s, settings, cpu = shape(), resolved(QuantizationSettings(method="aespa")), torch.device("cpu")
    monkeypatch.setattr("aespa_pl.planning.budget.free_bytes", lambda _: 1)
    assert divide(s, WORK, DataSettings(), settings, cpu).heads == 1
    assert divide(s, WORK, DataSettings(memory_gb=1), settings, cpu) == WHOLE
    hidden = DataSettings(memory_gb=2 * WORK.stream_bytes(s.hidden) / 1e9)
    assert (
        divide(s, WORK, hidden, settings, cpu).heads == 1
    )  # nothing left beside the hidden states
    words = described(divide(s, WORK, hidden, settings, cpu), s)
    assert words[0].startswith("H_V of 1 of 2 heads at once, in 2 passes")
    assert "learning in portions" in words[1]
    assert described(WHOLE, s) == []


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
    """A search compares 200 grids; a quick one 50, then 4 beside each of the best 4."""
    s = shape()
    settings = resolved(QuantizationSettings(method="aespa-fast"))
    q, k, v, o, *others = (m.size for m in s.matrices)
    folded = q + k + v + sum(others)  # the output projection's input has no norm before it
    assert block_visits(s, settings) == Visits(
        compared=200 * o + (2 * 200 + 5 * (50 + 16)) * folded,
        updated=s.weights,
        polished=0.5 * 10 * (s.weights - q - k),
        coupled=0.5 * 10 * (q + k),
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
    """Exact losses of 4 candidates and 2 for the parabola; A has 16 columns, or as many as the weights."""
    s, fast = shape(), resolved(QuantizationSettings(method="aespa-fast"))
    settings = replace(fast, grid=replace(fast.grid, zfold=False))
    expected = sum(2 * m.size * (6 * m.columns + 200 * min(16, m.columns)) for m in s.matrices)
    assert block_flops(s, WORK, settings)["grid"] == pytest.approx(expected)
    grouped = replace(settings, group_size=4)
    expected = sum(2 * m.size * (6 * 4 + 200 * 4) for m in s.matrices)
    assert block_flops(s, WORK, grouped)["grid"] == pytest.approx(expected)


def test_accelerators_need_more_workspace() -> None:
    s = replace(shape(), matrices=tuple(replace(m, rows=2**16) for m in shape().matrices))
    one, other = (device_bytes(s, WORK, PAPER, accelerator=yes) for yes in (False, True))
    largest = max(m.size for m in s.matrices)
    assert other["rounding"] - one["rounding"] == (20 - 8) * largest
    assert other["grid"] - one["grid"] == 12 * (2**26 - 2**18)
    assert other["statistics"] == one["statistics"]


def test_optq_factors_as_many_heads_as_fit_a_chunk() -> None:
    """LLaMA-7B: 16 of 32 heads at once on an accelerator, none but one on a CPU."""
    heads, d = 32, 4096
    layout = replace(shape().layout, heads=heads, key_value_heads=heads)
    matrices = tuple(replace(m, columns=d, rows=d) for m in shape().matrices)
    s = replace(shape(), layout=layout, matrices=matrices)
    one, other = (device_bytes(s, WORK, PAPER, accelerator=yes)["OPTQ"] for yes in (False, True))
    assert other - one == 6 * 4 * (16 - 1) * d**2


def test_grids_of_groups_need_memory_for_their_candidates() -> None:
    s = shape()
    found = [device_bytes(s, WORK, replace(PAPER, group_size=size))["grid"] for size in (None, 4)]
    most = max(m.rows for m in s.matrices), max(m.size // 4 for m in s.matrices)
    assert found[1] - found[0] == 12 * 200 * (most[1] - most[0])


def test_polish_needs_memory_for_query_and_key_together() -> None:
    s = shape()
    off = replace(PAPER, polish=replace(PAPER.polish, enabled=False))
    on = replace(PAPER, polish=replace(PAPER.polish, enabled=True))
    needs = [device_bytes(s, WORK, settings)["polish"] for settings in (off, on)]
    together = sum(m.size for m in s.matrices if m.role in (Role.QUERY, Role.KEY))
    assert needs[1] - needs[0] == 36 * max(together, *(m.size for m in s.matrices))


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0.0 "), (999, "999.0 "), (1500, "1.5 K"), (3.25e10, "32.5 G")]
)
def test_numbers_are_readable(number: float, text: str) -> None:
    assert human(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3, "3.0 s"), (119, "119.0 s"), (150, "2.5 min"), (9000, "2.5 h"), (2e6, "23.1 days")],
)
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert duration(seconds) == text
