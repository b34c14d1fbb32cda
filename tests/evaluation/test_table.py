"""What a test measures later takes the place of the same text alone, and never mixes two protocols."""

from typing import Any

from aespa_pl.evaluation.table import with_later

FITTED: dict[str, Any] = {
    "perplexity": {
        "original": {"a": 10.0, "b": 20.0},
        "nearest": {"a": 40.0, "b": 50.0},
        "quantized": {"a": 12.0, "b": 22.0},
    },
    "seconds": {"quantization": 4.0},
}


def test_a_text_that_was_not_measured_again_stays() -> None:
    later = {"perplexity": {"original": {"c": 9.0}, "quantized": {"c": 9.5}}, "size": {}}
    assert with_later(FITTED, later) == {
        "perplexity": {
            "original": {"a": 10.0, "b": 20.0, "c": 9.0},
            "nearest": {"a": 40.0, "b": 50.0},
            "quantized": {"a": 12.0, "b": 22.0, "c": 9.5},
        },
        "seconds": {"quantization": 4.0},
        "size": {},
    }


def test_a_text_with_other_segments_is_replaced_for_all_kinds() -> None:
    later = {"perplexity": {"original": {"a": 11.0}, "quantized": {"a": 13.0}}}
    assert with_later(FITTED, later)["perplexity"] == {
        "original": {"a": 11.0, "b": 20.0},
        "nearest": {"b": 50.0},
        "quantized": {"a": 13.0, "b": 22.0},
    }


def test_a_text_with_the_same_segments_keeps_nearest_rounding() -> None:
    later = {"perplexity": {"original": {"a": 10.0}, "quantized": {"a": 12.5}}}
    assert with_later(FITTED, later)["perplexity"] == {
        **FITTED["perplexity"],
        "quantized": {"a": 12.5, "b": 22.0},
    }


def test_divergence_goes_with_its_segments_and_tasks_are_joined_by_name() -> None:
    first = {
        "perplexity": {"original": {"a": 10.0, "b": 20.0}},
        "divergence": {"quantized": {"a": {"mean": 0.1}, "b": {"mean": 0.2}}},
        "tasks": {"quantized": {"piqa": {"value": 0.5}}},
    }
    later = {"perplexity": {"original": {"a": 11.0}}, "tasks": {"quantized": {"mine": {"value": 0.7}}}}
    joined = with_later(first, later)
    assert joined["divergence"] == {"quantized": {"b": {"mean": 0.2}}}
    assert joined["tasks"] == {"quantized": {"piqa": {"value": 0.5}, "mine": {"value": 0.7}}}
    assert "divergence" not in with_later(joined, {"perplexity": {"original": {"b": 21.0}}})


def test_nothing_measured_stays_nothing() -> None:
    assert with_later({}, {}) == {}
    assert with_later({}, {"tasks": {}}) == {"tasks": {}}
    assert with_later(FITTED, {}) == FITTED
