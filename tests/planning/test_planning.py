"""A plan follows from the shape of a model, divides what does not fit, and reads well."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from aespa_pl.measure import duration, human
from aespa_pl.models import family_of
from aespa_pl.planning.budget import choose_partition, partition_for, portions_in_words
from aespa_pl.planning.needs import FRAGMENTED, disk_bytes
from aespa_pl.planning.partition import WHOLE, Partition
from aespa_pl.planning.shape import Setup, Shape
from aespa_pl.resolve import resolved
from aespa_pl.settings import DataSettings, ObjectiveSettings, QuantizationSettings, RoundingSettings
from tests.models.examples import EXAMPLES, every_example, make_ours
from tests.planning.shapes import WORK, device_bytes, setup, shape


@every_example
def test_shape_is_that_of_a_real_model(name: str) -> None:
    model, found = make_ours(name), shape(name)
    family = family_of(model.config)
    blocks = model.get_submodule(family.blocks_path)
    assert found.blocks == len(blocks)
    in_blocks = [sum(p.numel() for p in block.parameters()) for block in blocks]
    assert max(kind.block_weights for kind in found.kinds) == max(in_blocks)
    assert found.in_blocks == sum(in_blocks)
    layouts = family.layouts(model.config)
    hungry = [layout.quantizes_values for layout in layouts]
    if name == "gemma4-full":  # its keys are values
        hungry = [layout.attended_group is not None for layout in layouts]
    if layouts[0].latent:  # none has a statistic of its values
        hungry = [True] * len(layouts)
    largest = max(count for count, of_kind in zip(in_blocks, hungry, strict=True) if of_kind)
    assert found.block_weights == largest
    everything = sum(p.numel() for p in model.parameters())
    assert found.stem_weights + sum(in_blocks) == everything
    index = in_blocks.index(largest)
    modules = {p.module for p in family.layout(model.config, index).projections}
    weights = sum(blocks[index].get_submodule(path).weight.numel() for path in modules)
    assert found.weights == weights
    roles = [matrix.role for matrix in found.matrices]
    of_inputs = [p.role for p in found.layout.groups[0].projections]
    assert roles[: len(of_inputs)] == of_inputs
    mixture = found.layout.mixture
    writers = 2 if mixture is None else 1 + mixture.count + (mixture.shared is not None)
    if mixture is not None and mixture.input_norm is not None:  # beside a dense network
        writers += 1
    writers += name == "gemma4-small"  # the network behind the feed-forward one
    assert sum(matrix.adds_to_residual for matrix in found.matrices) == writers


def test_memory_does_not_grow_with_the_number_of_blocks() -> None:
    few = shape()
    many = replace(few, blocks=10 * few.blocks)
    settings = resolved(QuantizationSettings(method="aespa"))
    assert device_bytes(few, WORK, settings) == device_bytes(many, WORK, settings)


def test_blocks_of_two_kinds_need_what_the_hungrier_needs() -> None:
    config: Any = EXAMPLES["qwen3.5"]()
    settings = resolved(QuantizationSettings(method="aespa"))
    needs = []
    for kinds in ("full full full", "linear linear linear", "full linear full"):
        config.layer_types = [f"{kind}_attention" for kind in kinds.split()]
        found = Shape.of(config, family_of(config).layouts(config))
        needs.append(device_bytes(found, WORK, settings))
    full, linear, mixed = needs
    phases = [phase for phase in mixed if phase not in ("embedding and head", "tuning of the model")]
    assert [mixed[phase] for phase in phases] == [max(full[phase], linear[phase]) for phase in phases]
    assert full["OPTQ"] > linear["OPTQ"]  # of V's Hessians


def test_parts_need_no_more_than_there_is() -> None:
    s, settings = shape(), resolved(QuantizationSettings(method="aespa"))
    needs = device_bytes(s, WORK, settings)
    assert partition_for(setup(s, WORK, settings), max(needs.values())) == WHOLE
    one = device_bytes(s, WORK, settings, Partition(heads=1))
    collecting = max(one[phase] for phase in ("statistics", "correction", "OPTQ"))
    assert collecting < max(needs[phase] for phase in ("statistics", "correction", "OPTQ"))
    assert partition_for(setup(s, WORK, settings), collecting).heads == 1
    in_parts = partition_for(setup(s, WORK, settings), 0.7 * needs["rounding"])
    assert in_parts.weights is not None
    assert device_bytes(s, WORK, settings, in_parts)["rounding"] <= 0.7 * needs["rounding"]
    larger = replace(in_parts, weights=2 * in_parts.weights)
    assert device_bytes(s, WORK, settings, larger)["rounding"] > 0.7 * needs["rounding"]


def test_statistics_of_experts_are_divided_where_they_do_not_fit() -> None:
    s, settings = shape("qwen2-moe"), resolved(QuantizationSettings(method="aespa-fast"))
    partition = partition_for(setup(s, WORK, settings), 0)
    whole, parts = (device_bytes(s, WORK, settings, p) for p in (WHOLE, partition))
    inputs = {m.input: m for m in s.matrices if m.of_expert}
    H = sum(4 * m.columns**2 for m in inputs.values())
    # of inputs of gate and up, and of outputs of down
    S = sum(4 * m.columns * (s.hidden if m.adds_to_residual else m.columns) for m in inputs.values())
    assert partition.experts is not None
    away = 1 - partition.experts / s.experts
    of_heads = 4 * s.hidden**2 * (s.layout.key_value_heads - (partition.heads or 0))
    saved = whole["statistics"] - parts["statistics"]
    assert saved == pytest.approx(FRAGMENTED * (away * (H + S) + of_heads), rel=1e-3)
    assert f"{partition.experts} of {s.experts} experts at once" in portions_in_words(partition, s)[-1]
    stored = [disk_bytes(setup(s, WORK, settings), 2, p) for p in (WHOLE, partition)]
    assert stored[1] - stored[0] >= H + S


def test_smallest_parts_are_planned_where_nothing_fits() -> None:
    s, settings = shape(), resolved(QuantizationSettings(method="aespa"))
    partition = partition_for(setup(s, WORK, settings), 0)
    assert partition.heads == 1
    learning = sum(m.size for m in s.matrices)
    assert partition.weights is not None
    assert partition.weights <= learning / 10
    layer = replace(
        settings, objective=ObjectiveSettings("layer", "layer"), rounding=RoundingSettings(learn="none")
    )
    assert partition_for(setup(s, WORK, layer), 0) == WHOLE


def test_memory_that_is_free_decides_unless_a_limit_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    s, settings, cpu = shape(), resolved(QuantizationSettings(method="aespa")), torch.device("cpu")
    monkeypatch.setattr("aespa_pl.planning.budget.free_bytes", lambda _: 1)
    assert choose_partition(Setup(s, WORK, DataSettings(), settings, cpu)).heads == 1
    assert choose_partition(Setup(s, WORK, DataSettings(memory_gb=1), settings, cpu)) == WHOLE
    hidden = DataSettings(memory_gb=2 * WORK.stream_bytes(s.hidden) / 1e9)
    assert (
        choose_partition(Setup(s, WORK, hidden, settings, cpu)).heads == 1
    )  # nothing left beside the hidden states
    words = portions_in_words(choose_partition(Setup(s, WORK, hidden, settings, cpu)), s)
    assert words[0].startswith("H_V of 1 of 2 heads at once, in 2 passes")
    assert "learning in portions" in words[1]
    assert portions_in_words(WHOLE, s) == []


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 KB"), (3.25e10, "32.5 GB")]
)
def test_numbers_are_readable(number: float, text: str) -> None:
    assert human(number, "B") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3, "3.0 s"), (119, "119.0 s"), (150, "2.5 min"), (9000, "2.5 h"), (2e6, "23.1 days")],
)
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert duration(seconds) == text
