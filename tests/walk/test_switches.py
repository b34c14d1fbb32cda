"""Each switch of the settings changes what it names and nothing else."""

from typing import Any

import pytest
import torch

from aespa_pl.calibration import attended
from aespa_pl.settings import GridSettings
from tests.walk.by_hand import NOT_LEARNED, OFF, Walked, differing
from tests.walks import BASE, changed


@pytest.mark.parametrize(("method", "learned"), [("aespa", 6), ("aespa-hybrid", 3), ("aespa-fast", 0)])
def test_method_says_which_projections_learn(method: str, learned: int, walked: Walked) -> None:
    """The others keep OPTQ's integers; learning moves some of each of the learned ones."""
    quantized, plain = walked("opt", {"method": method}), walked("opt", NOT_LEARNED)
    names = [p.name for p in quantized.layout.projections]
    assert names[:3] == ["q_proj", "k_proj", "v_proj"]
    assert differing(plain, quantized) == set(names[:learned])


SWITCHES: list[tuple[str, dict[str, Any], dict[str, Any], set[str]]] = [
    ("opt", {"objective.value": "layer"}, OFF, {"v_proj"}),
    ("llama-grouped", {"objective.value": "layer"}, OFF, {"v_proj"}),
    ("bloom", {"objective.value": "layer"}, OFF, {"value"}),
    ("opt", {"objective.query_key": "layer"}, {}, {"q_proj", "k_proj"}),
    ("llama-grouped", {"objective.query_key": "layer"}, {}, {"q_proj", "k_proj"}),
    ("qwen3", {"objective.query_key": "layer"}, {}, {"q_proj", "k_proj"}),
    ("bloom", {"objective.query_key": "layer"}, {}, {"query", "key"}),
    ("opt", {"objective.query_key": "layer"}, NOT_LEARNED, set()),
    ("opt", {"rounding.penalty_attention": 90.0}, {}, {"q_proj", "k_proj", "v_proj"}),
    ("opt", {"rounding.penalty_other": 90.0}, {"rounding.keep_best": False}, {"out_proj", "fc1", "fc2"}),
]


@pytest.mark.parametrize(("name", "switch", "others", "expected"), SWITCHES)
def test_switch_changes_what_it_names_and_nothing_else(
    name: str, switch: dict[str, Any], others: dict[str, Any], expected: set[str], walked: Walked
) -> None:
    off, on = walked(name, others), walked(name, {**others, **switch})
    assert differing(off, on) == expected
    if expected:
        assert differing(off, on, 1)  # which sees the other hidden states


@pytest.mark.parametrize(
    ("switch", "others"),
    [
        ({"grid.max_rounds": 1}, {}),
        ({"grid.exhaustive": True}, {}),
        ({"optq.enabled": False}, {}),
        (NOT_LEARNED, {}),
        ({"rounding.iterations": 3}, {}),
        ({"rounding.learning_rate": 0.01}, {}),
        ({"rounding.warmup": 0.9}, {"rounding.penalty_attention": 9.0}),
        ({"rounding.beta_start": 3.0}, {"rounding.penalty_attention": 9.0}),
        ({"rounding.beta_end": 19.0}, {"rounding.penalty_attention": 9.0}),
        ({"rounding.keep_best": False}, {}),
        ({"damping": 0.2}, {}),
        ({"polish.enabled": True}, {}),
        ({"polish.passes": 1}, {"polish.enabled": True}),
    ],
)
def test_switch_acts(switch: dict[str, Any], others: dict[str, Any], walked: Walked) -> None:
    one, two = walked("opt", others), walked("opt", {**others, **switch})
    integers = {key for key in one.file(0) if key.endswith(".integers")}
    assert any(not torch.equal(one.file(0)[key], two.file(0)[key]) for key in integers)


def test_fewer_tokens_change_the_values_alone(walked: Walked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attended, "LEAST_ROWS", 1)  # these segments are short
    of_all, of_some = (walked("opt", {**OFF, "objective.value_tokens": least}) for least in (0, 1))
    assert differing(of_all, of_some) == {"v_proj"}


def test_these_tests_differ_from_the_package_in_seven_settings() -> None:
    package: dict[str, object] = {"rounding.iterations": 2000, "rounding.learning_rate": 0.015}
    package |= {"damping": "auto", "grid.max_rounds": GridSettings().max_rounds}
    package |= {"polish.enabled": None, "input_correction": None, "method": "aespa-tuned"}
    assert changed(package) == type(BASE)()
