"""A method is what its declaration says, and the user's settings go before it."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from aespa_pl.commands.job import checked
from aespa_pl.errors import UserError
from aespa_pl.methods import METHODS, Method
from aespa_pl.resolve import resolved
from aespa_pl.settings import (
    Bits,
    BlockTuningSettings,
    GridSettings,
    ModelTuningSettings,
    ObjectiveSettings,
    OptqSettings,
    PolishSettings,
    QuantizationSettings,
    RoundingSettings,
    TuningSettings,
    keys_of,
)
from tests.jobs import embedded
from tests.models.examples import make_model
from tests.walks import changed, shortened, walk

OVERRIDES = {
    "search": ("grid.search", True),
    "zfold": ("grid.zfold", True),
    "awq": ("grid.awq", True),
    "optq": ("optq.enabled", True),
    "optq_rows": ("optq.rows", True),
    "query_key": ("objective.query_key", "attention"),
    "value": ("objective.value", "attention"),
    "learn": ("rounding.learn", "attention"),
    "keep_best": ("rounding.keep_best", True),
    "polish": ("polish.enabled", True),
    "input_correction": ("input_correction", 0.25),
    "tune_blocks": ("tuning.blocks.enabled", True),
    "parametrization": ("tuning.blocks.parametrization", "rounding"),
    "unit": ("tuning.blocks.unit", "sublayer"),
    "epochs": ("tuning.blocks.epochs", 5),
    "tune_model": ("tuning.model.enabled", True),
}
"""By field of a declaration: its setting, and a value that nearest rounding does not have."""


RATES = {
    "tuning.blocks.integer_rate", "tuning.blocks.scale_rate",
    "tuning.model.integer_rate", "tuning.model.scale_rate",
}  # fmt: skip
"""Settings that follow from what is learned, from the bits and from the model's width."""


def value_of(settings: QuantizationSettings, key: str) -> object:
    found: object = settings
    for name in key.split("."):
        found = getattr(found, name)
    return found


def test_every_field_of_a_declaration_has_its_setting() -> None:
    assert {field.name for field in fields(Method)} == {"name", *OVERRIDES}


@pytest.mark.parametrize("name", METHODS)
def test_nulls_become_what_the_method_says(name: str) -> None:
    settings = resolved(QuantizationSettings(method=name))
    for field, (key, _) in OVERRIDES.items():
        assert value_of(settings, key) == getattr(METHODS[name], field)


@pytest.mark.parametrize(
    ("method", "bits", "width", "rate"),
    [
        ("aespa-tuned", 2, 192, 0.005),
        ("aespa-tuned", 2, 576, 0.005 / 3),
        ("aespa-tuned", 2, 960, 0.001),
        ("aespa-tuned", 2, 8192, 0.001),
        ("aespa-tuned", 3, 192, 0.015 / 7),
        ("aespa-tuned", 4, 960, 0.0002),
        ("brecq", 4, 8192, 0.4),  # learns rounding variables
    ],
)
def test_integers_of_wide_models_and_more_bits_are_learned_at_a_lower_rate(
    method: str, bits: Bits, width: int, rate: float
) -> None:
    found = resolved(QuantizationSettings(method=method, bits=bits), width=width)
    assert found.tuning.blocks.integer_rate == pytest.approx(rate)
    assert resolved(found, width=64) == found
    given = changed({"tuning.blocks.integer_rate": 0.7}, QuantizationSettings(method=method))
    assert resolved(given, width=width).tuning.blocks.integer_rate == 0.7


@pytest.mark.parametrize("method", ["rtn", "brecq", "omniquant", "aespa-tuned"])
@pytest.mark.parametrize(
    ("learned", "integers", "scales"),
    [
        ("straight-through", 0.005 / 5 / 3, 0.003),
        ("annealed", 0.005 / 5 / 3, 0.003),
        ("rounding", 0.4, 0.003),  # the variables know neither bits nor width
        ("clipping", None, 0.01),
        ("affine", None, 0.01),
    ],
)
def test_rates_are_those_of_what_is_learned_whichever_the_method(
    method: str, learned: str, integers: float | None, scales: float
) -> None:
    off = {"grid.search": False, "grid.zfold": False, "optq.enabled": False, "polish.enabled": False}
    settings = changed(
        {"tuning.blocks.parametrization": learned, **off}, QuantizationSettings(method=method, bits=4)
    )
    found = resolved(settings, width=576).tuning.blocks
    if integers is not None:  # with the others no integers are learned
        assert found.integer_rate == pytest.approx(integers)
    assert found.scale_rate == scales


@pytest.mark.parametrize(
    ("bits", "width", "integers", "scales"),
    [
        (2, 192, 0.02, 0.003),
        (2, 576, 0.02, 0.001),
        (2, 4096, 0.02, 0.0006),
        (4, 64, 0.0008, 0.00012),
        (4, 4096, 0.0008, 0.00012),
    ],
)
def test_the_end_to_end_tuning_learns_more_bits_and_wider_models_at_lower_rates(
    bits: Bits, width: int, integers: float, scales: float
) -> None:
    found = resolved(QuantizationSettings(bits=bits), width=width).tuning.model
    assert found.integer_rate == pytest.approx(integers)
    assert found.scale_rate == pytest.approx(scales)
    kept = changed({"tuning.model.integer_rate": 0.0}, QuantizationSettings(bits=bits))
    assert resolved(kept).tuning.model.integer_rate == 0


def test_scales_are_learned_at_the_rate_of_most_projections() -> None:
    config = make_model("llama").config  # seven projections in each block
    rates = []
    for bits_of in ({}, {"v_proj": 4}, {"*": 4}, {"*": 4, "o_proj": 16}):
        given = embedded("llama", QuantizationSettings(bits=2, bits_of=bits_of))
        rates.append(checked(given, torch.device("cpu"), config).quantization.tuning.model)
    assert [found.scale_rate for found in rates] == pytest.approx([0.003, 0.003, 0.00012, 0.00012])
    assert len({found.integer_rate for found in rates}) == 1  # of 2 bits; projections have it in proportion


@pytest.mark.parametrize(
    ("name", "width", "blocks", "model"),
    [
        ("Q2_K", 192, (0.0025, 0.001), (0.015, 0.001)),
        ("Q3_K_M", 192, (0.0025 * 3 / 7, 0.001), (0.015 * 9 / 49, 0.001)),
        ("Q4_K", 192, (0.0025 / 5, 0.001), (0.015 / 25, 0.0005)),
        ("Q4_K", 384, (0.0025 / 10, 0.001), (0.015 / 25, 0.00025)),
    ],
)
def test_block_types_are_tuned_at_lower_rates(
    name: str, width: int, blocks: tuple[float, float], model: tuple[float, float]
) -> None:
    found = resolved(QuantizationSettings(format=name), width=width).tuning
    assert (found.blocks.integer_rate, found.blocks.scale_rate) == pytest.approx(blocks)
    assert (found.model.integer_rate, found.model.scale_rate) == pytest.approx(model)


@pytest.mark.parametrize("field", OVERRIDES)
def test_what_the_user_sets_goes_before_the_method(field: str) -> None:
    key, value = OVERRIDES[field]
    plain = QuantizationSettings(method="rtn", grid=GridSettings(search=True))
    assert value_of(resolved(changed({key: value}, plain)), key) == value


def test_a_false_of_the_user_is_no_null() -> None:
    off = QuantizationSettings(
        method="aespa",
        input_correction=0,
        grid=GridSettings(zfold=False, awq=False),
        optq=OptqSettings(enabled=False, rows=False),
        polish=PolishSettings(enabled=False),
        rounding=RoundingSettings(keep_best=False, learn="none"),
        objective=ObjectiveSettings("layer", "layer"),
        tuning=TuningSettings(
            BlockTuningSettings(False, "rounding", "sublayer", 1, 1, 0.1, 0.1),
            ModelTuningSettings(enabled=False, integer_rate=0.1, scale_rate=0.1),
        ),
    )
    found = resolved(off)
    assert found == changed({"grid.search": True, "products": "float32"}, off)
    assert resolved(found) == found


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("zfold", {"grid.search": False}, "grid.zfold is true and .*search is false"),
        ("rtn", {"grid.exhaustive": True}, "grid.exhaustive is true and .*false"),
        ("awq", {"grid.search": False}, "grid.awq is true and .*search is false"),
        ("awq", {"grid.zfold": True}, "grid.awq and .*grid.zfold are both true"),
    ],
)
def test_parts_of_a_search_that_do_not_go_are_refused(
    method: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=rf"{message} \(method {method}"):
        resolved(changed(changes, QuantizationSettings(method=method)))


@pytest.mark.parametrize("method", ["omniquant", "affinequant"])
def test_steps_whose_result_would_be_lost_are_refused(method: str) -> None:
    settings = QuantizationSettings(method=method)
    for key, value in {
        "grid.search": True,
        "optq.enabled": True,
        "rounding.learn": "all",
        "polish.enabled": True,
    }.items():
        with pytest.raises(UserError, match=rf"what quantization.{key} asks for would be lost"):
            resolved(changed({key: value}, settings))
    resolved(changed({"polish.enabled": True, "tuning.blocks.enabled": False}, settings))


def test_unresolved_settings_do_not_pass_for_a_method_that_learns_nothing() -> None:
    with pytest.raises(ValueError, match="not resolved"):
        QuantizationSettings().learns(attention=True)


def test_only_what_a_method_decides_may_be_null_in_addition() -> None:
    nullable = {
        k
        for k, kind in keys_of(QuantizationSettings, "").items()
        if type(None) in getattr(kind, "__args__", ())
    }
    assert nullable == {f".{key}" for key, _ in OVERRIDES.values()} | {
        ".group_size",
        ".target",
        *(f".{key}" for key in RATES),
    }


FREE: dict[str, object] = {"rounding.keep_best": None, "polish.enabled": None, "input_correction": None}
"""Nulls in place of what the tests' settings fix."""


def with_a_dead_input() -> PreTrainedModel:
    """Return a model of which one hidden unit is always 0, with weights that would widen every grid."""
    model = shortened(make_model("opt"))
    layer = model.model.decoder.layers[0]
    layer.fc1.bias.data.fill_(5)  # the others never are
    layer.fc1.bias.data[3] = -100
    layer.fc2.weight.data[:, 3] = 2 * layer.fc2.weight.abs().max()
    return model


def test_rtn_is_round_to_nearest_of_the_original_weights(tmp_path: Path) -> None:
    quantized = walk("opt", tmp_path, {"method": "rtn", **FREE}, model=with_a_dead_input())
    exported, compared = quantized.exported(), 0
    for name, layer in quantized.original.get_submodule(quantized.blocks_path).named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        W = layer.weight.double()
        low, high = W.amin(1, keepdim=True).clamp(max=0), W.amax(1, keepdim=True).clamp(min=0)
        scale = ((high - low) / 3).half().double()  # as it is stored
        zero = (-low / ((high - low) / 3)).round()
        expected = scale * (torch.clamp((W / scale).round() + zero, 0, 3) - zero)
        stored = exported.get_parameter(f"{quantized.blocks_path}.{name}.weight")
        torch.testing.assert_close(stored.double(), expected, rtol=1e-6, atol=0)
        compared += 1
    assert compared == 2 * 6
    for loss in quantized.losses(0).values():
        assert loss["final"] == loss["nearest"]
        assert loss["share_not_nearest"] == 0


def test_a_dead_input_costs_no_range_of_a_min_max_grid(tmp_path: Path) -> None:
    changes = {"method": "optq", "grid.search": False, **FREE}
    quantized = walk("opt", tmp_path, changes, model=with_a_dead_input())
    path = f"{quantized.blocks_path}.0.fc2.weight"
    W = quantized.original.get_parameter(path).clone()
    assert not quantized.exported().get_parameter(path)[:, 3].any()
    W[:, 3] = 0
    expected = (W.amax(1).clamp(min=0) - W.amin(1).clamp(max=0)) / 3
    torch.testing.assert_close(quantized.file(0)["fc2.scale"][:, 0].float(), expected.half().float())
